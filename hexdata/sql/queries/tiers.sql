-- Value sample tiers: number of positions, their share and mean value. NULL: positions without a tier.
SELECT
    value_sample_tier AS tier,
    count(*) AS positions,
    count(*) / sum(count(*)) OVER () AS share,
    avg(value) AS value_mean
FROM positions
GROUP BY tier
ORDER BY tier NULLS LAST
