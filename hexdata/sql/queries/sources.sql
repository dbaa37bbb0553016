-- Sources: positions, games, duplicate games, rejected records and flagged games of each.
WITH judged AS (
    SELECT
        source_id,
        count(duplicate_of) AS duplicates,
        count(*) FILTER (WHERE len([f FOR f IN flags IF f NOT LIKE 'duplicate-%']) > 0) AS flagged
    FROM games
    GROUP BY source_id
)

SELECT
    s.source_id,
    s.name,
    s.format,
    s.value_sense,
    s.bytes,
    s.records,
    s.positions,
    s.games,
    coalesce(j.duplicates, 0) AS duplicates,
    s.rejected,
    coalesce(j.flagged, 0) AS flagged
FROM sources AS s
LEFT JOIN judged AS j USING (source_id)
ORDER BY s.source_id
