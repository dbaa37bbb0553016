-- Number of pairs of rows of the same game at most $lags rows apart in a run, by lag. Rows are joined by bins
-- as wide as the longest lag, so that each row is compared with the rows of two bins only.
WITH earlier AS (
    SELECT run, game, place, unnest([place // $lags, place // $lags + 1]) AS bin
    FROM arranged
),

later AS (
    SELECT run, game, place, place // $lags AS bin
    FROM arranged
)

SELECT later.place - earlier.place AS lag, count(*) AS pairs
FROM earlier
INNER JOIN later USING (run, game, bin)
WHERE later.place > earlier.place AND later.place - earlier.place <= $lags
GROUP BY lag
ORDER BY lag
