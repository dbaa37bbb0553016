-- The rows of the sampled stretches of the shuffled order. Rows are compared within a run: a stretch, or the
-- part of a stretch in one segment.
CREATE OR REPLACE TABLE arranged AS
SELECT
    CASE WHEN $whole THEN 0 ELSE r.row_index // $stretch END * $buckets
    + CASE WHEN $by_bucket THEN r.bucket ELSE 0 END AS run,
    CASE WHEN $by_bucket THEN r.bucket ELSE 0 END AS segment,
    r.row_index,
    r.position_id,
    r.game,
    r.value - c.mean AS value
FROM shuffled AS r
INNER JOIN centres AS c USING (bucket)
WHERE $whole OR r.row_index // $stretch IN (SELECT stretch FROM stretches)
