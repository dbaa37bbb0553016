-- Rejected records per reason: number of records and sources, and the details of one record.
SELECT
    reason,
    count(*) AS records,
    count(DISTINCT source_id) AS sources,
    arg_min(detail, (source_id, record)) AS example
FROM rejected
GROUP BY reason
ORDER BY records DESC, reason
