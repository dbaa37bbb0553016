-- Per segment: rows, covariance of the row index and the rank in the input order, and both variances.
SELECT
    segment,
    count(*) AS rows,
    covar_pop(place, rank) AS together,
    var_pop(place) AS places,
    var_pop(rank) AS ranks
FROM (
    SELECT segment, place::DOUBLE AS place, rank() OVER (PARTITION BY segment ORDER BY position_id)::DOUBLE AS rank
    FROM arranged
)
GROUP BY segment
ORDER BY segment
