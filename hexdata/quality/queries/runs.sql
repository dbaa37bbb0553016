-- Start and end of each run of consecutive row indices in the table arranged.
SELECT segment, min(place)::BIGINT AS start, max(place)::BIGINT + 1 AS stop
FROM arranged
GROUP BY run, segment
ORDER BY run
