"""The stage that mixes positions in a reservoir, which is filled, swapped at random, and drained at the end.

Rows stay packed, in arrays that are allocated once. The stage does not use the content of a position.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.checks import check_count
from hexdata.errors import ConfigError, StoreError
from hexdata.live.coordinator import Stopped
from hexdata.live.stage import Stage, Worker
from hexdata.order import Permutation, derive_key, uniform_draw
from hexdata.shards.blocks import Block, block_length, row_fields, slice_rows

__all__ = ["Reservoir", "ShufflingFrameSampler"]

Int64Array = npt.NDArray[np.int64]

_SLOT: Final = "policy_slot"
"""Field of held rows: index of the row's dense policy in ``_PolicyStore``."""
_NO_POLICY: Final = -1
_DRAIN_ROWS: Final = 4096


class ShufflingFrameSampler(Stage):
    """Mixes positions in a reservoir: blocks in, blocks out.

    The stage emits nothing until the reservoir holds ``prefill`` of its capacity. After that, each new
    position replaces the one at a uniformly drawn row, which is emitted. Until the reservoir is full, half of
    the positions of a block are added and the other half are swapped. When the input closes, all remaining
    positions are emitted in random order. Each input position is emitted exactly once, even if the reservoir
    was never full.

    The stage has one thread. The metrics are ``held`` and ``size`` (positions held and capacity), and the
    ``bytes`` of the reservoir.

    Args:
        seed: Seed of the draws, which also depend on the number of earlier draws.
        reservoir: Capacity of the reservoir in positions. Default 1,000,000.
        prefill: Share of the capacity that is filled before positions are emitted, from 0 to 1. Default 1.0.

    Raises:
        ConfigError: The capacity is below 1, or the share is not from 0 to 1.
    """

    def __init__(self, *, seed: int, reservoir: int = 1_000_000, prefill: float = 1.0) -> None:
        super().__init__()
        share: object = prefill
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ConfigError("prefill cannot be used", found=repr(share), expected="a number from 0 to 1")
        size = check_count("reservoir", reservoir, 1)
        self.reservoir = Reservoir(size, seed, min_filled=max(1, int(size * share)))

    def work(self, worker: Worker) -> None:
        """Swap until the input is closed, then drain in blocks, without a second copy of the reservoir."""
        with suppress(Stopped):
            while True:
                self.put(worker, self.reservoir.swap(self.take(worker)))
        while (block := self.reservoir.drain(_DRAIN_ROWS)) is not None:
            self.put(worker, (block,))

    def state(self) -> dict[str, Any]:
        """Return the content of the reservoir."""
        return self.reservoir.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the content of the reservoir."""
        self.reservoir.load_state(state)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of every stage, and the fill of the reservoir."""
        held = {"held": self.reservoir.held, "size": self.reservoir.size, "bytes": self.reservoir.nbytes}
        return {**super().metrics(), **held}


