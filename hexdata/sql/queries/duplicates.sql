-- Duplicate games per split, exact or equal under a symmetry of the board, and their positions.
SELECT split, count(*) AS games, sum(positions)::BIGINT AS positions
FROM games
WHERE duplicate_of IS NOT NULL
GROUP BY split
ORDER BY split
