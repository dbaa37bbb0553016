-- The sum, over rows of a run at each lag from one another, of the product of their values less the mean.
SELECT {products}
FROM (
    SELECT value, {later}
    FROM arranged
    WINDOW in_order AS (PARTITION BY run ORDER BY place)
)
