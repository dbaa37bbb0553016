-- Number of games that play on each cell within their first ten moves.
WITH played AS (
    SELECT unnest(moves[1:10]) AS move FROM games WHERE moves IS NOT NULL
)

SELECT move, cell(move) AS cell, count(*) AS games
FROM played
GROUP BY move
ORDER BY move
