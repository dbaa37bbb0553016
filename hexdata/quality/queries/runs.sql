-- Where each run of the arranged rows begins and ends. Its places are without a gap.
SELECT segment, min(place)::BIGINT AS start, max(place)::BIGINT + 1 AS stop
FROM arranged
GROUP BY run, segment
ORDER BY run
