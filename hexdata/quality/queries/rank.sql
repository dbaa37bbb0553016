-- Place against rank in the input order, segment by segment: rows, covariance and both variances.
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
