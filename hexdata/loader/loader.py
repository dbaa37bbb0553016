"""The training loader: one epoch an iteration, each position exactly once over all ranks and workers.

The face of exact and stream mode. Never writes, and keeps no state but where it stands.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.batch import (
    DEFAULT_FIELDS,
    Batch,
    BatchOptions,
    BoardForm,
    FinalPolicy,
    make_batch,
    required_members,
)
from hexdata.checks import as_tuple, check_count
from hexdata.errors import ConfigError, HexdataError
from hexdata.loader.checkpoint import EpochDigest, LoaderPosition, check_state, make_state
from hexdata.loader.exact import ExactEpoch, ExactShards
from hexdata.loader.options import LoaderOptions, Mode, Remainder
from hexdata.loader.schedule import Epoch
from hexdata.loader.stream import StreamEpoch
from hexdata.progress import SILENT, Progress
from hexdata.shards.blocks import Block
from hexdata.shards.files import check_split
from hexdata.shards.locate import behind_cache, find_source, place_to_map
from hexdata.shards.options import CACHE_SIZE, CacheFolder, CacheOptions, Check, OnError
from hexdata.shards.source import Source
from hexdata.shards.sources import FolderSource, load_manifest
from hexdata.storage import AnyPath

__all__ = ["Delivery", "Loader"]


class Delivery(NamedTuple):
    """One batch on its way: its step, the ids of its positions without the padding, and its arrays."""

    step: int
    position_ids: npt.NDArray[np.int64]
    batch: Batch


class Loader:
    """Delivers a split as batches of NumPy arrays, in an order that follows from (seed, epoch).

    Iterating runs the epoch to its end, from the next batch on that was not delivered, then advances
    ``epoch``. An iteration that begins when all batches of an epoch are delivered runs the next epoch, so
    a loop may take exactly ``len(loader)`` batches. A loop that was left goes on where it was;
    ``set_epoch`` starts afresh. A loader can be pickled; it opens its shards again where it arrives.

    Args:
        store: a store's directory, or a folder of shards with their manifest.json; either may be in an
            object store, ``"s3://bucket/store"``. Also the URL of a folder of shards on a web server, or a
            command, ``"pipe:cat /data/{name}"``.
        split: which split.
        batch_size: positions a batch on this rank.
        seed: any integer.
        shuffle: False gives stored order; None means True for ``train`` and False for the others.
        mode: ``"exact"`` maps shards, local ones or copies, and permutes the split as a whole;
            ``"stream"`` reads shards from front to back and permutes windows. None means exact for a local
            folder, stream for whatever else.
        rank, world_size: this process among those that train together.
        remainder: of the last global batch, if positions do not fill it. ``"short"`` shares them out as
            evenly as can be; all ranks get the same number of batches, so where fewer positions than
            ranks are left, the batch of some ranks is empty. ``"pad"`` fills each rank's part up with
            repeats, marked in the field ``padding``, bool (B,), of every batch. ``"drop"`` leaves the
            positions out of the epoch.
        on_error: ``"raise"``, or ``"skip"`` to leave out shards that are missing, cut or altered, with a
            warning and a count in ``skipped``.
        check: ``"sizes"`` of the shards, or ``"digests"``, for which every byte is read.
        where: SQL on the labels that says which positions take part, such as ``"value_sample_tier < 2"``;
            null is no. In exact mode only, as is ``newest``.
        newest: so many games, those of the highest ids, take part.
        streams, window: of stream mode; see ``StreamPlan``.
        cache: the folder on this machine where copies are kept of shards that lie elsewhere. True: the
            usual one for those in an object store, none for others. None: no copies, so stream mode alone.
        cache_size: what they may take, bytes or text such as "50GB"; those used longest ago go first.
        prefetch: in stream mode with a cache, how many shards are fetched ahead; 0 for none, None for one a
            stream that this process reads.
        progress: hears of the shards that exact mode fetches before it returns.
        fields, planes, board, final_policy, tier_probability, symmetry: what batches hold; see
            ``BatchOptions``.

    Raises:
        ConfigError: an option has no meaning, options do not fit one another, or the split is not in the
            shards.
        StoreError: the shards are missing, incomplete or of another version.
        BudgetError: the cache is smaller than a shard, or in exact mode than the split.
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
        newest: int | None = None,
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
        progress: Progress = SILENT,
    ) -> None:
        source = find_source(store)
        self.options = LoaderOptions(
            split=split,
            batch_size=batch_size,
            seed=seed,
            shuffle=split == "train" if shuffle is None else shuffle,
            mode=_default_mode(source) if mode is None else mode,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
            on_error=on_error,
            check=check,
            where=where,
            newest=newest,
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
            copies=CacheOptions(cache, cache_size, prefetch),
        )
        self.manifest = load_manifest(source)
        stored = check_split(self.manifest, split, str(store))
        # The digest of an epoch needs the ids, asked for or not.
        self._members = sorted({*required_members(self.options.batch, stored), "position_id"})
        self._source = behind_cache(
            source,
            self.manifest.splits[self.options.split],
            self.options.copies,
            digests=self.options.check == "digests",
        )
        self._skipped: dict[str, set[range]] = {}
        self._skipped_epoch = 0
        self._exact = self._open_exact(progress) if self.options.mode == "exact" else None
        self._opened: tuple[int, Epoch] | None = None
        self._last_digest: str | None = None
        self._move_to(LoaderPosition())
        self._check_epoch()

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what was gathered ahead."""
        return {**self.__dict__, "_opened": None}

    def for_rank(self, rank: int, world_size: int) -> Loader:
        """Return a loader of the same positions for another rank; the shards are not opened again.

        It stands where this one does.

        Raises:
            ConfigError: there is no such rank, or this one stands within an epoch of another world size,
                whose batches are others.
        """
        epoch, batch = self._next_batch()
        if batch and world_size != self.options.world_size:
            raise ConfigError(
                "a loader cannot change its world size within an epoch",
                found=f"batch {batch}",
                hint="Make the loader for its ranks first, then load the state.",
            )
        other = copy.copy(self)
        other.options = replace(self.options, rank=rank, world_size=world_size)
        other._exact = self._exact.for_rank(rank, world_size) if self._exact else None
        other._skipped = copy.deepcopy(self._skipped)
        other._opened = other._last_digest = None
        same = (rank, world_size) == (self.options.rank, self.options.world_size)
        digest = self._digest.value if same and self._digest else None
        other._move_to(LoaderPosition(epoch, batch, digest if batch else 0))
        other._check_epoch()
        return other

    # --- what there is --------------------------------------------------------------------------------

    @property
    def positions(self) -> int:
        """How many positions an epoch has over all ranks, before any remainder is dropped."""
        return self._exact.positions if self._exact else self.manifest.positions(self.options.split)

    @property
    def skipped(self) -> dict[str, int]:
        """How many positions of which shard were left out, with ``on_error="skip"``.

        Exact mode knows them all when it opens; stream mode counts those of the epoch that was iterated
        last, and knows them when it has read it.
        """
        return {shard: sum(map(len, pieces)) for shard, pieces in self._skipped.items() if pieces}

    def __len__(self) -> int:
        """Return the batches of a whole epoch, the same for every rank."""
        return self._open(self._epoch).steps

    # --- where it stands ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that iterating runs, counted from 0.

        It advances when an iteration ends: at its end, or when a loop is left after the last batch.
        """
        return self._epoch

    @property
    def batch(self) -> int:
        """The batch of the epoch that comes next, counted from 0."""
        return self._batch

    def set_epoch(self, epoch: int, batch: int = 0) -> None:
        """Start ``epoch`` from its first batch; or from another, and then it has no digest.

        Raises:
            ConfigError: there is no such epoch or batch.
        """
        epoch, batch = check_count("epoch", epoch, 0), check_count("batch", batch, 0)
        if batch > len(self):
            raise ConfigError("no such batch", found=batch, expected=f"0 to {len(self)}")
        self._move_to(LoaderPosition(epoch, batch, None if batch else 0))

    @property
    def epoch_digest(self) -> str | None:
        """The digest of what this rank got in the epoch that ended last; see ``EpochDigest``.

        Two runs with the same digest got the same positions at the same steps; ``combine_digests`` adds
        up those of all ranks. None if no epoch has ended, or one that was begun on other ranks.
        """
        return self._last_digest

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, JSON-able: the batches delivered count, and no others."""
        digest = self._digest.value if self._digest else None
        return make_state(self.options, *self._identity(), LoaderPosition(self._epoch, self._batch, digest))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: of any rank and world size with the same global batch.

        A state taken after the last batch of an epoch is the beginning of the next epoch.

        Raises:
            StoreError: it was taken on other positions or under another version of the order.
            ConfigError: it was taken with other options, or is no state.
        """
        self._move_to(check_state(state, self.options, *self._identity(), len(self)))
        self._end_whole_epoch()

    def _identity(self) -> tuple[str, str | None]:
        """Return the digest of the shards, and that of the rows that take part unless all do."""
        return self.manifest.digest, self._exact.digest if self._exact else None

    def _move_to(self, position: LoaderPosition) -> None:
        self._epoch, self._batch = position.epoch, position.batch
        self._digest = (
            None
            if position.digest is None
            else EpochDigest(self.manifest.digest, position.epoch, position.digest)
        )

    # --- delivering -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Deliver the rest of the epoch, or all of the next one if nothing is left; then advance ``epoch``.

        Raises:
            StoreError, FormatError: a shard is not what the manifest says.
            ConfigError: the loader was sent elsewhere while iterating, or another iteration moved it.
        """
        with self.iteration() as epoch:
            for step, ids, batch in self.deliveries():
                self.record(step, ids)
                yield batch
                if (self._epoch, self._batch) != (epoch, step + 1):
                    raise ConfigError(
                        "the loader was moved while iterating",
                        found=f"batch {self._batch} of epoch {self._epoch}",
                        expected=f"batch {step + 1} of epoch {epoch}",
                        hint="Start a new iteration after set_epoch or load_state_dict.",
                    )

    @contextmanager
    def iteration(self) -> Iterator[int]:
        """Return the epoch that an iteration runs, and end it afterwards if all of it was delivered.

        An epoch that was delivered whole before, by a loop that took no batch too many, ends first.
        """
        self._end_whole_epoch()
        epoch, steps = self._epoch, len(self)
        try:
            yield epoch
        finally:
            if (self._epoch, self._batch) == (epoch, steps):
                self.end_epoch()

    def _end_whole_epoch(self) -> None:
        if self._next_batch() != (self._epoch, self._batch):
            self.end_epoch()

    def _next_batch(self) -> tuple[int, int]:
        """Return the epoch and the batch that are delivered next."""
        return (self._epoch + 1, 0) if 0 < len(self) == self._batch else (self._epoch, self._batch)

    def batches(self, worker: int = 0, workers: int = 1) -> Iterator[Batch]:
        """Yield what worker ``worker`` of ``workers`` has of the rest of the epoch; see ``deliveries``."""
        return (delivery.batch for delivery in self.deliveries(worker, workers))

    def deliveries(self, worker: int = 0, workers: int = 1) -> Iterator[Delivery]:
        """Yield this rank's batches of the steps t with t mod workers = worker, for the rest of the epoch.

        If nothing is left of the epoch, those of the next epoch are yielded. Where the loader stands does not
        change: whoever hands the batches on calls ``record`` for each, in the order of the steps, and
        ``end_epoch``.

        Raises:
            StoreError, FormatError: a shard is not what the manifest says.
            ConfigError: there is no such worker.
        """
        if not 0 <= worker < workers:
            raise ConfigError("no such worker", found=worker, expected=f"0 to {workers - 1}")
        number, next_step = self._next_batch()
        first = next_step + (worker - next_step) % workers
        epoch = self._open(number)
        if self._exact is None and self._skipped_epoch != number:
            self._skipped, self._skipped_epoch = {shard: set() for shard in self._skipped}, number
        steps = range(first, epoch.steps, workers)
        for step, (block, padding) in zip(steps, epoch.blocks(steps), strict=True):
            ids, batch = block["position_id"], self._make_batch(block, number)
            if self.options.remainder == "pad":
                batch["padding"] = np.zeros(len(ids), np.bool_) if padding is None else padding
            yield Delivery(step, ids if padding is None else ids[~padding], batch)

    def record(self, step: int, position_ids: npt.NDArray[np.int64]) -> None:
        """Count the batch of a step, the next one, as delivered: the ids of its positions, less padding.

        Raises:
            ConfigError: another step is next.
        """
        epoch, batch = self._next_batch()
        if step != batch:
            raise ConfigError("steps are recorded in their order", found=step, expected=batch)
        if epoch != self._epoch:
            self.end_epoch()
        self._batch += 1
        if self._digest:
            self._digest.add(step, position_ids)

    def end_epoch(self) -> None:
        """Advance ``epoch``, now that all its batches are delivered."""
        ended = None if self._digest is None else str(self._digest)
        self._move_to(LoaderPosition(self._epoch + 1))
        self._last_digest = ended

    def take(self, ranges: Sequence[tuple[int, int]], epoch: int) -> Iterator[Batch]:
        """Yield the positions at places [start, stop) of an epoch's order, whatever rank they belong to.

        Those of all ranges are gathered at once; ``chunk_sizes`` says how many are well asked for. Where
        the loader stands does not change, and there is no padding. In exact mode only.

        Raises:
            ConfigError: in stream mode, which has no such order, or places outside the epoch.
        """
        opened = self._open(check_count("epoch", epoch, 0))
        if not isinstance(opened, ExactEpoch):
            raise ConfigError("only exact mode can take places of an epoch", hint="Use mode='exact'.")
        for start, stop in ranges:
            if not 0 <= start <= stop <= self.positions:
                found, expected = f"[{start}, {stop})", f"within [0, {self.positions})"
                raise ConfigError("places outside the epoch", found=found, expected=expected)
        return (self._make_batch(block, epoch) for block in opened.take(ranges))

    def chunk_sizes(self) -> Iterator[int]:
        """Yield, without end, how many positions to ``take`` at once: few at first, later many.

        Raises:
            ConfigError: in stream mode.
        """
        if self._exact is None:
            raise ConfigError("only exact mode can take places of an epoch", hint="Use mode='exact'.")
        return self._exact.chunk_sizes()

    def _make_batch(self, block: Block, epoch: int) -> Batch:
        options = self.options
        return make_batch(block, options.batch, self.manifest.board_size, seed=options.seed, epoch=epoch)

    # --- opening --------------------------------------------------------------------------------------

    def _open(self, epoch: int) -> Epoch:
        """Return an epoch, the one of the last call if it is the same."""
        if self._opened is None or self._opened[0] != epoch:
            self._opened = (epoch, self._make_epoch(epoch))
        return self._opened[1]

    def _check_epoch(self) -> None:
        """See now that epochs can be opened, and that they deliver anything.

        Raises:
            ConfigError: options do not fit one another, or ``remainder="drop"`` leaves no batch.
            StoreError: a shard in a folder is missing or of another size.
        """
        if self.positions and not len(self):
            raise ConfigError(
                "remainder='drop' leaves no batch",
                found=f"{self.positions:,} positions",
                expected=f"at least the {self.options.global_batch:,} of a step over all ranks",
                hint="Lower batch_size, or use remainder='short' or 'pad'.",
            )

    def _make_epoch(self, epoch: int) -> Epoch:
        if self._exact:
            return self._exact.epoch(epoch)
        on_skip = self._skip if self.options.on_error == "skip" else None
        return StreamEpoch(self._source, self.manifest, self.options, epoch, self._members, on_skip)

    def _open_exact(self, progress: Progress) -> ExactShards:
        place = place_to_map(self._source)
        exact = ExactShards(place, self.manifest, self._members, self.options, progress)
        for name, positions, fault in exact.faults:
            self._skip(name, range(positions), fault)
        return exact

    def _skip(self, shard: str, rows: range, fault: HexdataError) -> None:
        """Count rows of a shard that are left out, and warn when it is first met."""
        if shard not in self._skipped:
            warnings.warn(f"left out: {fault}", stacklevel=2)
        self._skipped.setdefault(shard, set()).add(rows)


def _default_mode(source: Source) -> Mode:
    return "exact" if isinstance(source, FolderSource) else "stream"
