-- First moves of games: number of games with each, their share, and wins per colour.
SELECT
    moves[1] AS move,
    cell(moves[1]) AS cell,
    count(*) AS games,
    count(*) / sum(count(*)) OVER () AS share,
    count(*) FILTER (WHERE winner = 'BLUE') AS blue_wins,
    count(*) FILTER (WHERE winner = 'RED') AS red_wins
FROM games
WHERE len(moves) > 0
GROUP BY move
ORDER BY games DESC, move
