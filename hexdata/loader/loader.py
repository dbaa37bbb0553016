"""Training loader that delivers every position once per epoch over all ranks."""

from __future__ import annotations

import copy
import itertools
import operator
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from hexdata.batch import (
    DEFAULT_FIELDS,
    Batch,
    BatchOptions,
    BoardForm,
    FinalPolicy,
    make_batch,
)
from hexdata.checks import as_tuple, check_count
from hexdata.errors import ConfigError, HexdataError, without_secrets
from hexdata.loader.checkpoint import (
    DataIdentity,
    EpochDigest,
    LoaderPosition,
    check_state,
    make_state,
    where_of_state,
)
from hexdata.loader.exact import ExactEpoch, SelectedRows
from hexdata.loader.game_table import GameTable
from hexdata.loader.map_ahead import map_ahead
from hexdata.loader.opening import (
    all_members,
    default_mode,
    find_data,
    open_game_rows,
    open_shard_rows,
    store_of_shards,
    with_shards,
)
from hexdata.loader.options import MAX_EPOCH, LoaderOptions, Mode, Remainder
from hexdata.loader.row_filter import RowSubset
from hexdata.loader.schedule import Epoch, PackedStep
from hexdata.loader.stored_columns import open_unchanged, table_digest, table_files
from hexdata.loader.stream import StreamEpoch
from hexdata.loader.transform import TransformFunction, make_transform
from hexdata.loader.weights import RealisedWeights, Weights, weights_text
from hexdata.progress import SILENT, Progress
from hexdata.selection.options import Dedup
from hexdata.shards.blocks import Block
from hexdata.shards.locate import add_cache, check_split, load_manifest, require_mappable
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.options import CACHE_SIZE, CacheFolder, CacheOptions, Check, OnError
from hexdata.shards.sources import ShardSource
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.disk_space import translate_disk_full

__all__ = ["Delivery", "Loader", "refuse_index"]

_Read = TypeVar("_Read")


class Delivery(NamedTuple):
    """A batch and what :meth:`hexdata.loader.Loader.record` needs to count it as delivered."""

    step: int
    """Step of the epoch, counted from 0."""
    position_ids: npt.NDArray[np.int64]
    """Ids of the positions of the batch, without padding: int64, at most (B,)."""
    batch: Batch
    """The batch."""


