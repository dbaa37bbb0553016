-- The shuffled rows of some buckets: the index of each row and the columns that are measured.
SELECT
    b.bucket,
    b.start + r.file_row_number AS row_index,
    r.position_id,
    r.game_id,
    coalesce(r.game_id, -1 - r.position_id) AS game,
    r.value::DOUBLE AS value
FROM {files} AS r
INNER JOIN buckets AS b USING (filename)
