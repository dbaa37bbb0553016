"""The map-style form: positions by index, for people with a loader of their own.

Maps the shards as exact mode does. Never decides which index comes: that is the sampler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, SupportsIndex

import numpy as np

from hexdata.batch import (
    DEFAULT_FIELDS,
    Batch,
    BatchOptions,
    BoardForm,
    FinalPolicy,
    make_batch,
    required_members,
)
from hexdata.checks import as_int, as_tuple, check_count
from hexdata.loader.exact import ExactShards
from hexdata.loader.options import LoaderOptions
from hexdata.shards.locate import add_cache, check_split, find_source, load_manifest, require_mappable
from hexdata.shards.options import CACHE_SIZE, CacheFolder, CacheOptions, Check
from hexdata.storage import AnyPath

__all__ = ["PositionDataset"]

PositionArrays = dict[str, Any]
"""The arrays of one position, without a leading dimension; a number where a batch has one a position."""


_OUT_OF_RANGE: Final = 1 << 62
"""Beyond every position."""


class PositionDataset:
    """A split as a map-style dataset: ``dataset[i]`` is position i in stored order.

    ``dataset[shuffle_indices(range(len(dataset)), seed, epoch)[place]]`` is what ``Loader`` delivers at
    that place of an epoch. It can be pickled; it opens its shards again where it arrives.

    Args:
        store: a store's directory, or a folder of shards with their manifest.json; either may be in an
            object store, ``"s3://bucket/store"``.
        split: which split.
        seed: of the draws of ``symmetry`` and ``tier_probability``; ``set_epoch`` names their epoch.
        check: ``"sizes"`` of the shards, or ``"digests"``, for which every byte is read.
        where, newest: which positions there are, as in ``Loader``.
        cache, cache_size: where copies of shards that lie elsewhere are kept, as in ``Loader``.
        fields, planes, board, final_policy, tier_probability, symmetry: what a position holds; see
            ``BatchOptions``.

    Raises:
        ConfigError: an option has no meaning, or the split is not in the shards.
        StoreError: the shards are missing, incomplete or of another version.
        BudgetError: the split does not fit into the cache.
    """

    def __init__(
        self,
        store: str | AnyPath,
        split: str = "train",
        *,
        seed: int = 0,
        check: Check = "sizes",
        where: str | None = None,
        newest: int | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        planes: int = 2,
        board: BoardForm = "float32",
        final_policy: FinalPolicy = "zeros",
        tier_probability: tuple[float, float, float, float] | None = None,
        symmetry: bool = False,
        cache: CacheFolder = True,
        cache_size: int | str = CACHE_SIZE,
    ) -> None:
        self.options = LoaderOptions(
            split=split,
            seed=seed,
            shuffle=False,
            check=check,
            where=where,
            newest=newest,
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
        source = find_source(store)
        manifest = load_manifest(source)
        members = required_members(self.options.batch, check_split(manifest, split, str(store)))
        self.board_size = manifest.board_size
        source = add_cache(
            source,
            manifest.splits[self.options.split],
            self.options.copies,
            digests=self.options.check == "digests",
        )
        self._shards = ExactShards(require_mappable(source), manifest, members, self.options)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw symmetries and value weights of another epoch; the positions stay where they are."""
        self._epoch = check_count("epoch", epoch, 0)

    def __len__(self) -> int:
        return self._shards.positions

    def __getitem__(self, index: SupportsIndex) -> PositionArrays:
        """Return one position; negative indices count from the end.

        Raises:
            IndexError: there is no such position.
            TypeError: it is no integer.
            FormatError: its shard is not what the manifest says.
        """
        number = as_int(index)
        if number is None:
            raise TypeError(f"a position is given by an integer, not {_describe(index)}")
        return self.__getitems__([number])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[PositionArrays]:
        """Return these positions, in this order: what PyTorch's fetcher calls for a batch.

        They are gathered as one, and each is a view into it.
        """
        batch = self.batch(indices)
        return [{name: array[row] for name, array in batch.items()} for row in range(len(indices))]

    def batch(self, indices: Any) -> Batch:
        """Return these positions (B,), in this order, as one batch.

        Raises:
            IndexError, TypeError, FormatError: as for one position.
        """
        try:
            given = np.asarray(indices)
        except ValueError as error:  # rows of several lengths
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
            raise IndexError(f"no position {index} among the {len(self):,} of {self.options.split}")
        block = self._shards.take(numbers)
        options = self.options
        return make_batch(block, options.batch, self.board_size, seed=options.seed, epoch=self._epoch)


def _index_error(found: Any) -> TypeError:
    return TypeError(f"positions are given by a sequence or an array of integers, not {_describe(found)}")


def _describe(value: Any) -> str:
    """Return what a value is that cannot be an index: its type, and of several the type and the shape."""
    dtype = getattr(value, "dtype", None)
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"{value!r:.80}"
    return kind if dtype is None else f"{kind} of {dtype} and shape {tuple(value.shape)}"
