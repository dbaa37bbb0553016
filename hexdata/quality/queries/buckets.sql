-- Per bucket: rows, games, the rows of the largest game, the numbers of ordered pairs and triples of rows of the same
-- game, and the power sums of the values relative to the minimum, so that equal values give a variance of exactly 0.
-- Each row without a game counts as one game.
WITH per_game AS (
    SELECT
        bucket,
        game_id,
        -- HUGEINT, because n (n - 1) (n - 2) exceeds 64 bits for n above two million.
        CASE WHEN game_id IS NULL THEN 1 ELSE count(*) END::HUGEINT AS n,
        CASE WHEN game_id IS NULL THEN count(*) ELSE 1 END AS games,
        sum(value - $least) AS first,
        sum((value - $least) ** 2) AS second,
        sum((value - $least) ** 3) AS third,
        sum((value - $least) ** 4) AS fourth
    FROM shuffled
    GROUP BY bucket, game_id
)

SELECT
    bucket,
    sum(n * games)::BIGINT AS rows,
    sum(games)::BIGINT AS games,
    max(n)::BIGINT AS largest,
    sum(games * n * (n - 1)) AS pairs,
    sum(games * n * (n - 1) * (n - 2)) AS triples,
    sum(first),
    sum(second),
    sum(third),
    sum(fourth)
FROM per_game
GROUP BY bucket
ORDER BY bucket
