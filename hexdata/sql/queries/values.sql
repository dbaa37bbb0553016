-- Mean value of each bucket and of its split, with the range that contains 95 % of the buckets in a uniform random
-- shuffle.
WITH buckets AS (
    SELECT split, bucket, count(*) AS positions, avg(value) AS value_mean
    FROM shuffled
    GROUP BY ALL
),

splits AS (
    SELECT split, count(*) AS rows, avg(value) AS mean, coalesce(var_samp(value), 0) AS variance
    FROM shuffled
    GROUP BY split
),

banded AS (
    SELECT *, sqrt(variance / positions * (1 - positions / rows)) AS deviation
    FROM buckets
    INNER JOIN splits USING (split)
)

SELECT
    split,
    bucket,
    positions,
    round(value_mean, 6) AS value_mean,
    round(mean, 6) AS split_mean,
    round(mean - 1.96 * deviation, 6) AS low,
    round(mean + 1.96 * deviation, 6) AS high,
    round((value_mean - mean) / nullif(deviation, 0), 2) AS deviations
FROM banded
ORDER BY CASE split WHEN 'train' THEN 0 WHEN 'val' THEN 1 ELSE 2 END, bucket
