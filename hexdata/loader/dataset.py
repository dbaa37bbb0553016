"""Map-style dataset of single positions, for your own sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from hexdata.batch import Batch, make_batch
from hexdata.checks import as_int, check_count
from hexdata.errors import ConfigError, without_secrets
from hexdata.loader.exact import SelectedRows
from hexdata.loader.opening import find_data, open_data
from hexdata.loader.options import MAX_EPOCH, SplitOptions, takes_options
from hexdata.progress import SILENT
from hexdata.storage import AnyPath

PositionArrays = dict[str, Any]
"""The arrays of one position, without the batch dimension. Fields with one number per position are scalars.
"""


class PositionDataset:
    """Map-style dataset of a split: ``dataset[i]`` is position i in stored order.

    ``dataset[shuffle_indices(range(len(dataset)), seed, epoch)[i]]`` is the i-th position that ``Loader``
    delivers in an epoch. A dataset can be pickled. The copy shares the positions in memory.

    Example::

        dataset = PositionDataset("store", fields=("board", "value"))
        position = dataset[0]  # {"board": (2, n, n), "value": scalar}
        batch = dataset.batch([3, 1, 2])  # {"board": (3, 2, n, n), "value": (3,)}

    Args:
        store: Directory of a store, or of shards with their ``manifest.json``, on disk or in an object store
            (``"s3://bucket/store"``). There is no stream mode.
        split, fields, ...: Options, which ``help(hexdata.loader.SplitOptions)`` describes.

    Raises:
        ConfigError: An option has an invalid value, or the split does not exist.
        StoreError: Files are missing, damaged or incomplete, or have another format version.
        BudgetError: The split does not fit into memory, or a shard not into the cache.
    """

    @takes_options(SplitOptions)
    def __init__(self, store: str | AnyPath, *split: str, **given: Any) -> None:
        options = SplitOptions(*split, **given)
        if options.mode == "stream":
            raise ConfigError("a dataset has no stream mode; use mode='games' or 'exact'")
        data, mode = find_data(store, options.mode)
        # A remote folder would be streamed by a loader; a dataset needs random
        # access, so its shards are read into memory.
        options = replace(options, mode="games" if mode == "games" else "exact")
        opened = open_data(data, str(store), options, "raise", SILENT)
        # Arrays of weights are not kept: the options are pickled with the dataset.
        self.options = replace(options, weights=options.weights_text)
        self._rows, self.board_size = SelectedRows(opened, options, options.weights), opened.board_size
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
        return self.__getitems__([index])[0]

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
        # None for bools, too: a mask of booleans would silently select positions 0 and 1.
        numbers = [as_int(index) for index in indices] if hasattr(indices, "__iter__") else [None]
        size = len(self)
        for number in numbers:
            if number is None:
                raise TypeError(f"indices must be a sequence or an array of integers, not {indices!r:.80}")
            if not -size <= number < size:
                split = self.options.split
                raise IndexError(f"index {number} is out of range for the {size:,} positions of {split}")
        block = self._rows.take(np.array(numbers, np.int64) % size)
        return make_batch(block, self.options, self.board_size, seed=self.options.seed, epoch=self._epoch)
