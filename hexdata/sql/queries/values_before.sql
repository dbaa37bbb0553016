-- Mean value of the training split in the input order, divided into as many equal pieces as there are buckets.
WITH input AS (
    SELECT count(*) AS positions FROM positions
),

split AS (
    SELECT max(bucket) + 1 AS buckets FROM shuffled WHERE split = 'train'
)

SELECT
    s.position_id * p.buckets // i.positions AS piece,
    count(*) AS positions,
    avg(s.value) AS value_mean
FROM shuffled AS s
CROSS JOIN split AS p
CROSS JOIN input AS i
WHERE s.split = 'train'
GROUP BY piece
ORDER BY piece
