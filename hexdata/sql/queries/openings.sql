-- The twenty most frequent openings of three moves: the games that have each, their share of all games whose
-- moves are known that far, and how often blue won those with a known winner.
WITH opened AS (
    SELECT array_to_string([cell(move) FOR move IN moves[:3]], ' ') AS opening, winner
    FROM games
    WHERE len(moves) >= 3
)

SELECT
    opening,
    count(*) AS games,
    round(count(*) / sum(count(*)) OVER (), 6) AS share,
    round(avg(CASE winner WHEN 'BLUE' THEN 1 WHEN 'RED' THEN 0 END), 4) AS blue_won
FROM opened
GROUP BY opening
ORDER BY games DESC, opening
LIMIT 20
