"""Reconstruction of games from shuffled positions without ids, by following board + move = next board.

Accepts only certain chains. A chain starts at the empty board, ends at a final position, has every position
in between, and can be joined in one way only. A position that may belong to two games is assigned to none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import game_hash
from hexdata.convert.nodes import EVIDENCE, FINAL, NODES, NOWHERE, NodeMaker
from hexdata.convert.spool import Spool, write_arrow
from hexdata.games.find import GAMES, ROWS, binary_matrix, column
from hexdata.progress import SILENT, Progress
from hexdata.schema import NO_MOVE, board_bytes
from hexdata.storage import storage_of
from hexdata.store.session import DuckDBPyConnection, duckdb_session

__all__ = ["resolve_chains"]

Array = npt.NDArray[Any]

RESERVED_MEMORY: Final = 270 << 20
"""Measured bytes outside DuckDB's buffers and the loaded moves: interpreter, libraries, batches."""
MOVES_SHARE: Final = 8
"""The games that are proved together may use memory / ``MOVES_SHARE`` bytes."""
MOVE_BYTES: Final = 4
"""Bytes per position of the games that are proved together: its move, and its share of the bytes per game."""
BATCH_ROWS: Final = 1 << 15
"""Rows fetched from DuckDB at a time."""
BATCH_GAMES: Final = 1 << 12
"""Games written at a time."""

ONE_WAY_PLIES: Final = 2
"""A board with at most this many stones can be reached by one sequence of moves only."""

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


