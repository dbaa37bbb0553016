"""Map-style dataset of single positions, for your own sampler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal, SupportsIndex

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
from hexdata.checks import as_int, as_tuple, check_count
from hexdata.errors import without_secrets
from hexdata.loader.opening import (
    all_members,
    find_data,
    open_game_rows,
    open_shard_rows,
    store_of_shards,
    with_shards,
)
from hexdata.loader.options import MAX_EPOCH, LoaderOptions
from hexdata.loader.weights import Weights, weights_text
from hexdata.selection.options import Dedup
from hexdata.shards.locate import add_cache, check_split, load_manifest, require_mappable
from hexdata.shards.options import CACHE_SIZE, CacheFolder, CacheOptions, Check
from hexdata.storage import AnyPath
from hexdata.store import Store

__all__ = ["PositionDataset"]

PositionArrays = dict[str, Any]
"""The arrays of one position, without the batch dimension. Fields with one number per position are scalars.
"""

_OUT_OF_RANGE: Final = 1 << 62
"""Larger than every index."""


class PositionDataset:
    """Map-style dataset of a split: ``dataset[i]`` is position i in stored order.

    ``dataset[shuffle_indices(range(len(dataset)), seed, epoch)[i]]`` is the i-th position that ``Loader``
    delivers in an epoch. A dataset can be pickled. The copy opens the shards again, or shares the games.

    Example::

        dataset = PositionDataset("store", fields=("board", "value"))
        position = dataset[0]  # {"board": (2, n, n), "value": scalar}
        batch = dataset.batch([3, 1, 2])  # {"board": (3, 2, n, n), "value": (3,)}

    Args:
        store: Directory of a store, or of shards with their ``manifest.json``, on disk or in an object store
            (``"s3://bucket/store"``).
        split: "train", "val" or "test" (default "train").
        mode: "games" holds the games of a store in memory; "exact" maps shards (default None: "games" for a
            store without shards, otherwise "exact").
        seed: Seed of ``symmetry`` and ``tier_probability`` (default 0). ``set_epoch`` selects their epoch.
        check: "sizes" or "digests", as for ``Loader`` (default "sizes").
        where: SQL condition that selects positions, as for ``Loader``; null counts as false (default None:
            all positions).
        dedup: Duplicate games to leave out, "exact" or "symmetric", as for ``Loader`` (default "none").
        newest: Number of games with the highest ids whose positions are selected (default None: all games).
        shards: Shards of the split to read, as for ``Loader`` (default None: all shards).
        weights: Weight of each position, as for ``Loader``. :meth:`epoch_indices` then contains a position of
            weight w floor(w) or ceil(w) times (default None: once).
        fields: Names of the arrays, as for ``Loader`` (default board, policy, value).
        planes: Number of board planes, 2 or 3 (default 2).
        board: "float32", "float16", "uint8", "packed" or "fill" (default "float32").
        final_policy: Policy of final positions: "zeros", "uniform", or "skip" to leave them out (default
            "zeros").
        tier_probability: Probabilities of value weight 1 for tiers 0 to 3 (default None: all weights are 1).
        symmetry: Whether to apply a random symmetry to each position (default False).
        cache: Folder for local copies of remote shards. True: the default folder (default True).
        cache_size: Maximum size of the shard cache in bytes, or text such as "50GB" (default 50 GB). Least
            recently used shards are evicted first.

    Raises:
        ConfigError: An option has an invalid value, or the split does not exist.
        StoreError: Files are missing, damaged or incomplete, or have another format version.
        BudgetError: The split does not fit into the cache, or its games do not fit into memory.
    """

    def __init__(
        self,
        store: str | AnyPath,
        split: str = "train",
        *,
        mode: Literal["games", "exact"] | None = None,
        seed: int = 0,
        check: Check = "sizes",
        where: str | None = None,
        dedup: Dedup = "none",
        newest: int | None = None,
        shards: str | tuple[int, int] | None = None,
        weights: Weights | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        planes: int = 2,
        board: BoardForm = "float32",
        final_policy: FinalPolicy = "zeros",
        tier_probability: tuple[float, float, float, float] | None = None,
        symmetry: bool = False,
        cache: CacheFolder = True,
        cache_size: int | str = CACHE_SIZE,
    ) -> None:
        data = find_data(store, mode)
        self.options = LoaderOptions(
            split=split,
            mode="games" if isinstance(data, Store) else "exact",
            seed=seed,
            shuffle=False,
            check=check,
            where=where,
            dedup=dedup,
            newest=newest,
            shards=as_tuple(shards),
            weights=weights_text(weights),
            batch=BatchOptions(
                fields=as_tuple(fields),
                planes=planes,
                board=board,
                final_policy=final_policy,
                tier_probability=as_tuple(tier_probability),
                symmetry=symmetry,
            ),
            copies=CacheOptions(cache, cache_size),
        )
        if isinstance(data, Store):
            self._rows, games = open_game_rows(data, self.options, weights=weights)
            self.board_size = games.board_size
        else:
            manifest = load_manifest(data)
            open_store = partial(store_of_shards, data, manifest.digest)
            members = all_members(self.options, check_split(manifest, split, str(store)), str(store))
            manifest = with_shards(manifest, self.options, str(store))
            self.board_size = manifest.board_size
            entries = manifest.splits[self.options.split]
            source = add_cache(data, entries, self.options.copies)
            self._rows = open_shard_rows(
                require_mappable(source),
                manifest,
                members,
                self.options,
                weights=weights,
                open_store=open_store,
            )
        self._epoch = 0
        self._location = without_secrets(str(store))

    def __repr__(self) -> str:
        return (
            f"PositionDataset({self._location!r}, split={self.options.split!r}, positions={len(self):,}, "
            f"mode={self.options.mode!r})"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of symmetries and value weights. The order of positions does not change."""
        self._epoch = check_count("epoch", epoch, 0, MAX_EPOCH)

    def epoch_indices(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the indices of the positions of an epoch, ascending: int64 (E,).

        Without ``weights`` these are 0 … ``len(dataset)`` - 1. With them, each index occurs as often as
        ``Loader`` delivers its position in that epoch; ``shuffle_indices(indices, seed, epoch)`` gives the
        order of the loader.
        """
        epoch = check_count("epoch", epoch, 0, MAX_EPOCH)
        weighted = self._rows.weighted
        return np.arange(len(self)) if weighted is None else weighted.indices(epoch)

    def __len__(self) -> int:
        return self._rows.positions

    def __getitem__(self, index: SupportsIndex) -> PositionArrays:
        """Return one position. Negative indices count from the end.

        Raises:
            IndexError: The index is out of range.
            TypeError: The index is not an integer.
            FormatError: The shard differs from its manifest.
        """
        number = as_int(index)
        if number is None:
            raise TypeError(f"the index of a position must be an integer, not {_describe(index)}")
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[PositionArrays]:
        """Return several positions in the given order, as PyTorch's fetcher requests them for a batch.

        The positions are views of one batch.
        """
        batch = self.batch(indices)
        return [{name: array[row] for name, array in batch.items()} for row in range(len(indices))]

    def batch(self, indices: Any) -> Batch:
        """Return several positions in the given order as one batch.

        Args:
            indices: Integers (B,), as a sequence or an array. Negative indices count from the end.

        Raises:
            IndexError: An index is out of range.
            TypeError: ``indices`` is not a sequence or array of integers.
            FormatError: A shard differs from its manifest.
        """
        try:
            given = np.asarray(indices)
        except ValueError as error:  # nested sequences of different lengths
            raise _index_error(indices) from error
        if given.dtype == object and given.ndim == 1 and all(as_int(each) is not None for each in given):
            given = np.clip(given, -_OUT_OF_RANGE, _OUT_OF_RANGE).astype(np.int64)
        if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
            raise _index_error(indices)
        if given.dtype.kind == "u":
            given = np.minimum(given.astype(np.uint64), _OUT_OF_RANGE)
        numbers = given.astype(np.int64, copy=False)
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        wrong = (numbers < 0) | (numbers >= len(self))
        if wrong.any():
            index = indices[int(wrong.argmax())]
            raise IndexError(
                f"index {index} is out of range for the {len(self):,} positions of {self.options.split}"
            )
        block = self._rows.take(numbers)
        options = self.options
        return make_batch(block, options.batch, self.board_size, seed=options.seed, epoch=self._epoch)


def _index_error(found: Any) -> TypeError:
    return TypeError(f"indices must be a sequence or an array of integers, not {_describe(found)}")


def _describe(value: Any) -> str:
    """Return the value of a list or tuple, the dtype and shape of an array, or the type, for a message."""
    dtype = getattr(value, "dtype", None)
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"{value!r:.80}"
    return kind if dtype is None else f"{kind} of {dtype} and shape {tuple(value.shape)}"
