"""Exact mode: a new permutation of all positions every epoch, straight out of the mapped shards.

Holds some chunks of packed positions, and no order written out. Never reads a file by itself.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import StoreError
from hexdata.loader.options import LoaderOptions
from hexdata.loader.row_filter import RowSubset, select_rows
from hexdata.loader.schedule import EpochPlan, PackedStep, Share
from hexdata.order import Permutation, derive_key
from hexdata.progress import SILENT, Progress
from hexdata.shards.blocks import Block
from hexdata.shards.files import MappableSource
from hexdata.shards.manifest import REPAIR_HINT, ShardManifest
from hexdata.shards.mapped import GatheredRows, MappedShards

__all__ = ["ExactEpoch", "ExactShards"]

_FIRST_CHUNK: Final = 1 << 10
"""Positions that are gathered at first. Few, so that the first batch comes soon wherever one begins."""
_LARGEST_CHUNK: Final = 1 << 18
"""And at last. Many, so that a shard that is touched gives many."""
_GROWTH: Final = 4
_CHUNK_BYTES: Final = 64 << 20
"""What a chunk may take; it bounds those with dense policies."""


class ExactShards:
    """The mapped shards of a split and the rows of them that take part: all that epochs share.

    Attributes:
        positions: how many take part.
        digest: of the rows that take part and the shards that were skipped; None if all do.
        faults: the shards that were skipped: name, positions, and what is wrong.
    """

    def __init__(
        self,
        source: MappableSource,
        manifest: ShardManifest,
        members: Sequence[str],
        options: LoaderOptions,
        progress: Progress = SILENT,
    ) -> None:
        """Open the shards, to read these members.

        Raises:
            StoreError, BudgetError: as ``MappedShards``; or every shard of the split was skipped.
            ConfigError: as ``select_rows``.
        """
        self._members = members
        self._options = options
        self._shards = MappedShards(
            source,
            manifest,
            options.split,
            on_error=options.on_error,
            check=options.check,
            progress=progress,
        )
        if self._shards.faults and not self._shards.positions:
            raise StoreError(
                f"no shard of {options.split} can be used",
                path=source.address(""),
                found=self._shards.faults[0][1].detail(),
                hint=REPAIR_HINT,
            )
        self._subset = select_rows(self._shards, options)
        self.faults = [(entry.name, entry.positions, fault) for entry, fault in self._shards.faults]
        self.positions = self._shards.positions if self._subset is None else len(self._subset)
        self.digest = self._find_digest()

    def take(self, numbers: npt.NDArray[np.int64]) -> Block:
        """Return positions (B,), given by their numbers among those that take part, in stored order."""
        rows = numbers if self._subset is None else self._subset.rows(numbers)
        return self._shards.take(rows, self._members)

    def chunk_sizes(self) -> Iterator[int]:
        """Yield, without end, how many positions should be gathered at once, chunk after chunk."""
        return _chunk_sizes(self._shards, self._members)

    def epoch(self, epoch: int) -> ExactEpoch:
        """Return one epoch of the rank that the options name."""
        return ExactEpoch(self._shards, self._subset, self._members, self._options, epoch)

    def for_rank(self, rank: int, world_size: int) -> ExactShards:
        """Return the same shards, mapped once, with the epochs of another rank."""
        other = copy.copy(self)
        other._options = replace(self._options, rank=rank, world_size=world_size)
        return other

    def _find_digest(self) -> str | None:
        if self._subset is None and not self.faults:
            return None
        rows = "all" if self._subset is None else self._subset.digest
        skipped = [name for name, _, _ in self.faults]
        return hashlib.sha256(json.dumps([rows, skipped]).encode("ascii")).hexdigest()


class ExactEpoch:
    """One epoch of one rank: ``Permutation(n, derive_key(seed, "epoch", epoch))`` of the n positions.

    It is the order of ``shuffle_indices(range(n), seed, epoch)``; unshuffled, the stored order.
    """

    def __init__(
        self,
        shards: MappedShards,
        subset: RowSubset | None,
        members: Sequence[str],
        options: LoaderOptions,
        epoch: int,
    ) -> None:
        """Plan the epoch over the rows of ``subset`` (None: all), in blocks of these members."""
        self._shards = shards
        self._subset = subset
        self._members = members
        self._plan = EpochPlan(shards.positions if subset is None else len(subset), options)
        self._order: Permutation | None = None
        if options.shuffle:
            self._order = Permutation(self._plan.positions, derive_key(options.seed, "epoch", epoch))

    @property
    def steps(self) -> int:
        """Batches of the epoch, the same for every rank."""
        return self._plan.steps

    def blocks(self, steps: range) -> Iterator[PackedStep]:
        """Yield what this rank gets at each of these ascending steps; see ``Epoch``."""
        chunk: list[Share] = []
        sizes = _chunk_sizes(self._shards, self._members)
        count, enough = 0, next(sizes)
        for step in steps:
            share = self._plan.share(step)
            chunk.append(share)
            count += share.stop - share.start
            if count >= enough:
                yield from self._deliver(chunk)
                chunk, count, enough = [], 0, next(sizes)
        yield from self._deliver(chunk)

    def _deliver(self, shares: Sequence[Share]) -> Iterator[PackedStep]:
        """Gather what all the shares ask for at once, and yield it share by share."""
        places = [share.places(self._plan.positions) for share in shares]
        for share, block in zip(shares, self._gather_each(places), strict=True):
            yield block, share.padding_mask()

    def take(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Block]:
        """Yield places [start, stop) of the epoch's order, whatever step or rank they belong to.

        Those of all ranges are gathered at once: see ``ExactShards.chunk_sizes``.
        """
        return self._gather_each([np.arange(start, stop) for start, stop in ranges])

    def _gather_each(self, places: Sequence[npt.NDArray[np.int64]]) -> Iterator[Block]:
        """Gather all these places at once, and yield them array by array."""
        if not places:
            return
        gathered = self._gather(np.concatenate(places))
        start = 0
        for own in places:
            yield gathered.take(start, start + len(own))
            start += len(own)

    def _gather(self, places: npt.NDArray[np.int64]) -> GatheredRows:
        rows = places if self._order is None else self._order[places]
        if self._subset is not None:
            rows = self._subset.rows(rows)
        return self._shards.gather(rows, self._members)


def _chunk_sizes(shards: MappedShards, members: Sequence[str]) -> Iterator[int]:
    """Yield few positions at first, then more and more, up to what a chunk may take."""
    largest = min(_LARGEST_CHUNK, _CHUNK_BYTES // shards.bytes_per_row(members))
    size = min(_FIRST_CHUNK, largest)
    while True:
        yield size
        size = min(_GROWTH * size, largest)
