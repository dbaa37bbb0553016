-- The rows of the sampled stretches of position ids, in the input order.
CREATE OR REPLACE TABLE arranged AS
SELECT
    run,
    0 AS segment,
    row_number() OVER (PARTITION BY run ORDER BY position_id) - 1 AS row_index,
    position_id,
    game,
    value
FROM (
    SELECT
        CASE WHEN $whole THEN 0 ELSE position_id // $stretch END AS run,
        position_id,
        game,
        value - $mean AS value
    FROM shuffled
    WHERE $whole OR position_id // $stretch IN (SELECT stretch FROM stretches)
)
