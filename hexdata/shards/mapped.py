"""Random access to the positions of mapped shards, many at a time.

Rows count the positions of a split in stored order. Memory use is the maps, which belong to the page cache,
and the rows returned. If a shard is truncated while it is mapped, the process ends with SIGBUS; replace
shards by renaming, as ``hexdata export`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from hexdata.policy import SparsePolicies
from hexdata.progress import SILENT, Progress
from hexdata.schema import is_target
from hexdata.shards.block_check import find_bad_policy, find_bad_row
from hexdata.shards.blocks import POLICY_FIELDS, Block, policies_to_members
from hexdata.shards.files import LocalShard, MappableSource, open_shards, row_bytes
from hexdata.shards.manifest import FieldSpec, ShardManifest
from hexdata.shards.options import Check, OnError
from hexdata.shards.read_ahead import ReadAhead

__all__ = ["GatheredRows", "MappedShards"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]

_NO_POLICY: Final = -1
_TOUCHED_ROWS: Final = 1 << 11
"""Number of rows of several numbers that are copied together, few enough to fit into the CPU cache."""
_CHECKED_PER_ROW: Final = 8
"""Rows of whole blocks that are checked per row read, until all blocks of a field are checked.

A larger number delays the first batches; a smaller one checks more rows twice.
"""
_CHECKED_AS_BLOCKS: Final = ("position_id", "policy_row", "policy_count")
"""Members whose values are valid or not depending on other values of the block."""


class GatheredRows:
    """Rows that were read together, in the order in which they were requested."""

    def __init__(
        self,
        fields: Block,
        policy_slots: Int64Array | None = None,
        policies: Array | SparsePolicies | None = None,
    ) -> None:
        """Create the rows.

        Args:
            fields: The fields of the rows, without policies.
            policy_slots: Index of each row in ``policies``, -1 for none; None if policies are not read.
            policies: The policies: float32 (k, cells), or sparse.
        """
        self._fields = fields
        self._policy_slots = policy_slots
        self._policies = policies

    def take(self, start: int, stop: int) -> Block:
        """Return copies of rows [start, stop). Policies are sparse, except of shards of schema version 1."""
        block = {name: array[start:stop].copy() for name, array in self._fields.items()}
        if self._policy_slots is not None and self._policies is not None:
            slots = self._policy_slots[start:stop]
            rows = np.flatnonzero(slots != _NO_POLICY)
            if isinstance(self._policies, SparsePolicies):
                return block | policies_to_members(self._policies.take(slots[rows]), rows)
            block["policy"] = self._policies.take(slots[rows], axis=0)
            block["policy_row"] = rows.astype(np.uint32)
        return block


class _Locations(NamedTuple):
    """Locations of requested rows.

    Attributes:
        blocks: Block of each row, counted over the split.
        rows_in_block: Index of each row in its block.
    """

    blocks: Int64Array
    rows_in_block: Int64Array


class _MappedBytes(NamedTuple):
    """All maps of a split as one array, so that one NumPy call reads rows of many shards.

    Attributes:
        data: One byte per address from the lowest map to the end of the highest. Only bytes within a map may
            be read; the addresses between the maps belong to others.
        starts: Index in ``data`` of the first byte of each shard.
    """

    data: Array
    starts: Int64Array


class _SparseIndex(NamedTuple):
    """Sparse policies of one shard, by row of the shard.

    Attributes:
        has_policy: Whether each row has a policy, (rows,).
        items: Number of policy cells of the rows before each row, and of all rows, (rows + 1,).
        starts: For each block, the index of its first policy cell in the view of ``policy_cell`` minus the
            number of policy cells of the blocks before it.
        shifts: For each block, the index of its first probability minus that of its first policy cell, each
            in its view.
    """

    has_policy: npt.NDArray[np.bool_]
    items: Array
    starts: Int64Array
    shifts: Int64Array


class _DensePolicies(NamedTuple):
    """Dense policies of one shard of schema version 1.

    Policy i of the shard is at byte ``starts[block] + i * width``.

    Attributes:
        rows: The rows of the shard with a dense policy, ascending.
        starts: For each block, the offset of its first policy minus the bytes of the policies before it.
    """

    rows: npt.NDArray[np.int32]
    starts: Int64Array


class _MappedField(NamedTuple):
    """One field of all shards.

    Single numbers are aligned in a shard: the view has one element per number, and offsets count numbers.
    Rows of several numbers are not: the view has one element per byte offset (elements overlap), and offsets
    count bytes.

    Attributes:
        dtype: Type of one number.
        shape: Shape of one row.
        step: Distance between two rows in elements of the view.
        starts: Offset of each block in the view.
        view: The maps of all shards as elements of the field.
        data: The same as bytes; see ``_MappedBytes``.
        checked: Whether the values of each block have been checked.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    step: int
    starts: Int64Array
    view: Array
    data: Array
    checked: npt.NDArray[np.bool_]


