-- Counts of groups of rows, such as those of each bucket: rows, games, the rows of the largest game, the numbers of
-- ordered pairs and triples of rows of the same game, the mean value, and the sums of the second to fourth powers of the
-- values about it, which are 0 if all are equal or some are not finite. Each row without a game counts as one game.
WITH per_game AS (
    SELECT
        group_number,
        game_id,
        -- HUGEINT, because n (n - 1) (n - 2) exceeds 64 bits for n above two million.
        CASE WHEN game_id IS NULL THEN 1 ELSE count(*) END::HUGEINT AS n,
        CASE WHEN game_id IS NULL THEN count(*) ELSE 1 END AS games,
        fsum(value) AS first,
        fsum(value ** 2) AS second,
        fsum(value ** 3) AS third,
        fsum(value ** 4) AS fourth
    FROM (SELECT $group AS group_number, game_id, value FROM shuffled)
    GROUP BY group_number, game_id
),

sums AS (
    SELECT
        group_number,
        sum(n * games)::BIGINT AS rows,
        sum(games)::BIGINT AS games,
        max(n)::BIGINT AS largest,
        sum(games * n * (n - 1)) AS pairs,
        sum(games * n * (n - 1) * (n - 2)) AS triples,
        fsum(first) / rows AS m,
        fsum(second) AS p2,
        fsum(third) AS p3,
        fsum(fourth) AS p4,
        p2 - rows * m ** 2 AS difference,
        -- The sums are large numbers of which small differences remain, so equal values rarely give 0.
        isfinite(difference) AND difference >= 1e-12 * p2 AS differ
    FROM per_game
    GROUP BY group_number
)

SELECT
    group_number,
    rows,
    games,
    largest,
    pairs,
    triples,
    m,
    CASE WHEN differ THEN difference ELSE 0 END AS second,
    CASE WHEN differ THEN p3 - 3 * m * p2 + 2 * m ** 3 * rows ELSE 0 END,
    -- At least second ** 2 / rows (Cauchy-Schwarz); rounding may give less.
    CASE WHEN differ THEN greatest(p4 - 4 * m * p3 + 6 * m ** 2 * p2 - 3 * m ** 4 * rows, second ** 2 / rows) ELSE 0 END
FROM sums
ORDER BY group_number
