-- Flagged games per reason: number of games, positions and sources, and the id of one game.
SELECT
    flag,
    count(*) AS games,
    sum(positions)::BIGINT AS positions,
    count(DISTINCT source_id) AS sources,
    min(game_id) AS example_game
FROM (SELECT game_id, source_id, positions, unnest(flags) AS flag FROM games)
GROUP BY flag
ORDER BY games DESC, flag
