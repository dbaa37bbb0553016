"""Reading of a :class:`GameTable` from a store, which only has to be converted.

The first pass over the positions reads labels. It finds the games whose positions follow from the moves of
the game, and compares every label with them. The second pass reads only the parts that contain other
positions, policies, or labels that vary within a game. Boards are read for shuffled collections only: those
of other sources were compared with the moves when the store was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import pack_boards
from hexdata.errors import BudgetError, ConfigError, StoreError
from hexdata.fill import fill_dtype, fill_to_stones, games_to_fill, never_filled
from hexdata.games.find import binary_matrix
from hexdata.games.findings import moves_on_stones
from hexdata.loader.game_table import PACKED_PREFIX, GameTable
from hexdata.loader.row_policies import RowPolicies, count_entries, find_ranges
from hexdata.loader.stored_columns import StoredColumns, open_unchanged, table_digest
from hexdata.policy import SparsePolicies
from hexdata.pool import available_memory
from hexdata.progress import SILENT, Progress
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, SPLITS, games_schema, positions_schema, sources_schema
from hexdata.shards.block_check import find_bad_row
from hexdata.shards.blocks import Block, block_fields, columns_to_block, join_blocks, null_of, take_rows
from hexdata.shards.options import Check
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.columns import convert_columns
from hexdata.store.files import FileFacts
from hexdata.store.parquet import open_parquet, read_checked

__all__ = ["read_game_table"]

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

_OTHER_SPLIT: Final = -2
_NOT_IN_TABLE: Final = -1
_SHUFFLED: Final = "legacy-shuffled"
"""Format of sources whose boards are not compared with the moves when the store is made."""
_LABELS: Final = (
    *("position_id", "game_id", "position_in_game", "total_positions"),
    *("move", "policy", "value", "player_to_move"),
)
_GAME_COLUMNS: Final = ("game_id", "first_player", "moves", "positions", "total_positions", "split")
_POLICY_CELLS: Final = "policy.list.element.cell"
"""Path in the Parquet file of the cells of policies, which are enough to count them."""
_PACKED_BYTES: Final = 128
"""Upper bound of the bytes of a packed position while a table is made, without optional columns."""
_ENTRY_BYTES: Final = 6
"""Bytes of a cell of a policy and of its probability while a table is made."""
_ROW_BYTES: Final = 2
"""Bytes of a position of a game while a table is made: its tier, and whether it was read."""
_DENSE: Final = 8
"""Ratio of the range of numbers to their count up to which they are counted and not sorted."""
_MEMORY_SHARE: Final = 0.8
"""Share of the available memory that a table may take."""


def read_game_table(
    store: Store,
    split: str,
    *,
    tiers: bool,
    targets: Mapping[str, str] = MappingProxyType({}),
    policies: bool = True,
    check: Check = "sizes",
    progress: Progress = SILENT,
) -> GameTable:
    """Read the positions of a split as games.

    Args:
        store: The store.
        split: "train", "val" or "test". Positions without a game are in "train".
        tiers: Whether to read value sample tiers.
        targets: Optional columns to read, with the dtype of each in the table (default: none).
        policies: Whether to read the policies that are not one-hot. Otherwise the table only contains which
            positions have one (default True).
        check: "digests" also compares every board with the moves of its game; "sizes" only those of shuffled
            collections. The digest of every file is checked when it is read. Default: "sizes".
        progress: Advanced by the number of positions (default: no reports).

    Raises:
        StoreError: A file is missing or damaged, or contains an invalid value.
        ConfigError: The split is unknown or has no positions.
        BudgetError: The table does not fit into the available memory.
    """
    if split not in SPLITS:
        raise ConfigError("unknown split", path=store.path, found=split, expected=", ".join(SPLITS))
    if store.manifest.board_size is None:
        raise ConfigError(
            "the store has no positions", path=store.path, hint="Convert files with `hexdata convert` first."
        )
    given: dict[str, Any] = {"tiers": tiers, "targets": dict(targets), "policies": policies}
    reader = _TableReader(store, split, **given, all_boards=check == "digests")
    progress.begin("read games", store.manifest.counts["positions"], "positions")
    arrays = reader.read(progress)
    if not len(arrays["fill"]) and not len(arrays[PACKED_PREFIX + "position_id"]):
        raise ConfigError("the split has no positions", path=store.path, found=split)
    digest = table_digest(store)
    again = partial(_read_again, store.path, digest, split, check=check, **given)
    columns = StoredColumns(store.path, digest, store.manifest.targets)
    return GameTable(reader.board_size, arrays, again, columns)


def _read_again(path: AnyPath, digest: str, split: str, **options: Any) -> GameTable:
    """Read a table whose temporary file is gone.

    Raises:
        StoreError: The store has changed since.
    """
    return read_game_table(open_unchanged(path, digest), split, **options)


def _read_table(
    store: Store, folder: str, table: pa.Schema, columns: Sequence[str]
) -> Iterator[tuple[AnyPath, pa.Table]]:
    """Yield each file of a small table, and some of its columns."""
    schema = pa.schema([table.field(name) for name in columns])
    for name, facts in store.manifest.files_in(folder).items():
        path = store.path / name
        yield path, pa.Table.from_batches(read_checked(path, schema, facts), schema)


_OF_KEPT_GAMES: Final = (
    *("first_player", "game_id", "first_id", "lowest_id", "highest_id", "value"),
    *("own_ids", "own_values"),
)
"""Arrays with one number for each game, from which games outside the table are removed."""


class _Part(NamedTuple):
    """A file of positions."""

    path: AnyPath
    facts: FileFacts
    check_boards: bool


@dataclass
class _PartFacts:
    """Facts about a part from the first pass."""

    has_unknown: bool = False
    """Whether it has positions of the split that belong to no game."""
    has_policies: bool = False
    """Whether it has positions with a policy that is not one-hot."""
    lowest_game: int = np.iinfo(np.int64).max
    highest_game: int = -1


@dataclass
class _Candidates:
    """The games of the split whose moves are known. G games with R positions.

    Attributes:
        fill: Fill rows (G, n·n).
        first_player: Player who began, uint8 (G,); 255 if unknown, in games without moves.
        game_id: Ids (G,).
        starts: Row of the first position of each game, and R, (G + 1,).
        is_plain: Whether all positions read so far follow from the moves, (G,).
        is_known: Whether ``first_id`` and ``value`` are set, (G,).
        first_id: Position id at ply 0, if ids are consecutive, (G,).
        lowest_id, highest_id: Lowest and highest position id read, (G,).
        value: Value of all positions, if it is constant: bits of a float32, (G,).
        own_ids, own_values: Whether the ids are not consecutive, or the values vary, (G,).
        read_count: Number of positions read of each game, as long as each is read in order, (G,).
        was_read: Whether each position was read, (R,); None as long as each game is read in order.
        columns: Labels of each position by name, (R,): ``tier`` and optional columns, if they are read, and
            ``policy_count``, the number of entries of the policy, as soon as a position has one.
    """

    fill: Array
    first_player: npt.NDArray[np.uint8]
    game_id: Int64Array
    starts: Int64Array
    columns: dict[str, Array]
    is_plain: Bools = field(init=False)
    is_known: Bools = field(init=False)
    first_id: Int64Array = field(init=False)
    lowest_id: Int64Array = field(init=False)
    highest_id: Int64Array = field(init=False)
    value: npt.NDArray[np.uint32] = field(init=False)
    own_ids: Bools = field(init=False)
    own_values: Bools = field(init=False)
    read_count: npt.NDArray[np.int32] = field(init=False)
    was_read: Bools | None = None

    def __post_init__(self) -> None:
        games = len(self.fill)
        self.is_plain = np.ones(games, np.bool_)
        self.is_known, self.own_ids, self.own_values = np.zeros((3, games), np.bool_)
        self.first_id = np.zeros(games, np.int64)
        self.lowest_id = np.full(games, np.iinfo(np.int64).max)
        self.highest_id = np.full(games, -1)
        self.value = np.zeros(games, np.uint32)
        self.read_count = np.zeros(games, np.int32)

    def demote(self, games: Array) -> None:
        """Exclude games from the table, so that their positions are packed."""
        self.is_plain[games] = False

    def keep_plain(self) -> None:
        """Remove the games that are not plain."""
        keep = self.is_plain
        if keep.all():
            return
        lengths = np.diff(self.starts)
        kept, rows = np.flatnonzero(keep), 0
        for start in range(0, len(kept), 1 << 12):  # in place, since these arrays take most of the memory
            chosen = kept[start : start + (1 << 12)]
            self.fill[start : start + len(chosen)] = self.fill[chosen]
            moved = find_ranges(self.starts[chosen], lengths[chosen])
            for column in self.columns.values():
                column[rows : rows + len(moved)] = column[moved]
            rows += len(moved)
        self.fill = self.fill[: len(kept)]
        self.columns = {name: column[:rows] for name, column in self.columns.items()}
        self.starts = np.concatenate([[0], np.cumsum(lengths[keep])])
        for name in _OF_KEPT_GAMES:
            setattr(self, name, getattr(self, name)[keep])


class _RowsWithPolicy(NamedTuple):
    """Policies of some rows."""

    rows: Int64Array
    """The rows, (k,), each once."""
    policies: SparsePolicies
    """The k policies."""

    @classmethod
    def join(cls, parts: Sequence[_RowsWithPolicy]) -> _RowsWithPolicy:
        """Return all of several policies, in ascending order of rows."""
        rows = np.concatenate([np.empty(0, np.int64), *(part.rows for part in parts)])
        return cls(rows, SparsePolicies.join([part.policies for part in parts])).sorted()

    def sorted(self) -> _RowsWithPolicy:
        """Return the policies in ascending order of rows."""
        if (np.diff(self.rows) > 0).all():
            return self
        order = np.argsort(self.rows)
        return _RowsWithPolicy(self.rows[order], self.policies.take(order))

    def renumbered(self, new_rows: Int64Array) -> _RowsWithPolicy:
        """Return the policies with ``new_rows[row]`` for each row."""
        return _RowsWithPolicy(new_rows[self.rows], self.policies).sorted()


class _TableReader:
    """Reads the arrays of a table in two passes."""

    def __init__(
        self,
        store: Store,
        split: str,
        *,
        tiers: bool,
        targets: dict[str, str],
        policies: bool,
        all_boards: bool,
    ) -> None:
        assert store.manifest.board_size is not None
        self.board_size = store.manifest.board_size
        self._cells = self.board_size**2
        self._store = store
        self._split = split
        self._targets = {name: np.dtype(dtype) for name, dtype in targets.items()}
        self._columns = ({"tier": np.dtype(np.uint8)} if tiers else {}) | self._targets
        self._with_policies = policies
        self._schema = positions_schema(self.board_size, [*targets])
        shuffled = _shuffled_sources(store)
        self._parts = [
            _Part(store.path / name, facts, all_boards or _source_of(name) in shuffled)
            for name, facts in store.manifest.files_in("positions").items()
        ]
        self._facts = [_PartFacts() for _ in self._parts]
        self._memory = int(available_memory() * _MEMORY_SHARE)
        self._needed = 0
        self._packed_count = 0

    def read(self, progress: Progress) -> dict[str, Array]:
        """Return the arrays of the table."""
        games = self._store.manifest.counts["games"]
        # The last number is that of positions without a game.
        self._number = np.full(games + 1, _OTHER_SPLIT, np.int32)
        self._number[-1] = _NOT_IN_TABLE if self._split == "train" else _OTHER_SPLIT
        self._table = self._read_games()
        for part, rows in self._batches(range(len(self._parts)), self._label_columns, labels=True):
            self._read_labels(part, rows)
            progress.advance(rows.num_rows)
        self._finish_games()
        own_labels = self._read_own_labels()
        packed, packed_policies = self._read_packed()
        policies = self._read_policies(len(packed["value"]), packed_policies)
        return self._arrays(own_labels, packed, policies)

    # --- games ----------------------------------------------------------------------------------------

    def _read_games(self) -> _Candidates:
        """Read the games of the split, and number those whose moves are known."""
        counts = self._store.manifest.counts
        games = counts["games"]
        self._require_memory(
            games * self._cells * fill_dtype(self.board_size).itemsize + _ROW_BYTES * counts["positions"]
        )
        # Rows that are not used take no memory.
        fill = np.empty((games, self._cells), fill_dtype(self.board_size))
        ids, first_players, lengths = (
            [np.empty(0, np.int64)],
            [np.empty(0, np.uint8)],
            [np.empty(0, np.int64)],
        )
        count, last_id = 0, -1
        for path, table in _read_table(self._store, "games", games_schema(), _GAME_COLUMNS):
            last_id = self._check_games(path, table, last_id)
            table = table.filter(pa.compute.field("split") == self._split)
            game_ids = table.column("game_id").to_numpy()
            self._number[game_ids] = _NOT_IN_TABLE
            rows, moves, counts_of_moves = _whole_games(table, self._cells)
            if not len(rows):
                continue
            first = table.column("first_player").fill_null(255).to_numpy()[rows]
            found = games_to_fill(moves, counts_of_moves, first & 1, self.board_size)
            distinct = np.count_nonzero(found != never_filled(found.dtype), axis=1) == counts_of_moves
            distinct &= (first <= 1) | (counts_of_moves == 0)
            chosen = rows[distinct]
            if len(chosen):
                self._number[game_ids[chosen]] = np.arange(count, count + len(chosen))
                fill[count : count + len(chosen)] = found[distinct]
                ids.append(game_ids[chosen])
                first_players.append(first[distinct])
                lengths.append(counts_of_moves[distinct] + 1)
                count += len(chosen)
        game_id, length = np.concatenate(ids), np.concatenate(lengths)
        self._require_memory(self._target_bytes * int(length.sum()))
        columns = {name: np.empty(int(length.sum()), dtype) for name, dtype in self._columns.items()}
        starts = np.concatenate([[0], np.cumsum(length)])
        return _Candidates(fill[:count], np.concatenate(first_players), game_id, starts, columns)

    def _check_games(self, path: AnyPath, table: pa.Table, last_id: int) -> int:
        """Check the ids and splits of a part of the games, and return its last id.

        Args:
            path: The part.
            table: Its rows.
            last_id: Last id of the part before.
        """
        ids = table.column("game_id").to_numpy()
        last = self._store.manifest.counts["games"] - 1
        wrong = np.flatnonzero((np.diff(ids, prepend=last_id) <= 0) | (ids > last))
        if len(wrong):
            expected = f"ascending numbers up to {last}"
            raise self._invalid(path, "game_id", f"{ids[wrong[0]]} in row {wrong[0]}", expected)
        for split in table.column("split").unique().to_pylist():
            if split not in SPLITS:
                raise self._invalid(path, "split", split, ", ".join(SPLITS))
        return int(ids[-1]) if len(ids) else last_id

    # --- first pass -----------------------------------------------------------------------------------

    @property
    def _label_columns(self) -> tuple[str, ...]:
        return (*_LABELS, *map(_stored_name, self._columns))

    @property
    def _target_bytes(self) -> int:
        """Bytes of the optional columns of one position."""
        return sum(dtype.itemsize for dtype in self._targets.values())

    def _read_labels(self, part: int, rows: pa.Table) -> None:
        """Compare labels of positions with the moves of their games.

        Most labels are compared once for a run: consecutive positions of one game with consecutive plies and
        ids, alternating players and the same other labels. In game order a run is a whole game.
        """
        table = self._table
        self._find_policies(part, rows)
        number = self._numbers(part, rows)
        ply = _column(rows, "position_in_game", NO_PLY)
        total = _column(rows, "total_positions", NO_PLY)
        player = _column(rows, "player_to_move", 255)
        position_id = _column(rows, "position_id", 0)
        value = np.ascontiguousarray(_column(rows, "value", np.nan)).view(np.uint32)
        begins = np.ones(len(number), np.bool_)
        begins[1:] = number[1:] != number[:-1]
        begins[1:] |= ply[1:] != ply[:-1] + ply.dtype.type(1)
        begins[1:] |= position_id[1:] - position_id[:-1] != 1
        begins[1:] |= (player[1:] ^ player[:-1]) != 1
        begins[1:] |= total[1:] != total[:-1]
        begins[1:] |= value[1:] != value[:-1]
        heads = np.flatnonzero(begins)
        lengths = np.diff(heads, append=len(number))
        self._packed_count += int(lengths[number[heads] == _NOT_IN_TABLE].sum())
        if self._split == "train" and rows.column("game_id").null_count:
            self._facts[part].has_unknown = True
        inside = number[heads] >= 0
        heads, lengths = heads[inside], lengths[inside]
        if not len(heads):
            return

        ids = position_id[heads]
        # Nothing else determines these labels.
        self._check_values(part, {"value": value[heads].view(np.float32), "position_id": ids})
        self._check_values(part, {"position_id": ids + (lengths - 1)})
        games, first_plies = number[heads], ply[heads].astype(np.int64)
        alone = np.flatnonzero(table.first_player[games] > 1)  # games without moves
        table.first_player[games[alone]] = player[heads[alone]] & 1
        totals = table.starts[games + 1] - table.starts[games]
        plain = (total[heads] == totals) & (first_plies + lengths <= totals)
        plain &= player[heads] == (first_plies + table.first_player[games] & 1)
        table.demote(games[~plain])
        table.demote(number[self._other_rows(number, ply, rows)])
        self._count_positions(games[plain], first_plies[plain], lengths[plain])

        np.minimum.at(table.lowest_id, games, ids)
        np.maximum.at(table.highest_id, games, ids + lengths - 1)
        first_ids = ids - first_plies
        new = np.flatnonzero(~table.is_known[games])
        table.first_id[games[new]] = first_ids[new]
        table.value[games[new]] = value[heads[new]]
        table.is_known[games[new]] = True
        table.own_ids[games[table.first_id[games] != first_ids]] = True
        table.own_values[games[table.value[games] != value[heads]]] = True
        columns = {name: _stored_name(name) for name in self._columns}
        if self._facts[part].has_policies or "policy_count" in table.columns:
            columns["policy_count"] = "policy"
        if not columns:
            return
        given = find_ranges(heads[plain], lengths[plain])
        positions = find_ranges((table.starts[games] + first_plies)[plain], lengths[plain])
        for name, stored in columns.items():
            if name == "policy_count":
                values = self._policy_counts(part, rows)[given]
            else:
                values = _column(rows, stored, null_of(stored))[given]
                self._check_values(part, {stored: values})
            with np.errstate(over="ignore"):  # a float64 that float32 cannot represent is infinite
                table.columns[name][positions] = values

    def _policy_counts(self, part: int, rows: pa.Table) -> npt.NDArray[np.uint16]:
        """Return the number of entries of the policy of each position; 0 for none."""
        column = rows.column("policy").combine_chunks()
        if not pa.types.is_struct(column.type.value_type):
            with_policy, policies = self._policies_of(part, rows)
            numbers = np.zeros(len(column), np.uint16)
            numbers[with_policy] = count_entries(policies)
            return numbers
        counts = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        if len(counts) and counts.max() > self._cells:
            found, expected = f"{counts.max()} cells", f"at most {self._cells}"
            raise self._invalid(self._parts[part].path, "policy", found, expected)
        is_valid = column.is_valid().to_numpy(zero_copy_only=False)
        return np.where(is_valid, np.maximum(counts, 1), 0).astype(np.uint16)

    def _find_policies(self, part: int, rows: pa.Table) -> None:
        """Note whether rows of a part have policies, and prepare to count those of games."""
        column = rows.column("policy")
        if column.null_count == len(column):
            return
        self._facts[part].has_policies = True
        table = self._table
        if "policy_count" not in table.columns:
            self._require_memory(2 * int(table.starts[-1]))
            table.columns["policy_count"] = np.zeros(int(table.starts[-1]), np.uint16)

    def _numbers(self, part: int, rows: pa.Table) -> npt.NDArray[np.int32]:
        """Return the number of the game of each position in the table, or why it has none."""
        game_id = _column(rows, "game_id", NO_GAME)
        if len(game_id):
            low, high = int(game_id.min()), int(game_id.max())
            if low < NO_GAME or high >= len(self._number) - 1:
                expected = f"0 to {len(self._number) - 2}, or null"
                raise self._invalid(
                    self._parts[part].path, "game_id", low if low < NO_GAME else high, expected
                )
            facts = self._facts[part]
            facts.lowest_game, facts.highest_game = min(facts.lowest_game, low), max(facts.highest_game, high)
        return self._number.take(game_id, mode="wrap")

    def _other_rows(self, number: Array, ply: Array, rows: pa.Table) -> Int64Array:
        """Return the rows of games whose move or board does not follow from the moves of the game.

        The move of the last position of a game, if it has one, is added to the fill row.
        """
        table = self._table
        move = _column(rows, "move", NO_MOVE)
        cells = number * np.int64(self._cells) + move
        filled = table.fill.reshape(-1).take(cells, mode="clip")  # clipped where the result is not used
        expected = ply + table.first_player.take(number, mode="clip")
        follows = (filled == expected) & (move < self._cells)
        others = np.flatnonzero(~follows)
        others = others[number[others] >= 0]
        games = number[others]
        is_last = ply[others] + 1 == table.starts[games + 1] - table.starts[games]
        further = is_last & (move[others] < self._cells) & (filled[others] == never_filled(filled.dtype))
        table.fill.reshape(-1)[cells[others[further]]] = expected[others[further]]
        found = [others[~(further | (is_last & (move[others] == NO_MOVE)))]]
        if "board" in rows.column_names:
            found.append(self._rows_with_other_boards(number, ply, rows))
        return np.concatenate(found)

    def _rows_with_other_boards(self, number: Array, ply: Array, rows: pa.Table) -> Int64Array:
        table, n = self._table, self.board_size
        inside = np.flatnonzero((number >= 0) & (ply < self._cells + 1))
        fill = table.fill.take(number[inside], axis=0)
        plies = ply[inside] + table.first_player.take(number[inside])
        stones = fill_to_stones(fill, plies.astype(fill.dtype)).reshape(len(fill), 2, n, n)
        boards = binary_matrix(rows.column("board"))[inside]
        found: Int64Array = inside[(pack_boards(stones) != boards).any(axis=1)]
        return found

    def _count_positions(self, games: Array, first_plies: Array, lengths: Array) -> None:
        """Count the positions of runs as read, and note the games of which a position occurs twice.

        While every game is read in order, the number of positions read of each is enough.
        """
        table = self._table
        if table.was_read is None:
            stops = first_plies + lengths
            goes_on = np.zeros(len(games), np.bool_)
            goes_on[1:] = games[1:] == games[:-1]
            expected = np.where(goes_on, np.roll(stops, 1), table.read_count[games])
            others = games[~goes_on]
            if (expected == first_plies).all() and len(np.unique(others)) == len(others):
                table.read_count[games] = stops  # of equal games, the last number remains
                return
            table.was_read = np.zeros(int(table.starts[-1]), np.bool_)
            table.was_read[find_ranges(table.starts[:-1], table.read_count.astype(np.int64))] = True
        positions = table.starts[games] + first_plies
        if (lengths > 1).any():
            positions, games = find_ranges(positions, lengths), np.repeat(games, lengths)
        table.demote(games[table.was_read[positions]])
        table.demote(games[_find_repeated(positions)])
        table.was_read[positions] = True

    def _finish_games(self) -> None:
        """Keep only the games whose positions were all read and follow from their moves."""
        table = self._table
        if table.was_read is None:
            table.is_plain &= table.read_count == np.diff(table.starts)
        else:
            table.is_plain &= np.logical_and.reduceat(table.was_read, table.starts[:-1])
        lost = np.flatnonzero(~table.is_plain)
        self._packed_count += int(np.diff(table.starts)[lost].sum())
        self._number[table.game_id[lost]] = _NOT_IN_TABLE
        table.was_read = None
        table.keep_plain()
        self._number[table.game_id] = np.arange(len(table.game_id))

    # --- second pass ----------------------------------------------------------------------------------

    def _read_own_labels(self) -> dict[str, Array]:
        """Return the arrays of the labels that vary within games other than by the ply."""
        table = self._table
        lengths = np.diff(table.starts)
        arrays: dict[str, Array] = {}
        needed = 0
        for name, varies in (("position_id", table.own_ids), ("value", table.own_values)):
            if not varies.any():
                continue
            dtype = np.dtype(np.float32)
            if name == "position_id":
                table.first_id[varies] = table.lowest_id[varies]
                dtype = np.min_scalar_type(int((table.highest_id - table.lowest_id)[varies].max()))
            ends = np.cumsum(lengths * varies)
            arrays[f"{name}_start"] = np.where(varies, ends - lengths, -1)
            arrays[f"{name}s"] = np.zeros(int(ends[-1]), dtype)
            needed += arrays[f"{name}s"].nbytes
        self._require_memory(needed)
        names = [name for name in ("position_id", "value") if f"{name}s" in arrays]
        games = table.game_id[table.own_ids | table.own_values]
        columns = ("game_id", "position_in_game", *names)
        for part, rows in self._batches(self._parts_with(games), columns):
            numbers = self._numbers(part, rows)
            inside = np.flatnonzero(numbers >= 0)
            numbers, plies = numbers[inside], _column(rows, "position_in_game", NO_PLY)[inside]
            for name in names:
                starts = arrays[f"{name}_start"][numbers]
                own = np.flatnonzero(starts >= 0)
                labels = _column(rows, name, 0)[inside[own]]
                if name == "position_id":
                    labels = labels - table.first_id[numbers[own]]
                arrays[f"{name}s"][starts[own] + plies[own]] = labels
        return arrays

    def _read_packed(self) -> tuple[Block, _RowsWithPolicy]:
        """Return the positions outside the table, in ascending order of position id, and their policies."""
        self._require_memory(self._packed_count * (_PACKED_BYTES + 2 * self._target_bytes))
        parts = set(self._parts_with(np.flatnonzero(self._number[:-1] == _NOT_IN_TABLE)))
        parts |= {part for part, facts in enumerate(self._facts) if facts.has_unknown}
        targets = [*self._targets]
        columns = (*block_fields(self.board_size, with_policy=False, targets=targets), "policy")
        blocks: list[Block] = []
        found: list[_RowsWithPolicy] = []
        count = 0
        for part, rows in self._batches(sorted(parts), columns):
            others = np.flatnonzero(self._numbers(part, rows) == _NOT_IN_TABLE)
            if not len(others):
                continue
            chosen = rows.take(pa.array(others))
            given, policies = self._policies_of(part, chosen)
            block = columns_to_block(chosen, with_policy=False, targets=targets)
            self._check_values(part, block)
            self._require_memory(2 * _ENTRY_BYTES * len(policies.cells))  # with their concatenation
            with np.errstate(over="ignore"):
                block |= {name: block[name].astype(dtype) for name, dtype in self._targets.items()}
            blocks.append(block)
            found.append(_RowsWithPolicy(given + count, policies))
            count += len(others)
        return self._join(blocks, found)

    def _policies_of(self, part: int, rows: pa.Table) -> tuple[Int64Array, SparsePolicies]:
        """Return the rows that have a policy that is not one-hot, and these policies."""
        try:
            return SparsePolicies.from_arrow(rows.column("policy"), self._cells)
        except StoreError as error:
            raise self._invalid(
                self._parts[part].path, "policy", error.found or error.reason, str(error.expected)
            ) from error

    def _read_policies(self, packed: int, of_packed: _RowsWithPolicy) -> dict[str, Array]:
        """Return the arrays of the policies of all rows; none if no row has one.

        Args:
            packed: Number of positions outside the table.
            of_packed: Their policies.
        """
        table = self._table
        game_rows = int(table.starts[-1])
        counts = table.columns.pop("policy_count", np.zeros(0, np.uint16))
        packed_counts = count_entries(of_packed.policies)
        entries = int(counts.sum(dtype=np.int64) + packed_counts.sum())
        if not entries:
            return {}
        rows, contents = game_rows + packed, self._with_policies
        self._require_memory(
            2 * rows + RowPolicies.bytes_of(rows, entries, self._cells, contents=contents), policies=contents
        )
        all_counts = np.zeros(rows, np.uint16)
        all_counts[: len(counts)] = counts
        all_counts[game_rows + of_packed.rows] = packed_counts
        del counts
        arrays = RowPolicies.allocate(all_counts, self._cells, contents=contents)
        if not contents:
            return arrays
        policies = RowPolicies(arrays)
        policies.put(game_rows + of_packed.rows, of_packed.policies)
        parts = [part for part in self._parts_with(table.game_id) if self._facts[part].has_policies]
        for part, batch in self._batches(parts, ("game_id", "position_in_game", "policy")):
            numbers, plies = self._numbers(part, batch), _column(batch, "position_in_game", NO_PLY)
            found, given = self._policies_of(part, batch)
            inside = np.flatnonzero(numbers[found] >= 0)
            found = found[inside]
            if len(inside) < len(given):
                given = given.take(inside)
            if not policies.put(table.starts[numbers[found]] + plies[found], given):
                path = self._parts[part].path
                raise self._invalid(path, "policy", "other numbers of cells", "those read before")
        return arrays

    def _parts_with(self, games: Int64Array) -> list[int]:
        """Return the parts that may contain positions of any of these games, ascending ids (k,)."""
        firsts = np.searchsorted(games, [facts.lowest_game for facts in self._facts])
        last = np.append(games, np.iinfo(np.int64).max)
        return [
            part
            for part, (first, facts) in enumerate(zip(firsts.tolist(), self._facts, strict=True))
            if last[first] <= facts.highest_game
        ]

    def _check_values(self, part: int, block: Block) -> None:
        for name, array in block.items():
            bad = find_bad_row(name, array, self.board_size)
            if bad is not None:
                raise self._invalid(self._parts[part].path, name, bad.found, bad.expected)

    def _join(
        self, blocks: Sequence[Block], found: Sequence[_RowsWithPolicy]
    ) -> tuple[Block, _RowsWithPolicy]:
        """Return the positions outside the table, in ascending order of position id, and their policies."""
        if not blocks:
            fields = block_fields(self.board_size, with_policy=False, targets=[*self._targets])
            empty = {name: np.empty((0, *spec.shape), spec.dtype) for name, spec in fields.items()}
            return empty, _RowsWithPolicy.join([])
        joined = join_blocks(blocks)
        policies = _add_irregular_policies(joined, _RowsWithPolicy.join(found), self.board_size)
        ids = joined["position_id"]
        if (np.diff(ids) > 0).all():
            return joined, policies
        order = np.argsort(ids, kind="stable")
        new_rows = np.empty(len(ids), np.int64)
        new_rows[order] = np.arange(len(ids))
        return take_rows(joined, order), policies.renumbered(new_rows)

    def _arrays(
        self, own_labels: dict[str, Array], packed: Block, policies: dict[str, Array]
    ) -> dict[str, Array]:
        """Return the arrays of the table."""
        table = self._table
        arrays: dict[str, Array] = {
            "fill": table.fill,
            "first_player": table.first_player,
            "game_id": table.game_id,
            "starts": table.starts,
            "position_id": table.first_id,
            "value": table.value.view(np.float32),
        }
        arrays |= table.columns | own_labels | policies
        return arrays | {PACKED_PREFIX + name: array for name, array in packed.items()}

    # --- files ----------------------------------------------------------------------------------------

    def _batches(
        self, parts: Sequence[int], columns: Sequence[str], *, labels: bool = False
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield row groups of parts, each with its part; the next one is read meanwhile.

        Args:
            parts: The parts.
            columns: Columns to read. The column ``policy`` has the type of the file.
            labels: Whether to read boards, too, of the parts whose boards have to be compared, and only the
                cells of policies.
        """
        groups = self._row_groups(parts, columns, labels=labels)
        with ThreadPoolExecutor(1) as executor:
            coming = executor.submit(next, groups, None)
            while (item := coming.result()) is not None:
                coming = executor.submit(next, groups, None)
                yield item

    def _row_groups(
        self, parts: Sequence[int], columns: Sequence[str], *, labels: bool
    ) -> Iterator[tuple[int, pa.Table]]:
        for part in parts:
            path, facts, check_boards = self._parts[part]
            names = [*columns, "board"] if labels and check_boards else [*columns]
            schema = pa.schema([self._schema.field(name) for name in names])
            with open_parquet(path, schema, facts) as file:
                converted = pa.schema([field for field in schema if field.name != "policy"])
                stored = list(converted.names)
                if "policy" in names:
                    leaves = {file.schema.column(i).path for i in range(len(file.schema))}
                    stored.append(_POLICY_CELLS if labels and _POLICY_CELLS in leaves else "policy")
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=stored)
                    converted_rows = convert_columns(table, converted)
                    if "policy" in names:
                        converted_rows = converted_rows.append_column("policy", table.column("policy"))
                    yield part, converted_rows

    def _require_memory(self, needed: int, *, policies: bool = False) -> None:
        self._needed += needed
        if self._needed <= self._memory:
            return
        fields = [*self._targets, *(["policy"] if policies else [])]
        fewer = f"Leave out some of the fields {', '.join(fields)}; or run" if fields else "Run"
        raise BudgetError.of_memory(
            "the table of games does not fit into the available memory",
            found=self._memory,
            expected=self._needed,
            hint=f"{fewer} `hexdata shuffle` and `hexdata export`, and load the shards with mode='stream'.",
        )

    def _invalid(self, path: AnyPath, column: str, found: object, expected: str) -> StoreError:
        return StoreError(
            "the table contains an invalid value",
            path=path,
            record=f"column {column}",
            found=found,
            expected=expected,
            hint="Run `hexdata verify` to see what else is wrong; then convert the sources again.",
        )


