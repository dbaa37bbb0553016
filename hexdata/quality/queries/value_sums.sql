-- Power sums of the values of each bucket, relative to the minimum of all values, so that equal values give a
-- variance of exactly 0.
SELECT
    bucket,
    count(*)::BIGINT AS rows,
    sum(value - $least) AS first,
    sum((value - $least) ** 2) AS second,
    sum((value - $least) ** 3) AS third,
    sum((value - $least) ** 4) AS fourth
FROM shuffled
GROUP BY bucket
ORDER BY bucket
