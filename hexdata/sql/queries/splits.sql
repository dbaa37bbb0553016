-- Splits: games, duplicate games and positions, shuffled positions and buckets, exported positions and shards.
WITH played AS (
    SELECT
        split,
        count(*) AS games,
        count(duplicate_of) AS duplicates,
        sum(positions)::BIGINT AS positions
    FROM games
    GROUP BY split
),

mixed AS (
    SELECT split, count(*) AS shuffled, max(bucket) + 1 AS buckets
    FROM shuffled
    GROUP BY split
),

written AS (
    SELECT split, sum(positions)::BIGINT AS exported, count(*) AS shards
    FROM shards
    GROUP BY split
)

SELECT
    split,
    coalesce(games, 0) AS games,
    coalesce(duplicates, 0) AS duplicates,
    coalesce(positions, 0) AS positions,
    shuffled,
    buckets,
    exported,
    shards
FROM (VALUES (1, 'train'), (2, 'val'), (3, 'test')) AS s (number, split)
LEFT JOIN played USING (split)
LEFT JOIN mixed USING (split)
LEFT JOIN written USING (split)
WHERE games IS NOT NULL OR shuffled IS NOT NULL
ORDER BY number
