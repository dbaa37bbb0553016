"""The positions of a split as games: one fill row for each game, and the labels of its positions.

Rows count the positions of the split: first the positions of whole games, by game id and ply, then the other
positions, which are packed, by position id. ``hexdata.fill`` describes fill rows; ``game_reader`` reads a
table from a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.fill import (
    POSITION_PLY,
    FillArray,
    boards_to_fill,
    fill_to_move,
    never_filled,
)
from hexdata.loader.row_policies import RowPolicies
from hexdata.loader.shared_arrays import SharedArrays
from hexdata.loader.stored_columns import StoredColumns
from hexdata.schema import EXTRA_PREFIX, NO_MOVE, is_target
from hexdata.shards.blocks import SPARSE_FIELDS, Block, block_length, slice_rows, take_rows

__all__ = ["PACKED_PREFIX", "GameTable", "TableRows"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]

_SCAN_ROWS: Final = 1 << 18
"""Minimum number of rows in each block of a scan."""
_LARGEST_SHIFT: Final = 6
_MAX_STEPS: Final = 4
"""Maximum number of games that begin within a group of rows, if the groups are not single rows."""
PACKED_PREFIX: Final = "packed."
"""Prefix of the arrays of packed positions."""
_NEED_FILL: Final = frozenset(("fill", "move"))
_POLICY: Final = ("policy", "policy_row")


class TableRows:
    """Gathered rows, in the order in which they were requested."""

    def __init__(self, block: Block) -> None:
        self._policies = {name: block[name] for name in SPARSE_FIELDS if name in block}
        self._block = {name: array for name, array in block.items() if name not in self._policies}
        counts = self._policies.get("policy_count", np.empty(0, np.uint16))
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def take(self, start: int, stop: int) -> Block:
        """Return views of rows [start, stop)."""
        cut = slice_rows(self._block, start, stop)
        if self._policies:
            first, last = np.searchsorted(self._policies["policy_row"], (start, stop))
            cut["policy_row"] = self._policies["policy_row"][first:last] - np.uint32(start)
            if "policy_cell" in self._policies:
                own = slice(self._starts[first], self._starts[last])
                cut["policy_count"] = self._policies["policy_count"][first:last]
                cut["policy_cell"] = self._policies["policy_cell"][own]
                cut["policy_probability"] = self._policies["policy_probability"][own]
        return cut


class GameTable:
    """Positions of a split, most of them as whole games.

    A table can be pickled. The copies of all processes of a machine share the arrays through a temporary
    file; if it is gone, a copy reads the table again.

    Args:
        board_size: Board size n.
        arrays: The arrays of G games with R positions in total, and of P other positions:

            - ``fill`` (G, n·n): fill rows, uint8, or uint16 above board size 15.
            - ``first_player`` uint8 (G,): player who began, 0 blue, 1 red.
            - ``game_id`` int64 (G,), ascending.
            - ``starts`` int64 (G + 1,): row of the first position of each game; the last number is R.
            - ``position_id`` int64 (G,) and ``value`` float32 (G,): labels of the position at ply 0. The
              position id grows by one for each ply, and the value stays the same.
            - ``position_id_start``, ``value_start`` int64 (G,): -1 for games to which this applies. For the
              others, index of the label at ply 0 in ``position_ids`` or ``values``, which contain a label for
              each position of these games. ``position_ids`` contains offsets from ``position_id``, which is
              then the lowest id. Absent if there are no such games.
            - ``tier`` uint8 (R,): value sample tiers. Absent if no member or condition needs them.
            - ``root_value`` float32, ``visits`` int32, ``weight`` float32, ``extra.NAME`` float32, each (R,):
              optional columns of the store. Absent if no member needs them.
            - ``policy_group``, ``policy_offset``, ``policy_cell``, ``policy_probability``: the policies of
              all R + P rows, which ``row_policies`` describes. Absent if no position has one. The last two
              are absent if no member needs them.
            - ``packed.NAME`` (P, …): the fields of the other positions, as in a block, without policies.
        read_again: Returns an equal table. Called by a copy that cannot open the temporary file.
        columns: Reads columns from the store that the table does not contain in full precision, for ``scan``
            (default None: it has no others).

    Attributes:
        board_size: Board size n.
        arrays: The arrays.
        positions: Number of positions.
        games: Number of games, G.
        game_rows: Number of positions that belong to games, R.
    """

    def __init__(
        self,
        board_size: int,
        arrays: Mapping[str, Array],
        read_again: Callable[[], GameTable],
        columns: StoredColumns | None = None,
    ) -> None:
        self.board_size = board_size
        self.arrays = dict(arrays)
        self._read_again = read_again
        self._columns = columns
        self._shared: SharedArrays | None = None
        self._use_arrays()

    def _use_arrays(self) -> None:
        arrays = self.arrays
        self._fill: FillArray = arrays["fill"]
        self._first_player = arrays["first_player"]
        self._packed: Block = {
            name.removeprefix(PACKED_PREFIX): array
            for name, array in arrays.items()
            if name.startswith(PACKED_PREFIX)
        }
        self._policies = RowPolicies(arrays) if "policy_offset" in arrays else None
        starts = arrays["starts"]
        self.games = len(self._fill)
        self.game_rows = int(starts[-1])
        self.positions = self.game_rows + block_length(self._packed)
        self._starts: Array = starts.astype(np.int32 if self.positions < 1 << 31 else np.int64)
        self._stops: Array = self._starts[1:]
        self._shift, self._first_games, self._steps = _index_rows(self._starts)

    # --- sharing between processes --------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Write the arrays to a file, which this table and its copies use from now on."""
        if self._shared is None:
            self._shared = SharedArrays(self.arrays)
            self.arrays = self._shared.arrays()
            self._use_arrays()
        return _open_copy, (self.board_size, self._shared, self._read_again, self._columns)

    # --- reading --------------------------------------------------------------------------------------

    @property
    def has_policies(self) -> bool:
        """Whether any position has a policy that is not one-hot."""
        return self._policies is not None

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the optional columns of the store, sorted."""
        return self._columns.targets if self._columns else tuple(sorted(filter(is_target, self.arrays)))

    def bytes_per_row(self, members: Sequence[str]) -> int:
        """Return the approximate size of a gathered row in bytes, including its sparse policy."""
        entries = self._policies.entries_per_row if self._policies and "policy" in members else 0
        return self._fill.itemsize * self.board_size**2 + 8 * len(members) + int(6 * entries)

    def wait_until_ready(self) -> None:
        """Return at once, because the table is in memory."""

    def gather(self, rows: Int64Array, members: Sequence[str]) -> TableRows:
        """Return members of any rows.

        Args:
            rows: Row numbers (B,), in any order; a number may repeat.
            members: Names of the members: fields of a shard except ``board``; or ``fill``, which adds the
                fill rows (B, n·n) as ``fill`` and their plies (B,) as ``ply``. ``policy`` adds
                ``SPARSE_FIELDS``, and ``policy_row`` adds only the first of them; both add nothing if no
                position has a policy.

        Raises:
            IndexError: A row is outside the split.
        """
        return TableRows(self.take(rows, members))

    def take(self, rows: Int64Array, members: Sequence[str]) -> Block:
        """Return members of rows (B,) as one block, in the order given; see :meth:`gather`."""
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.positions):
            raise IndexError(f"a row is outside the {self.positions:,} rows of the split")
        if self.game_rows == self.positions:
            return self._take_games(rows, members) | self._take_policies(rows, members)
        in_game = rows < self.game_rows
        of_games, others = np.flatnonzero(in_game), np.flatnonzero(~in_game)
        found = self._take_games(rows[of_games], members)
        packed = self._take_packed(rows[others] - self.game_rows, members)
        merged: Block = {}
        for name, values in found.items():
            both = np.empty((len(rows), *values.shape[1:]), values.dtype)
            both[of_games], both[others] = values, packed[name]
            merged[name] = both
        return merged | self._take_policies(rows, members)

    def _take_policies(self, rows: Int64Array, members: Sequence[str]) -> Block:
        if self._policies is None or not set(_POLICY) & set(members):
            return {}
        if "policy" in members:
            return self._policies.take(rows)
        return {"policy_row": np.flatnonzero(self._policies.has_policy(rows)).astype(np.uint32)}

    def scan(self, members: Sequence[str]) -> Iterator[Block]:
        """Yield members of all rows in order, some at a time.

        Each block also has ``policy_row``, the rows with a policy that is not one-hot, which may be empty.

        Args:
            members: Names of the members: labels and optional columns of the store. Columns that the table
                does not contain, and ``extra.NAME``, which it contains as float32, are read from the store
                and released after the scan.

        Raises:
            StoreError: The store, from which a column must be read, has changed or is damaged.
            BudgetError: The columns do not fit into the available memory.
        """
        stored = self._read_columns(members)
        labels = [name for name in members if name != "move" and name not in stored]
        games, first = len(self._fill), 0
        while first < games:
            row = int(self._starts[first])
            stop = int(np.searchsorted(self._starts, row + _SCAN_ROWS))
            stop = min(max(stop, first + 1), games)
            numbers = np.repeat(np.arange(first, stop), np.diff(self._starts[first : stop + 1]))
            plies = np.arange(row, int(self._starts[stop])) - self._starts[numbers]
            block = self._labels(numbers, plies, labels)
            with_policy = self._rows_with_policy(row, int(self._starts[stop]))
            if "move" in members:
                block["move"] = self._moves_of_games(first, stop)
            block |= {name: column[row : self._starts[stop]] for name, column in stored.items()}
            yield {**block, "policy_row": with_policy}
            first = stop
        if block_length(self._packed):
            with_policy = self._rows_with_policy(self.game_rows, self.positions)
            block = {name: self._packed[name] for name in members if name not in stored}
            block |= {name: column[self.game_rows :] for name, column in stored.items()}
            yield {**block, "policy_row": with_policy}

    def _read_columns(self, members: Sequence[str]) -> dict[str, Array]:
        """Return the columns among the members that must be read from the store, (positions,) each."""
        if self._columns is None:
            return {}
        missing = [
            name
            for name in members
            if name.startswith(EXTRA_PREFIX)
            or (is_target(name) and name not in self.arrays)
            or (name == "value_sample_tier" and "tier" not in self.arrays)
        ]
        return self._columns.read(missing, self.positions, self.find_rows)

    def find_rows(self, game_ids: Int64Array, plies: Array, position_ids: Int64Array) -> Int64Array:
        """Return the rows of positions (B,), in any order; -1 for those outside the split.

        Args:
            game_ids: Ids of the games (B,), -1 for none.
            plies: Plies in the games (B,).
            position_ids: Ids of the positions (B,).
        """
        plies = plies.astype(np.int64)
        games = _find_sorted(self.arrays["game_id"], game_ids)
        first, stop = self._starts.take(games), self._starts.take(games + 1)
        rows = np.where((games >= 0) & (first + plies < stop), first + plies, -1)
        others = np.flatnonzero(games < 0)
        packed = _find_sorted(self._packed["position_id"], position_ids[others])
        rows[others] = np.where(packed >= 0, packed + self.game_rows, -1)
        return rows

    def _rows_with_policy(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        return np.empty(0, np.uint32) if self._policies is None else self._policies.rows_in(start, stop)

    def find(self, rows: Array) -> tuple[Array, Array]:
        """Return the game (B,) and the ply (B,) of rows (B,) that belong to games."""
        rows = rows.astype(self._starts.dtype, copy=False)
        games = self._first_games.take(rows >> self._shift)
        for _ in range(self._steps):
            games += self._stops.take(games) <= rows
        return games, rows - self._starts.take(games)

    def _take_games(self, rows: Int64Array, members: Sequence[str]) -> Block:
        games, plies = self.find(rows)
        block = self._labels(games, plies, [name for name in members if name not in _NEED_FILL])
        if not _NEED_FILL.isdisjoint(members):
            fill = self._fill.take(games, axis=0)
            ply = (plies + self._first_player.take(games)).astype(fill.dtype)
            if "move" in members:
                block["move"] = fill_to_move(fill, ply)
            if "fill" in members:
                block |= {"fill": fill, "ply": ply}
        return block

    def _labels(self, games: Array, plies: Array, members: Sequence[str]) -> Block:
        """Return labels of positions, given their games (B,) and plies (B,)."""
        labels: dict[str, Callable[[], Array]] = {
            "game_id": lambda: self.arrays["game_id"].take(games),
            "player_to_move": lambda: (plies + self._first_player.take(games)).astype(np.uint8) & np.uint8(1),
            "position_id": lambda: self._position_ids(games, plies),
            "position_in_game": lambda: plies.astype(np.uint16),
            "total_positions": lambda: (self._stops.take(games) - self._starts.take(games)).astype(np.uint16),
            "value": lambda: self._values(games, plies),
            "value_sample_tier": lambda: self.arrays["tier"].take(self._starts.take(games) + plies),
        }
        for name in filter(is_target, members):
            labels[name] = partial(self._targets, name, games, plies)
        return {name: labels[name]() for name in members if name not in _POLICY}

    def _targets(self, name: str, games: Array, plies: Array) -> Array:
        """Return an optional column. It is aligned with the rows of the games."""
        values: Array = self.arrays[name].take(self._starts.take(games) + plies)
        return values

    def _position_ids(self, games: Array, plies: Array) -> Int64Array:
        """Return position ids: consecutive, or each game's lowest one plus an offset for each position."""
        ids: Int64Array = self.arrays["position_id"].take(games)
        own = self._own_labels("position_id", games, plies)
        if own is None:
            ids += plies
        else:
            rows, offsets = own
            if len(rows) < len(ids):
                ids += np.where(self.arrays["position_id_start"].take(games) < 0, plies, 0)
            ids[rows] += offsets.astype(np.int64)
        return ids

    def _values(self, games: Array, plies: Array) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = self.arrays["value"].take(games)
        own = self._own_labels("value", games, plies)
        if own is not None:
            values[own[0]] = own[1]
        return values

    def _own_labels(self, name: str, games: Array, plies: Array) -> tuple[Int64Array, Array] | None:
        """Return the rows with a label of their own, and these labels; None if the table has none."""
        if f"{name}_start" not in self.arrays:
            return None
        starts = self.arrays[f"{name}_start"].take(games)
        rows = np.flatnonzero(starts >= 0)
        return rows, self.arrays[f"{name}s"].take(starts[rows] + plies[rows])

    def _moves_of_games(self, first: int, stop: int) -> npt.NDArray[np.uint16]:
        """Return the moves of all positions of the games [first, stop); 65535 for none."""
        fill, starts = self._fill[first:stop], self._starts[first : stop + 1].astype(np.int64)
        moves = np.full(starts[-1] - starts[0], NO_MOVE, np.uint16)
        games, cells = np.nonzero(fill != never_filled(fill.dtype))
        plies = fill[games, cells].astype(np.int64) - self._first_player[first:stop][games]
        moves[starts[games] - starts[0] + plies] = cells
        return moves

    def _take_packed(self, rows: Int64Array, members: Sequence[str]) -> Block:
        taken = take_rows(self._packed, rows)
        block = {name: taken[name] for name in members if name in taken}
        if "fill" in members:
            fill = boards_to_fill(taken["board"], taken["move"], self.board_size)
            block |= {"fill": fill, "ply": np.full(len(fill), POSITION_PLY, fill.dtype)}
        return block


