"""The stage that collects positions into batches for the trainer, with the fields and options of the Loader.

It keeps the order of the positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from hexdata.batch import Batch, BatchOptions, make_batch
from hexdata.live.chunk import Number
from hexdata.live.stage import Transform
from hexdata.schema import board_size_of
from hexdata.shards.blocks import Block, block_length, join_blocks, slice_rows


@dataclass(kw_only=True, eq=False)
class TensorGenerator(Transform):
    """Combines blocks of positions into batches: blocks in, batches out.

    Every batch has ``batch_size`` positions, except the last one if the input ends. Symmetries and value
    weights are drawn from the seed and the number of the batch, so a repeated position gets new draws.

    With several threads, the order of blocks and batches may change. The counts are ``batches``
    and ``positions``.

    Args:
        batch_size: Positions per batch.
        batch: Fields and options of batches.
        seed: Seed for the draws of symmetries and value weights.
        threads: Number of threads of the stage. Default 1.

    Raises:
        ConfigError: An option has an invalid value.
    """

    batch_size: int
    batch: BatchOptions
    seed: int
    threads: int = 1

    consumes = "blocks"
    produces = "batches"
    kept: ClassVar = {"_batches": Number, "_pending": list[Block]}

    def __post_init__(self) -> None:
        super().__init__(threads=self.threads)
        self._pending: list[Block] = []
        self._batches = 0

    def process(self, item: Block) -> Iterable[Batch]:
        """Return the batches that a block completes."""
        with self._lock:
            self._pending.append(item)
            rows = sum(map(block_length, self._pending))
            full, first = rows // self.batch_size, self._batches
            if not full:
                return []
            block, end = join_blocks(self._pending), full * self.batch_size
            self._batches += full
            self._pending = [slice_rows(block, end, rows)] if end < rows else []
        # Outside the lock, which only divides the rows, so that threads make arrays at the same time.
        starts = range(0, end, self.batch_size)
        parts = [slice_rows(block, start, start + self.batch_size) for start in starts]
        return [self._make(number, part) for number, part in enumerate(parts, first)]

    def finish(self) -> Iterable[Batch]:
        """Return the last, short batch; nothing if no positions are left."""
        if not self._pending:
            return ()
        number, block = self._batches, join_blocks(self._pending)
        self._batches, self._pending = number + 1, []
        return (self._make(number, block),)

    def _make(self, number: int, block: Block) -> Batch:
        self.count("batches")
        self.count("positions", block_length(block))
        size = board_size_of(block["board"].shape[1])
        return make_batch(block, self.batch, size, seed=self.seed, epoch=number)
