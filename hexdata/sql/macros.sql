-- Macros over the boards and games of a store. DuckDB substitutes the arguments of a macro as text, so that the
-- names of inner columns must differ from any name of a column that an argument may contain.
CREATE MACRO board_size() AS $size;

CREATE MACRO cell(move) AS
CASE
    WHEN move >= 0 AND move < board_size() * board_size()
    THEN CASE WHEN move % board_size() >= 26 THEN 'a' ELSE '' END
        || chr((97 + move % board_size() % 26)::INTEGER) || (move // board_size() + 1)::INTEGER
END;

CREATE MACRO policy_probability(policy, cell) AS
CASE
    WHEN policy IS NOT NULL
    THEN coalesce(["its item".probability FOR "its item" IN policy IF "its item".cell = cell][1], 0::FLOAT)
END;

CREATE MACRO stones(board) AS bit_count(board::BIT)::INTEGER;

CREATE MACRO blue_stones(board) AS bit_count(board::BIT & '$blue'::BIT)::INTEGER;

CREATE MACRO red_stones(board) AS bit_count(board::BIT & '$red'::BIT)::INTEGER;

CREATE MACRO planes(board) AS string_split(left(board::BIT::VARCHAR, $bits), '')::UTINYINT[$bits];

CREATE MACRO trmph(game) AS (
    SELECT
        '#' || board_size() || ',' || array_to_string([cell(m) FOR m IN "its moves"], '')
        || CASE "its winner" WHEN 'BLUE' THEN ' b' WHEN 'RED' THEN ' r' ELSE '' END
    FROM (SELECT game_id AS "its id", moves AS "its moves", winner AS "its winner" FROM games)
    WHERE "its id" = game
);
