-- The largest share that one game has of a bucket of the training split, and the games in that bucket.
-- A bucket can be below a share s only if it holds at least 1 / s games.
WITH per_game AS (
    SELECT bucket, game_id, count(*) AS positions
    FROM shuffled
    WHERE split = 'train'
    GROUP BY bucket, game_id
),

per_bucket AS (
    SELECT
        bucket,
        max(positions) FILTER (game_id IS NOT NULL) / sum(positions) AS largest_share,
        count(game_id) AS games
    FROM per_game
    GROUP BY bucket
)

SELECT
    max(largest_share) AS largest_share,
    arg_max(games, (largest_share, -bucket)) FILTER (games > 0) AS games
FROM per_bucket
