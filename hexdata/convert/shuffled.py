"""The games of shuffled sources, whose positions are spread over all files of a collection.

Positions with ids are sorted by id and grouped like those of other sources. The games of the others are found
by following board + move = next board, ply by ply, and their positions are then sorted and grouped like those
with an id. DuckDB joins, sorts and spills, so memory does not grow with the collection.

**Chains.** A chain starts at the empty board, ends at a final position, has every position in between, and
can be joined in one way only. Each position is joined to a chain that leads to its board, within one class:
equal origin, length, winner (or value, where no winner is named) and first player. Equal positions with equal
pasts are interchangeable; copies of a game receive them in the order of their rows. The move of a position
whose policy states none is the stone that leads to the only board of its class with one stone more. Where
chains with different pasts reach the same board and then diverge, all of them end. A chain becomes a game if
each of its boards is the one after the move of the board before, which ``find_games`` checks. This makes
hashes of 64 bits sufficient for the joins.

If no position of the collection is missing, every game found was played, and the games not found are those
that cross another game of their class. With one or two missing positions, every game found was still played.
With more, two crossing games may be joined to one if three or more of the missing positions are where the two
games cross.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import PurePosixPath
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.convert.spool import Source, Spool, write_arrow
from hexdata.games.find import EVIDENCE, GAMES, ROWS, Grouping, find_games, grouping_of
from hexdata.games.findings import Finding, column, has_bit
from hexdata.order import derive_key, sort_key
from hexdata.schema import NO_MOVE, binary_matrix, board_bytes
from hexdata.storage import local_work, storage_of
from hexdata.store.session import DuckDBPyConnection, duckdb_session

BATCH_ROWS: Final = 1 << 15
"""Rows fetched from DuckDB at a time."""
RESERVED_MEMORY: Final = 270 << 20
"""Measured bytes outside DuckDB's buffers: interpreter, libraries, batches."""

Hashes = npt.NDArray[np.uint64]


def collection_key(source: Source) -> str:
    """Return a key of the collection of a shuffled source. Games are shared within a collection only.

    Files of one shuffle are in one folder, have the same number of buckets, and list the same source files
    in any order. Sources without any id form one collection per value convention, because their games are
    found by the boards. A file with ids that lists no source files is a collection by itself. All files of
    KataHex are one collection.
    """
    facts = source.facts
    if not facts.with_id:
        return f"no ids, {source.convention}"
    if facts.format == "katahex":  # its ids are random numbers, equal only for positions of the same game
        return facts.format
    if not facts.shuffle:
        return source.sha256
    return f"{PurePosixPath(source.name).parent} {facts.shuffle}"


def find_shuffled_games(
    sources: Sequence[Source],
    board_size: int,
    *,
    truncate: bool,
    memory: int,
    threads: int,
) -> int:
    """Find the games of a collection; write ``rows`` to each spool and ``games`` to the first.

    Positions with the same (origin, file_idx, line_idx) are one game if they agree on its length and
    winner, and no ply occurs twice. Otherwise the id does not identify a game, and the game is unknown. In
    KataHex, positions without a ply and a winner belong to the game, too. Positions without an id are joined
    to chains of boards.

    Args:
        sources: The sources of one collection, in the order of their names.
        board_size: N.
        truncate: Whether games are cut before repeated moves.
        memory: Memory limit in bytes, for DuckDB and this process together.
        threads: Number of threads of DuckDB.

    Returns:
        The number of games found.

    Raises:
        BudgetError: DuckDB needs more memory.
    """
    spools, facts = [source.spool for source in sources], [source.facts for source in sources]
    first, with_id = spools[0].folder, sum(own.with_id for own in facts)
    scratch = local_work(first, "chains")
    storage_of(scratch).remove_tree()  # a killed run may have left it
    buffers, found_games = memory * 7 // 8 - RESERVED_MEMORY, 0
    passes: list[tuple[Grouping, str]] = []
    if with_id:
        passes.append((grouping_of(facts[0].format, True, with_id, 0), _BY_ID))
    if with_id < sum(own.positions for own in facts):
        passes.append(("chains", _BY_CHAIN))
    try:
        with (
            duckdb_session(memory=buffers, threads=threads, spill=scratch) as con,
            write_arrow(first / "games.arrow", GAMES) as writer,
        ):
            con.from_arrow(ROWS.append(_ROW).empty_table()).create("found")
            if ("chains", _BY_CHAIN) in passes:
                _follow_chains(con, spools, board_size)
            for grouping, query in passes:
                start, positions = found_games, _sorted_positions(con, spools, query)
                for table, rows, games in find_games(positions, board_size, grouping, truncate=truncate):
                    found = con.from_arrow(rows.append_column(_ROW, table["row"])).filter("game >= 0")
                    found.project(f"* REPLACE (game + {start} AS game)").insert_into("found")
                    writer.write_table(games)
                    found_games += games.num_rows
            _write_rows(con, spools)
    finally:
        storage_of(scratch).remove_tree()
    return found_games


