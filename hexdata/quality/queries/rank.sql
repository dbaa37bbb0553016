-- Per segment: rows, covariance of the row index and the rank in the input order, and both variances.
SELECT
    segment,
    count(*) AS rows,
    covar_pop(row_index, rank) AS covariance,
    var_pop(row_index) AS index_variance,
    var_pop(rank) AS rank_variance
FROM (
    SELECT segment, row_index::DOUBLE AS row_index, rank() OVER (PARTITION BY segment ORDER BY position_id)::DOUBLE AS rank
    FROM arranged
)
GROUP BY segment
ORDER BY segment
