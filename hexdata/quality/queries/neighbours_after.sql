-- The share of adjacent positions of the training split that are of one game, in shuffled order.
SELECT count(*) FILTER (game_id = previous) / nullif(count(*) - 1, 0) AS share
FROM (
    SELECT game_id, lag(game_id) OVER (ORDER BY bucket, file_row_number) AS previous
    FROM shuffled
    WHERE split = 'train'
)
