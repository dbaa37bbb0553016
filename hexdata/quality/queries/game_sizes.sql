-- Number of games by their number of rows.
SELECT positions, count(*)::BIGINT AS games
FROM (
    SELECT count(*)::BIGINT AS positions
    FROM shuffled
    WHERE game_id IS NOT NULL
    GROUP BY game_id
)
GROUP BY positions
ORDER BY positions
