-- Per lag: the sum of (value - mean) (later value - mean) over pairs of rows of a run.
SELECT {products}
FROM (
    SELECT value, {later}
    FROM arranged
    WINDOW in_order AS (PARTITION BY run ORDER BY row_index)
)
