"""Positions taken out of mapped shards at random, many at a time.

Rows count the positions of a split in stored order. Never reads a shard front to back, never writes, and
never decides which rows come.

Memory is the maps, which are the page cache's, and what was asked for. A shard that is cut while it is
mapped ends the process with SIGBUS: replace shards by renaming, as ``hexdata export`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.progress import SILENT, Progress
from hexdata.shards.block_check import find_bad_row
from hexdata.shards.blocks import POLICY_FIELDS, Block
from hexdata.shards.files import LocalShard, ShardPlace, open_shards, row_bytes
from hexdata.shards.manifest import FieldSpec, ShardManifest
from hexdata.shards.options import Check, OnError

__all__ = ["Gathered", "MappedShards"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]

_NO_POLICY: Final = -1
_CHECKED_AHEAD: Final = 8
"""Rows of whole blocks that are checked for each that is delivered, until all of a field are checked.

More would make the first batches slow, fewer would check more rows twice.
"""
_OF_WHOLE_BLOCKS: Final = ("position_id", "policy_row")
"""The fields of which one value can be wrong because of another: blocks of them are checked at first use."""


class Gathered:
    """Positions out of many shards, grouped by shard; ``take`` gives any of them in the order asked for.

    Grouping lets each shard be touched once. Putting the positions back in order is left to ``take``, a
    batch at a time, when they are about to be used and fit into the processor's cache.
    """

    def __init__(self, fields: Block, places: Int64Array, policy_slots: Int64Array | None) -> None:
        """Hold ``fields``, grouped: place i of the order asked for stands at ``places[i]`` of them.

        ``policy_slots`` gives each grouped position its row of ``fields["policy"]``, -1 if it has none.
        """
        self._fields = fields
        self._places = places
        self._slots = policy_slots

    def take(self, start: int, stop: int) -> Block:
        """Return the positions at places [start, stop) of the order asked for, as arrays of their own."""
        places = self._places[start:stop]
        block = {
            # The places are known to be inside; "raise" would buffer the result.
            name: array.take(places, axis=0, mode="clip")
            for name, array in self._fields.items()
            if name not in POLICY_FIELDS
        }
        if self._slots is not None:
            slots = self._slots.take(places)
            rows = np.flatnonzero(slots != _NO_POLICY)
            block["policy"] = self._fields["policy"].take(slots[rows], axis=0)
            block["policy_row"] = rows.astype(np.uint32)
        return block


class _Groups(NamedTuple):
    """Rows grouped by shard: where each stands, which part lies in which shard, and the way back."""

    blocks: Int64Array
    within: Int64Array
    parts: list[tuple[int, slice]]
    places: Int64Array


class _Dense(NamedTuple):
    """The dense policies of one shard: the ascending rows of the shard that have one, and where it is.

    Policy i of the shard, in a block, begins at byte ``starts[block] + i * width``.
    """

    rows: npt.NDArray[np.int32]
    starts: Int64Array


class _Field(NamedTuple):
    """One field of all shards, open.

    ``views`` gives each shard as elements of the field, from its first byte on. Single numbers are
    aligned, so ``step`` is 1 and ``starts`` counts numbers. Rows of several numbers may begin at any
    byte, so elements overlap, one beginning at every byte; ``step`` is a row's width, and ``starts``
    counts bytes. ``starts`` goes by block, as does ``sound``, whether its values have been checked.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    step: int
    starts: Int64Array
    views: list[Array]
    sound: npt.NDArray[np.bool_]


