-- Games that are there more than once, exactly or as images of one another: by split, and how many positions.
SELECT split, count(*) AS games, sum(positions)::BIGINT AS positions
FROM games
WHERE duplicate_of IS NOT NULL
GROUP BY split
ORDER BY split
