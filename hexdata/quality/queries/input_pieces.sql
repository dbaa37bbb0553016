-- The same counts for the input order: the position ids are divided into as many equal pieces as there are
-- buckets, and the requested pieces are counted.
WITH per_game AS (
    SELECT
        (position_id * $buckets) // $positions AS piece,
        game_id,
        count(*) AS n,
        sum(value - $least) AS value
    FROM shuffled
    WHERE (position_id * $buckets) // $positions IN (SELECT unnest($pieces))
    GROUP BY piece, game_id
)

SELECT
    sum(n)::BIGINT AS rows,
    (count(game_id) + coalesce(sum(n) FILTER (WHERE game_id IS NULL), 0))::BIGINT AS games,
    greatest(
        coalesce(max(n) FILTER (WHERE game_id IS NOT NULL), 0),
        (count(*) > count(game_id))::BIGINT
    ) AS largest,
    sum(value) AS value
FROM per_game
GROUP BY piece
ORDER BY piece
