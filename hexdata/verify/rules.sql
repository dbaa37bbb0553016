-- Rows that must not exist in the tables of a store. The first line of a rule has the check, the table, the kind of the
-- record and what is expected, separated by bars; the query returns the bad rows, as (number of the record, what was
-- found), of which the first is reported. A null is no bad value, except within a list. The table `files` has the files
-- of the manifest: folder, file, first_row, rows, and part, the number in the name, which is that of its first source.

-- in = out + rejected | sources | row | its number
SELECT first_row + file_row_number, 'source_id ' || source_id
FROM sources JOIN files USING (folder, file)
WHERE source_id <> first_row + file_row_number;

-- position ids | positions | row | its number
SELECT first_row + file_row_number, 'position_id ' || position_id
FROM positions JOIN files USING (folder, file)
WHERE position_id <> first_row + file_row_number;

-- game ids | games | row | its number
SELECT first_row + file_row_number, 'game_id ' || game_id
FROM games JOIN files USING (folder, file)
WHERE game_id <> first_row + file_row_number;

-- in = out + rejected | sources | source | as many rejected records as it states, and records = positions + rejected
SELECT source_id, s.name || format(
    ': {:,} positions and {:,} rejected records; it states {:,} rejected records of {:,}',
    positions, counted, s.rejected, records
)
FROM sources AS s LEFT JOIN (
    SELECT source_id, count(*) AS listed FROM rejected GROUP BY source_id
) USING (source_id), (SELECT coalesce(listed, 0) AS counted)
WHERE counted <> s.rejected OR records <> positions + counted;

-- in = out + rejected | rejected | source | one of the sources
SELECT source_id, 'rejected records' FROM rejected WHERE source_id NOT BETWEEN 0 AND $sources - 1;

-- in = out + rejected | positions | part | the positions of its sources, which are counted together
SELECT part, format('{:,} positions, but its sources state {:,}', rows, stated)
FROM files LEFT JOIN (
    SELECT part, sum(positions)::BIGINT AS listed
    FROM sources ASOF JOIN (SELECT part FROM files WHERE folder = 'positions') ON source_id >= part
    GROUP BY part
) USING (part), (SELECT coalesce(listed, 0) AS stated)
WHERE folder = 'positions' AND rows <> stated;

-- in = out + rejected | sources | total | the numbers of records, positions and rejected records of the manifest
SELECT 0, totals
FROM (SELECT [sum(records), sum(positions), sum(rejected)] AS totals FROM sources)
WHERE list_transform(totals, lambda n: coalesce(n, 0)) <> [$records, $converted, $rejected]
    OR coalesce(totals[2], 0) <> $positions;

-- source values | sources | source | 64 hexadecimal digits
SELECT source_id, 'sha256 ' || sha256 FROM sources WHERE NOT regexp_full_match(sha256, '[0-9a-f]{64}');

-- source values | sources | source | a JSON object or null
-- Escapes of surrogates become line feeds, because a lone one, which a pickle may contain, is invalid for DuckDB.
SELECT source_id, 'header ' || left(header, 100)
FROM (SELECT *, regexp_replace(header, 'ud[89a-f][0-9a-f]{2}', 'n', 'gi') AS text FROM sources)
WHERE CASE WHEN json_valid(text) THEN json_type(text) <> 'OBJECT' ELSE header IS NOT NULL END;

-- games | positions | game | a game_id of the table games
SELECT game_id, 'an unknown game' FROM positions WHERE game_id NOT BETWEEN 0 AND $games - 1;

-- games | games | game | as many positions as it states; of a recovered game, each ply once, below total_positions
-- Games $first to $last. A game has at most $cells + 1 positions. bitstring_agg refuses values out of its bounds, and a
-- repeated ply sets its bit once, so it is missing from the number of bits. Other games keep the plies that their
-- metadata state. A LEFT JOIN, because a game without any position has no group.
SELECT game_id, CASE
    WHEN g.positions <> coalesce(found, 0) THEN coalesce(found, 0) || ' positions'
    ELSE plies || ' valid plies of ' || with_ply
END
FROM (SELECT game_id, positions, provenance FROM games WHERE game_id BETWEEN $first AND $last) AS g
LEFT JOIN (
    SELECT game_id, count(*) AS found, count(position_in_game) AS with_ply,
        coalesce(bit_count(bitstring_agg(position_in_game, 0, $cells) FILTER (
            position_in_game < least(coalesce(total_positions, $cells + 1), $cells + 1)
        )), 0) AS plies
    FROM positions WHERE game_id BETWEEN $first AND $last
    GROUP BY game_id
) USING (game_id)
WHERE g.positions <> coalesce(found, 0) OR (provenance = 'recovered' AND plies <> with_ply);

