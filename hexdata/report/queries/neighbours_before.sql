-- How many positions of the training split come right after one of the same game, in input order.
SELECT
    count(*) FILTER (game_id = previous) AS same_game,
    count(*) AS pairs
FROM (SELECT game_id, lag(game_id) OVER () AS previous FROM training)
