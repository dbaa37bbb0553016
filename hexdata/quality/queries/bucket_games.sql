-- Per bucket: the number of games, the rows of the largest game, and the numbers of ordered pairs and triples
-- of rows of the same game. Each row without a game counts as one game.
WITH known AS (
    SELECT bucket, count(*)::HUGEINT AS n
    FROM shuffled
    WHERE game_id IS NOT NULL
    GROUP BY bucket, game_id
),

of_known AS (
    SELECT
        bucket,
        count(*) AS games,
        max(n) AS largest,
        sum(n * (n - 1)) AS pairs,
        sum(n * (n - 1) * (n - 2)) AS triples
    FROM known
    GROUP BY bucket
),

of_all AS (
    SELECT bucket, count(*) AS rows, count(*) FILTER (WHERE game_id IS NULL) AS unknown
    FROM shuffled
    GROUP BY bucket
)

SELECT
    a.bucket,
    a.rows,
    coalesce(k.games, 0) + a.unknown AS games,
    greatest(coalesce(k.largest, 0), (a.unknown > 0)::HUGEINT) AS largest,
    coalesce(k.pairs, 0) AS pairs,
    coalesce(k.triples, 0) AS triples
FROM of_all AS a
LEFT JOIN of_known AS k USING (bucket)
ORDER BY a.bucket
