-- Start and end of each run of consecutive row indices in the table arranged.
SELECT segment, min(row_index)::BIGINT AS start, max(row_index)::BIGINT + 1 AS stop
FROM arranged
GROUP BY run, segment
ORDER BY run
