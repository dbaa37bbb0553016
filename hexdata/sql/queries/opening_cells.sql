-- Where the first ten moves of the games go: of each cell, how many games play there within their first ten.
WITH played AS (
    SELECT unnest(moves[1:10]) AS move FROM games WHERE moves IS NOT NULL
)

SELECT move, cell(move) AS cell, count(*) AS games
FROM played
GROUP BY move
ORDER BY move