def resolve_chains(
    spools: Sequence[Spool],
    board_size: int,
    first_game: int = 0,
    *,
    memory: int,
    threads: int,
    progress: Progress = SILENT,
) -> int:
    """Find the games of positions without ids; write ``rows`` to each spool and ``games`` to the first.

    The search proceeds ply by ply. It joins each position to a chain that leads to its board, within one
    class: equal origin, length, winner (or value, where no winner is named) and first player. Equal
    positions with equal pasts are interchangeable; copies of a game receive them in the order of their
    rows. The move of a position whose policy states none is the stone that leads to the only board of its
    class with one stone more. Where chains with different pasts reach the same board and then diverge, all
    of them end. A chain
    that reaches a final position is proved: each of its boards is compared with the replay of its moves.
    The proof makes hashes of 64 bits sufficient for the joins.

    If no position of the collection is missing, every game found was played, and the games not found are
    those that cross another game of their class. With one or two missing positions, every game found was
    still played. With more, two crossing games may be joined to one if three or more of the missing
    positions are where the two games cross.

    Args:
        spools: The spools of one collection, in the order of their sources.
        board_size: N.
        first_game: Number of games that were found by their ids. ``rows`` and ``games`` contain them and
            are extended. Default 0: existing ``rows`` and ``games`` are replaced.
        memory: Memory limit in bytes, for DuckDB and this process together.
        threads: Number of threads of DuckDB.
        progress: Receives the progress. Default: ignores it.

    Returns:
        The number of games found.

    Raises:
        BudgetError: DuckDB needs more memory.
    """
    proof_memory = memory // MOVES_SHARE
    first = spools[0].folder
    scratch = storage_of(first).work_path("chains", "chains")
    storage_of(scratch).remove_tree()  # a killed run may have left it
    try:
        with duckdb_session(
            memory=memory - RESERVED_MEMORY - proof_memory, threads=threads, spill=scratch
        ) as con:
            search = _Search(con, spools, board_size, progress)
            search.gather()
            search.follow()
            games = search.publish_games(first_game, proof_memory // MOVE_BYTES)
            search.publish_rows(first_game)
    finally:
        storage_of(scratch).remove_tree()
    return games


class _Search:
    """The search through one collection, one method per step. It uses these tables in DuckDB:

    ``nodes``: every position that can be followed.
    ``links``: the positions in a chain, with ``head``, the row of the chain's first position.
    ``ends``: the heads of the chains that reached a final position.
    ``games``: the proved chains among them, with the numbers of their games.
    """

    def __init__(
        self, con: DuckDBPyConnection, spools: Sequence[Spool], board_size: int, progress: Progress
    ) -> None:
        self.con = con
        self.spools = spools
        self.board_size = board_size
        self.progress = progress
        self.maker = NodeMaker(board_size)

    def _count(self, rows: str) -> int:
        count: int = self.con.execute(f"SELECT count(*) FROM {rows}").fetchall()[0][0]
        return count

    def gather(self) -> None:
        """Fill ``nodes``, sorted by ply, so that a query for one ply skips the others.

        Rows are numbered continuously across the spools.
        """
        self.con.register("gathered", pa.RecordBatchReader.from_batches(NODES, self._gathered()))
        self.con.execute("CREATE TABLE nodes AS FROM gathered ORDER BY ply")
        self.con.unregister("gathered")

    def _gathered(self) -> Iterator[pa.RecordBatch]:
        row = 0
        for spool in self.spools:
            for batch in spool.batches("raw", EVIDENCE):
                yield self.maker.nodes(batch, row)
                row += batch.num_rows

    # Chains

    def follow(self) -> None:
        """Fill ``links`` and ``ends``, ply by ply, until no chain continues."""
        self.con.execute("CREATE TABLE links (row BIGINT, head BIGINT, ply USMALLINT, move USMALLINT)")
        self.con.execute("CREATE TABLE ends (head BIGINT, class BIGINT, total BIGINT)")
        self.con.execute(
            "CREATE TABLE last AS SELECT *, 0 AS short, row AS head, 0 AS past FROM nodes WHERE ply = 0"
        )
        self.progress.begin("follow games", None, "plies")
        ply = 0
        self._find_moves(ply)
        while self._count(f"last WHERE head IS NOT NULL AND next < {NOWHERE}"):
            self._join(ply + 1)
            self._add_links(ply)
            self.con.execute("DROP TABLE last; ALTER TABLE joined RENAME TO last")
            self.progress.advance(1)
            ply += 1
            self._find_moves(ply)
        self._add_links(ply)
        self.con.execute("DROP TABLE last; DROP TABLE nodes")

    def _find_moves(self, ply: int) -> None:
        """Set the moves of those positions of ``last`` that state none and have one possible next board."""
        states_none = f"next = {NOWHERE} AND move = {NO_MOVE}"
        query = f"SELECT DISTINCT node, ((class & 1) + {ply}) & 1 AS player FROM last WHERE {states_none}"
        found = self.con.execute(query).fetchnumpy()
        nodes, player = found["node"], found["player"].astype(np.int64)
        if not len(nodes):
            return
        query = f"SELECT DISTINCT node FROM nodes WHERE ply = {ply + 1} ORDER BY node"
        following = self.con.execute(query).fetchnumpy()["node"]
        if not len(following):
            return
        count, move = np.zeros((2, len(nodes)), dtype=np.int64)
        cells = len(self.maker.stones) // 2
        for cell in range(cells):
            after = nodes ^ self.maker.stones[cell + player * cells]
            occurs = following[np.searchsorted(following[:-1], after)] == after
            count += occurs
            move[occurs] = cell
        moved = {"node": nodes, "after": nodes ^ self.maker.stones[move + player * cells], "cell": move}
        self.con.register("moved", pa.table(moved).filter(pa.array(count == 1)))
        self.con.execute(
            f"""
            UPDATE last SET next = after, move = cell FROM moved
            WHERE last.node = moved.node AND {states_none}
            """
        )
        self.con.unregister("moved")

    def _join(self, ply: int) -> None:
        """Create ``joined`` from the positions of a ply."""
        query = _JOIN.format(ply=ply, one_way=ply <= ONE_WAY_PLIES)
        self.con.execute(f"CREATE TABLE joined AS {query}")
        if ply > ONE_WAY_PLIES + 1 and self._end_uncertain_chains():
            self.con.execute(f"CREATE OR REPLACE TABLE joined AS {query}")

    def _end_uncertain_chains(self) -> bool:
        """End the chains of ``last`` on boards where a position may be missing, and return whether any ended.

        Each loose position shows that a position before it is missing, on one of the boards with one stone
        less. The positions that a board is ``short`` of account for as many of these. If more loose
        positions follow the board, a chain may have received the position of another chain there.
        """
        loose = self._per_node("count(*) AS number", "joined WHERE loose")
        known = self._per_node("any_value(short) AS number", "last WHERE past >= 0")
        few, many = sorted((loose, known), key=lambda found: len(found["node"]))
        if not len(few["node"]):
            return False
        before = np.zeros(len(known["node"]), dtype=np.int64)
        for stone in self.maker.stones:
            neighbour = few["node"] ^ stone
            at = np.searchsorted(many["node"][:-1], neighbour)
            matches = np.flatnonzero(many["node"][at] == neighbour)
            of_few, of_many = matches, at[matches]
            of_loose, of_known = (of_few, of_many) if few is loose else (of_many, of_few)
            before[of_known] += loose["number"][of_loose]
        nodes = known["node"][before > known["number"]]
        self.con.register("doubtful", pa.table({"node": nodes}))
        self.con.execute("UPDATE last SET head = NULL, past = -1 WHERE node IN (FROM doubtful)")
        self.con.unregister("doubtful")
        return bool(len(nodes))

    def _per_node(self, number: str, rows: str) -> dict[str, Array]:
        """Return the aggregate ``number`` for each ``node`` of ``rows``, in ascending node."""
        query = f"SELECT node, {number} FROM {rows} GROUP BY node ORDER BY node"
        return self.con.execute(query).fetchnumpy()

    def _add_links(self, ply: int) -> None:
        """Add the chains of ``last``, the positions of ``ply``, to ``links`` and ``ends``."""
        self.con.execute(f"INSERT INTO links SELECT row, head, {ply}, move FROM last WHERE head IS NOT NULL")
        self.con.execute(
            f"""
            INSERT INTO ends SELECT head, class, {ply + 1} FROM last
            WHERE head IS NOT NULL AND next = {FINAL}
            """
        )

    # Games

    def publish_games(self, first_game: int, positions: int) -> int:
        """Prove the chains that reached a final position, number them by ascending head, and write ``games``.

        Args:
            first_game: Number of games that were found by their ids.
            positions: Approximate number of positions that are proved together.

        Returns:
            The number of games proved.
        """
        self.con.execute(
            f"""
            CREATE TABLE parts AS SELECT *,
                (sum(total) OVER (ORDER BY head ROWS UNBOUNDED PRECEDING) - 1) // {positions} AS part
            FROM ends
            """
        )
        self.con.execute("CREATE TABLE games (head BIGINT, game BIGINT, total BIGINT, first_player BIGINT)")
        self.progress.begin("prove games", self._count("links JOIN ends USING (head)"), "positions")
        count = first_game
        with write_arrow(self.spools[0].folder / "games.arrow", GAMES) as writer:
            for batch in self.spools[0].batches("games") if first_game else ():
                writer.write_batch(batch)
            parts = self.con.execute("SELECT DISTINCT part FROM parts ORDER BY part").fetchall()
            for (part,) in parts:
                games, value = self._prove(self._load(part), part)
                self._number(games, count)
                count += len(games)
                for table in self._described(games, value):
                    writer.write_table(table)
        return count - first_game

    def _load(self, part: int) -> _Games:
        query = f"SELECT head, class, total FROM parts WHERE part = {part} ORDER BY head"
        ends = self.con.execute(query).fetchnumpy()
        total = ends["total"]
        moves = np.empty(total.sum(), dtype=np.uint16)
        done = 0
        query = f"SELECT move FROM links JOIN parts USING (head) WHERE part = {part} ORDER BY head, ply"
        for batch in self.con.sql(query).to_arrow_reader(BATCH_ROWS):
            moves[done : done + batch.num_rows] = batch.column(0).to_numpy()
            done += batch.num_rows
        return _Games(ends["head"], ends["class"], total, np.cumsum(total) - total, moves)

    def _prove(self, games: _Games, part: int) -> tuple[_Games, npt.NDArray[np.float64]]:
        """Compare every board of the games of a part with the replay of their moves.

        Returns:
            The games without a difference, and the values of their first positions, (G,).
        """
        is_valid = np.ones(len(games), dtype=bool)
        value = np.empty(len(games))
        query = f"SELECT row, head, ply FROM links JOIN parts USING (head) WHERE part = {part} ORDER BY row"
        rows = _RowReader(self.con, query)
        for spool in self.spools:
            for batch in spool.batches("raw", ("board", "value")):
                row, head, ply = rows.take(batch.num_rows).T
                game = np.searchsorted(games.head, head)
                boards = binary_matrix(batch.column("board"))[row]
                differ = (games.boards(game, ply, self.board_size) != boards).any(axis=1)
                is_valid[game[differ]] = False
                begins = ply == 0
                value[game[begins]] = column(batch, "value", np.nan)[row[begins]]
                self.progress.advance(len(row))
        return games.only(is_valid), value[is_valid]

    def _number(self, games: _Games, first: int) -> None:
        """Add games to ``games``, numbered from ``first``."""
        columns = {
            "head": games.head,
            "game": np.arange(first, first + len(games)),
            "total": games.total,
            "first_player": games.first_player,
        }
        self.con.register("proved", pa.table(columns))
        self.con.execute("INSERT INTO games FROM proved")
        self.con.unregister("proved")

    def _described(self, games: _Games, value: npt.NDArray[np.float64]) -> Iterator[pa.Table]:
        """Yield the games as tables with the schema ``GAMES``, ``BATCH_GAMES`` rows at a time."""
        listed = []
        columns = (
            *self.maker.origins_and_winners(games.classes),
            games.first_player.tolist(),
            value.tolist(),
        )
        for moves, origin, winner, first_player, won in zip(games.move_lists(), *columns, strict=True):
            listed.append(
                {
                    "origin": origin,
                    "winner": winner,
                    "value": won,
                    "total_positions": len(moves) + 1,
                    "positions": len(moves) + 1,
                    "first_player": first_player,
                    "moves": moves,
                    "game_hash": game_hash(moves, self.board_size, first_player),
                    "provenance": "recovered",
                }
            )
            if len(listed) == BATCH_GAMES:
                yield pa.Table.from_pylist(listed, schema=GAMES)
                listed = []
        yield pa.Table.from_pylist(listed, schema=GAMES)

    def publish_rows(self, first_game: int) -> None:
        """Write ``rows`` of each spool: the values known before, overwritten for positions of found games."""
        query = f"""
            SELECT row, game, ply, total, (ply + first_player) % 2 AS player,
                CASE WHEN move = {NO_MOVE} THEN -1 ELSE move::INTEGER END AS move
            FROM links JOIN games USING (head) ORDER BY row
        """
        rows = _RowReader(self.con, query)
        for spool in self.spools:
            known = (
                spool.batches("rows")
                if first_game
                else map(_rows_without_games, spool.batches("raw", _IN_METADATA))
            )
            with write_arrow(spool.folder / "rows.arrow", ROWS) as writer:
                for batch in known:
                    writer.write_batch(_merge_rows(batch, rows.take(batch.num_rows)))


@dataclass(frozen=True)
class _Games:
    """G games in ascending ``head``; all arrays except ``moves`` have shape (G,)."""

    head: Array
    classes: Array
    total: Array
    starts: Array
    """Index of each game's first move in ``moves``."""
    moves: npt.NDArray[np.uint16]
    """The moves of all games, concatenated; those of each game end with ``NO_MOVE``."""

    def __len__(self) -> int:
        return len(self.head)

    @property
    def first_player(self) -> Array:
        """The first player of each game: 0 blue, 1 red."""
        return NodeMaker.first_players(self.classes)

    def only(self, chosen: npt.NDArray[np.bool_]) -> _Games:
        """Return the games that the mask ``chosen`` (G,) selects; ``moves`` is not copied."""
        kept = {name: getattr(self, name)[chosen] for name in ("head", "classes", "total", "starts")}
        return replace(self, **kept)

    def move_lists(self) -> Iterator[npt.NDArray[np.uint16]]:
        """Yield the moves of each game, uint16 (m,)."""
        for start, total in zip(self.starts.tolist(), self.total.tolist(), strict=True):
            yield self.moves[start : start + total - 1]

    def boards(self, game: Array, ply: Array, board_size: int) -> npt.NDArray[np.uint8]:
        """Return the boards of games after the moves before a ply.

        Args:
            game: Index of the game, (N,).
            ply: Ply of the board, (N,).
            board_size: N.

        Returns:
            Packed boards, (N, width).
        """
        row = np.repeat(np.arange(len(game)), ply)
        move_ply = np.arange(len(row)) - np.repeat(np.cumsum(ply) - ply, ply)
        cell = self.moves[self.starts[game][row] + move_ply]
        colour = (move_ply + NodeMaker.first_players(self.classes[game])[row]) & 1
        stones = np.zeros((len(game), 8 * board_bytes(board_size)), dtype=bool)
        stones[row, cell + colour * board_size * board_size] = True
        return np.packbits(stones, axis=1)


class _RowReader:
    """The result of a query, read in parts. Its first column, ``row``, ascends."""

    def __init__(self, con: DuckDBPyConnection, query: str) -> None:
        self._batches = con.sql(query).to_arrow_reader(BATCH_ROWS)
        self._pending = np.empty((0, len(self._batches.schema)), dtype=np.int64)
        self._start = 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """Return the results for the next ``count`` values of ``row``.

        Returns:
            int64 (N, columns), with ``row`` relative to the first of these values.
        """
        stop = self._start + count
        while not len(self._pending) or self._pending[-1, 0] < stop:
            batch = next(self._batches, None)
            if batch is None:
                break
            columns = [values.to_numpy().astype(np.int64) for values in batch.columns]
            self._pending = np.concatenate([self._pending, np.stack(columns, axis=1)])
        cut = np.searchsorted(self._pending[:, 0], stop)
        taken, self._pending = self._pending[:cut], self._pending[cut:]
        taken[:, 0] -= self._start
        self._start = stop
        return taken


_IN_METADATA: Final = ("position_in_game", "total_positions")


def _rows_without_games(raw: pa.RecordBatch) -> pa.RecordBatch:
    """Return ``ROWS`` of positions without a known game: ply and length from their metadata."""
    stated = dict(zip(("ply", "total"), (raw.column(name) for name in _IN_METADATA), strict=True))
    columns = [stated.get(field.name, pa.nulls(raw.num_rows, field.type)) for field in ROWS]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


def _merge_rows(rows: pa.RecordBatch, found: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Return ``rows`` with some of them overwritten.

    Args:
        rows: ``ROWS`` of a batch.
        found: int64 (N, 1 + columns): index of the row, then its new values.
    """
    columns = []
    for field, values in zip(ROWS, found.T[1:], strict=True):
        merged = column(rows, field.name, -1).copy()
        merged[found[:, 0]] = values
        columns.append(pa.array(merged, mask=merged < 0).cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)
