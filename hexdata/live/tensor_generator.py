"""The stage that collects positions into batches for the trainer, with the fields and options of the Loader.

It keeps the order of the positions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Literal, get_args

from hexdata.batch import Batch, BatchOptions, make_batch
from hexdata.checks import check_choice, check_count, check_seed
from hexdata.live.stage import Transform, Worker
from hexdata.schema import board_size_of
from hexdata.shards.blocks import Block, block_length, join_blocks, slice_rows

__all__ = ["LastBatch", "TensorGenerator"]

LastBatch = Literal["short", "drop"]
"""Treatment of the positions at the end of the input that do not fill a batch: deliver a short batch, or drop
them."""

_Filled = tuple[int, list[Block]]
"""Number of a batch, and the blocks that form it."""


class TensorGenerator(Transform):
    """Combines blocks of positions into batches: blocks in, batches out.

    Every batch has ``batch_size`` positions, except the last one if the input ends. Symmetries and value
    weights are drawn from the seed and the number of the batch, so a repeated position gets new draws.

    With several threads, the order of batches may change; each batch has the same positions and draws as with
    one thread. The counts are ``batches`` and ``positions``.

    Args:
        batch_size: Positions per batch.
        batch: Fields and options of batches.
        seed: Seed for the draws of symmetries and value weights.
        remainder: Treatment of the positions left when the input ends: ``"short"`` (default) delivers a short
            batch, ``"drop"`` drops them.
        threads: Number of threads of the stage. Default 1.

    Raises:
        ConfigError: An option has an invalid value.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        batch: BatchOptions,
        seed: int,
        remainder: LastBatch = "short",
        threads: int = 1,
    ) -> None:
        super().__init__(threads=threads)
        check_choice("remainder", remainder, get_args(LastBatch))
        self.batch_size = check_count("batch_size", batch_size, 1)
        self.batch = batch
        self.seed = check_seed(seed)
        self.remainder = remainder
        self._pending: list[Block] = []
        self._pending_rows = 0
        self._batches = 0
        self._collect_lock = threading.Lock()

    def work(self, worker: Worker) -> None:
        """Take, collect, build and put batches.

        Taking and collecting are one step, so that threads collect the blocks in order.
        """
        assert self.source is not None
        while True:
            filled = self.wait_for(worker, self._collect_next, condition=self.source.filled)
            self.put(worker, self._make_all(filled or []))

    def process(self, item: Block) -> Iterable[Batch]:
        """Return the batches that a block completes, as ``work`` builds them but without a pipeline."""
        with self._collect_lock:
            filled = self._collect(item)
        return self._make_all(filled)

    def finish(self) -> Iterable[Batch]:
        """Return the last, short batch; nothing if no positions are left or the remainder is dropped."""
        if not self._pending_rows or self.remainder == "drop":
            return ()
        number, block = self._batches, join_blocks(self._pending)
        self._batches, self._pending, self._pending_rows = number + 1, [], 0
        return (self._make(number, block),)

    def state(self) -> dict[str, Any]:
        """Return the number of batches made and the positions that wait for the next one."""
        pending = join_blocks(self._pending) if self._pending_rows else {}
        return {"batches": self._batches, "pending": pending}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the number of batches and the waiting positions."""
        self._batches = state["batches"]
        self._pending = [state["pending"]] if state["pending"] else []
        self._pending_rows = sum(map(block_length, self._pending))

    def _collect_next(self) -> list[_Filled] | None:
        """Take and collect the next block under the coordinator's lock; return None if there is none. No data
        is copied.
        """
        assert self.source is not None
        block = self.source.pop()
        if block is None:
            return None
        with self._collect_lock:  # uncontended: a pipeline collects under the coordinator's lock
            return self._collect(block)

    def _collect(self, block: Block) -> list[_Filled]:
        """Add a block to the waiting positions; return the batches it fills. The caller holds the lock."""
        filled: list[_Filled] = []
        start, rows = 0, block_length(block)
        while rows - start >= self.batch_size - self._pending_rows:
            stop = start + self.batch_size - self._pending_rows
            filled.append((self._batches, [*self._pending, slice_rows(block, start, stop)]))
            self._batches += 1
            self._pending, self._pending_rows, start = [], 0, stop
        if start < rows:
            self._pending.append(slice_rows(block, start, rows))
            self._pending_rows += rows - start
        return filled

    def _make_all(self, filled: Iterable[_Filled]) -> list[Batch]:
        return [self._make(number, join_blocks(parts)) for number, parts in filled]

    def _make(self, number: int, block: Block) -> Batch:
        self.count("batches")
        self.count("positions", block_length(block))
        size = board_size_of(block["board"].shape[1])
        return make_batch(block, self.batch, size, seed=self.seed, epoch=number)
