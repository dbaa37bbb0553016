-- The share of same-game neighbours that a uniform shuffle of the training split is expected to have:
-- two places hold the same game with probability sum n (n - 1) / (N (N - 1)).
WITH per_game AS (
    SELECT game_id, count(*)::DOUBLE AS n
    FROM shuffled
    WHERE split = 'train'
    GROUP BY game_id
)

SELECT sum(n * (n - 1)) FILTER (game_id IS NOT NULL) / nullif(sum(n) * (sum(n) - 1), 0) AS share
FROM per_game