-- games | positions | position | a ply of its game with the next one of its moves, or no move
-- Games $first to $last.
SELECT position_id, format('move {} at ply {} of game {}', coalesce(move::VARCHAR, 'null'), position_in_game, game_id)
FROM (SELECT * FROM positions WHERE game_id BETWEEN $first AND $last)
JOIN (SELECT game_id, moves FROM games WHERE game_id BETWEEN $first AND $last) USING (game_id)
WHERE position_in_game > len(moves) OR move <> moves[position_in_game + 1];

-- games | games | game | the winner that its positions name or, if none does, that of their value; or null
-- Games $first to $last.
SELECT game_id, 'winner ' || winner
FROM (SELECT game_id, winner FROM games WHERE game_id BETWEEN $first AND $last)
JOIN (
    SELECT game_id, min(winner) AS named, min(value) AS low, max(value) AS high
    FROM positions WHERE game_id BETWEEN $first AND $last
    GROUP BY game_id
) USING (game_id), (SELECT CASE WHEN high = 0 THEN 'BLUE' WHEN low = 1 THEN 'RED' END AS by_value)
WHERE winner <> coalesce(named, by_value);

-- games | games | game | all games of a game_hash in one split, so that validation does not measure what was trained
SELECT max(game_id), 'another split than game ' || min(game_id)
FROM games GROUP BY game_hash HAVING min(split) <> max(split);

-- game values | games | game | one of $splits
SELECT game_id, 'split ' || split FROM games WHERE split NOT IN ($splits);

-- game values | games | game | BLUE, RED or null
SELECT game_id, 'winner ' || winner FROM games WHERE winner NOT IN ('BLUE', 'RED');

-- game values | games | game | one of $end_reasons or null
SELECT game_id, 'end_reason ' || end_reason FROM games WHERE end_reason NOT IN ($end_reasons);

-- game values | games | game | one of $swaps or null
SELECT game_id, 'swap ' || swap FROM games WHERE swap NOT IN ($swaps);

-- game values | games | game | 0 for blue or 1 for red
SELECT game_id, 'first_player ' || first_player FROM games WHERE first_player > 1;

-- game values | games | game | 1 or more
SELECT game_id, 'positions ' || positions FROM games WHERE positions < 1;

-- game values | games | game | one of the sources
SELECT game_id, 'source_id ' || source_id FROM games WHERE source_id NOT BETWEEN 0 AND $sources - 1;

-- game values | games | game | 'metadata' or 'recovered'
SELECT game_id, 'provenance ' || provenance FROM games WHERE provenance NOT IN ('metadata', 'recovered');

-- game values | games | game | names of flags or null
-- list_count does not count nulls.
SELECT game_id, 'flags ' || flags::VARCHAR FROM games WHERE len(flags) <> list_count(flags);

-- game values | games | game | cells of the board, each once unless the game has the flag repeated-move
SELECT game_id, 'moves ' || moves::VARCHAR
FROM games
WHERE list_max(moves) >= $cells OR len(moves) <> list_count(moves)
    OR (
        len(moves) <> len(list_distinct(moves))
        AND NOT coalesce(list_contains(flags, 'repeated-move'), false)
    );

-- game values | games | game | the split that follows from its game_hash and the options of convert
-- As `split_of` does: the first 8 bytes of the hash are a fraction of 2^64.
SELECT game_id, 'split ' || split
FROM games, (SELECT ('0x' || left(hex(game_hash), 16))::UBIGINT / 2.0::DOUBLE ** 64 AS part)
WHERE split <> CASE
    WHEN part < $test::DOUBLE THEN 'test'
    WHEN part < $held_out::DOUBLE THEN 'val'
    ELSE 'train'
END;

-- game values | games | game | the first game of the same game_hash, or null if it is this one
SELECT game_id, 'duplicate_of ' || coalesce(duplicate_of::VARCHAR, 'null')
FROM (
    SELECT game_id, duplicate_of, nullif(min(game_id) OVER (PARTITION BY game_hash), game_id) AS first
    FROM games
)
WHERE duplicate_of IS DISTINCT FROM first;