_ROW: Final = pa.field("row", pa.int64())
"""Number of a position in the collection."""
_BY_ID: Final = "FROM positions WHERE line_idx IS NOT NULL ORDER BY origin_number, file_idx, line_idx, row"
_BY_CHAIN: Final = """
SELECT positions.* REPLACE (chain AS line_idx, ply AS position_in_game, total AS total_positions)
FROM positions JOIN chained USING (row) ORDER BY chain, ply
"""
"""Queries for the positions of each game one after the other."""


def _sorted_positions(
    con: DuckDBPyConnection, spools: Sequence[Spool], query: str
) -> Iterator[pa.RecordBatch]:
    """Yield the positions in the order of a query: ``EVIDENCE``, and ``row``."""
    numbers: dict[str | None, int] = {}

    def positions() -> Iterator[pa.RecordBatch]:
        """Yield all positions; long origins are numbered in the order of their appearance."""
        start = 0
        for batch in chain.from_iterable(spool.batches("raw", EVIDENCE) for spool in spools):
            number = pa.array(numbers_of(batch.column("origin"), numbers))
            row = pa.array(np.arange(start, start + batch.num_rows))
            start += batch.num_rows
            yield batch.drop_columns("origin").append_column("origin_number", number).append_column(_ROW, row)

    reader = _reader(positions())
    evidence = pa.schema([field for field in reader.schema if field.name != "origin_number"])
    evidence = evidence.append(pa.field("origin", pa.string()))
    cursor = con.cursor()  # another query runs while its result is read
    cursor.register("positions", reader)
    origins = None
    for batch in cursor.sql(query).to_arrow_reader(BATCH_ROWS):
        # Complete only now, as the sort has read all positions.
        origins = pa.array([*numbers], pa.string()) if origins is None else origins
        origin = origins.take(batch.column("origin_number"))
        yield batch.append_column("origin", origin).select(evidence.names).cast(evidence)
    cursor.close()