def _stored_name(column: str) -> str:
    """Return the column of positions from which a column of the table is read."""
    return "value_sample_tier" if column == "tier" else column


def _column(rows: pa.Table, name: str, null: float) -> Array:
    column = rows.column(name)
    if column.null_count:
        column = column.fill_null(null)
    array: Array = column.to_numpy()
    return array


def _find_repeated(numbers: Int64Array) -> Int64Array:
    """Return indices of numbers that occur more than once: all but one of each."""
    if not len(numbers):
        return numbers
    low = int(numbers.min())
    size = int(numbers.max()) - low + 1
    if size <= _DENSE * len(numbers):  # counting is faster than sorting
        occurs = np.zeros(size, np.bool_)
        occurs[numbers - low] = True
        if np.count_nonzero(occurs) == len(numbers):
            return numbers[:0]
    order = np.argsort(numbers, kind="stable")
    repeated: Int64Array = order[1:][np.diff(numbers[order]) == 0]
    return repeated


def _whole_games(games: pa.Table, cells: int) -> tuple[Int64Array, Array, Int64Array]:
    """Return the rows of the games with all moves and positions, their concatenated moves and their lengths.

    Args:
        games: Columns of games.
        cells: Number of cells of a board. Games with other moves, or null moves, are left out.
    """
    moves = games.column("moves").combine_chunks()
    lengths = moves.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    positions = games.column("positions").to_numpy()
    totals = games.column("total_positions").fill_null(0).to_numpy()
    whole = (lengths >= 0) & (lengths <= cells) & (positions == lengths + 1) & (totals == lengths + 1)
    rows = np.flatnonzero(whole)
    values = moves.filter(pa.array(whole)).flatten().fill_null(NO_MOVE).to_numpy()
    if len(values) and values.max() >= cells:
        of_game = np.repeat(np.arange(len(rows)), lengths[rows])
        valid = np.ones(len(rows), np.bool_)
        valid[of_game[values >= cells]] = False
        values, rows = values[valid[of_game]], rows[valid]
    return rows, values, lengths[rows]


def _add_irregular_policies(block: Block, policies: _RowsWithPolicy, board_size: int) -> _RowsWithPolicy:
    """Add the moves on occupied cells, which a fill row cannot represent, as one-hot policies."""
    move = np.where(block["move"] == NO_MOVE, -1, block["move"].astype(np.int64))
    rows = np.setdiff1d(moves_on_stones(block["board"], move, board_size), policies.rows)
    if not len(rows):
        return policies
    one_hot = SparsePolicies(np.arange(len(rows) + 1), block["move"][rows], np.ones(len(rows), np.float32))
    return _RowsWithPolicy.join([policies, _RowsWithPolicy(rows, one_hot)])


def _shuffled_sources(store: Store) -> set[int]:
    """Return the numbers of the sources that are files of shuffled collections."""
    found: set[int] = set()
    for _, table in _read_table(store, "sources", sources_schema(), ("source_id", "format")):
        for source, kind in zip(*(column.to_pylist() for column in table.columns), strict=True):
            if kind == _SHUFFLED:
                found.add(source)
    return found


def _source_of(name: str) -> int:
    return int(name.rpartition("-")[2].removesuffix(".parquet"))
