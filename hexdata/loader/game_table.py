"""The positions of a split as games: one fill row for each game, and the labels of its positions.

Rows count the positions of the split: first the positions of whole games, by game id and ply, then the other
positions, which are packed, by position id. ``hexdata.fill`` describes fill rows; ``game_reader`` reads a
table from a store, and ``shard_table`` one without games from shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.arrays import NUMPY, Arrays
from hexdata.fill import POSITION_PLY, boards_to_fill, fill_dtype, fill_to_move
from hexdata.loader.shared_arrays import SharedArrays, allocate
from hexdata.policy import SparsePolicies
from hexdata.schema import EXTRA_PREFIX, is_target
from hexdata.shards.blocks import Block, block_length
from hexdata.store import Store

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]
OpenStore = Callable[[], Store | None]
"""Returns the store of the games of a split; None if the split was read from shards without a store."""
StoredColumns = Callable[[Sequence[str]], dict[str, Array]]
"""Reads columns of all positions of a table, (positions,) each, from the store."""

# Limits the memory of a scan: 1 MB for each label of 8 bytes. Selections scan all rows of a split.
_SCAN_ROWS: Final = 1 << 17
"""Number of rows in each block of a scan."""
# Groups of 64 rows: larger ones contain the beginnings of more games, each of which costs a step of find().
_LARGEST_SHIFT: Final = 6
_MAX_STEPS: Final = 4
"""Maximum number of games that begin within a group of rows, if the groups are not single rows."""
_POLICIES: Final = 1 << 12
"""Number of policies that are copied together, which limits the memory for their indices."""
PACKED_PREFIX: Final = "packed."
"""Prefix of the arrays of packed positions."""
_NEED_FILL: Final = frozenset(("fill", "move"))
_POLICY: Final = ("policy", "policy_row")


def policy_arrays(
    found: list[tuple[Int64Array, SparsePolicies | None]], positions: int, cells: int
) -> dict[str, Array]:
    """Return the arrays of policies of a table; none if no row has one.

    Args:
        found: Rows of the table (k,), and the policies of these rows, or None if only the rows are needed. Is
            emptied, so that the memory of each part is free as soon as it is copied.
        positions: Number of rows of the table.
        cells: Number of cells of the board.
    """
    if not any(len(rows) for rows, _ in found):
        return {}
    counts = allocate((positions,), np.uint16)
    for rows, policies in found:
        # A policy of zeros has one entry, a cell with 0, because 0 entries mean that there is no policy.
        counts[rows] = 1 if policies is None else np.maximum(np.diff(policies.starts), 1)
    entries = int(counts.sum(dtype=np.int64))
    # One number for each position of the split, so 4 bytes are used where they suffice.
    starts = allocate((positions + 1,), np.uint32 if entries < 1 << 32 else np.int64)
    np.cumsum(counts, out=starts[1:], dtype=starts.dtype)
    if any(policies is None for _, policies in found):
        return {"policy_start": starts}
    cell = allocate((entries,), np.min_scalar_type(cells - 1))
    probability = allocate((entries,), np.float32)
    while found:
        rows, policies = found.pop()
        assert policies is not None
        for first in range(0, len(rows), _POLICIES):
            bounds = policies.starts[first : first + _POLICIES + 1]
            own = NUMPY.ranges(starts[rows[first : first + _POLICIES]].astype(np.int64), np.diff(bounds))
            part = slice(bounds[0], bounds[-1])
            cell[own], probability[own] = policies.cells[part], policies.probabilities[part]
    return {"policy_start": starts, "policy_cell": cell, "policy_probability": probability}


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
            - ``position_offset`` int16 or int64 (R,), to be added to the position ids, and ``values`` (R,) in
              place of ``value``, if this does not apply to every game. Otherwise absent.
            - ``value_sample_tier`` uint8 (R,): absent if no member or condition needs it.
            - ``root_value`` float32, ``visits`` int32, ``weight`` float32, ``extra.NAME`` float32, each (R,):
              optional columns of the store. Absent if no member needs them.
            - ``policy_start`` (R + P + 1,), ``policy_cell`` and ``policy_probability``: sparse policies. Row
              r has the entries from ``policy_start[r]`` to ``policy_start[r + 1]``, exclusive, none without a
              policy. Absent if no position has one. The last two are absent if no member needs them.
            - ``packed.NAME`` (P, …): the fields of the other positions, as in a block, without policies.
        read_again: Returns an equal table. Called by a copy that cannot open the temporary file (default
            None: the table cannot be pickled).
        targets: Names of the optional columns of the store, sorted (default: those of ``packed``).
        columns: Reads columns from the store that the table does not contain in full precision, for ``scan``
            (default None: it has no others).
        open_store: Opens the store of the games, which is compared then, since it may have grown (default
            None: there is none).

    Attributes:
        open_store: As given.
        board_size: Board size n.
        arrays: The arrays.
        positions: Number of positions.
        games: Number of games, G.
        game_rows: Number of positions that belong to games, R.
        targets: Names of the optional columns of the store.
        has_policies: Whether any row has a policy that is not one-hot.
    """

    def __init__(
        self,
        board_size: int,
        arrays: Mapping[str, Array],
        read_again: Callable[[], GameTable] | None = None,
        targets: Sequence[str] | None = None,
        columns: StoredColumns | None = None,
        open_store: OpenStore | None = None,
    ) -> None:
        self.board_size, self.open_store = board_size, open_store
        self.read_again = read_again
        self._columns = columns
        self._shared: SharedArrays | None = None
        self._use(dict(arrays), NUMPY)
        starts = self.arrays["starts"]
        self.games = len(starts) - 1
        self.game_rows = int(starts[-1])
        self.positions = self.game_rows + block_length(self.packed)
        self.targets = tuple(sorted(filter(is_target, self.packed))) if targets is None else tuple(targets)
        # find() gathers from this array for every row; 32-bit numbers
        # let twice as many fit into the CPU cache.
        self._starts: Array = starts.astype(np.int32 if self.positions < 1 << 31 else np.int64)
        self._stops: Array = self._starts[1:]
        self._shift, self._first_games, self._steps = _index_rows(self._starts)

    def _use(self, arrays: dict[str, Any], ops: Arrays) -> None:
        """Use arrays of a library."""
        self.arrays, self.ops = arrays, ops
        self.packed: dict[str, Any] = {
            name.removeprefix(PACKED_PREFIX): array
            for name, array in arrays.items()
            if name.startswith(PACKED_PREFIX)
        }
        self.has_policies = "policy_start" in arrays

    # --- sharing between processes --------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Write the arrays to a file, which this table and its copies use from now on."""
        if self._shared is None:
            # Otherwise each copy would hold a table of its own. The original
            # maps the file too, which frees its arrays.
            self._shared = SharedArrays(self.arrays)
            self._use(self._shared.arrays(), NUMPY)
        options = self.board_size, self.read_again, self.targets, self._columns, self.open_store
        return _open_copy, (self._shared, *options)

    # --- reading --------------------------------------------------------------------------------------

    def bytes_per_row(self, members: Sequence[str]) -> int:
        """Return the approximate size of a gathered row in bytes, including its sparse policy."""
        entries = len(self.arrays["policy_cell"]) if self.has_policies and "policy" in members else 0
        row = fill_dtype(self.board_size).itemsize * self.board_size**2 + 8 * len(members)
        return row + 6 * entries // max(self.positions, 1)

    def on(self, ops: Arrays, members: Sequence[str]) -> GameTable:
        """Return a table whose arrays are those of another library, for :meth:`take` of some members.

        Raises:
            BudgetError: The arrays do not fit into the memory of the device.
        """
        # Only the arrays that these members are computed from: memory
        # of a device is scarcer than of the host.
        needed = {*members, "first_player", "position_offset", *(f"{name}s" for name in members)}
        needed |= {PACKED_PREFIX + name for name in members}
        if not needed.isdisjoint(_POLICY):
            needed.add("policy_start")
        if "policy" in members:
            needed |= {"policy_cell", "policy_probability"}
        if not _NEED_FILL.isdisjoint(members):
            needed |= {"fill", f"{PACKED_PREFIX}board", f"{PACKED_PREFIX}move"}
        index = {"_starts": self._starts, "_stops": self._stops, "_first_games": self._first_games}
        put = dict(ops.put_all({k: v for k, v in self.arrays.items() if k in needed} | index))
        other = copy.copy(self)
        for name in index:
            setattr(other, name, put.pop(name))
        other._use(put, ops)
        return other

    def take(self, rows: Any, members: Sequence[str]) -> dict[str, Any]:
        """Return members of rows as one block.

        Args:
            rows: Row numbers (B,), in any order; a number may repeat.
            members: Names of the members: fields of a shard, of which ``board`` only if there are no games;
                or ``fill``, which adds the fill rows (B, n·n) as ``fill`` and their plies (B,) as ``ply``.
                ``policy`` adds ``SPARSE_FIELDS``, and ``policy_row`` adds only the first of them; both add
                nothing if no position has a policy.

        Raises:
            IndexError: A row is outside the split. Tensors are not checked.
        """
        ops = self.ops
        # A device would have to wait for the check, and its rows come from a permutation.
        if ops is NUMPY and len(rows) and not (rows.min() >= 0 and rows.max() < self.positions):
            raise IndexError(f"a row is outside the {self.positions:,} rows of the split")
        if not self.game_rows:
            block = self._take_packed(rows, members)
        elif self.game_rows == self.positions:
            block = self._take_games(rows, members)
        else:
            takes = [partial(take, members=members) for take in (self._take_games, self._take_packed)]
            block = ops.merge(rows, self.game_rows, takes)
        if not self.has_policies or not set(_POLICY) & set(members):
            return block
        return block | self.take_policies(rows, contents="policy" in members)

    def take_policies(self, rows: Any, *, contents: bool) -> dict[str, Any]:
        """Return the policies of rows (B,) as ``SPARSE_FIELDS`` of a block with B rows.

        Args:
            rows: The rows.
            contents: Whether to return more than ``policy_row``.
        """
        ops, starts = self.ops, self.arrays["policy_start"]
        first = ops.cast(ops.take(starts, rows), "int64")
        counts = ops.cast(ops.take(starts, rows + 1), "int64") - first
        found = ops.nonzero(counts)
        block = {"policy_row": ops.cast(found, "uint32")}
        if contents:
            counts = counts[found]
            entries = ops.ranges(first[found], counts)
            block["policy_count"] = ops.cast(counts, "uint16")
            block["policy_cell"] = ops.cast(ops.take(self.arrays["policy_cell"], entries), "uint16")
            block["policy_probability"] = ops.take(self.arrays["policy_probability"], entries)
        return block

    def scan(self, members: Sequence[str]) -> Iterator[tuple[slice, Block]]:
        """Yield members of all rows in order, some rows at a time, and which rows these are.

        Args:
            members: Names of the members: labels, optional columns of the store, and ``policy_row``. Columns
                that the table does not contain, and ``extra.NAME``, which it contains as float32, are read
                from the store and released after the scan.

        Raises:
            StoreError: The store, from which a column must be read, has changed or is damaged.
            BudgetError: The columns do not fit into the available memory.
        """
        # Conditions are evaluated with the numbers of the store: float32
        # could change the result for an extra column.
        optional = [name for name in members if is_target(name) or name == "value_sample_tier"]
        missing = [name for name in optional if name not in self.arrays or name.startswith(EXTRA_PREFIX)]
        stored = self._columns(missing) if self._columns and missing else {}
        labels = [name for name in members if name not in stored]
        for start in range(0, self.positions, _SCAN_ROWS):
            own = slice(start, min(start + _SCAN_ROWS, self.positions))
            block = self.take(np.arange(start, own.stop), labels)
            yield own, block | {name: column[own] for name, column in stored.items()}

    def find(self, rows: Any) -> tuple[Any, Any]:
        """Return the game (B,) and the ply (B,) of rows (B,) that belong to games."""
        ops = self.ops
        # The index gives the game at the beginning of a group; each step
        # moves on if the row is beyond that game.
        games = ops.take(self._first_games, rows >> self._shift)
        for _ in range(self._steps):
            games += ops.take(self._stops, games) <= rows
        return games, rows - ops.take(self._starts, games)

    def _take_games(self, rows: Any, members: Sequence[str]) -> dict[str, Any]:
        ops, arrays = self.ops, self.arrays
        games, plies = self.find(rows)
        block = {}
        for name in members:
            if name in _POLICY or name in _NEED_FILL:
                continue
            if name == "game_id":
                label = ops.take(arrays["game_id"], games)
            elif name == "player_to_move":
                # Players alternate, so the parity of the ply, shifted by who began, is the player.
                label = ops.cast(plies + ops.take(arrays["first_player"], games), "uint8") & 1
            elif name == "position_id":
                label = ops.take(arrays["position_id"], games) + plies
                if "position_offset" in arrays:
                    label += ops.take(arrays["position_offset"], rows)
            elif name == "value" and "values" not in arrays:
                label = ops.take(arrays["value"], games)
            elif name == "position_in_game":
                label = ops.cast(plies, "uint16")
            elif name == "total_positions":
                label = ops.cast(ops.take(self._stops, games) - ops.take(self._starts, games), "uint16")
            else:  # a column that is aligned with the rows of the games
                label = ops.take(arrays["values" if name == "value" else name], rows)
            block[name] = label
        if not _NEED_FILL.isdisjoint(members):
            fill = ops.take(arrays["fill"], games)
            ply = ops.cast(plies + ops.take(arrays["first_player"], games), fill_dtype(self.board_size).name)
            if "move" in members:
                block["move"] = fill_to_move(fill, ply, ops)
            if "fill" in members:
                block |= {"fill": fill, "ply": ply}
        return block

    def _take_packed(self, rows: Any, members: Sequence[str]) -> dict[str, Any]:
        ops = self.ops
        block = {name: ops.take(self.packed[name], rows) for name in members if name in self.packed}
        if "fill" in members:
            board, move = (ops.take(self.packed[name], rows) for name in ("board", "move"))
            block["fill"] = boards_to_fill(board, move, self.board_size, ops)
            block["ply"] = ops.full((len(board),), POSITION_PLY, fill_dtype(self.board_size).name)
        return block


def _open_copy(
    shared: SharedArrays, board_size: int, read_again: Callable[[], GameTable], *options: Any
) -> GameTable:
    try:
        arrays = shared.arrays()
    except (FileNotFoundError, PermissionError):  # gone, or of another user
        # A pickled loader may outlive its process, or be opened on another machine.
        return read_again()
    table = GameTable(board_size, arrays, read_again, *options)
    table._shared = shared
    return table


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
        # One bound beyond the last row, so that the last group is counted as well.
        bounds = np.arange(0, rows + (1 << shift), 1 << shift).clip(max=max(rows - 1, 0))
        games = np.searchsorted(starts, bounds, side="right") - 1
        steps = int(np.diff(games).max(initial=0))
        if steps <= _MAX_STEPS or not shift:
            return shift, games.astype(starts.dtype), steps
        shift -= 1
