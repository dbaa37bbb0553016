-- Number of pairs of rows of the same game in the same batch and run, for three batch sizes, each a multiple
-- of the previous one.
WITH small AS (
    SELECT run, row_index // $small AS batch, game, count(*)::BIGINT AS n
    FROM arranged
    GROUP BY run, batch, game
),

middle AS (
    SELECT run, batch // ($middle // $small) AS batch, game, sum(n)::BIGINT AS n
    FROM small
    GROUP BY run, 2, game
),

large AS (
    SELECT run, batch // ($large // $middle) AS batch, game, sum(n)::BIGINT AS n
    FROM middle
    GROUP BY run, 2, game
)

SELECT
    (SELECT coalesce(sum(n * (n - 1) // 2), 0) FROM small) AS small,
    (SELECT coalesce(sum(n * (n - 1) // 2), 0) FROM middle) AS middle,
    (SELECT coalesce(sum(n * (n - 1) // 2), 0) FROM large) AS large
