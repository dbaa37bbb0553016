-- The share of same-game neighbours that a uniform shuffle of the training split is expected to have:
-- two places hold the same game with probability sum n (n - 1) / (N (N - 1)).
SELECT sum(n::DOUBLE * (n - 1)) / (any_value(total)::DOUBLE * (any_value(total) - 1)) AS share
FROM (
    SELECT count(*) AS n, (SELECT count(*) FROM shuffled WHERE split = 'train') AS total
    FROM shuffled
    WHERE split = 'train' AND game_id IS NOT NULL
    GROUP BY game_id
)