class MappedShards:
    """Random access to the rows of one split. Picklable; the shards are mapped again after unpickling.

    Args:
        source: Source of the shards.
        manifest: The shard manifest.
        split: Name of the split.
        on_error, check, progress: As for :func:`open_shards`. Defaults: ``"raise"``, ``"sizes"``, no reports.

    Attributes:
        positions: Number of rows in the shards that can be used.
        faults: With ``on_error="skip"``, the shards that cannot be used, with their errors.

    Raises:
        StoreError: A shard is missing or has another size; with ``check="digests"``, another digest.
        BudgetError: The process cannot map all shards, or the cache is too small for the split.
    """

    def __init__(
        self,
        source: MappableSource,
        manifest: ShardManifest,
        split: str,
        *,
        on_error: OnError = "raise",
        check: Check = "sizes",
        progress: Progress = SILENT,
    ) -> None:
        self._shards, self.faults = open_shards(
            source, manifest, split, on_error=on_error, check=check, progress=progress
        )
        self._fields = manifest.fields
        self._block_size = manifest.block_size
        self._board_size = manifest.board_size
        positions = [shard.entry.positions for shard in self._shards]
        blocks = [shard.entry.blocks for shard in self._shards]
        self._first_rows = np.cumsum([0, *positions])
        self._first_blocks = np.cumsum([0, *blocks])
        self.positions = int(self._first_rows[-1])
        # Exported shards except the last contain only whole blocks; then the block of a row needs no search.
        self._has_whole_blocks = all(size % self._block_size == 0 for size in positions[:-1])
        # NumPy sorts 16-bit integers by counting, ten times as fast as by comparing.
        number = np.uint16 if len(blocks) <= 1 << 16 else np.uint32
        self._shard_of_block = np.repeat(np.arange(len(blocks), dtype=number), blocks)
        self._headers_checked = np.zeros(int(self._first_blocks[-1]), np.bool_)
        self._open_fields: dict[str, _MappedField] = {}
        self._dense: dict[int, _DensePolicies] = {}
        self._sparse: dict[int, _SparseIndex | None] = {}
        self._bytes: _MappedBytes | None = None
        self._read_ahead: ReadAhead | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the maps and the results of checks."""
        unchecked = np.zeros_like(self._headers_checked)
        return {
            **self.__dict__,
            "_open_fields": {},
            "_dense": {},
            "_sparse": {},
            "_bytes": None,
            "_headers_checked": unchecked,
        }

    def read_ahead(self, progress: Progress = SILENT) -> ReadAhead:
        """Start to read and check the shards; :meth:`wait_until_ready` waits for the end.

        In copies made by pickling, and after a fork, :meth:`wait_until_ready` starts it again.

        Args:
            progress: Receives the bytes read during :meth:`wait_until_ready` (default: no reports).
        """
        self._read_ahead = ReadAhead(self._shards, progress)
        self._read_ahead.start()
        return self._read_ahead

    def wait_until_ready(self) -> None:
        """Wait until the shards are read ahead and checked, if :meth:`read_ahead` was called.

        Raises:
            StoreError, BudgetError: A shard cannot be read, or has another digest.
        """
        if self._read_ahead is not None:
            self._read_ahead.wait()

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the optional columns, which only some stores have, sorted."""
        return tuple(sorted(filter(is_target, self._fields)))

    def bytes_per_row(self, members: Sequence[str]) -> int:
        """Return the size of these fields of one row in bytes, including a dense policy."""
        fields = {"policy": FieldSpec("<f4", (self._board_size**2,)), **self._fields}
        return sum(row_bytes(fields[name]) for name in members)

    def gather(self, rows: Int64Array, members: Sequence[str]) -> GatheredRows:
        """Read fields of any rows.

        Args:
            rows: Row numbers (B,), in any order; a number may repeat.
            members: Names of the fields.

        Raises:
            IndexError: A row is outside the split.
            FormatError: A block does not match the manifest, or a row has an invalid value. A block's headers
                are checked when it is first used, values when they are read.
            StoreError: After unpickling, a shard is missing or has another size.
        """
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.positions):
            raise IndexError(f"a row is outside the {self.positions:,} rows of the split")
        locations = self._locate(rows)
        self._check_headers(locations.blocks)
        fields = {name: self._gather_field(name, locations) for name in members if name not in POLICY_FIELDS}
        if "policy" not in members:
            return GatheredRows(fields)
        policies: Array | SparsePolicies
        if "policy" in self._fields:
            slots, policies = self._gather_dense(locations)
        else:
            slots, policies = self._gather_sparse(locations)
        return GatheredRows(fields, slots, policies)

    def take(self, rows: Int64Array, members: Sequence[str]) -> Block:
        """Return fields of rows (B,) as one block, in the order given; raises as :meth:`gather` does."""
        return self.gather(rows, members).take(0, len(rows))

    def scan(self, members: Sequence[str]) -> Iterator[Block]:
        """Yield fields of all rows in stored order, one shard at a time.

        Each block also has ``policy_row``, the rows with a dense policy, which may be empty.

        Args:
            members: Names of the fields; not ``policy``.

        Raises:
            FormatError, StoreError: As for :meth:`gather`.
        """
        for number, shard in enumerate(self._shards):
            first = int(self._first_blocks[number])
            blocks = np.arange(first, first + shard.entry.blocks)
            self._check_headers(blocks)
            scanned: Block = {"policy_row": self._rows_with_policy(number)}
            for name in members:
                field = self._field(name)
                self._check_values(name, _select_unchecked(field.checked, blocks))
                parts = [
                    field.view[start : start + shard.stored_rows(name, block)]
                    for block, start in enumerate(field.starts[blocks].tolist())
                ]
                scanned[name] = np.concatenate(parts)
            yield scanned

    def _rows_with_policy(self, number: int) -> Array:
        """Return the rows of a shard with a policy that is not one-hot, ascending."""
        if "policy" in self._fields:
            return self._dense_of(number).rows
        index = self._sparse_of(number)
        return np.empty(0, np.int64) if index is None else np.flatnonzero(index.has_policy)

    # --- rows and checks ------------------------------------------------------------------------------

    def _locate(self, rows: Int64Array) -> _Locations:
        if self._has_whole_blocks:
            blocks = rows // self._block_size
            return _Locations(blocks, rows - blocks * self._block_size)
        numbers = np.searchsorted(self._first_rows, rows, side="right") - 1
        blocks, rows_in_block = np.divmod(rows - self._first_rows[numbers], self._block_size)
        return _Locations(blocks + self._first_blocks[numbers], rows_in_block)

    def _check_headers(self, blocks: Int64Array) -> None:
        """Check the headers of blocks that have not been checked yet.

        Raises:
            FormatError: They do not match the manifest.
        """
        for block in _select_unchecked(self._headers_checked, blocks).tolist():
            shard, index = self._shard_of(block)
            shard.check_block(index)
            self._headers_checked[block] = True

    def _field(self, name: str) -> _MappedField:
        if name not in self._open_fields:
            if self._bytes is None:
                self._bytes = _join_maps(self._shards)
            self._open_fields[name] = _open_field(name, self._fields[name], self._shards, self._bytes)
        return self._open_fields[name]

    def _shard_of(self, block: int) -> tuple[LocalShard, int]:
        """Return the shard that contains a block, and the index of the block in it."""
        number = int(self._shard_of_block[block])
        return self._shards[number], block - int(self._first_blocks[number])

    def _check_values(self, name: str, blocks: Int64Array) -> None:
        """Check the values of a field in these blocks, which must ascend.

        Raises:
            FormatError: As for :func:`check_field`.
        """
        checked = self._field(name).checked
        shards = self._shard_of_block[blocks]
        for part in np.split(blocks, np.flatnonzero(np.diff(shards)) + 1):
            if len(part):
                shard, index = self._shard_of(int(part[0]))
                shard.check_values(name, (part - part[0] + index).tolist())
                checked[part] = True

    def _check_rows(self, name: str, values: Array, blocks: Int64Array) -> None:
        """Check values of a field that were read from these blocks, one row each.

        Whole blocks are checked, each once, up to a limit per call that keeps the delay short. In the other
        blocks only the rows that were read are checked.

        Raises:
            FormatError: As for :func:`check_field` of the block, so that it is the error of stream mode.
        """
        checked = self._check_some_blocks(name, blocks, len(values))
        if checked is None:
            return
        left = np.flatnonzero(~checked[blocks])
        bad = find_bad_row(name, values[left], self._board_size)
        if bad is not None:
            self._check_values(name, blocks[left[bad.row]].reshape(1))

    def _check_some_blocks(self, name: str, blocks: Int64Array, rows: int) -> npt.NDArray[np.bool_] | None:
        """Check a limited number of whole blocks from which rows were read.

        Returns:
            Which blocks of the split are checked; None if these blocks are all checked.
        """
        checked = self._field(name).checked
        unchecked = _select_unchecked(checked, blocks)
        if name not in _CHECKED_AS_BLOCKS:
            unchecked = unchecked[: -(-_CHECKED_PER_ROW * rows // self._block_size)]
        self._check_values(name, unchecked)
        return None if not len(unchecked) or checked.all() else checked

    def _check_policies(self, policies: SparsePolicies, blocks: Int64Array) -> None:
        """Check sparse policies that were read from these blocks, like :meth:`_check_rows`.

        Raises:
            FormatError: As for :func:`check_field` and :func:`check_policies` of the block.
        """
        for name in ("policy_cell", "policy_probability"):
            checked = self._check_some_blocks(name, blocks, len(blocks))
            if checked is None:
                continue
            left = np.flatnonzero(~checked[blocks])
            part = policies.take(left)
            values = part.cells if name == "policy_cell" else part.probabilities
            bad = find_bad_row(name, values, self._board_size)
            if bad is None and name == "policy_cell":
                bad = find_bad_policy(np.diff(part.starts), part.cells)
            if bad is not None:
                policy = int(np.searchsorted(part.starts, bad.row, side="right")) - 1
                self._check_values(name, blocks[left[policy]].reshape(1))

    # --- reading --------------------------------------------------------------------------------------

    def _gather_field(self, name: str, locations: _Locations) -> Array:
        """Return one field of the rows."""
        field = self._field(name)
        starts = field.starts.take(locations.blocks) + locations.rows_in_block * field.step
        rows = _take_rows(field, starts)
        self._check_rows(name, rows, locations.blocks)
        return rows

    def _gather_sparse(self, locations: _Locations) -> tuple[Int64Array, SparsePolicies]:
        """Return the index of each row in the policies, -1 for none, and the policies in that order."""
        count = len(locations.blocks)
        first, length, shift = np.zeros((3, count), np.int64)
        has_policy = np.zeros(count, np.bool_)
        for shard, part in self._parts_of_shards(locations):
            index = self._sparse_of(shard)
            if index is None:
                continue
            blocks = locations.blocks[part] - self._first_blocks[shard]
            rows = blocks * self._block_size + locations.rows_in_block[part]
            items = index.items[rows].astype(np.int64)
            length[part] = index.items[rows + 1] - items
            first[part] = index.starts[blocks] + items
            shift[part] = index.shifts[blocks]
            has_policy[part] = index.has_policy[rows]
        slots = np.where(has_policy, np.cumsum(has_policy) - 1, _NO_POLICY)
        chosen = np.flatnonzero(has_policy)
        policies = self._take_items(first[chosen], length[chosen], shift[chosen])
        self._check_policies(policies, locations.blocks[chosen])
        return slots, policies

    def _take_items(self, first: Int64Array, length: Int64Array, shift: Int64Array) -> SparsePolicies:
        """Return copies of policies.

        Args:
            first: Index of the first cell of each policy in the view of ``policy_cell``, (k,).
            length: Number of cells of each policy, (k,).
            shift: What to add to the index of a cell to get that of its probability, (k,).
        """
        cell, probability = self._field("policy_cell"), self._field("policy_probability")
        starts = np.zeros(len(first) + 1, np.int64)
        np.cumsum(length, out=starts[1:])
        cells = np.empty(starts[-1], cell.dtype)
        probabilities = np.empty(starts[-1], probability.dtype)
        for row in range(0, len(first), _TOUCHED_ROWS):
            own = slice(row, row + _TOUCHED_ROWS)
            begin, end = starts[row], starts[min(row + _TOUCHED_ROWS, len(first))]
            items = np.repeat(first[own] - starts[:-1][own], length[own]) + np.arange(begin, end)
            cell.view.take(items, mode="clip", out=cells[begin:end])
            items += np.repeat(shift[own], length[own])
            probability.view.take(items, mode="clip", out=probabilities[begin:end])
        return SparsePolicies(starts, cells, probabilities)

    def _sparse_of(self, number: int) -> _SparseIndex | None:
        """Return the index of the policies of a shard, which the first call makes; None if it has none."""
        if number not in self._sparse:
            self._sparse[number] = self._find_sparse(number)
        return self._sparse[number]

    def _find_sparse(self, number: int) -> _SparseIndex | None:
        shard, first = self._shards[number], int(self._first_blocks[number])
        if "policy_row" not in shard.entry.offsets:
            return None
        blocks = np.arange(first, first + shard.entry.blocks)
        self._check_headers(blocks)
        for name in ("policy_row", "policy_count"):
            self._check_values(name, blocks)
        rows, counts = self._field("policy_row"), self._field("policy_count")
        has_policy = np.zeros(shard.entry.positions, np.bool_)
        items = np.zeros(shard.entry.positions + 1, np.int64)
        for block, (row, count) in enumerate(
            zip(rows.starts[blocks].tolist(), counts.starts[blocks].tolist(), strict=True)
        ):
            length = shard.stored_rows("policy_row", block)
            own = rows.view[row : row + length].astype(np.int64) + block * self._block_size
            has_policy[own] = True
            items[own + 1] = counts.view[count : count + length]
        np.cumsum(items, out=items)
        cells = self._field("policy_cell").starts[blocks]
        return _SparseIndex(
            has_policy,
            items.astype(np.uint32) if items[-1] < 1 << 32 else items,
            cells - items[: shard.entry.positions : self._block_size],
            self._field("policy_probability").starts[blocks] - cells,
        )

    def _parts_of_shards(self, locations: _Locations) -> Iterator[tuple[int, Int64Array]]:
        """Yield each shard of the locations, with the indices of its locations."""
        shards = self._shard_of_block[locations.blocks]
        order = np.argsort(shards, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1):
            if len(part):
                yield int(shards[part[0]]), part

    def _gather_dense(self, locations: _Locations) -> tuple[Int64Array, Array]:
        """Return the index of each row in the policies, -1 for none, and the policies."""
        field = self._field("policy")
        slots = np.full(len(locations.blocks), _NO_POLICY, np.int64)
        starts: list[Int64Array] = [np.empty(0, np.int64)]
        count = 0
        for shard, part in self._parts_of_shards(locations):
            dense = self._dense_of(shard)
            if not len(dense.rows):
                continue
            blocks = locations.blocks[part] - self._first_blocks[shard]
            rows = blocks * self._block_size + locations.rows_in_block[part]
            ranks = np.searchsorted(dense.rows, rows)
            has_policy = np.flatnonzero(dense.rows.take(ranks, mode="clip") == rows)
            starts.append(dense.starts[blocks[has_policy]] + ranks[has_policy] * field.step)
            slots[part[has_policy]] = np.arange(count, count + len(has_policy))
            count += len(has_policy)
        policies = _take_rows(field, np.concatenate(starts))
        with_policy = np.flatnonzero(slots != _NO_POLICY)
        blocks_of_policies = np.empty(count, np.int64)
        blocks_of_policies[slots[with_policy]] = locations.blocks[with_policy]
        self._check_rows("policy", policies, blocks_of_policies)
        return slots, policies

    def _dense_of(self, number: int) -> _DensePolicies:
        """Return the dense policies of a shard, which the first call finds."""
        if number not in self._dense:
            self._dense[number] = self._find_dense(number)
        return self._dense[number]

    def _find_dense(self, number: int) -> _DensePolicies:
        shard, first = self._shards[number], int(self._first_blocks[number])
        if "policy_row" not in shard.entry.offsets:
            return _DensePolicies(np.empty(0, np.int32), np.zeros(shard.entry.blocks, np.int64))
        blocks = np.arange(first, first + shard.entry.blocks)
        self._check_headers(blocks)
        policies, field = self._field("policy"), self._field("policy_row")
        self._check_values("policy_row", blocks)
        rows: list[Array] = []
        starts, count = [], 0
        for block, start in enumerate(field.starts[blocks].tolist()):
            length = shard.stored_rows("policy_row", block)
            stored = field.view[start : start + length]
            rows.append(stored.astype(np.int32) + np.int32(block * self._block_size))
            starts.append(policies.starts[first + block] - count * policies.step)
            count += length
        return _DensePolicies(np.concatenate(rows), np.array(starts, np.int64))


def _join_maps(shards: Sequence[LocalShard]) -> _MappedBytes:
    maps = [np.frombuffer(shard.open(), np.uint8) for shard in shards]
    addresses = np.array([each.ctypes.data for each in maps], np.int64)
    if not len(maps):
        return _MappedBytes(np.empty(0, np.uint8), addresses)
    starts = addresses - addresses.min()
    length = max(int(start) + len(each) for start, each in zip(starts, maps, strict=True))
    lowest = maps[int(addresses.argmin())]
    return _MappedBytes(as_strided(lowest, (length,), (1,), writeable=False), starts)


def _open_field(
    name: str, spec: FieldSpec, shards: Sequence[LocalShard], mapped: _MappedBytes
) -> _MappedField:
    dtype = np.dtype(spec.dtype)
    starts = np.array(
        [
            first + start
            for first, shard in zip(mapped.starts.tolist(), shards, strict=True)
            for start in shard.entry.offsets[name]
        ],
        np.int64,
    )
    checked = np.zeros(len(starts), np.bool_)
    size, width = len(mapped.data), row_bytes(spec)
    if not spec.shape:
        view = mapped.data[: size - size % width].view(dtype)
        return _MappedField(dtype, (), 1, starts // width, view, mapped.data, checked)
    rows = np.ndarray((max(0, size - width + 1),), f"V{width}", mapped.data, strides=(1,))
    return _MappedField(dtype, spec.shape, width, starts, rows, mapped.data, checked)


def _take_rows(field: _MappedField, offsets: Int64Array) -> Array:
    """Return copies of the rows at these offsets, which must be those of rows within the maps."""
    view = field.view
    if not field.shape:
        # The offsets are valid, as the headers were checked, and mode="raise" would check them again.
        return view.take(offsets, mode="clip")
    found = np.empty(len(offsets), view.dtype)
    for start in range(0, len(offsets), _TOUCHED_ROWS):
        part = offsets[start : start + _TOUCHED_ROWS]
        # Reading single bytes, the CPU fetches many rows from memory at once; copying rows, only a few.
        field.data.take(part, mode="clip")
        field.data.take(part + (view.itemsize - 1), mode="clip")
        found[start : start + _TOUCHED_ROWS] = view[part]  # take would first copy the overlapping elements
    return found.view(field.dtype).reshape(-1, *field.shape)


def _select_unchecked(checked: npt.NDArray[np.bool_], blocks: Int64Array) -> Int64Array:
    """Return the blocks that are not checked yet, ascending and without repeats."""
    if checked.all():
        return blocks[:0]
    selected = np.zeros(len(checked), np.bool_)
    selected[blocks] = True
    return np.flatnonzero(selected & ~checked)
