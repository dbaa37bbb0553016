"""Reading of a :class:`GameTable` from a store, which only has to be converted.

The first pass over the positions reads labels and policies. It finds the games whose positions follow from
the moves of the game, and compares every label with them. A second pass, which most stores do not need, reads
the other positions. Boards of games are read for shuffled collections only: those of other sources were
compared with the moves when the store was made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.arrays import NUMPY
from hexdata.board import pack_boards
from hexdata.errors import ConfigError, StoreError
from hexdata.fill import fill_dtype, fill_to_stones, games_to_fill, never_filled
from hexdata.games.findings import moves_on_stones
from hexdata.loader.game_table import PACKED_PREFIX, GameTable, policy_arrays
from hexdata.loader.options import Check
from hexdata.loader.shared_arrays import allocate, require_memory
from hexdata.order import sort_key
from hexdata.policy import SparsePolicies
from hexdata.pool import read_ahead
from hexdata.progress import SILENT, Progress
from hexdata.schema import (
    NO_GAME,
    NO_MOVE,
    NO_PLY,
    SPLITS,
    binary_matrix,
    games_schema,
    is_target,
    positions_schema,
    sources_schema,
)
from hexdata.shards.block_check import find_bad_row, invalid_table
from hexdata.shards.blocks import Block, block_fields, columns_to_block, join_blocks, null_of
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.parquet import memory_returned, open_parquet, read_batches

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]
_Policies = tuple[Int64Array, SparsePolicies | None]
"""Rows that have a policy that is not one-hot, (k,), and the k policies, if they are read."""

# Numbers of games that are not in the table; negative, so that one comparison finds those that are.
_UNKNOWN: Final = -1 << 63
"""Position id of games of which no position has been read."""
_OTHER_SPLIT: Final = -2
_NOT_IN_TABLE: Final = -1
_SHUFFLED: Final = "legacy-shuffled"
"""Format of sources whose boards are not compared with the moves when the store is made."""
_NULLS: Final = {
    "position_id": 0,
    "game_id": NO_GAME,
    "position_in_game": NO_PLY,
    "total_positions": NO_PLY,
    "move": NO_MOVE,
    "value": np.nan,
    "player_to_move": 255,
}
"""Labels that the first pass compares, each with a number for null."""
_GAME_COLUMNS: Final = ("game_id", "first_player", "moves", "positions", "total_positions", "split")
_POLICY_CELLS: Final = "policy.list.element.cell"
"""Path in the Parquet file of the cells of policies, which are enough to count them."""
_ROW_BYTES: Final = 2
_ROWS: Final = 1 << 15
"""Number of rows whose labels are compared together. Larger arrays leave the CPU cache, and malloc returns
their memory to the system each time."""
_GAMES: Final = 1 << 12
"""Number of games whose rows are moved together."""
_PACKED_BYTES: Final = 128
_ENTRY_BYTES: Final = 12
"""Upper bounds of the bytes of a position of a game, of a packed one, and of a cell of a policy with its
probability while a table is made, without optional columns."""


def table_digest(store: Store, files: Sequence[int] | None = None) -> str:
    """Return the digest that identifies the positions and games of a store.

    Args:
        store: The store.
        files: Numbers of files of games and of positions, to identify those that the store had before further
            ones were added (default None: all files).
    """
    return store.manifest.digest("games", "positions", first=files)


def open_unchanged(path: AnyPath, digest: str) -> Store:
    """Open a store whose positions and games are still those with a digest.

    Raises:
        StoreError: The store has changed, or it cannot be opened.
    """
    store = Store.open(path)
    if (found := table_digest(store)) != digest:
        reason = "the store has changed since the loader was made"
        raise StoreError(reason, path=path, found=found, expected=digest, hint="Make a new loader.")
    return store


def read_game_table(
    store: Store,
    split: str,
    columns: Mapping[str, str],
    policies: bool = True,
    check: Check = "sizes",
    progress: Progress = SILENT,
) -> GameTable:
    """Read the positions of a split as games.

    Args:
        store: The store.
        split: "train", "val" or "test". Positions without a game are in "train".
        columns: ``value_sample_tier`` and optional columns to read, with the dtype of each in the table.
        policies: Whether to read the policies that are not one-hot. Otherwise the table only contains which
            positions have one (default True).
        check: "digests" also compares every board with the moves of its game; "sizes" only those of shuffled
            collections. The digest of every file is checked when it is read. Default: "sizes".
        progress: Advanced by the number of positions (default: no reports).

    Raises:
        StoreError: A file is missing or damaged, or contains an invalid value.
        ConfigError: The split has no positions.
        BudgetError: The table does not fit into the available memory.
    """
    # Only a store without positions has no board size, which the arrays need.
    if store.manifest.board_size is None:
        raise ConfigError("the store has no positions; run `hexdata convert`", path=store.path)
    with memory_returned():
        # The reader is not kept: its arrays would take memory while the rows are indexed.
        arrays = _TableReader(store, split, columns, policies, check).read(progress)
    if not len(arrays["fill"]) and not len(arrays[PACKED_PREFIX + "position_id"]):
        raise ConfigError("the split has no positions", path=store.path, found=split)
    # Copies in other processes may have to read again, and must then find the same files.
    digest = table_digest(store)
    again = partial(_read_again, store.path, digest, split, columns, policies, check)
    read_columns = partial(_read_columns, store.path, digest, split, check)
    return GameTable(store.manifest.board_size, arrays, again, store.manifest.targets, read_columns)


def _read_again(path: AnyPath, digest: str, *options: Any) -> GameTable:
    """Read a table whose temporary file is gone.

    Raises:
        StoreError: The store has changed since.
    """
    return read_game_table(open_unchanged(path, digest), *options)


def _read_columns(
    path: AnyPath, digest: str, split: str, check: Check, names: Sequence[str]
) -> dict[str, Array]:
    """Return columns of all positions of a table, with the dtypes of shards and ``null_of`` for null.

    A table with these columns is read, and only they are kept.

    Raises:
        StoreError: The store has changed, a file is missing or damaged, or a value is invalid.
        BudgetError: The columns do not fit into the available memory.
    """
    fields = block_fields(1, with_policy=False, targets=list(filter(is_target, names)))
    columns = {name: fields[name].dtype for name in names}
    arrays = _read_again(path, digest, split, columns, False, check).arrays
    return {name: np.concatenate([arrays[name], arrays[PACKED_PREFIX + name]]) for name in names}


class _TableReader:
    """Reads the arrays of a table.

    G games of the split are candidates, with R positions. ``_of_game`` has these arrays (G,):

    - ``game_id`` int64; ``first_player`` uint8, who began, 255 if unknown, in games without moves;
      ``positions`` int64, the number of positions.
    - ``is_plain``: whether all positions read so far follow from the moves.
    - ``keys``: the sum of the sort keys of the plies read, mod 2^64. It is that of all plies if each ply was
      read once; other plies have the same sum by chance only.
    - ``position_id``: the id at ply 0 if ids are consecutive, or ``_UNKNOWN``; and ``value``, both of the
      first positions read.

    ``_number`` has the index in these of each game of the store, or why it has none; the last number is that
    of positions without a game. ``_fill`` are the fill rows (G, n·n), ``_starts`` the row of the first
    position of each game, and R, (G + 1,). ``_columns`` are labels of each position (R,): those requested,
    and ``position_offset`` or ``values`` as soon as those of a game do not follow from the first one.
    ``_policies`` are those of positions of games.
    """

    def __init__(
        self, store: Store, split: str, columns: Mapping[str, str], policies: bool, check: Check
    ) -> None:
        assert store.manifest.board_size is not None
        self.board_size = store.manifest.board_size
        self._cells = self.board_size**2
        self._store, self._split, self._check = store, split, check
        self._dtypes = {name: np.dtype(dtype) for name, dtype in columns.items()}
        self._targets = list(filter(is_target, columns))
        self._with_policies = policies
        self._policies: list[_Policies] = []
        self._needed = self._packed_count = 0

    def read(self, progress: Progress) -> dict[str, Array]:
        """Return the arrays of the table."""
        progress.begin("read games", self._store.manifest.counts["positions"], "positions")
        # One entry more than there are games: NO_GAME is -1, so that it takes the last entry.
        self._number = np.full(self._store.manifest.counts["games"] + 1, _OTHER_SPLIT, np.int32)
        self._number[-1] = _NOT_IN_TABLE if self._split == "train" else _OTHER_SPLIT
        self._read_games()
        # First pass: finds the games that can be held as moves. The second one needs to know which these are.
        with closing(read_ahead(self._groups([*_NULLS, "policy", *self._dtypes], is_first=True))) as groups:
            for path, rows, number in groups:
                for start in range(0, len(number), _ROWS):
                    own = slice(start, start + _ROWS)
                    self._read_labels(path, rows[own], number[own])
                progress.advance(rows.num_rows)
        self._keep_plain_games()
        packed = self._read_packed()
        games, rows = self._of_game, int(self._starts[-1]) + len(packed["value"])
        self._require_memory(8 * rows if self._policies else 0)
        return {
            "fill": self._fill,
            "first_player": games["first_player"],
            "game_id": games["game_id"],
            "starts": self._starts,
            "position_id": games["position_id"],
            "value": games["value"],
            **self._columns,
            **policy_arrays(self._policies, rows, self._cells),
            **{PACKED_PREFIX + name: array for name, array in packed.items()},
        }

    def _read_games(self) -> None:
        """Read the games of the split, and number those whose moves are known."""
        counts, dtype = self._store.manifest.counts, fill_dtype(self.board_size)
        games, last, count = counts["games"], -1, 0
        # Before memory is allocated: Linux grants more than it has, and ends a process that writes to it.
        self._require_memory(games * self._cells * dtype.itemsize + _ROW_BYTES * counts["positions"])
        # As large as all games of the store: the pages of games in other splits
        # are never written, so they take no memory.
        fill = allocate((games, self._cells), dtype)
        game_id, first_player, length = (allocate((games,), each) for each in (np.int64, np.uint8, np.int64))
        with closing(read_ahead(self._small_tables("games", games_schema(), _GAME_COLUMNS))) as tables:
            for path, table in tables:
                ids = table.column("game_id").to_numpy()
                # Ids index arrays below, and the order of rows depends on their order.
                wrong = np.flatnonzero((np.diff(ids, prepend=last) <= 0) | (ids >= games))
                if len(wrong):
                    row, expected = int(wrong[0]), f"ascending numbers up to {games - 1}"
                    raise invalid_table(path, "column game_id", f"{ids[row]} in row {row}", expected)
                for split in table.column("split").unique().to_pylist():
                    if split not in SPLITS:
                        raise invalid_table(path, "column split", split, ", ".join(SPLITS))
                last = int(ids[-1]) if len(ids) else last
                own = pc.equal(table.column("split"), self._split).to_numpy()
                self._number[ids[own]] = _NOT_IN_TABLE
                rows, moves, lengths = _whole_games(table, own, self._cells)
                first = table.column("first_player").fill_null(255).to_numpy()[rows]
                # 255 for unknown becomes player 1; such a game is used only if it has
                # no moves, when the number does not matter.
                of_games = games_to_fill(moves, lengths, first & 1, self.board_size)
                # A cell that is played twice has only one ply in a fill row, so
                # that fewer cells are filled than moves made.
                distinct = np.count_nonzero(of_games != never_filled(dtype), axis=1) == lengths
                distinct &= (first <= 1) | (lengths == 0)
                chosen = ids[rows[distinct]]
                self._number[chosen] = np.arange(count, count + len(chosen))
                new = slice(count, count + len(chosen))
                fill[new], game_id[new] = of_games[distinct], chosen
                first_player[new], length[new] = first[distinct], lengths[distinct] + 1
                count += len(chosen)
        self._fill, length = fill[:count], length[:count]
        self._starts = np.concatenate([[0], np.cumsum(length)])
        positions = int(self._starts[-1])
        self._require_memory(sum(dtype.itemsize for dtype in self._dtypes.values()) * positions)
        self._columns = {name: allocate((positions,), dtype) for name, dtype in self._dtypes.items()}
        self._of_game: dict[str, Array] = {
            "game_id": game_id[:count],
            "first_player": first_player[:count],
            "positions": length,
            "is_plain": np.ones(count, np.bool_),
            "position_id": np.full(count, _UNKNOWN),
            "value": np.zeros(count, np.float32),
            "keys": np.zeros(count, np.uint64),
        }
        # The sum of the keys of the plies below each ply.
        self._key_sums = np.cumsum(np.concatenate([[np.uint64(0)], sort_key(np.arange(self._cells + 1), 0)]))

    # --- first pass -----------------------------------------------------------------------------------

    def _read_labels(self, path: AnyPath, rows: pa.Table, number: npt.NDArray[np.int32]) -> None:
        """Compare labels of positions with the moves of their games.

        Most labels are compared once for a run: consecutive positions of one game with consecutive plies and
        ids, alternating players and the same other labels. In game order a run is a whole game.
        """
        games, starts = self._of_game, self._starts
        labels = {name: _numbers_of(rows, name, null) for name, null in _NULLS.items()}
        heads = _heads_of_runs(number, labels)
        lengths, of_run = np.diff(heads, append=len(number)), number[heads]
        self._packed_count += int(lengths[of_run == _NOT_IN_TABLE].sum())
        # Rows of packed positions and of other splits are only counted here.
        inside = of_run >= 0
        heads, lengths, of_run = heads[inside], lengths[inside], of_run[inside]
        if not len(heads):
            return
        ids, values, player = (labels[name][heads] for name in ("position_id", "value", "player_to_move"))
        first_plies = labels["position_in_game"][heads].astype(np.int64)
        # Nothing else determines these labels.
        _check_values(path, "value", values, self.board_size)
        _check_values(path, "position_id", ids, self.board_size)
        _check_values(path, "position_id", ids + (lengths - 1), self.board_size)
        alone = np.flatnonzero(games["first_player"][of_run] > 1)  # games without moves
        games["first_player"][of_run[alone]] = player[alone] & 1

        # A run is plain if its totals, plies and players are those of the moves.
        totals = games["positions"][of_run]
        plain = (labels["total_positions"][heads] == totals) & (first_plies + lengths <= totals)
        plain &= player == (first_plies + games["first_player"][of_run] & 1)
        games["is_plain"][of_run[~plain]] = False
        games["is_plain"][number[self._other_rows(number, labels, rows)]] = False

        # Only plain runs are written to the columns.
        of_run, plies, counts = of_run[plain], first_plies[plain], lengths[plain]
        # Not +=, which would count only one of several runs of the same game.
        np.add.at(games["keys"], of_run, self._key_sums[plies + counts] - self._key_sums[plies])
        # The id at ply 0, if ids grow with plies. The first run of a game sets its id and value.
        first_ids, values = ids[plain] - plies, values[plain]
        is_new = games["position_id"][of_run] == _UNKNOWN
        is_new[1:] &= of_run[1:] != of_run[:-1]
        games["position_id"][of_run[is_new]] = first_ids[is_new]
        games["value"][of_run[is_new]] = values[is_new]
        offsets = first_ids - games["position_id"][of_run]
        # Only where the offset is not 0, so that the pages of games with consecutive ids take no memory.
        if len(moved := np.flatnonzero(offsets)):
            own = NUMPY.ranges(starts[of_run[moved]] + plies[moved], counts[moved])
            self._offsets(offsets)[own] = np.repeat(offsets[moved], counts[moved])
        if "values" not in self._columns and (_bits(games["value"][of_run]) != _bits(values)).any():
            self._require_memory(values.itemsize * int(starts[-1]))
            self._columns["values"] = np.repeat(games["value"], games["positions"])
        has_columns = self._dtypes or "values" in self._columns
        if has_columns or rows.column("policy").null_count < rows.num_rows:
            self._put_columns(path, rows, labels, number, NUMPY.ranges(heads[plain], counts))

    def _offsets(self, offsets: Int64Array) -> Array:
        """Return the column ``position_offset``, in a dtype that these offsets fit into."""
        column, count = self._columns.get("position_offset"), int(self._starts[-1])
        # Games whose positions are far apart from each other need wider numbers.
        dtype = np.int16 if np.abs(offsets).max() <= np.iinfo(np.int16).max else np.int64
        if column is None or column.itemsize < np.dtype(dtype).itemsize:
            self._require_memory(np.dtype(dtype).itemsize * count)
            given, column = column, allocate((count,), dtype)
            if given is not None:
                column[:] = given
            self._columns["position_offset"] = column
        return column

    def _put_columns(
        self, path: AnyPath, rows: pa.Table, labels: Mapping[str, Array], number: Array, given: Int64Array
    ) -> None:
        """Write the rows ``given`` of a row group to the columns."""
        of_row, plies = number[given], labels["position_in_game"][given]
        own = self._starts[of_row] + plies
        for name in self._dtypes:
            values = _numbers_of(rows, name, null_of(name))[given]
            _check_values(path, name, values, self.board_size)
            with np.errstate(over="ignore"):  # a float64 that float32 cannot represent is infinite
                self._columns[name][own] = values
        if "values" in self._columns:
            self._columns["values"][own] = labels["value"][given]
        if rows.column("policy").null_count == rows.num_rows:
            return
        row_of = np.full(len(rows), -1)
        row_of[given] = own
        found, policies = self._policies_of(path, rows)
        # The policies of other rows are read with the packed positions, if they are in the split.
        self._add_policies(*_choose(row_of[found], policies, row_of[found] >= 0))

    def _add_policies(self, rows: Int64Array, policies: SparsePolicies | None) -> None:
        """Keep policies of rows of the table."""
        self._require_memory(_ENTRY_BYTES * len(policies.cells) if policies else 0, policies=True)
        self._policies.append((rows, policies))

    def _policies_of(self, path: AnyPath, rows: pa.Table) -> _Policies:
        """Return the rows with policies, and the policies if they are read."""
        column = rows.column("policy").combine_chunks()
        if not self._with_policies:
            return np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)), None
        try:
            return SparsePolicies.from_arrow(column, self._cells)
        except StoreError as error:
            found = error.found or error.reason
            raise invalid_table(path, "column policy", found, str(error.expected)) from error

    def _other_rows(self, number: Array, labels: Mapping[str, Array], rows: pa.Table) -> Int64Array:
        """Return the rows of games whose move or board does not follow from the moves of the game.

        The move of the last position of a game, if it has one, is added to the fill row.
        """
        fill, first_player = self._fill, self._of_game["first_player"]
        move, ply = labels["move"], labels["position_in_game"]
        cells = number * np.int64(self._cells) + move
        filled = fill.reshape(-1).take(cells, mode="clip")  # clipped where the result is not used
        expected = ply + first_player.take(number, mode="clip")
        others = np.flatnonzero(~((filled == expected) & (move < self._cells)))
        others = others[number[others] >= 0]
        of_other = number[others]
        # The move of the last position of a game, for example from a search, is not in the list of moves.
        is_last = ply[others] + 1 == self._starts[of_other + 1] - self._starts[of_other]
        further = is_last & (move[others] < self._cells) & (filled[others] == never_filled(filled.dtype))
        fill.reshape(-1)[cells[others[further]]] = expected[others[further]]
        found: Int64Array = others[~(further | (is_last & (move[others] == NO_MOVE)))]
        if "board" not in rows.column_names:
            return found
        # Plies out of range, also null, were found above already and would wrap in the dtype of fill rows.
        inside = np.flatnonzero((number >= 0) & (ply < self._cells + 1))
        own = fill.take(number[inside], axis=0)
        plies = ply[inside] + first_player.take(number[inside])
        stones = fill_to_stones(own, plies.astype(own.dtype)).reshape(len(own), 2, self.board_size, -1)
        boards = binary_matrix(rows.column("board"))[inside]
        return np.concatenate([found, inside[(pack_boards(stones) != boards).any(axis=1)]])

    def _keep_plain_games(self) -> None:
        """Keep only the games whose positions were all read once and follow from their moves."""
        games = self._of_game
        lengths = games["positions"]
        keep = games["is_plain"] & (games["keys"] == self._key_sums[lengths])
        if not keep.all():
            self._packed_count += int(lengths[~keep].sum())
            # Positions of the other games are read as packed ones in the next pass.
            self._number[games["game_id"][~keep]] = _NOT_IN_TABLE
            starts, dropped = self._starts, np.cumsum(np.where(keep, 0, lengths))
            self._fill = _keep_rows(self._fill, keep, np.arange(len(keep) + 1))
            self._columns = {name: _keep_rows(column, keep, starts) for name, column in self._columns.items()}
            self._starts = np.concatenate([[0], np.cumsum(lengths[keep])])
            self._of_game = games = {name: array[keep] for name, array in games.items()}
            self._number[games["game_id"]] = np.arange(len(self._fill))
            for number, (rows, policies) in enumerate(self._policies):
                of_row = np.searchsorted(starts, rows, side="right") - 1
                self._policies[number] = _choose(rows - dropped[of_row], policies, keep[of_row])
            # The games that needed these columns may be gone.
            offset, values = (self._columns.get(name) for name in ("position_offset", "values"))
            if offset is not None and not offset.any():
                del self._columns["position_offset"]
            if values is not None:
                firsts = np.repeat(games["value"], games["positions"])
                if (_bits(values) == _bits(firsts)).all():
                    del self._columns["values"]

    # --- second pass ----------------------------------------------------------------------------------

    def _read_packed(self) -> Block:
        """Return the positions outside the table, by ascending id, and keep their policies."""
        target_bytes = sum(dtype.itemsize for dtype in self._dtypes.values())
        self._require_memory(self._packed_count * (_PACKED_BYTES + 2 * target_bytes))
        fields = block_fields(self.board_size, with_policy=False, targets=self._targets)
        # An empty block, so that the join has all fields and dtypes if there are no such positions.
        blocks: list[Block] = [
            {
                name: np.empty((0, *spec.shape), self._dtypes.get(name, spec.dtype))
                for name, spec in fields.items()
            }
        ]
        found: list[_Policies] = []
        count, last = 0, -1
        for path, rows, numbers in self._groups([*fields, "policy"]) if self._packed_count else ():
            chosen = rows.take(pa.array(np.flatnonzero(numbers == _NOT_IN_TABLE)))
            given, policies = self._policies_of(path, chosen)
            block = columns_to_block(chosen, with_policy=False, targets=self._targets)
            for name, array in block.items():
                _check_values(path, name, array, self.board_size)
            ids = block["position_id"]
            # The order of rows must not depend on how positions are divided into files.
            if len(wrong := np.flatnonzero(np.diff(ids, prepend=last) <= 0)):
                raise invalid_table(path, "column position_id", ids[wrong[0]], "ascending numbers")
            last = ids[-1] if len(ids) else last
            # A fill row cannot represent a move on an occupied cell, which becomes a one-hot policy.
            move = np.where(block["move"] == NO_MOVE, -1, block["move"].astype(np.int64))
            others = np.setdiff1d(moves_on_stones(block["board"], move, self.board_size), given)
            one_hot = None
            if self._with_policies:
                probabilities = np.ones(len(others), np.float32)
                one_hot = SparsePolicies(np.arange(len(others) + 1), block["move"][others], probabilities)
            found += [(given + count, policies), (others + count, one_hot)]
            with np.errstate(over="ignore"):
                block |= {name: block[name].astype(dtype) for name, dtype in self._dtypes.items()}
            blocks.append(block)
            count += chosen.num_rows
        for given, policies in found:
            self._add_policies(given + self._starts[-1], policies)
        return join_blocks(blocks)

    # --- files ----------------------------------------------------------------------------------------

    def _small_tables(
        self, folder: str, schema: pa.Schema, columns: Sequence[str]
    ) -> Generator[tuple[AnyPath, pa.Table], None, None]:
        """Yield each file of a small table, and some of its columns."""
        chosen = pa.schema([schema.field(name) for name in columns])
        for name, facts in self._store.manifest.files_in(folder).items():
            path = self._store.path / name
            with open_parquet(path, chosen, facts) as file:
                table = pa.Table.from_batches(read_batches(file, chosen, threads=False), chosen)
            yield path, table

    def _groups(
        self, columns: Sequence[str], *, is_first: bool = False
    ) -> Generator[tuple[AnyPath, pa.Table, npt.NDArray[np.int32]], None, None]:
        """Yield the path, columns of the rows and the numbers of the games of each row group.

        Args:
            columns: Columns to read.
            is_first: Whether to read all row groups, and also boards that have to be compared. Otherwise only
                those with packed positions.
        """
        shuffled: set[int] = set()
        for _, table in self._small_tables("sources", sources_schema(), ("source_id", "format")):
            ids, formats = (column.to_pylist() for column in table.columns)
            shuffled |= {number for number, kind in zip(ids, formats, strict=True) if kind == _SHUFFLED}
        schema = positions_schema(self.board_size, self._targets)
        parts = self._store.manifest.files_in("positions")
        # The number of a part is that of its first source; it has all sources before that of the next part.
        firsts = [int(re.split("[-.]", name)[1]) for name in parts]
        for (name, facts), first, after in zip(parts.items(), firsts, [*firsts[1:], math.inf], strict=True):
            path, read = self._store.path / name, [*columns]
            has_shuffled = any(first <= source < after for source in shuffled)
            if is_first and (self._check == "digests" or has_shuffled):
                read.append("board")
            chosen = pa.schema([schema.field(each) for each in read])
            if not self._with_policies:  # the cells are enough to see which positions have one
                read[read.index("policy")] = _POLICY_CELLS
            with open_parquet(path, chosen, facts) as file:
                for group in range(file.num_row_groups):
                    # The ids of games are a small column, and often show that
                    # nothing else of a row group is needed.
                    if not is_first:
                        numbers = self._numbers(path, file.read_row_group(group, columns=["game_id"]))
                        if not (numbers == _NOT_IN_TABLE).any():
                            continue
                    rows = file.read_row_group(group, columns=read, use_threads=False)
                    yield path, rows, self._numbers(path, rows)

    def _numbers(self, path: AnyPath, rows: pa.Table) -> npt.NDArray[np.int32]:
        """Return the number of the game of each position in the table, or why it has none."""
        game_id = _numbers_of(rows, "game_id", NO_GAME)
        if len(game_id):
            low, high = int(game_id.min()), int(game_id.max())
            if low < NO_GAME or high >= len(self._number) - 1:
                found, expected = low if low < NO_GAME else high, f"0 to {len(self._number) - 2}, or null"
                raise invalid_table(path, "column game_id", found, expected)
        # "wrap" makes -1, for no game, the last entry.
        return self._number.take(game_id, mode="wrap")

    def _require_memory(self, needed: int, *, policies: bool = False) -> None:
        self._needed += needed
        fields = [*self._targets, *(["policy"] if policies else [])]
        fewer = f"Leave out some of the fields {', '.join(fields)}; or run" if fields else "Run"
        hint = f"{fewer} `hexdata shuffle` and `hexdata export`, and load the shards with mode='stream'."
        require_memory(self._needed, "the table of games does not fit into the available memory", hint)


def _keep_rows(array: Array, keep: npt.NDArray[np.bool_], starts: Int64Array) -> Array:
    """Return the rows of the games to keep. They are moved, since a copy may not fit into the memory.

    Args:
        array: Rows of all games (R, …), which are changed.
        keep: Which games to keep (G,).
        starts: First row of each game, and R, (G + 1,).
    """
    count = 0
    for first in range(0, len(keep), _GAMES):
        own, bounds = keep[first : first + _GAMES], starts[first : first + _GAMES + 1]
        rows = array[bounds[0] : bounds[-1]][np.repeat(own, np.diff(bounds))]
        array[count : count + len(rows)] = rows
        count += len(rows)
    return array[:count]


def _choose(rows: Int64Array, policies: SparsePolicies | None, chosen: npt.NDArray[np.bool_]) -> _Policies:
    """Return some of the rows (k,) with their policies."""
    if policies is not None and not chosen.all():
        policies = policies.take(np.flatnonzero(chosen))
    return rows[chosen], policies


def _heads_of_runs(number: Array, labels: Mapping[str, Array]) -> Int64Array:
    """Return the first row of each run, which continues the row before it in every label."""
    begins = np.ones(len(number), np.bool_)
    begins[1:] = number[1:] != number[:-1]
    for name, step in (("position_in_game", 1), ("position_id", 1), ("total_positions", 0)):
        array = labels[name]
        begins[1:] |= array[1:] != array[:-1] + array.dtype.type(step)
    begins[1:] |= (labels["player_to_move"][1:] ^ labels["player_to_move"][:-1]) != 1
    bits = _bits(labels["value"])
    begins[1:] |= bits[1:] != bits[:-1]
    return np.flatnonzero(begins)


def _bits(array: Array) -> Array:
    """Return floats as integers, so that 0.0 and -0.0 differ; and integers unchanged."""
    return np.ascontiguousarray(array).view(np.uint32) if array.dtype == np.float32 else array


def _whole_games(
    games: pa.Table, chosen: npt.NDArray[np.bool_], cells: int
) -> tuple[Int64Array, Array, Int64Array]:
    """Return the rows of the games with all moves and positions, their concatenated moves and their lengths.

    Args:
        games: Columns of games.
        chosen: Which of the games to return, (games,).
        cells: Number of cells of a board. Games with other moves, or null moves, are left out.
    """
    moves = games.column("moves").combine_chunks()
    lengths = moves.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    positions = games.column("positions").to_numpy()
    totals = games.column("total_positions").fill_null(0).to_numpy()
    # A game of m moves has m + 1 positions: the empty board and one after each move.
    whole = chosen & (lengths >= 0) & (lengths <= cells)
    whole &= (positions == lengths + 1) & (totals == lengths + 1)
    rows = np.flatnonzero(whole)
    # A null move becomes a cell outside the board, which the check below finds.
    values = moves.flatten().fill_null(NO_MOVE).to_numpy()[np.repeat(whole, np.maximum(lengths, 0))]
    if values.max(initial=0) >= cells:
        of_game = np.repeat(np.arange(len(rows)), lengths[rows])
        valid = np.ones(len(rows), np.bool_)
        valid[of_game[values >= cells]] = False
        values, rows = values[valid[of_game]], rows[valid]
    return rows, values, lengths[rows]


def _numbers_of(rows: pa.Table, name: str, null: float) -> Array:
    """Return a column as numbers, with a number for null."""
    column = rows.column(name)
    array: Array = (column.fill_null(null) if column.null_count else column).to_numpy()
    return array


def _check_values(path: AnyPath, name: str, values: Array, board_size: int) -> None:
    if (bad := find_bad_row(name, values, board_size)) is not None:
        raise invalid_table(path, f"column {name}", bad.found, bad.expected)
