-- What is suspicious about games, by reason: how many games have each flag, of how many sources, and one of them.
SELECT
    flag,
    count(*) AS games,
    sum(positions)::BIGINT AS positions,
    count(DISTINCT source_id) AS sources,
    min(game_id) AS a_game
FROM (SELECT game_id, source_id, positions, unnest(flags) AS flag FROM games)
GROUP BY flag
ORDER BY games DESC, flag
