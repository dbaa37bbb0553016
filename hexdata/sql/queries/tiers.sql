-- Value sample tiers: the positions of each, their share, and their mean value. NULL is a position without.
SELECT
    value_sample_tier AS tier,
    count(*) AS positions,
    count(*) / sum(count(*)) OVER () AS share,
    avg(value) AS value_mean
FROM positions
GROUP BY tier
ORDER BY tier NULLS LAST