def _open_copy(
    board_size: int,
    shared: SharedArrays,
    read_again: Callable[[], GameTable],
    columns: StoredColumns | None,
) -> GameTable:
    try:
        arrays = shared.arrays()
    except (FileNotFoundError, PermissionError):  # gone, or of another user
        return read_again()
    table = GameTable(board_size, arrays, read_again, columns)
    table._shared = shared
    return table


def _find_sorted(numbers: Int64Array, wanted: Int64Array) -> Int64Array:
    """Return the index of each wanted number in ascending numbers, -1 for those that do not occur."""
    found = np.searchsorted(numbers, wanted)
    if not len(numbers):
        return found - 1
    occurs = numbers.take(found, mode="clip") == wanted
    return np.where(occurs, found, -1)


def _index_rows(starts: Array) -> tuple[int, Array, int]:
    """Return an index of the games of rows, which needs fewer cache misses than a binary search.

    Args:
        starts: Row of the first position of each game, and the number of rows (G + 1,).

    Returns:
        A shift s; the game of each row that is a multiple of 2^s; and the maximum number of games that begin
        between such a row and the next one.
    """
    rows = int(starts[-1])
    shift = _LARGEST_SHIFT
    while True:
        bounds = np.arange(0, rows + (1 << shift), 1 << shift).clip(max=max(rows - 1, 0))
        games = np.searchsorted(starts, bounds, side="right") - 1
        steps = int(np.diff(games).max(initial=0))
        if steps <= _MAX_STEPS or not shift:
            return shift, games.astype(starts.dtype), steps
        shift -= 1