class Reservoir:
    """Rows of blocks, one array per field, allocated when the first block arrives. For a single thread.

    Dense policies are stored in a separate array that grows on demand, so that only rows with one need the
    memory. Each row holds the index of its policy in that array.

    Args:
        size: Capacity in rows.
        seed: Seed of the draws.
        min_filled: Number of rows held before any is returned, from 1 to ``size``.
    """

    def __init__(self, size: int, seed: int, min_filled: int) -> None:
        self.size = size
        self.min_filled = min_filled
        self._key = derive_key(seed, "live", "reservoir")
        self._seed = seed
        self._fields: Block = {}
        self._policies = _PolicyStore()
        self._filled = 0
        self._swapped = 0
        self._drained = 0

    @property
    def held(self) -> int:
        """Number of rows held."""
        return self._filled - self._drained

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(array.nbytes for array in self._fields.values()) + self._policies.nbytes

    def swap(self, block: Block) -> list[Block]:
        """Add the rows of a block; return the rows they replace as one block, or an empty list.

        Each row replaces one at an index drawn uniformly from the filled ones, or is added while the
        reservoir is not full.

        Raises:
            StoreError: The block has other fields than earlier ones.
        """
        if self._drained:
            self._compact()
        if not self._fields:
            self._fields = self._allocate(block, self.size)
        self._check_fields(block)
        rows = block_length(block)
        added = min(rows, max(0, self.min_filled - self._filled))
        added += min(-(-(rows - added) // 2), self.size - self._filled - added)
        self._append(slice_rows(block, 0, added))
        return [self._exchange(slice_rows(block, added, rows))] if added < rows else []

    def drain(self, count: int) -> Block | None:
        """Remove and return up to ``count`` rows in random order; return None once the reservoir is empty."""
        if not self.held:
            return None
        order = Permutation(self._filled, derive_key(self._seed, "live", "drain", self._swapped))
        rows = order.slice(self._drained, min(self._drained + count, self._filled))
        self._drained += len(rows)
        drained = {name: array.take(rows, axis=0) for name, array in self._fields.items()}
        self._fields[_SLOT][rows] = _NO_POLICY
        return self._release(drained)

    def state(self) -> dict[str, Any]:
        """Return the rows and counts."""
        rows = {name: array[: self._filled].copy() for name, array in self._fields.items()}
        slots = rows.pop(_SLOT, np.zeros(0, np.int32))
        with_policy = np.flatnonzero(slots != _NO_POLICY)
        return {
            "rows": rows,
            "policy_row": with_policy,
            "policy": self._policies.read(slots[with_policy]),
            "filled": self._filled,
            "swapped": self._swapped,
            "drained": self._drained,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the rows and counts of a reservoir of this size."""
        self._fields, self._policies, self._filled = {}, _PolicyStore(), 0
        if state["rows"]:
            block: Block = dict(state["rows"])
            if len(state["policy_row"]):
                block |= {"policy": state["policy"], "policy_row": state["policy_row"]}
            self._fields = self._allocate(block, self.size)
            self._append(block)
        self._swapped, self._drained = state["swapped"], state["drained"]

    def _append(self, block: Block) -> None:
        stop = self._filled + block_length(block)
        for name, values in self._store_policies(block).items():
            self._fields[name][self._filled : stop] = values
        self._filled = stop

    def _exchange(self, block: Block) -> Block:
        """Swap the rows of a block, in order, with rows at drawn indices.

        The swap is vectorized. Rows with the same index form a chain: the first one receives the held row,
        each later one receives the row before it, and the last one stays in the reservoir.
        """
        count = block_length(block)
        draws = uniform_draw(np.arange(self._swapped, self._swapped + count), self._key)
        indices = (draws * self._filled).astype(np.int64)
        self._swapped += count
        order = np.argsort(indices, kind="stable")
        repeated = indices[order[1:]] == indices[order[:-1]]
        later, earlier = order[1:][repeated], order[:-1][repeated]
        out: Block = {}
        for name, values in self._store_policies(block).items():
            held = self._fields[name]
            out[name] = held.take(indices, axis=0)
            out[name][later] = values[earlier]
            held[indices] = values  # for equal indices, NumPy keeps the last value
        return self._release(out)

    def _store_policies(self, block: Block) -> Block:
        """Return the rows of a block as they are held: with the index of each dense policy."""
        rows = {name: block[name] for name in row_fields(block)}
        rows[_SLOT] = np.full(block_length(block), _NO_POLICY, np.int32)
        if "policy" in block:
            rows[_SLOT][block["policy_row"]] = self._policies.add(block["policy"])
        return rows

    def _release(self, rows: Block) -> Block:
        """Return held rows as a block, and free their policies."""
        slots = rows.pop(_SLOT)
        with_policy = np.flatnonzero(slots != _NO_POLICY)
        if len(with_policy):
            rows["policy"] = self._policies.read(slots[with_policy])
            rows["policy_row"] = with_policy.astype(np.uint32)
            self._policies.free(slots[with_policy])
        return rows

    def _compact(self) -> None:
        """Move the rows left after a partial drain together."""
        order = Permutation(self._filled, derive_key(self._seed, "live", "drain", self._swapped))
        remaining = order.slice(self._drained, self._filled)
        for array in self._fields.values():
            array[: len(remaining)] = array[remaining]
        self._filled, self._drained = len(remaining), 0

    def _allocate(self, block: Block, rows: int) -> Block:
        fields = {
            name: np.empty((rows, *block[name].shape[1:]), block[name].dtype) for name in row_fields(block)
        }
        fields[_SLOT] = np.empty(rows, np.int32)
        return fields

    def _check_fields(self, block: Block) -> None:
        expected = {
            name: (array.dtype.str, array.shape[1:]) for name, array in self._fields.items() if name != _SLOT
        }
        found = {name: (block[name].dtype.str, block[name].shape[1:]) for name in row_fields(block)}
        if found != expected:
            raise StoreError("a block has other fields than earlier blocks", found=found, expected=expected)


class _PolicyStore:
    """Dense policies (k, cells) at indices that stay fixed until freed. The array grows by doubling."""

    def __init__(self) -> None:
        self._store = np.empty((0, 0), np.float32)
        self._free = np.empty(0, np.int32)

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def add(self, policies: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        """Store policies (k, cells); return their indices, int32 (k,)."""
        missing = len(policies) - len(self._free)
        if missing > 0:
            old = len(self._store)
            new = np.empty((max(2 * old, old + missing), policies.shape[1]), np.float32)
            if old:
                new[:old] = self._store
            self._store = new
            self._free = np.concatenate((self._free, np.arange(old, len(new), dtype=np.int32)))
        slots, self._free = self._free[: len(policies)], self._free[len(policies) :]
        self._store[slots] = policies
        return slots

    def read(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return self._store[slots]

    def free(self, slots: npt.NDArray[np.int32]) -> None:
        self._free = np.concatenate((self._free, slots))
