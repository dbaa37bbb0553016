-- Pairs of adjacent rows from the same game, in the input order and in the shuffled order of each split, with the
-- number expected in a uniform random order.
WITH ordered AS (
    -- The tables are read in order; `adjacent` is true if the row read before has the preceding index.
    SELECT
        'input' AS rows,
        game_id,
        lag(game_id) OVER () AS game_before,
        lag(position_id) OVER () = position_id - 1 AS adjacent
    FROM positions
    UNION ALL
    SELECT split, game_id, lag(game_id) OVER (), lag(rank) OVER () = rank - 1
    FROM shuffled
),

games AS (
    SELECT
        rows,
        game_id,
        count(*) AS n,
        count(*) FILTER (WHERE adjacent) AS pairs,
        count(*) FILTER (WHERE adjacent AND game_id = game_before) AS same_game
    FROM ordered
    GROUP BY rows, game_id
),

orders AS (
    SELECT
        rows,
        sum(pairs)::BIGINT AS pairs,
        sum(same_game)::BIGINT AS same_game,
        coalesce(sum(n * (n - 1)) FILTER (WHERE game_id IS NOT NULL), 0) / (sum(n) * (sum(n) - 1)) AS chance
    FROM games
    GROUP BY rows
    HAVING sum(n) > 1
)

SELECT rows, pairs, same_game, same_game / pairs AS share, pairs * chance AS same_game_expected, chance AS share_expected
FROM orders
ORDER BY list_position(['input', 'train', 'val', 'test'], rows)
