-- Games by number of positions in the store, and wins per colour.
SELECT
    positions,
    count(*) AS games,
    count(*) FILTER (WHERE winner = 'BLUE') AS blue_wins,
    count(*) FILTER (WHERE winner = 'RED') AS red_wins
FROM games
GROUP BY positions
ORDER BY positions