class MappedShards:
    """The shards of one split, read at random. It can be pickled, and maps them again where it arrives.

    Attributes:
        positions: how many rows there are, in the shards that are used.
        faults: what is wrong with the others, with ``on_error="skip"``.

    Raises:
        StoreError: a shard is missing or has another size; with ``check="digests"``, other bytes.
        BudgetError: there are more shards than the process may map, or than there is room for copies.
    """

    def __init__(
        self,
        place: ShardPlace,
        manifest: ShardManifest,
        split: str,
        *,
        on_error: OnError = "raise",
        check: Check = "sizes",
        progress: Progress = SILENT,
    ) -> None:
        """Map the shards of ``split``; see ``open_shards``."""
        self._shards, self.faults = open_shards(
            place, manifest, split, on_error=on_error, check=check, progress=progress
        )
        self._fields = manifest.fields
        self._block_size = manifest.block_size
        self._board_size = manifest.board_size
        positions = [shard.entry.positions for shard in self._shards]
        blocks = [shard.entry.blocks for shard in self._shards]
        self._first_rows = np.cumsum([0, *positions])
        self._first_blocks = np.cumsum([0, *blocks])
        self.positions = int(self._first_rows[-1])
        # Where all shards but the last are whole blocks, as exported ones are, rows need no search.
        self._regular = all(size % self._block_size == 0 for size in positions[:-1])
        # 16 bits sort by counting, ten times as fast as by comparing.
        number = np.uint16 if len(blocks) <= 1 << 16 else np.uint32
        self._shard_of_block = np.repeat(np.arange(len(blocks), dtype=number), blocks)
        self._whole = np.zeros(int(self._first_blocks[-1]), np.bool_)
        self._open_fields: dict[str, _Field] = {}
        self._dense: dict[int, _Dense] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the maps behind."""
        return {**self.__dict__, "_open_fields": {}, "_dense": {}, "_whole": np.zeros_like(self._whole)}

    def bytes_each(self, members: Sequence[str]) -> int:
        """Return how many bytes a position takes in these members, if it has a dense policy."""
        return sum(row_bytes(self._fields[name]) for name in members)

    def gather(self, rows: Int64Array, members: Sequence[str]) -> Gathered:
        """Fetch these members of rows (B,), which may stand in any order and repeat.

        Raises:
            IndexError: a row is outside the split.
            FormatError: a block is not what the manifest says, found when it is first used; or a row of it
                holds what no position has, found when it is read.
            StoreError: after unpickling, a shard is not there or has another size.
        """
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.positions):
            raise IndexError(f"row outside the {self.positions:,} of the split")
        groups = self._group(rows)
        self._check_blocks(groups.blocks)
        fields = {name: self._gather_field(name, groups) for name in members if name not in POLICY_FIELDS}
        slots = None
        if "policy" in members:
            slots, fields["policy"] = self._gather_policies(groups)
        return Gathered(fields, groups.places, slots)

    def take(self, rows: Int64Array, members: Sequence[str]) -> Block:
        """Return these members of rows (B,) as one block, in the order given; raises as ``gather`` does."""
        return self.gather(rows, members).take(0, len(rows))

    def scan(self, members: Sequence[str]) -> Iterator[Block]:
        """Yield these members of all rows in stored order, one shard at a time.

        Each block has ``policy_row`` too, the rows with a dense policy, be there any or not. ``policy``
        itself cannot be asked for. Raises as ``gather`` does.
        """
        for number, shard in enumerate(self._shards):
            first = int(self._first_blocks[number])
            blocks = np.arange(first, first + shard.entry.blocks)
            self._check_blocks(blocks)
            scanned: Block = {"policy_row": self._dense_of(number).rows}
            for name in members:
                field = self._field(name)
                self._check_values(name, _not_yet(field.sound, blocks))
                parts = [
                    field.views[number][start : start + shard.stored_rows(name, block)]
                    for block, start in enumerate(field.starts[blocks].tolist())
                ]
                scanned[name] = np.concatenate(parts)
            yield scanned

    # --- finding --------------------------------------------------------------------------------------

    def _group(self, rows: Int64Array) -> _Groups:
        if self._regular:
            blocks = rows // self._block_size
            within = rows - blocks * self._block_size
        else:
            numbers = np.searchsorted(self._first_rows, rows, side="right") - 1
            blocks, within = np.divmod(rows - self._first_rows[numbers], self._block_size)
            blocks += self._first_blocks[numbers]
        shards = self._shard_of_block[blocks]
        order = np.argsort(shards, kind="stable")
        counts = np.bincount(shards, minlength=len(self._shards))
        stops = np.cumsum(counts)
        parts = [
            (shard, slice(int(stops[shard] - counts[shard]), int(stops[shard])))
            for shard in np.flatnonzero(counts).tolist()
        ]
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return _Groups(blocks[order], within[order], parts, places)

    def _check_blocks(self, blocks: Int64Array) -> None:
        """Check once that blocks are where the manifest says, with their own headers.

        Raises:
            FormatError: one is not.
        """
        for block in _not_yet(self._whole, blocks).tolist():
            shard, number = self._shard_of(block)
            shard.check_block(number)
            self._whole[block] = True

    def _field(self, name: str) -> _Field:
        if name not in self._open_fields:
            self._open_fields[name] = _open_field(name, self._fields[name], self._shards)
        return self._open_fields[name]

    def _shard_of(self, block: int) -> tuple[LocalShard, int]:
        """Return the shard that a block is in, and the block's number in it."""
        number = int(self._shard_of_block[block])
        return self._shards[number], block - int(self._first_blocks[number])

    def _check_values(self, name: str, blocks: Int64Array) -> None:
        """Check once what a field of these blocks holds; they ascend.

        Raises:
            FormatError: as ``check_field``.
        """
        sound = self._field(name).sound
        shards = self._shard_of_block[blocks]
        for part in np.split(blocks, np.flatnonzero(np.diff(shards)) + 1):
            if len(part):
                shard, number = self._shard_of(int(part[0]))
                shard.check_values(name, (part - part[0] + number).tolist())
                sound[part] = True

    def _check_rows(self, name: str, found: Array, blocks: Int64Array) -> None:
        """Check the values of a field that were read from these blocks, a row each.

        Whole blocks are checked, each once, but never so many that a batch waits for long. Of the other
        blocks only what was read is checked.

        Raises:
            FormatError: as ``check_field`` of the block, so that it is the error of stream mode.
        """
        sound = self._field(name).sound
        new = _not_yet(sound, blocks)
        if name not in _OF_WHOLE_BLOCKS:
            new = new[: -(-_CHECKED_AHEAD * len(found) // self._block_size)]
        self._check_values(name, new)
        if not len(new) or sound.all():
            return
        left = np.flatnonzero(~sound[blocks])
        bad = find_bad_row(name, found[left], self._board_size)
        if bad is not None:
            self._check_values(name, blocks[left[bad.row]].reshape(1))

    # --- fetching -------------------------------------------------------------------------------------

    def _gather_field(self, name: str, groups: _Groups) -> Array:
        """Return one field of the rows, grouped."""
        field = self._field(name)
        starts = field.starts[groups.blocks] + groups.within * field.step
        found = np.empty(len(starts), field.views[0].dtype if field.views else field.dtype)
        for shard, part in groups.parts:
            _pick(field.views[shard], starts[part], found[part])
        rows = found.view(field.dtype).reshape(-1, *field.shape)
        self._check_rows(name, rows, groups.blocks)
        return rows

    def _gather_policies(self, groups: _Groups) -> tuple[Int64Array, Array]:
        """Return the dense policies of the rows, and for each grouped row which is its own, or -1."""
        field = self._field("policy")
        slots = np.full(len(groups.blocks), _NO_POLICY, np.int64)
        found: list[Array] = [np.empty((0, *field.shape), field.dtype)]
        count = 0
        for shard, part in groups.parts:
            dense = self._dense_of(shard)
            if not len(dense.rows):
                continue
            blocks = groups.blocks[part] - self._first_blocks[shard]
            rows = blocks * self._block_size + groups.within[part]
            ranks = np.searchsorted(dense.rows, rows)
            has_policy = np.flatnonzero(dense.rows.take(ranks, mode="clip") == rows)
            starts = dense.starts[blocks[has_policy]] + ranks[has_policy] * field.step
            policies = field.views[shard][starts]
            found.append(policies.view(field.dtype).reshape(-1, *field.shape))
            slots[part.start + has_policy] = np.arange(count, count + len(has_policy))
            count += len(has_policy)
        rows = np.concatenate(found)
        self._check_rows("policy", rows, groups.blocks[slots != _NO_POLICY])
        return slots, rows

    def _dense_of(self, number: int) -> _Dense:
        """Return where the dense policies of a shard are, found at the first call."""
        if number not in self._dense:
            self._dense[number] = self._find_dense(number)
        return self._dense[number]

    def _find_dense(self, number: int) -> _Dense:
        shard, first = self._shards[number], int(self._first_blocks[number])
        if "policy_row" not in shard.entry.offsets:
            return _Dense(np.empty(0, np.int32), np.zeros(shard.entry.blocks, np.int64))
        blocks = np.arange(first, first + shard.entry.blocks)
        self._check_blocks(blocks)
        policies, field = self._field("policy"), self._field("policy_row")
        self._check_values("policy_row", blocks)
        rows: list[Array] = []
        starts, count = [], 0
        for block, start in enumerate(field.starts[blocks].tolist()):
            length = shard.stored_rows("policy_row", block)
            stored = field.views[number][start : start + length]
            rows.append(stored.astype(np.int32) + np.int32(block * self._block_size))
            starts.append(policies.starts[first + block] - count * policies.step)
            count += length
        return _Dense(np.concatenate(rows), np.array(starts, np.int64))


def _open_field(name: str, spec: FieldSpec, shards: Sequence[LocalShard]) -> _Field:
    dtype = np.dtype(spec.dtype)
    starts = np.array([start for shard in shards for start in shard.entry.offsets[name]], np.int64)
    sound = np.zeros(len(starts), np.bool_)
    if not spec.shape:
        views: list[Array] = [
            np.frombuffer(shard.open(), dtype, shard.entry.bytes // dtype.itemsize) for shard in shards
        ]
        return _Field(dtype, (), 1, starts // dtype.itemsize, views, sound)
    width = row_bytes(spec)
    views = [
        np.ndarray((shard.entry.bytes - width + 1,), f"V{width}", shard.open(), strides=(1,))
        for shard in shards
    ]
    return _Field(dtype, spec.shape, width, starts, views, sound)


def _pick(view: Array, places: Int64Array, found: Array) -> None:
    """Write the elements at these places into ``found``."""
    if view.strides == (view.itemsize,):
        # Places are inside, as the headers have been checked; "raise" would buffer the result.
        view.take(places, out=found, mode="clip")
    else:
        found[...] = view[places]  # take would first copy the overlapping elements of the whole shard


def _not_yet(done: npt.NDArray[np.bool_], blocks: Int64Array) -> Int64Array:
    """Return those of the blocks, each once and ascending, that are not done."""
    if done.all():
        return blocks[:0]
    new = np.zeros(len(done), np.bool_)
    new[blocks] = True
    return np.flatnonzero(new & ~done)