def refuse_index(loader: object, index: object) -> NoReturn:
    """Raise the error of ``loader[index]``, which a DataLoader of PyTorch would call.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        "a loader delivers its batches in order, and has none at an index",
        found=f"{type(loader).__name__}[{index}]",
        hint="For PyTorch, use hexdata.torch.TorchLoader(loader, num_workers=2) in place of a DataLoader.",
    )


class Loader:
    """Iterable over batches of a split, as NumPy arrays, in an order determined by the seed and the epoch.

    Each iteration delivers the rest of the current epoch and then advances ``epoch``. If the epoch has no
    batches left, it delivers the next epoch, so a loop may also take exactly ``len(loader)`` batches. After a
    loop was left early, the next iteration continues with the next batch; ``set_epoch`` restarts an epoch.

    A loader can be pickled. The copy opens the shards again, or shares the games with the original.

    Example::

        loader = Loader("store", batch_size=256, seed=1)
        for batch in loader:  # one epoch
            train(batch["board"], batch["policy"], batch["value"])

    Args:
        store: Directory of a store, or of shards with their ``manifest.json``, on disk or in an object store
            (``"s3://bucket/store"``); or the URL of a folder of shards on a web server; or a command that
            prints a shard (``"pipe:cat /data/{name}"``). Games mode requires a store.
        split: "train", "val" or "test" (default "train").
        batch_size: Positions per batch of this rank (default 1024).
        seed: Any integer (default 0).
        shuffle: Whether to shuffle. False delivers the stored order (default None: only ``train`` is
            shuffled).
        mode: "games" holds the games of a store in memory, and permutes their positions; no shuffle or export
            is needed. "exact" maps local shards, or cached copies, and permutes the whole split. "stream"
            reads shards sequentially and permutes windows of them (default None: "games" for a store without
            shards, "exact" for local shards, otherwise "stream").
        rank: Rank of this process (default 0).
        world_size: Number of ranks (default 1).
        remainder: How to deliver the last global batch if it is incomplete (default "short"). "short" shares
            its positions evenly among the ranks; batches may then be shorter, or empty if there are fewer
            positions than ranks. "pad" fills the batches with repeated positions; every batch then contains
            ``padding``, bool (B,), True for repeated positions. "drop" omits the global batch.
        on_error: "raise", or "skip" to leave out shards that are missing, truncated or altered; each gives a
            warning and an entry in ``skipped``. "skip" requires shards (default "raise").
        check: "digests" also compares every board with its game in games mode, and the digests of all shards
            when the loader is made in exact mode. "sizes" compares digests when files are read, but in exact
            mode not those of shards that do not fit into the memory (default "sizes").
        where: SQL condition that selects positions by labels, such as ``"value_sample_tier < 2"``, by the
            results of a search that the store has, such as ``"visits >= 100 AND extra.temperature < 0.5"``,
            and by columns of the game and of its source, such as ``"provenance = 'metadata'"``, which require
            a store. Null counts as false. ``set_epoch`` can change it. Not in stream mode (default None: all
            positions).
        dedup: "exact" leaves out games with the moves and the first player of an earlier game, "symmetric"
            also those that equal one under a symmetry of the board, as ``hexdata shuffle --dedup`` does. Only
            games with positions that ``where`` selects are compared. Requires a store; not in stream mode
            (default "none").
        newest: Number of games with the highest ids whose positions are selected. Not in stream mode (default
            None: all games).
        shards: Shards of the split to read, counted from 0 in the order of the manifest: text with the first
            and the last one, such as ``"0-49"``, or a pair (start, stop), such as ``(0, 50)``. Not in games
            mode (default None: all shards).
        weights: Weight of each position, from 0 to 65,535. Each epoch delivers a position of weight w
            floor(w) or ceil(w) times, w times on average, and 0 leaves it out. An SQL expression over the
            columns of ``where``, such as ``"weight"`` or ``"CASE WHEN value_sample_tier = 0 THEN 2 ELSE 0.5
            END"``; or numbers (positions of the split,) in stored order; or a pair of position ids and
            weights, both (M,), in any order, which contains every position of the split. Not in stream mode
            (default None: each position once).
        streams: (P, Q) of stream mode: each global batch has P parts, and consecutive steps cycle through Q
            streams per part, so an epoch is read as P · Q streams. The number of ranks must divide P, and the
            number of workers Q (default (4, 4)).
        window: Maximum number of consecutive rows of a stream that are permuted together in stream mode
            (default 262,144).
        cache: Folder for local copies of remote shards. True: the default folder, for object stores only.
            None: no copies; remote shards then require stream mode (default True).
        cache_size: Maximum size of the shard cache in bytes, or text such as "50GB" (default 50 GB). Least
            recently used shards are evicted first.
        prefetch: Number of shards that stream mode fetches into the cache in advance. 0: none (default None:
            one per stream that this process reads, at least two).
        threads: Number of threads that prepare batches ahead of the caller. 1: batches are prepared in the
            thread that asks for them. More threads let batches be prepared while the caller computes, but
            hardly raise the rate otherwise. The batches are the same (default 1).
        transform: Function that is called with each batch, a dict of arrays, and returns the batch to
            deliver, a mapping of names to arrays. It is called where the batch is made: in the threads, or in
            the DataLoader workers of ``hexdata.torch`` (default None).
        progress: Receives progress while shards are downloaded, checked and read ahead, or games are read
            (default: no reports).
        fields: Names of the arrays in a batch, from ``hexdata.batch.FIELDS``, or of those that only stores
            with results of a search have: ``root_value``, ``visits``, ``weight`` and ``extra.NAME`` (default
            board, policy, value).
        planes: Number of board planes, 2 or 3 (default 2).
        board: "float32", "float16", "uint8", "packed" or "fill" (default "float32").
        final_policy: Policy of final positions: "zeros", "uniform", or "skip" to leave them out (default
            "zeros").
        tier_probability: Probabilities of value weight 1 for tiers 0 to 3 (default None: all weights are 1).
        symmetry: Whether to apply a random symmetry to each position (default False).

    Attributes:
        options: The options.
        board_size: Board size n.
        manifest: The manifest of the shards, with those that ``shards`` selects; None in games mode.
        games: The table of the games and other positions of the split in games mode; otherwise None.
        transform: The function that is applied to each batch; None for none.

    Raises:
        ConfigError: An option is invalid, options contradict each other, or the split does not exist.
        StoreError: Files are missing, damaged or incomplete, or have another format version.
        BudgetError: The cache is smaller than a shard or, in exact mode, than the split; or the games do not
            fit into memory.
    """

    def __init__(
        self,
        store: str | AnyPath,
        *,
        split: str = "train",
        batch_size: int = 1024,
        seed: int = 0,
        shuffle: bool | None = None,
        mode: Mode | None = None,
        rank: int = 0,
        world_size: int = 1,
        remainder: Remainder = "short",
        on_error: OnError = "raise",
        check: Check = "sizes",
        where: str | None = None,
        dedup: Dedup = "none",
        newest: int | None = None,
        shards: str | tuple[int, int] | None = None,
        weights: Weights | None = None,
        streams: tuple[int, int] = (4, 4),
        window: int = 262_144,
        fields: Sequence[str] = DEFAULT_FIELDS,
        planes: int = 2,
        board: BoardForm = "float32",
        final_policy: FinalPolicy = "zeros",
        tier_probability: tuple[float, float, float, float] | None = None,
        symmetry: bool = False,
        cache: CacheFolder = True,
        cache_size: int | str = CACHE_SIZE,
        prefetch: int | None = None,
        threads: int = 1,
        transform: TransformFunction | None = None,
        progress: Progress = SILENT,
    ) -> None:
        copies = CacheOptions(cache, cache_size, prefetch)
        data = find_data(store, mode)
        self.options = LoaderOptions(
            split=split,
            batch_size=batch_size,
            seed=seed,
            shuffle=split == "train" if shuffle is None else shuffle,
            mode=default_mode(data) if mode is None else mode,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
            on_error=on_error,
            check=check,
            where=where,
            dedup=dedup,
            newest=newest,
            shards=as_tuple(shards),
            weights=weights_text(weights),
            streams=as_tuple(streams),
            window=window,
            batch=BatchOptions(
                fields=as_tuple(fields),
                planes=planes,
                board=board,
                final_policy=final_policy,
                tier_probability=as_tuple(tier_probability),
                symmetry=symmetry,
            ),
            copies=copies,
            threads=threads,
        )
        self.transform = make_transform(transform)
        self._skipped: dict[str, set[range]] = {}
        self._skipped_epoch = 0
        self.manifest: ShardManifest | None = None
        self.games: GameTable | None = None
        self._files: list[int] | None = None
        self._selected: SelectedRows | None = None
        self._source: ShardSource | None = None
        self._location = data.path if isinstance(data, Store) else Path(without_secrets(str(store)))
        with translate_disk_full(self._location):
            if isinstance(data, Store):
                self._open_games(data, weights, progress)
            else:
                self._open_shards(data, str(store), weights, progress)
        self._first_where = where
        self._opened: tuple[int, Epoch] | None = None
        self._last_digest: str | None = None
        self._move_to(LoaderPosition())
        self._check_epoch()

    def __repr__(self) -> str:
        options = self.options
        return (
            f"Loader({str(self._location)!r}, split={options.split!r}, positions={self.positions:,}, "
            f"mode={options.mode!r}, seed={options.seed})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the open epoch."""
        return {**self.__dict__, "_opened": None}

    def for_rank(self, rank: int, world_size: int) -> Loader:
        """Return a loader for another rank, at the same position. The shards are not opened again.

        Args:
            rank: Rank of the new loader.
            world_size: Number of ranks.

        Raises:
            ConfigError: The rank is invalid, or this loader is within an epoch and ``world_size`` differs.
        """
        epoch, batch = self._next_batch()
        self.options.require_world_size(world_size, "loader", epoch, batch)
        other = copy.copy(self)
        other.options = replace(self.options, rank=rank, world_size=world_size)
        other._selected = self._selected.for_rank(rank, world_size) if self._selected else None
        other._skipped = copy.deepcopy(self._skipped)
        other._opened = other._last_digest = None
        same = (rank, world_size) == (self.options.rank, self.options.world_size)
        digest = self._digest.value if same and self._digest else None
        other._move_to(LoaderPosition(epoch, batch, digest if batch else 0))
        other._check_epoch()
        return other

    # --- contents -------------------------------------------------------------------------------------

    @property
    def positions(self) -> int:
        """Number of positions in the epoch over all ranks, before an incomplete batch is dropped.

        With ``weights``, repetitions count, and the number may differ by one between epochs.
        """
        if self._selected:
            return self._selected.size(self._epoch)
        assert self.manifest is not None
        return self.manifest.positions(self.options.split)

    @property
    def subset(self) -> RowSubset | None:
        """Rows that ``where``, ``newest`` and ``final_policy="skip"`` select, or None for all. Not in stream
        mode, where it is None.
        """
        return self._selected.subset if self._selected else None

    @property
    def realised(self) -> RealisedWeights | None:
        """What ``weights`` amount to in the current epoch, over all ranks; None without weights."""
        weighted = self._selected.weighted if self._selected else None
        return weighted.realised(self._epoch) if weighted else None

    def epoch_rows(self, epoch: int) -> RowSubset | None:
        """Return the rows of the split that an epoch delivers, in stored order, or None for all.

        With ``weights``, rows are repeated or absent. Otherwise these are the rows of ``subset``. Not in
        stream mode, where it is None.
        """
        opened = self._open(epoch)
        return opened.subset if isinstance(opened, ExactEpoch) else None

    @property
    def skipped(self) -> dict[str, int]:
        """Number of positions left out with ``on_error="skip"``, by shard name.

        Exact mode finds them when the loader is made. Stream mode counts those of the latest epoch while it
        reads the shards.
        """
        return {shard: sum(map(len, rows)) for shard, rows in self._skipped.items() if rows}

    __getitem__ = refuse_index

    def __len__(self) -> int:
        """Return the number of batches of the epoch, which is the same for every rank.

        With ``weights``, it may differ by one between epochs.
        """
        return self.steps(self._epoch)

    def steps(self, epoch: int) -> int:
        """Return the number of batches of an epoch, which is the same for every rank."""
        is_open = self._opened is not None and self._opened[0] == epoch
        if self._selected and not is_open:
            return self._selected.steps(epoch)
        return self._open(epoch).steps

    # --- position -------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0.

        It advances when an iteration ends, or when a loop is left after the last batch.
        """
        return self._epoch

    @property
    def batch(self) -> int:
        """Index of the next batch of the epoch."""
        return self._batch

    def set_epoch(self, epoch: int, batch: int = 0, *, where: str | EllipsisType | None = ...) -> None:
        """Start the next iteration at a batch of ``epoch``.

        Args:
            epoch: Epoch, counted from 0, at most 2^61.
            batch: Index of the first batch (default 0). Otherwise the epoch has no digest.
            where: Condition that selects the positions of this epoch and of all epochs that follow, until it
                is changed again; None selects all positions. Not in stream mode (default ``...``: the
                condition does not change).

        Raises:
            ConfigError: ``epoch`` is out of range, ``batch`` is not within the epoch, or ``where`` is invalid
                or selects no position. The loader has not changed.
        """
        epoch, batch = check_count("epoch", epoch, 0, MAX_EPOCH), check_count("batch", batch, 0)
        changed = self if where is ... else self._with_where(where)
        if batch > changed.steps(epoch):
            raise ConfigError(
                "batch is beyond the end of the epoch", found=batch, expected=f"0 to {changed.steps(epoch)}"
            )
        self._select_as(changed)
        self._move_to(LoaderPosition(epoch, batch, None if batch else 0))

    @property
    def epoch_digest(self) -> str | None:
        """Digest of the positions that this rank received in the last complete epoch.

        Two runs with the same digest received the same positions at the same steps. ``combine_digests``
        combines the digests of all ranks. None if no epoch is complete, or if part of the epoch was delivered
        to another rank or skipped with ``set_epoch``.
        """
        return self._last_digest

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch, and the options, as a dict for JSON."""
        digest = self._digest.value if self._digest else None
        position = LoaderPosition(self._epoch, self._batch, digest)
        return make_state(self.options, self._identity(), position, self._first_where)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a state. Its rank and world size may differ if the global batch is the same.

        If the condition ``where`` was changed by ``set_epoch``, it is changed in the same way.

        A state saved after the last batch of an epoch resumes at the next epoch. In games mode, a state saved
        between two epochs, whose ``batch`` is 0, remains valid when games are added to the store.

        Raises:
            StoreError: The state belongs to other positions or another version of the order.
            ConfigError: The state belongs to a loader with other options, or it is not a state.
        """
        changed = self._with_where(where_of_state(state, self.options.where, self._first_where))
        position = check_state(state, changed.options, changed._identity(), changed.steps, self._older_digest)
        self._select_as(changed)
        self._move_to(position)
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
        changed._opened = None
        if self._selected:
            changed._selected = self._selected.select(changed.options)
        changed._check_epoch()
        return changed

    def _select_as(self, changed: Loader) -> None:
        """Take over the selection of a copy from :meth:`_with_where`."""
        if changed is not self:
            self.options, self._selected, self._opened = changed.options, changed._selected, None

    def _identity(self) -> DataIdentity:
        """Return the identity of the data and of the selected rows."""
        return DataIdentity(self._data_digest, self._selected.digest if self._selected else None, self._files)

    def _older_digest(self, files: Sequence[int]) -> str:
        """Return the digest of the first files of games and of positions."""
        return table_digest(open_unchanged(self._location, self._data_digest), files)

    def _move_to(self, position: LoaderPosition) -> None:
        self._epoch, self._batch = position.epoch, position.batch
        self._digest = (
            None
            if position.digest is None
            else EpochDigest(self._data_digest, position.epoch, position.digest)
        )

    # --- delivery -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch, or the next epoch if no batches are left; then advance ``epoch``.

        Raises:
            StoreError, FormatError: A shard differs from its manifest, or the disk fails.
            ConfigError: The position of the loader was changed during the iteration.
        """
        with self.iteration() as epoch:
            options = self.options
            for step, ids, batch in self.deliveries():
                self.record(step, ids)
                yield batch
                if (self._epoch, self._batch) != (epoch, step + 1) or self.options is not options:
                    raise ConfigError(
                        "the position of the loader was changed while iterating",
                        found=f"batch {self._batch} of epoch {self._epoch}",
                        expected=f"batch {step + 1} of epoch {epoch}",
                        hint="Start a new iteration after set_epoch or load_state_dict.",
                    )

    @contextmanager
    def iteration(self) -> Iterator[int]:
        """Return a context manager that gives the epoch of an iteration and ends complete epochs.

        If the current epoch is complete when the context is entered, that epoch is ended first.
        """
        self._end_complete_epoch()
        epoch, steps = self._epoch, len(self)
        try:
            yield epoch
        finally:
            if (self._epoch, self._batch) == (epoch, steps):
                self.end_epoch()

    def _end_complete_epoch(self) -> None:
        if self._next_batch() != (self._epoch, self._batch):
            self.end_epoch()

    def _next_batch(self) -> tuple[int, int]:
        """Return the epoch and the index of the next batch."""
        return (self._epoch + 1, 0) if 0 < len(self) == self._batch else (self._epoch, self._batch)

    def batches(self, worker: int = 0, workers: int = 1) -> Iterator[Batch]:
        """Yield the batches of one worker for the rest of the epoch; see :meth:`deliveries`."""
        return (delivery.batch for delivery in self.deliveries(worker, workers))

    def deliveries(self, worker: int = 0, workers: int = 1) -> Iterator[Delivery]:
        """Yield this rank's batches of every ``workers``-th step for the rest of the epoch.

        Worker w delivers the steps t with t mod ``workers`` = w.

        If no batches are left, yield those of the next epoch. The position of the loader does not change: the
        caller passes each delivery to :meth:`record`, in order of the steps, and calls :meth:`end_epoch`.

        Args:
            worker: Index of the worker (default 0).
            workers: Number of workers (default 1).

        Raises:
            StoreError, FormatError: A shard differs from its manifest.
            ConfigError: ``worker`` is not below ``workers``.
        """
        if not 0 <= worker < workers:
            raise ConfigError("worker must be below workers", found=worker, expected=f"0 to {workers - 1}")
        epoch, next_step = self._next_batch()
        first = next_step + (worker - next_step) % workers
        opened = self._open(epoch)
        if self._selected is None and self._skipped_epoch != epoch:
            self._skipped, self._skipped_epoch = {shard: set() for shard in self._skipped}, epoch
        steps = range(first, opened.steps, workers)
        with self._thread_pool() as pool:
            packed = zip(steps, self._reading(opened.blocks(steps, pool)), strict=True)
            deliver = partial(self._deliver, epoch)
            # Two batches per thread, since the next one may wait for a chunk of positions.
            yield from map_ahead(deliver, packed, pool, 2 * self.options.threads)

    def record(self, step: int, position_ids: npt.NDArray[np.int64]) -> None:
        """Count the next batch as delivered.

        Args:
            step: Step of the batch, which must be the next one.
            position_ids: Ids of its positions without padding, int64, at most (B,).

        Raises:
            ConfigError: ``step`` is not the next step.
        """
        self._count_step(step)
        if self._digest:
            self._digest.add(step, position_ids)

    def record_sum(self, step: int, key_sum: Any) -> None:
        """Count the next batch as delivered, given what it adds to the digest of the epoch.

        Args:
            step: Step of the batch, which must be the next one.
            key_sum: Sum of the sort keys of its positions; see ``EpochDigest.add_sum``.

        Raises:
            ConfigError: ``step`` is not the next step.
        """
        self._count_step(step)
        if self._digest:
            self._digest.add_sum(key_sum)

    def _count_step(self, step: int) -> None:
        epoch, batch = self._next_batch()
        if step != batch:
            raise ConfigError(
                "steps must be recorded in order", found=f"step {step}", expected=f"step {batch}"
            )
        if epoch != self._epoch:
            self.end_epoch()
        self._batch += 1

    def end_epoch(self) -> None:
        """Advance ``epoch`` after all its batches were delivered."""
        ended = None if self._digest is None else str(self._digest)
        self._move_to(LoaderPosition(self._epoch + 1))
        self._last_digest = ended

    def take(self, ranges: Sequence[tuple[int, int]], epoch: int) -> Iterator[Batch]:
        """Yield one batch for each range [start, stop) of indices in an epoch's order, over all ranks.

        All ranges are gathered together; :meth:`chunk_sizes` gives suitable total lengths. The position of
        the loader does not change, and batches have no padding. Not in stream mode.

        Args:
            ranges: Ranges of indices.
            epoch: The epoch.

        Raises:
            ConfigError: The loader is in stream mode, or a range is outside the epoch.
        """
        opened = self._open(check_count("epoch", epoch, 0))
        if not isinstance(opened, ExactEpoch):
            raise _not_in_stream_mode()
        assert self._selected is not None
        size = self._selected.size(epoch)
        for start, stop in ranges:
            if not 0 <= start <= stop <= size:
                found, expected = f"[{start}, {stop})", f"within [0, {size})"
                raise ConfigError("a range is outside the epoch", found=found, expected=expected)
        return (self._make_batch(block, epoch) for block in self._reading(opened.take(ranges)))

    def take_stream(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Batch]:
        """Yield batches for ranges [start, stop) of indices in the concatenation of all epochs.

        As :meth:`take`, but a range that contains the end of an epoch gives one batch for each epoch.

        Args:
            ranges: Ascending ranges of indices, counted from the beginning of epoch 0.

        Raises:
            ConfigError: The loader is in stream mode.
        """
        if self._selected is None:
            raise _not_in_stream_mode()
        parts = [part for start, stop in ranges for part in self._selected.split_range(start, stop)]
        for epoch, group in itertools.groupby(parts, key=operator.itemgetter(0)):
            yield from self.take([(first, last) for _, first, last in group], epoch)

    @property
    def mean_positions(self) -> Fraction:
        """Mean of ``positions`` over all epochs: with ``weights``, the sum of the weights."""
        return self._selected.mean_size if self._selected else Fraction(self.positions)

    def chunk_sizes(self) -> Iterator[int]:
        """Yield, endlessly, how many positions to :meth:`take` at once: few at first, later more.

        Raises:
            ConfigError: The loader is in stream mode.
        """
        if self._selected is None:
            raise _not_in_stream_mode()
        return self._selected.chunk_sizes()

    def _reading(self, blocks: Iterator[_Read]) -> Iterator[_Read]:
        """Yield what is read, with errors of the disk as errors of hexdata."""
        with translate_disk_full(self._location):
            yield from blocks

    def _thread_pool(self) -> AbstractContextManager[ThreadPoolExecutor | None]:
        threads = self.options.threads
        return ThreadPoolExecutor(threads, "hexdata-loader") if threads > 1 else nullcontext()

    def _deliver(self, epoch: int, packed: tuple[int, PackedStep]) -> Delivery:
        step, (block, padding) = packed
        ids, batch = block["position_id"], self._make_batch(block, epoch)
        if self.options.remainder == "pad":
            batch["padding"] = np.zeros(len(ids), np.bool_) if padding is None else padding
        if self.transform:
            batch = self.transform(batch, step, epoch)
        return Delivery(step, ids if padding is None else ids[~padding], batch)

    def _make_batch(self, block: Block, epoch: int) -> Batch:
        options = self.options
        return make_batch(block, options.batch, self.board_size, seed=options.seed, epoch=epoch)

    # --- epochs ---------------------------------------------------------------------------------------

    def _open(self, epoch: int) -> Epoch:
        """Return an epoch; the one opened last is kept."""
        if self._opened is None or self._opened[0] != epoch:
            self._opened = (epoch, self._make_epoch(epoch))
        return self._opened[1]

    def _check_epoch(self) -> None:
        """Open the epoch to find errors early, and check that it has batches.

        Raises:
            ConfigError: Options contradict each other, or ``remainder="drop"`` leaves no batch.
            StoreError: A shard in a folder is missing or has another size.
        """
        len(self)  # stream mode opens the epoch
        smallest = self._selected.smallest_size if self._selected else self.positions
        if smallest and self.options.remainder == "drop" and smallest < self.options.global_batch:
            raise ConfigError(
                "remainder='drop' leaves no batch",
                found=f"{smallest:,} positions",
                expected=f"at least {self.options.global_batch:,}, a full batch on every rank",
                hint="Lower batch_size, or use remainder='short' or 'pad'.",
            )

    def _make_epoch(self, epoch: int) -> Epoch:
        if self._selected:
            return self._selected.epoch(epoch)
        on_skip = self._skip if self.options.on_error == "skip" else None
        assert self.manifest is not None
        assert self._source is not None
        return StreamEpoch(self._source, self.manifest, self.options, epoch, self._members, on_skip)

    # --- opening --------------------------------------------------------------------------------------

    def _open_shards(
        self, source: ShardSource, location: str, weights: Weights | None, progress: Progress
    ) -> None:
        options = self.options
        self.manifest = load_manifest(source)
        self.board_size = self.manifest.board_size
        self._data_digest = self.manifest.digest
        stored = check_split(self.manifest, options.split, location)
        self._members = all_members(options, stored, location)
        self.manifest = with_shards(self.manifest, options, location)
        entries = self.manifest.splits[options.split]
        self._source = add_cache(source, entries, options.copies)
        if options.mode == "exact":
            mappable = require_mappable(self._source)
            self._selected = open_shard_rows(
                mappable,
                self.manifest,
                self._members,
                options,
                progress,
                weights=weights,
                open_store=partial(store_of_shards, source, self._data_digest),
            )
            for name, positions, fault in self._selected.faults:
                self._skip(name, range(positions), fault)

    def _open_games(self, store: Store, weights: Weights | None, progress: Progress) -> None:
        self._data_digest = table_digest(store)
        self._files = table_files(store)
        self._selected, self.games = open_game_rows(store, self.options, progress, weights)
        self.board_size = self.games.board_size

    def _skip(self, shard: str, rows: range, fault: HexdataError) -> None:
        """Count skipped rows of a shard, and issue a warning for the first of them."""
        if shard not in self._skipped:
            warnings.warn(f"skipped a shard: {fault}", stacklevel=2)
        self._skipped.setdefault(shard, set()).add(rows)


def _not_in_stream_mode() -> ConfigError:
    return ConfigError(
        "stream mode cannot deliver ranges of an epoch",
        found="mode='stream'",
        hint="Use mode='games' or mode='exact'.",
    )
