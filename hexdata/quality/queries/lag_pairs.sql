-- Number of pairs of rows of the same game at most $lags rows apart in a run, by lag. Rows are joined by bins
-- as wide as the longest lag, so that each row is compared with the rows of two bins only.
WITH earlier AS (
    SELECT run, game, row_index, unnest([row_index // $lags, row_index // $lags + 1]) AS bin
    FROM arranged
),

later AS (
    SELECT run, game, row_index, row_index // $lags AS bin
    FROM arranged
)

SELECT later.row_index - earlier.row_index AS lag, count(*) AS pairs
FROM earlier
INNER JOIN later USING (run, game, bin)
WHERE later.row_index > earlier.row_index AND later.row_index - earlier.row_index <= $lags
GROUP BY lag
ORDER BY lag
