-- The largest share that one game has of a bucket of the training split, and the games in that bucket.
-- A bucket can be below a share s only if it holds at least 1 / s games.
WITH per_game AS (
    SELECT bucket, game_id, count(*) AS positions
    FROM shuffled
    WHERE split = 'train' AND game_id IS NOT NULL
    GROUP BY bucket, game_id
)
SELECT
    bucket,
    max(positions) / sum(positions) AS largest_share,
    count(*) AS games,
    sum(positions)::BIGINT AS positions
FROM per_game
GROUP BY bucket
ORDER BY largest_share DESC, bucket
LIMIT 1
