"""The stage that mixes positions in a reservoir, which is filled, swapped at random, and drained at the end.

Rows stay packed, in arrays that are allocated once. The stage does not use the content of a position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import StoreError
from hexdata.live.chunk import Number
from hexdata.live.stage import Transform
from hexdata.order import Permutation, derive_key, uniform_draw
from hexdata.schema import is_target
from hexdata.shards.blocks import Block, block_length, null_rows, row_fields, slice_rows

_HAS_POLICY: Final = "has_policy"
"""Field of held rows: whether the row has a dense policy."""
_DRAIN_ROWS: Final = 4096
"""Rows per block at the end of the input: as many as a few batches, and a small part of a reservoir."""


@dataclass(kw_only=True, eq=False)
class ShufflingFrameSampler(Transform):
    """Mixes positions in a reservoir: blocks in, blocks out.

    The stage emits nothing until the reservoir is full. After that, each new position replaces the one at a
    uniformly drawn row, which is emitted. When the input closes, all remaining positions are emitted in
    random order. Each input position is emitted exactly once, even if the reservoir was never full.

    Rows stay packed, in one array per field that is allocated when the first block arrives. Dense policies
    and policy weights are held for all rows as soon as one block has them.

    The stage has one thread. The metrics are ``held`` and ``size`` (positions held and capacity), and the
    ``bytes`` of the reservoir.

    Args:
        seed: Seed of the draws, which also depend on the number of earlier draws.
        reservoir: Capacity of the reservoir in positions. Default 1,000,000.
    """

    seed: int
    reservoir: int = 1_000_000

    consumes = produces = "blocks"
    kept: ClassVar = {"rows": Block, "swapped": Number, "drained": Number}

    def __post_init__(self) -> None:
        super().__init__()
        self._key = derive_key(self.seed, "live", "reservoir")
        self._fields: Block = {}
        self._filled = 0
        self._swapped = 0
        self._drained = 0

    @property
    def held(self) -> int:
        """Number of rows held."""
        return self._filled - self._drained

    def metrics(self) -> dict[str, float]:
        """Return the metrics of every stage, and the fill of the reservoir."""
        size = sum(array.nbytes for array in self._fields.values())
        return {**super().metrics(), "held": self.held, "size": self.reservoir, "bytes": size}

    def wait_reason(self) -> str | None:
        """Return that the reservoir is being filled."""
        if not 0 < self.held < self.reservoir:
            return None
        return f"the reservoir has {self.held:,} of the {self.reservoir:,} positions before the first batch"

    def process(self, item: Block) -> list[Block]:
        """Add the rows of a block; return the rows they replace as one block, or an empty list.

        Each row replaces one at an index drawn uniformly from the filled ones, or is added while the
        reservoir is not full.
        """
        if self._drained:  # a state from the end of the input, continued with new files
            remaining = self._drain_order().slice(self._drained, self._filled)
            for array in self._fields.values():
                array[: len(remaining)] = array[remaining]
            self._filled, self._drained = len(remaining), 0
        rows = block_length(item)
        added = min(rows, self.reservoir - self._filled)
        self._append(slice_rows(item, 0, added))
        return [self._exchange(slice_rows(item, added, rows))] if added < rows else []

    def finish(self) -> Iterator[Block]:
        """Yield the rows block by block in random order, without a second copy of the reservoir."""
        while self.held:
            rows = self._drain_order().slice(self._drained, min(self._drained + _DRAIN_ROWS, self._filled))
            # Before the yield, since rows that were returned must not be in a state.
            self._drained += len(rows)
            yield _rows_to_block({name: array.take(rows, axis=0) for name, array in self._fields.items()})

    def state(self) -> dict[str, Any]:
        """Return the rows and counts."""
        rows = _rows_to_block({name: array[: self._filled] for name, array in self._fields.items()})
        return {"rows": rows, "swapped": self._swapped, "drained": self._drained}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the rows and counts of a reservoir of this size.

        Raises:
            ValueError: There are too many rows.
        """
        if state["rows"]:
            self._append(state["rows"])
        self._swapped, self._drained = state["swapped"], state["drained"]
        if self._drained > self._filled:
            raise ValueError(f"{self._drained} of {self._filled} rows drained")

    def _drain_order(self) -> Permutation:
        return Permutation(self._filled, derive_key(self.seed, "live", "drain", self._swapped))

    def _append(self, block: Block) -> None:
        stop = self._filled + block_length(block)
        for name, values in self._block_to_rows(block).items():
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
        # Stable, so that rows with the same index stay in the order in which they arrived.
        order = np.argsort(indices, kind="stable")
        repeated = indices[order[1:]] == indices[order[:-1]]
        later, earlier = order[1:][repeated], order[:-1][repeated]
        out: Block = {}
        for name, values in self._block_to_rows(block).items():
            held = self._fields[name]
            out[name] = held.take(indices, axis=0)
            out[name][later] = values[earlier]
            held[indices] = values  # for equal indices, NumPy keeps the last value
        return _rows_to_block(out)

    def _block_to_rows(self, block: Block) -> Block:
        """Return the fields of a block, with one entry per row, and those that only the reservoir has."""
        count = block_length(block)
        rows = {name: block[name] for name in row_fields(block)}
        if "policy" in block:
            rows[_HAS_POLICY] = np.zeros(count, np.bool_)
            rows[_HAS_POLICY][block["policy_row"]] = True
            rows["policy"] = np.zeros((count, block["policy"].shape[1]), np.float32)
            rows["policy"][block["policy_row"]] = block["policy"]
        differing = (rows.keys() ^ self._fields.keys()) - {"policy", _HAS_POLICY}
        if self._fields and not all(map(is_target, differing)):
            raise StoreError("blocks have different fields", found=f"only some have {', '.join(differing)}")
        for name in rows.keys() - self._fields.keys():
            self._fields[name] = _absent_rows(name, self.reservoir, rows[name])
        for name in self._fields.keys() - rows.keys():
            rows[name] = _absent_rows(name, count, self._fields[name])
        return rows


def _absent_rows(name: str, count: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return rows without a policy, or whose optional column is null."""
    # Memory of zeros is taken when it is written to.
    return null_rows(name, count) if is_target(name) else np.zeros((count, *like.shape[1:]), like.dtype)


def _rows_to_block(rows: Block) -> Block:
    policies, has_policy = rows.pop("policy", None), rows.pop(_HAS_POLICY, None)
    if policies is not None and has_policy is not None and has_policy.any():
        rows |= {"policy": policies[has_policy], "policy_row": np.flatnonzero(has_policy).astype(np.uint32)}
    return rows
