-- What was rejected, by reason: how many records, of how many sources, and what was found in one of them.
SELECT
    reason,
    count(*) AS records,
    count(DISTINCT source_id) AS sources,
    arg_min(detail, (source_id, record)) AS example
FROM rejected
GROUP BY reason
ORDER BY records DESC, reason
