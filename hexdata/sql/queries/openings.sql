-- The twenty most frequent openings of three moves: number of games, share of the games with at least three known
-- moves, and the fraction won by blue among those with a known winner.
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
