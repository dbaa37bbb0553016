-- Games per bucket, and the share of the largest game, with the values expected in a uniform random shuffle.
-- Positions without a game count as games of one position. Splits of more than 16 million positions are sampled:
-- every k-th bucket.
WITH splits AS (
    SELECT
        split,
        count(*)::DOUBLE AS total,
        1 / (max(bucket) + 1) AS part,
        1 + (count(*) - 1) // 16_000_000 AS step
    FROM shuffled
    GROUP BY split
),

buckets AS (
    SELECT
        split,
        bucket,
        sum(n)::BIGINT AS positions,
        (count(game_id) + coalesce(sum(n) FILTER (WHERE game_id IS NULL), 0))::BIGINT AS games,
        max(CASE WHEN game_id IS NULL THEN 1 ELSE n END) AS largest
    FROM (
        SELECT split, bucket, game_id, count(*) AS n
        FROM shuffled INNER JOIN splits USING (split)
        WHERE bucket % step = 0
        GROUP BY ALL
    )
    GROUP BY ALL
),

sizes AS ( -- number of games of the split with n rows
    SELECT split, CASE WHEN game_id IS NULL THEN 1 ELSE n END AS n,
        sum(CASE WHEN game_id IS NULL THEN n ELSE 1 END)::DOUBLE AS games
    FROM (SELECT split, game_id, count(*) AS n FROM shuffled GROUP BY ALL)
    GROUP BY ALL
),

tails AS ( -- probability that a game of n rows has k or more rows in one bucket, where each row is with probability `part`
    SELECT split, n, games, k, sum(exp(
        lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
        -- DuckDB has no logarithm of 0, which occurs with a single bucket.
        + k * ln(part) + (n - k) * ln(greatest(1 - part, 1e-300))
    )) OVER (PARTITION BY split, n ORDER BY k DESC) AS tail
    FROM sizes INNER JOIN splits USING (split), unnest(range(1, n + 1)) AS t (k)
),

largest AS ( -- the mean is the sum over k of the probability that some game has k or more rows
    SELECT split, sum(1 - below) AS expected
    FROM (
        SELECT split, k, exp(sum(games * ln(greatest(1 - tail, 1e-300)))) AS below FROM tails GROUP BY ALL
    )
    GROUP BY split
),

present AS ( -- a game is absent from a bucket if all rows of the bucket are drawn from other games
    SELECT split, bucket, sum(s.games * (1 - CASE WHEN total - positions >= n THEN exp(
        lgamma(total - positions + 1) + lgamma(total - n + 1)
        - lgamma(total - positions - n + 1) - lgamma(total + 1)
    ) ELSE 0 END)) AS expected
    FROM buckets INNER JOIN splits USING (split) INNER JOIN sizes AS s USING (split)
    GROUP BY ALL
)

SELECT
    split,
    bucket,
    positions,
    games,
    round(present.expected, 1) AS games_expected,
    round(largest / positions, 8) AS largest_share,
    round(l.expected / positions, 8) AS expected_share
FROM buckets INNER JOIN present USING (split, bucket) INNER JOIN largest AS l USING (split)
ORDER BY list_position(['train', 'val', 'test'], split), bucket