def _reader(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
    """Return a reader of batches, at least one, which have the schema of the first one."""
    first = next(batches)
    return pa.RecordBatchReader.from_batches(first.schema, chain([first], batches))


_STATED: Final = ("position_in_game", "total_positions", "move", "findings")
"""Columns of positions that ``ROWS`` has too."""
_MERGED: Final = """
SELECT game, coalesce(ply, position_in_game) AS ply, coalesce(total, total_positions) AS total, player,
    coalesce(found.move, stated.move) AS move, coalesce(found.findings, stated.findings) AS findings, cut
FROM stated LEFT JOIN (FROM ordered WHERE row >= {start} AND row < {stop}) AS found USING (row) ORDER BY row
"""
"""Query for ``ROWS`` of positions: what they state, overwritten where a game was found."""


def _write_rows(con: DuckDBPyConnection, spools: Sequence[Spool]) -> None:
    """Write the table ``rows`` of each spool."""
    con.execute("CREATE TABLE ordered AS FROM found ORDER BY row")  # ranges of rows are found fast
    start = 0
    for spool in spools:
        with write_arrow(spool.folder / "rows.arrow", ROWS) as writer:
            for batch in spool.batches("raw", _STATED):
                stop = start + batch.num_rows
                con.register("stated", batch.append_column(_ROW, pa.array(np.arange(start, stop))))
                merged = con.sql(_MERGED.format(start=start, stop=stop)).to_arrow_table()
                writer.write_table(merged.cast(ROWS))
                start = stop


def numbers_of(texts: pa.Array, numbers: dict[str | None, int]) -> npt.NDArray[np.int64]:
    """Return the number of each text or null, int64 (N,), in the order of their first appearance.

    Args:
        texts: The texts.
        numbers: The numbers of the texts before, to which new ones are added.
    """
    encoded = texts.dictionary_encode(null_encoding="encode")
    codes = [numbers.setdefault(text, len(numbers)) for text in encoded.dictionary.to_pylist()]
    found: npt.NDArray[np.int64] = np.array(codes, np.int64)[encoded.indices.to_numpy()]
    return found


# Games found by their boards

ONE_WAY_PLIES: Final = 2
"""A board with at most this many stones can be reached by one sequence of moves only."""

FINAL: Final = (1 << 64) - 1
"""Value of ``next`` for a final position."""
NOWHERE: Final = (1 << 64) - 2
"""Value of ``next`` for a position that has no single move, or a move to an occupied cell."""

CHAIN_EVIDENCE: Final = (
    *("board", "move", "has_policy", "findings", "value", "winner", "origin"),
    *("line_idx", "position_in_game", "total_positions", "player_to_move"),
)
"""The columns of spooled positions from which nodes are computed."""

_JOIN: Final = f"""
WITH at_ply AS (
    SELECT *, count(*) OVER board AS positions, min(next) OVER board = max(next) OVER board AS one_future,
        row_number() OVER (PARTITION BY node ORDER BY row) AS number
    FROM nodes WHERE ply = {{ply}} WINDOW board AS (PARTITION BY node)
), paths AS (
    SELECT next AS node, row, head,
        CASE WHEN past < 0 THEN -1 ELSE min(row) OVER (PARTITION BY last.node, past) END AS past
    FROM last WHERE next < {NOWHERE}
), arriving AS (
    SELECT *, count(*) OVER board AS arrivals, min(past) OVER board = max(past) OVER board AS one_past,
        row_number() OVER (PARTITION BY node ORDER BY row) AS number
    FROM paths WINDOW board AS (PARTITION BY node)
), joined AS (
    SELECT at_ply.*, head, past, arrivals IS NULL AS loose, greatest(arrivals - positions, 0) AS short,
        one_past AND (arrivals >= positions OR {{one_way}}) OR one_future AND positions >= arrivals AS certain
    FROM at_ply LEFT JOIN arriving USING (node, number)
)
SELECT row, class, node, next, move, loose, short, CASE WHEN certain THEN head END AS head,
    CASE WHEN {{one_way}} THEN 0 WHEN certain THEN past ELSE -1 END AS past
FROM joined
"""
"""Query that joins the positions of a ply to ``last``, the positions of the ply before.

``head`` is the row of the empty board at the start of the chain, null without a chain. ``past`` is a number
that identifies the moves that led to a position, -1 if they are unknown.

The k-th chain that arrives at a board is joined to the k-th position with this board. The join is certain in
two cases. Either all arriving chains have the same past, and there are no more positions than chains, as a
surplus position would have another past; up to ``ONE_WAY_PLIES`` stones it would not. Or all positions have
the same next board, and there are no more chains than positions, as it would be unknown which chain lacks its
position. ``short`` is the number of chains that arrive at a board and find no position. ``loose`` marks a
position at which no chain arrives.
"""


_FIND_MOVES: Final = f"""
UPDATE last SET next = after, move = cell FROM (
    SELECT node AS board, any_value(after) AS after, any_value(cell) AS cell
    FROM (
        SELECT node, xor(node, word) AS after, cell FROM stones JOIN (
            SELECT DISTINCT node, ((class & 1) + {{ply}}) & 1 AS player FROM last
            WHERE next = {NOWHERE} AND move = {NO_MOVE}
        ) USING (player)
    )
    WHERE after IN (SELECT node FROM nodes WHERE ply = {{ply}} + 1)
    GROUP BY node HAVING count(*) = 1
)
WHERE node = board AND next = {NOWHERE} AND move = {NO_MOVE}
"""
"""Query that sets the moves of positions of ``last`` that state none and have one possible next board."""

_END_CHAINS: Final = """
UPDATE last SET head = NULL, past = -1 WHERE node IN (
    SELECT known.node FROM {few}, stones, {many} WHERE {many}.node = xor({few}.node, word)
    GROUP BY known.node HAVING sum(loose.number) > any_value(known.number)
)
"""
"""Query that ends the chains of ``last`` on boards where a position may be missing.

Each loose position shows that a position before it is missing, on one of the boards with one stone less. The
positions that a board is ``short`` of account for as many of these. If more loose positions follow the board,
a chain may have received the position of another chain there.
"""


def _follow_chains(con: DuckDBPyConnection, spools: Sequence[Spool], board_size: int) -> None:
    """Create the table ``chained``: positions with the number of their chain, their ply and its length.

    ``nodes`` has every position that can be followed, and ``links`` those in a chain, with ``head``, the row
    of the chain's first position.
    """
    cells, width = board_size * board_size, board_bytes(board_size)
    words = sort_key(np.arange(8 * width), derive_key(0, "nodes", "stones"))
    words[2 * cells :] = 0  # the unused bits of a packed board
    player, cell = np.divmod(np.arange(2 * cells), cells)
    con.from_arrow(pa.table({"player": player, "cell": cell, "word": words[: 2 * cells]})).create("stones")
    nodes = con.from_arrow(_reader(_nodes(spools, board_size, words)))
    nodes = nodes.project("* REPLACE (ply::USMALLINT AS ply, move::USMALLINT AS move)")
    nodes.order("ply").create("nodes")  # so that a query for one is fast
    con.execute("CREATE TABLE links (row BIGINT, head BIGINT, ply USMALLINT, next UBIGINT)")
    con.execute("CREATE TABLE last AS SELECT *, 0 AS short, row AS head, 0 AS past FROM nodes WHERE ply = 0")

    def exist(rows: str) -> bool:
        return bool(con.execute(f"SELECT 1 FROM {rows} LIMIT 1").fetchall())

    for ply in count():
        if exist(f"last WHERE next = {NOWHERE} AND move = {NO_MOVE}"):
            con.execute(_FIND_MOVES.format(ply=ply))
        goes_on = exist(f"last WHERE head IS NOT NULL AND next < {NOWHERE}")
        if goes_on:
            query = _JOIN.format(ply=ply + 1, one_way=ply < ONE_WAY_PLIES)
            con.execute(f"CREATE TABLE joined AS {query}")
            if ply > ONE_WAY_PLIES and exist("joined WHERE loose") and _end_uncertain_chains(con):
                # The chains that ended take no positions any more, so others may.
                con.execute(f"CREATE OR REPLACE TABLE joined AS {query}")
        con.execute(f"INSERT INTO links SELECT row, head, {ply}, next FROM last WHERE head IS NOT NULL")
        con.execute("DROP TABLE last")
        if not goes_on:
            break
        con.execute("ALTER TABLE joined RENAME TO last")
    con.execute(
        f"""
        CREATE TABLE chained AS SELECT row, chain, ply, total FROM links JOIN (
            SELECT head, ply + 1 AS total, row_number() OVER (ORDER BY head) AS chain
            FROM links WHERE next = {FINAL}
        ) USING (head)
        """
    )


def _end_uncertain_chains(con: DuckDBPyConnection) -> bool:
    """End the chains of ``last`` on boards where a position may be missing; return whether any ended."""
    con.execute(
        """
        CREATE OR REPLACE TABLE loose AS
        SELECT node, count(*) AS number FROM joined WHERE loose GROUP BY node;
        CREATE OR REPLACE TABLE known AS
        SELECT node, any_value(short) AS number FROM last WHERE past >= 0 GROUP BY node
        """
    )
    # Every neighbour of the shorter list is looked up in the longer one.
    few, many = sorted(("loose", "known"), key=lambda name: len(con.table(name)))
    ended: int = con.execute(_END_CHAINS.format(few=few, many=many)).fetchall()[0][0]
    return ended > 0


def _nodes(spools: Sequence[Spool], board_size: int, words: Hashes) -> Iterator[pa.RecordBatch]:
    """Yield the nodes of the positions without an id that can be part of a chain.

    Their column ``class`` encodes the values that all positions of a game share: origin, length, winner and
    first player. ``node`` is the hash of class and board, and ``next`` the hash of class and next board.

    The hash of a board is the xor of one random word per stone, so a move adds one xor (Zobrist 1970, "A New
    Hashing Method with Application for Game Playing"). The hash of the class is added by xor, too. Classes
    number the origins in the order of their appearance.

    Positions are omitted if the number of stones differs from their ply, as after a move to an occupied cell,
    if their ply is not below their length, or if neither a winner nor a value of 0 or 1 is stated. The ply
    defaults to the number of stones, and the player to move to the one who moves at this ply if blue began.

    Args:
        spools: The spools of the collection, whose rows are numbered continuously.
        board_size: N.
        words: The word of each bit of a packed board.
    """
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1)
    # The xor of the words of the bits set, per byte of a packed board and value: (width, 256).
    tables = np.bitwise_xor.reduce(words.reshape(-1, 1, 8) * bits, axis=2)
    origins: dict[str | None, int] = {}
    first_row = 0
    for raw in chain.from_iterable(spool.batches("raw", CHAIN_EVIDENCE) for spool in spools):
        boards = binary_matrix(raw.column("board"))
        stones = np.bitwise_count(boards).sum(axis=1, dtype=np.int64)
        ply, total = column(raw, "position_in_game", -1), column(raw, "total_positions", -1)
        ply = np.where(ply < 0, stones, ply)
        move, player = column(raw, "move", -1), column(raw, "player_to_move", -1)
        player = np.where(player < 0, ply & 1, player)
        winner, value = column(raw, "winner", -1), column(raw, "value", np.nan)
        # 0 or 1 for a named winner, else 2 or 3 for a value of 0 or 1.
        outcome = np.where(winner >= 0, winner, np.where(value == 0, 2, np.where(value == 1, 3, -1)))
        followed = (column(raw, "line_idx", -1) < 0) & (ply == stones) & (outcome >= 0)
        followed &= (ply < total) | (total < 0)

        origin = numbers_of(raw.column("origin"), origins)
        # Fields of one integer: the length takes 17 bits, the outcome 2 and the first player 1.
        common = origin << 20 | (total + 1) << 3 | outcome << 1 | (player ^ ply) & 1
        node = sort_key(common, derive_key(0, "nodes", "classes"))
        for table, values in zip(tables, boards.T, strict=True):
            node ^= table[values]
        is_move = (move >= 0) & ~has_bit(column(raw, "findings", 0), Finding.OCCUPIED_MOVE)
        after = node ^ words[np.where(is_move, move + player * board_size**2, 0)]
        final = (move < 0) & (column(raw, "has_policy", 0) == 0) & ((ply == total - 1) | (total < 0))
        columns = {
            "row": np.arange(first_row, first_row + len(node)),
            "ply": ply,
            "class": common,
            "node": node,
            "next": np.where(final, np.uint64(FINAL), np.where(is_move, after, np.uint64(NOWHERE))),
            "move": np.where(move < 0, NO_MOVE, move),
        }
        yield pa.record_batch({name: values[followed] for name, values in columns.items()})
        first_row += len(node)
