"""The training loader: one epoch an iteration, each position exactly once over all ranks.

Holds one window of shards at a time. Never writes, and keeps no state but where it stands.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError, StoreError
from hexdata.formats.shards import Block, ShardManifest
from hexdata.loader.batch import Batch, join_blocks, members_of, take_rows, unpack
from hexdata.loader.options import DEFAULT_FIELDS, LoaderOptions, Remainder
from hexdata.loader.plan import EpochPlan, count_batches
from hexdata.loader.reader import ShardReader
from hexdata.loader.state import check_state, make_state
from hexdata.order import Permutation
from hexdata.store import Store

__all__ = ["Loader"]


class Loader:
    """Delivers a split as batches of NumPy arrays, in an order that follows from (seed, epoch).

    The positions of an epoch are one stream: the shards in a permuted order, taken in windows of
    ``window_shards``, all positions of a window permuted as one. Step t is the next
    ``batch_size * world_size`` positions of the stream, and each rank takes its ``batch_size`` of them;
    so ranks change nothing but who gets what. Every rank reads every window.

    Iterating runs the epoch to its end, from the next batch on that was not delivered, then advances
    ``epoch``. A loop that was left goes on where it was; ``set_epoch`` starts afresh.

    Args:
        store: a store's directory, or a folder of shards with their manifest.json.
        split: which split.
        batch_size: positions a batch on this rank.
        seed: any integer.
        shuffle: False gives stored order; None means True for ``train`` and False for the others.
        window_shards: shards in memory at once. The default fields take 49 bytes a position at n = 13,
            a dense policy 676 more; while a window is read, its largest field is there twice.
        rank, world_size: this process among those that train together.
        remainder: of the last global batch, if positions do not fill it. ``"short"`` shares them out as
            evenly as can be; all ranks get the same number of batches, so where fewer positions than
            ranks are left, the batch of some ranks is empty. ``"drop"`` leaves them out of the epoch.
        fields: what batches hold: board float32 (B, 2, n, n), policy float32 (B, n·n): dense where there
            is a dense one, else one-hot, zeros on final positions; value float32 (B,); on request
            position_id, game_id, move, player_to_move, value_sample_tier, position_in_game and
            total_positions, (B,) with the dtypes and the sentinels for null of the shards.

    Raises:
        ConfigError: an option has no meaning, or the split is not in the shards.
        StoreError: the shards are missing, incomplete or of another version.
    """

    def __init__(
        self,
        store: str | Path,
        *,
        split: str = "train",
        batch_size: int = 1024,
        seed: int = 0,
        shuffle: bool | None = None,
        window_shards: int = 8,
        rank: int = 0,
        world_size: int = 1,
        remainder: Remainder = "short",
        fields: Sequence[str] = DEFAULT_FIELDS,
    ) -> None:
        self.options = LoaderOptions(
            split=split,
            batch_size=batch_size,
            seed=seed,
            shuffle=split == "train" if shuffle is None else shuffle,
            window_shards=window_shards,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
            fields=tuple(fields),
        )
        folder = _shard_folder(Path(store))
        self.manifest = ShardManifest.load(folder)
        self._reader = _open_reader(folder, self.manifest, self.options)
        self._sizes = [shard.positions for shard in self.manifest.splits[split]]
        self._epoch = 0
        self._batch = 0

    @property
    def epoch(self) -> int:
        """The epoch that iterating runs, counted from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch`` from its first batch."""
        if epoch < 0:
            raise ConfigError("epochs count from 0", found=epoch)
        self._epoch, self._batch = epoch, 0

    def __len__(self) -> int:
        """Return the batches of a whole epoch, the same for every rank."""
        return count_batches(sum(self._sizes), self.options)

    def __iter__(self) -> Iterator[Batch]:
        """Deliver the rest of the epoch, then advance ``epoch``.

        Raises:
            StoreError, FormatError: a shard is not what the manifest says. No position of its window
                has been delivered.
            ConfigError: ``epoch`` was changed while iterating.
        """
        plan = EpochPlan(self._sizes, self.options, self._epoch)
        stream = _Stream(plan, self._reader)
        while self._batch < plan.batches:
            block = stream.take(*plan.rank_range(self._batch))
            batch = unpack(block, self.options.fields, self.manifest.board_size)
            self._batch += 1
            yield batch
            if self._epoch != plan.epoch:
                raise ConfigError("the epoch was changed while iterating", cure="Start a new iteration.")
        self._epoch, self._batch = plan.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, JSON-able: the batches delivered count, and no others."""
        return make_state(self.options, self.manifest.digest, self._epoch, self._batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: of any rank and world size with the same global batch.

        Raises:
            StoreError: it was taken on other shards or under another version of the order.
            ConfigError: it was taken with other options, or is no state.
        """
        self._epoch, self._batch = check_state(state, self.options, self.manifest.digest, len(self))


class _Stream:
    """The stream of an epoch with the window in memory that was asked for last."""

    def __init__(self, plan: EpochPlan, reader: ShardReader) -> None:
        self._plan = plan
        self._reader = reader
        self._window = -1
        self._block: Block = {}
        self._order: Permutation | None = None

    def take(self, start: int, stop: int) -> Block:
        """Return the positions at places [start, stop), packed; windows before them are not read."""
        parts = []
        for window, first, last in self._plan.pieces(start, stop):
            if window != self._window:
                self._load(window)
            parts.append(take_rows(self._block, self._rows(first, last)))
        return join_blocks(parts)

    def _load(self, window: int) -> None:
        self._block = {}  # let go of the last window before the next one fills the memory
        shards = self._plan.windows[window]
        self._block = join_blocks([block for shard in shards for block in self._reader.read(shard)])
        self._order = self._plan.window_order(window)
        self._window = window

    def _rows(self, first: int, last: int) -> npt.NDArray[np.int64]:
        return np.arange(first, last) if self._order is None else self._order.slice(first, last)


def _shard_folder(store: Path) -> Path:
    """Return the folder of the shards' manifest: ``store`` itself, or the one in a store.

    A store to which more was added since its shards were written is warned of: they lack it.

    Raises:
        StoreError: it is a store that was not exported.
    """
    try:
        whole = Store.open(store)
    except StoreError:  # no store, but perhaps a folder of shards, as may be copied anywhere
        return store if not (store / "shards").is_dir() else store / "shards"
    if "export" not in whole.manifest.stages:
        whole.require_stage("export")
    for stage in ("shuffle", "export"):
        try:
            whole.require_stage(stage)
        except StoreError as error:
            warnings.warn(str(error), stacklevel=3)
    return store / "shards"


def _open_reader(folder: Path, manifest: ShardManifest, options: LoaderOptions) -> ShardReader:
    if manifest.layout != "blocks":
        raise ConfigError(
            "the loader reads shards of blocks",
            path=folder,
            found=f"layout {manifest.layout}",
            cure="Run `hexdata export` with --layout blocks.",
        )
    shards = manifest.splits.get(options.split)
    if shards is None:
        splits = ", ".join(manifest.splits)
        raise ConfigError("no such split in the shards", path=folder, found=options.split, expected=splits)
    stored = shards[0].offsets.keys() if shards else ()
    return ShardReader(folder, manifest, options.split, members_of(options.fields, stored))
