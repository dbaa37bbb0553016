-- Pairs of rows of one game that stand at most $lags places apart in a run, by their lag. Rows meet in bins
-- as wide as the longest lag, their own and the next, so that no row meets more than two bins of others.
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
