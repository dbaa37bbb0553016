-- Number of buckets that contain positions of a game, before and after the shuffle, for up to 20,000 evenly spaced
-- games of the training split. Before the shuffle, the whole input is divided into as many equal pieces as there
-- are buckets. With fewer than 32 buckets, 64 equal pieces of the input and of the training split are used
-- instead. Positions without a game are ignored.
WITH split AS (
    SELECT
        count(*) AS positions,
        max(game_id) // 20000 + 1 AS step,
        CASE WHEN max(bucket) >= 31 THEN max(bucket) + 1 ELSE least(64, count(*)) END AS pieces,
        max(bucket) >= 31 AS by_bucket
    FROM shuffled
    WHERE split = 'train'
),

input AS (
    SELECT count(*) AS positions FROM positions
),

placed AS (
    SELECT
        s.game_id,
        p.pieces,
        s.position_id * p.pieces // i.positions AS piece_before,
        CASE WHEN p.by_bucket THEN s.bucket ELSE s.rank * p.pieces // p.positions END AS piece_after
    FROM shuffled AS s
    CROSS JOIN split AS p
    CROSS JOIN input AS i
    WHERE s.split = 'train' AND s.game_id % p.step = 0
),

reached AS (
    SELECT
        pieces,
        count(*) AS positions,
        count(DISTINCT piece_before) AS before,
        count(DISTINCT piece_after) AS after
    FROM placed
    GROUP BY pieces, game_id
)

SELECT pieces, positions, before, after, count(*) AS games
FROM reached
GROUP BY ALL
ORDER BY ALL
