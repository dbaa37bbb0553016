"""Training loader that delivers every position once per epoch over all ranks."""

from __future__ import annotations

import copy
import itertools
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, Self

import numpy as np

from hexdata.batch import Batch, make_batch
from hexdata.checks import check_count
from hexdata.errors import ConfigError, HexdataError, without_secrets
from hexdata.loader.checkpoint import (
    DataIdentity,
    EpochDigest,
    LoaderPosition,
    check_state,
    make_state,
    where_of_state,
)
from hexdata.loader.epochs import Delivery, EpochLoader
from hexdata.loader.exact import ExactEpoch, SelectedRows
from hexdata.loader.game_reader import open_unchanged, table_digest
from hexdata.loader.opening import find_data, open_data
from hexdata.loader.options import LoaderOptions, takes_options
from hexdata.loader.schedule import EpochSchedule, Part
from hexdata.loader.stream import StreamEpoch
from hexdata.loader.weights import RealisedWeights
from hexdata.progress import SILENT
from hexdata.storage import AnyPath, translate_errors
from hexdata.store import Store


class Loader(EpochLoader):
    """Iterable over batches of a split, as NumPy arrays, in an order determined by the seed and the epoch.

    Each iteration delivers the rest of the current epoch, of ``len(loader)`` batches, and then advances
    ``epoch``; if no batches are left, it delivers the next epoch. A loader can be pickled; the copy shares
    the positions in memory. A method that raises an error has not changed the loader.

    Example::

        loader = Loader("store", batch_size=256, seed=1)
        for batch in loader:  # one epoch
            train(batch["board"], batch["policy"], batch["value"])

    Args:
        store: Folder of a store or of shards, on disk, in an object store (``"s3://bucket/store"``) or, for
            shards, on a web server; or a command that prints a shard (``"pipe:cat /data/{name}"``).
        split, batch_size, ...: Options, which ``help(hexdata.loader.LoaderOptions)`` describes.

    Attributes:
        options: The options, ``LoaderOptions``.
        board_size: Board size n.
        manifest, games: The manifest of the selected shards; in games mode, the table of the games instead.

    Raises:
        ConfigError: An option or a split is invalid, or the position was changed during an iteration.
        StoreError, FormatError: A file is missing or damaged, or a state belongs to other positions.
        BudgetError: The cache is smaller than a shard; or the positions do not fit into memory.
    """

    @takes_options(LoaderOptions)
    def __init__(self, store: str | AnyPath, *split: str, **given: Any) -> None:
        options = LoaderOptions(*split, **given)
        self.transform = options.transform
        data, mode = find_data(store, options.mode)
        options = replace(options, mode=mode)
        # Shown in messages and reprs, so a URL loses its query and a command its arguments.
        self._location = data.path if isinstance(data, Store) else Path(without_secrets(str(store)))
        with translate_errors(self._location):
            self._data = opened = open_data(data, str(store), options, options.on_error, options.progress)
            # Another condition replaces the selection, while the data is shared by all copies.
            self._selected = SelectedRows(opened, options, options.weights) if opened.table else None
        # Arrays, functions and reports are not kept, since the options are pickled and compared.
        self.options: LoaderOptions = replace(
            options, weights=options.weights_text, transform=None, progress=SILENT
        )
        self.board_size, self.manifest = opened.board_size, opened.manifest
        self.games = opened.table if opened.manifest is None else None
        self._skipped: dict[str, set[range]] = {}
        self._skipped_epoch = 0
        for name, positions, fault in opened.skipped:
            self._skip(name, range(positions), fault)
        self._first_where = options.where
        self._opened: tuple[int, ExactEpoch | StreamEpoch] | None = None
        self._last_digest: str | None = None
        self._move_to(0)
        # Last, when the loader is complete: it opens the first epoch.
        self._check_epoch()

    def __repr__(self) -> str:
        options = self.options
        return (
            f"Loader({str(self._location)!r}, split={options.split!r}, positions={self.positions:,}, "
            f"mode={options.mode!r}, seed={options.seed})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which counts alone, without the open epoch."""
        # It is opened again from the seed where it is needed.
        own = {"_digest": copy.deepcopy(self._digest), "_skipped": copy.deepcopy(self._skipped)}
        return {**self.__dict__, **own, "_opened": None}

    def _for_rank(self, rank: int, world_size: int) -> Self:
        """Return a loader for another rank, at the same position. It shares the positions in memory."""
        other = super()._for_rank(rank, world_size)
        other._last_digest = None
        if other._batch and self._digest and other.options == self.options:
            # The digest of the batches before is that of this rank.
            other._move_to(other._epoch, other._batch, self._digest.value)
        other._check_epoch()
        return other

    # --- contents -------------------------------------------------------------------------------------

    @property
    def positions(self) -> int:
        """Number of positions in the epoch over all ranks, counting repetitions by ``weights``."""
        if self._selected:
            return self._selected.size(self._epoch)
        assert self.manifest is not None
        return self.manifest.positions(self.options.split)

    @property
    def realised(self) -> RealisedWeights | None:
        """What ``weights`` amount to in the current epoch, over all ranks; None without weights."""
        weighted = self._selected.weighted if self._selected else None
        return weighted.realised(self._epoch) if weighted else None

    @property
    def skipped(self) -> dict[str, int]:
        """Number of positions left out with ``on_error="skip"``, by shard; in stream mode, of this epoch."""
        return {shard: sum(map(len, rows)) for shard, rows in self._skipped.items() if rows}

    def steps(self, epoch: int) -> int:
        """Return the number of batches of an epoch, which is the same for every rank."""
        # The number of steps follows from the size alone, so that an epoch need not be opened to find it.
        if self._selected:
            return EpochSchedule(self._selected.size(epoch), self.options).steps
        return self._open(epoch).steps

    def take(self, ranges: Sequence[tuple[int, int]], epoch: int) -> Iterator[Batch]:
        """Yield a batch per range [start, stop) of an epoch's order over all ranks. Not in stream mode."""
        opened = self._open(check_count("epoch", epoch, 0))
        if self._selected is None or not isinstance(opened, ExactEpoch):
            raise ConfigError("stream mode cannot deliver ranges of an epoch; use games or exact mode")
        size = self._selected.size(epoch)
        for start, stop in ranges:
            if not 0 <= start <= stop <= size:
                raise ConfigError(f"the range [{start}, {stop}) is outside the {size} positions of the epoch")
        # One batch for all ranges: each call has a cost of its own, and mixtures ask for many short ranges.
        batch = self._make_batch(opened.take(ranges), epoch)
        ends = [0, *itertools.accumulate(stop - start for start, stop in ranges)]
        return (
            {name: array[first:last] for name, array in batch.items()}
            for first, last in itertools.pairwise(ends)
        )

    def _take_stream(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Yield batches for ascending ranges of indices in the concatenation of all epochs.

        As :meth:`take`, but a range that contains the end of an epoch gives one batch for each epoch.
        """
        assert self._selected is not None
        parts = [part for start, stop in ranges for part in self._selected.split_range(start, stop)]
        for epoch, group in itertools.groupby(parts, key=operator.itemgetter(0)):
            yield from self.take([(first, last) for _, first, last in group], epoch)

    @property
    def _mean_positions(self) -> Fraction:
        """Mean of ``positions`` over all epochs: with ``weights``, the sum of the weights."""
        return self._selected.mean_size if self._selected else Fraction(self.positions)

    # --- position -------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int, batch: int = 0, *, where: str | EllipsisType | None = ...) -> None:
        """Start the next iteration at a batch of an epoch; ``where``, if given, selects positions from it."""
        # A copy is changed and checked first, so that this loader stays as it was after an error.
        changed = self if where is ... else self._with_where(where)
        super(Loader, changed).set_epoch(epoch, batch)
        self.__dict__.update(changed.__dict__)

    @property
    def epoch_digest(self) -> str | None:
        """Digest of what this rank received in the last complete epoch, see ``combine_digests``; or None."""
        return self._last_digest

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch, and the options, as a dict for JSON."""
        digest = self._digest.value if self._digest else None
        position = LoaderPosition(self._epoch, self._batch, digest)
        return make_state(self.options, self._identity(), position, self._first_where)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a state, with the condition ``where`` that ``set_epoch`` had set.

        Its rank and world size may differ if the global batch is the same. In games mode, a state saved
        between two epochs remains valid when games are added to the store.
        """
        # As in set_epoch: the copy is checked, then takes effect as a whole.
        changed = self._with_where(where_of_state(state, self.options.where, self._first_where))
        position = check_state(state, changed.options, changed._identity(), changed.steps, self._older_digest)
        changed._move_to(*position)
        self.__dict__.update(changed.__dict__)
        # A state that was saved after the last batch continues with the next epoch.
        self._end_complete_epoch()

    def _with_where(self, where: str | None) -> Loader:
        """Return this loader, or a copy that selects by another condition.

        Raises:
            ConfigError: The condition is invalid, selects too few positions, or this is stream mode.
        """
        if where == self.options.where:
            return self
        changed = copy.copy(self)
        changed.options = replace(self.options, where=where)
        if self._selected:
            changed._selected = self._selected.select(changed.options)
        changed._check_epoch()
        return changed

    def _identity(self) -> DataIdentity:
        """Return the identity of the data and of the selected rows."""
        return self._data.identity._replace(rows=self._selected.digest if self._selected else None)

    def _older_digest(self, files: Sequence[int]) -> str:
        """Return the digest of the first files of games and of positions."""
        return table_digest(open_unchanged(self._location, self._data.identity.digest), files)

    def _move_to(self, epoch: int, batch: int = 0, digest: int | None = None) -> None:
        super()._move_to(epoch, batch)
        # In the middle of an epoch the sum of the batches before is needed; at its beginning it is 0.
        known = digest if batch else 0
        data = self._data.identity.digest
        self._digest = None if known is None else EpochDigest(data, epoch, known)

    def _end_epoch(self) -> None:
        # Before the base class moves on, which starts a new digest.
        ended = None if self._digest is None else str(self._digest)
        super()._end_epoch()
        self._last_digest = ended

    # --- delivery -------------------------------------------------------------------------------------

    def _make(self, epoch: int, steps: range) -> Iterator[Delivery]:
        opened = self._open(epoch)
        # Stream mode finds faults in each epoch again. The names stay, so
        # that each shard gives one warning only.
        if self._selected is None and self._skipped_epoch != epoch:
            self._skipped, self._skipped_epoch = {shard: set() for shard in self._skipped}, epoch
        deliver = partial(self._deliver_part, epoch)
        with translate_errors(self._location):
            parts = opened.parts(steps)
            if self.options.threads == 1:
                for part in parts:
                    yield from deliver(part)
            else:
                yield from _in_threads(deliver, parts, self.options.threads)

    def _deliver_part(self, epoch: int, part: Part) -> Iterator[Delivery]:
        """Make the batches of a part together, and yield them one by one."""
        block = part.read()
        # Copied, since batches share arrays with the block, and a transform may change them in place.
        made, ids = self._make_batch(block, epoch), block["position_id"].copy()
        if self.options.last_batch == "pad":
            made["padding"] = np.zeros(len(ids), np.bool_) if part.padding is None else part.padding.copy()
        # All steps of a part have the same size: a shorter last step is a part of its own.
        size = len(ids) // len(part.steps)
        for number, step in enumerate(part.steps):
            own = slice(number * size, (number + 1) * size)
            batch = self._transformed({name: array[own] for name, array in made.items()}, step, epoch)
            yield Delivery(step, batch, ids[own] if part.padding is None else ids[~part.padding])

    def _make_batch(self, block: Mapping[str, Any], epoch: int) -> Batch:
        return make_batch(block, self.options, self.board_size, seed=self.options.seed, epoch=epoch)

    def _open(self, epoch: int) -> ExactEpoch | StreamEpoch:
        """Return an epoch; the one opened last is kept."""
        if self._opened is not None and self._opened[0] == epoch:
            return self._opened[1]
        opened: ExactEpoch | StreamEpoch
        if self._selected:
            opened = self._selected.epoch(epoch, self.options)
        else:
            on_skip = self._skip if self.options.on_error == "skip" else None
            opened = StreamEpoch(self._data, self.options, epoch, on_skip)
        # One epoch at a time: an open epoch may hold the order of its shards, or a copy of its rows.
        self._opened = (epoch, opened)
        return opened

    def _check_epoch(self) -> None:
        """Open the epoch to find errors early, and check that it has batches.

        Raises:
            ConfigError: Options contradict each other, or ``remainder="drop"`` leaves no batch.
            StoreError: A shard in a folder is missing or has another size.
        """
        len(self)  # stream mode opens the epoch
        smallest, needed = int(self._mean_positions), self.options.global_batch
        if self.options.remainder == "drop" and 0 < smallest < needed:
            raise ConfigError(f"remainder='drop' leaves no batch: {smallest:,} positions, {needed:,} a batch")

    def _skip(self, shard: str, rows: range, fault: HexdataError) -> None:
        """Count skipped rows of a shard, and issue a warning for the first of them."""
        if shard not in self._skipped:
            warnings.warn(f"skipped positions: {fault}", stacklevel=2)
        self._skipped.setdefault(shard, set()).add(rows)


def _in_threads(
    deliver: Callable[[Part], Iterator[Delivery]], parts: Iterator[Part], threads: int
) -> Iterator[Delivery]:
    """Yield the deliveries of parts in order. Those of the next parts are made in threads meanwhile."""
    pool, pending = ThreadPoolExecutor(threads, "hexdata-loader"), deque[Future[list[Delivery]]]()
    try:
        for part in parts:
            pending.append(pool.submit(lambda own: [*deliver(own)], part))
            # One part more than threads, so that a thread that has finished finds another part waiting.
            if len(pending) > threads:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        # Also if the caller leaves the loop: waiting parts are dropped, running ones are awaited.
        pool.shutdown(cancel_futures=True)
