"""Pipelines of the library webdataset over the batches or positions of a ``Loader``.

The order, the ranks and the DataLoader workers are those of ``hexdata.torch.LoaderDataset``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import EllipsisType
from typing import Any, Final, Literal

import webdataset as wds
from webdataset.utils import pytorch_worker_info

from hexdata.checks import as_int, check_choice
from hexdata.errors import ConfigError
from hexdata.loader import Loader
from hexdata.loader.epochs import Delivery
from hexdata.torch import LoaderDataset

__all__ = ["LoaderPipeline", "Sample"]

Sample = dict[str, Any]
"""NumPy arrays by field name, and ``__key__``, the name of the sample."""

_KINDS: Final = ("batches", "positions")
_ROW: Final = "row"
"""Key of a state: number of positions of the next batch that have been delivered."""


class LoaderPipeline(wds.DataPipeline, wds.FluidInterface):
    """A ``wds.DataPipeline`` whose samples are the batches or the positions of a ``Loader``.

    It has the methods of ``wds.WebDataset``: ``map``, ``select``, ``to_tuple``, ``compose`` and so on. Each
    iteration runs the next epoch. A DataLoader or ``wds.WebLoader`` over it delivers the batches of the
    loader in their order, for any number of workers.

    Example::

        pipeline = LoaderPipeline(Loader("store", batch_size=256, seed=1)).to_tuple("board", "value")
        for board, value in wds.WebLoader(pipeline, batch_size=None, num_workers=2):
            train(board, value)

    Args:
        loader: The loader. Its epoch and batch are where the first iteration starts. It is not modified.
        samples: "batches" yields the batches of the loader, with ``__key__`` = "EPOCH-STEP", both with six
            digits. "positions" yields single positions: the arrays without their first dimension, and
            ``__key__`` = the position id with nine digits (default "batches").
        rank, world_size: Rank of this process and number of ranks (default None: those of the loader or, if
            it has one rank, those that webdataset finds at the first iteration: the environment variables
            RANK and WORLD_SIZE, or torch.distributed).

    Raises:
        ConfigError: An option has an invalid value; or ``samples="positions"``, and the loader pads batches
            or has a transform; or PyTorch is not installed.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        samples: Literal["batches", "positions"] = "batches",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_choice("samples", samples, _KINDS)
        kind = _Positions if samples == "positions" else _Batches
        super().__init__(kind(loader, rank=rank, world_size=world_size))

    def iterator(self) -> Iterator[Any]:
        """Begin the next epoch, and return an iterator of its samples and of the repetitions.

        The epoch begins here, not with the first sample, so that a state saved before it has the right epoch.
        """
        # Not a generator function, whose body would run with the first sample only.
        return self._repeat(self.iterator1())

    def _repeat(self, samples: Iterator[Any]) -> Iterator[Any]:
        for repetition in range(self.repetitions):
            count = 0
            for count, sample in enumerate(self.iterator1() if repetition else samples, start=1):  # noqa: B007
                yield sample
            # `repeat()` without a number would otherwise go on for ever without yielding anything.
            if not count:  # this worker has no samples, also in the epochs that follow
                return

    @property
    def loader(self) -> Loader:
        """The loader of this rank."""
        return self._source.loader

    @property
    def _source(self) -> LoaderDataset:
        source: LoaderDataset = self.stage(0)
        return source

    def set_epoch(self, epoch: int, *, where: str | EllipsisType | None = ...) -> None:
        """Start the next iteration at the first batch of ``epoch``, also in running workers.

        Args:
            epoch: Epoch, counted from 0.
            where: Condition that selects the positions from this epoch on; see ``Loader.set_epoch`` (default
                ``...``: the condition does not change).
        """
        self._source.set_epoch(epoch, where=where)

    def state_dict(self) -> dict[str, Any]:
        """Return a state from which to resume after the last sample that the loader yielded.

        Samples that a later stage holds back, such as ``shuffle`` or ``batched``, are not delivered again.

        Raises:
            ConfigError: Workers have run, so the samples that were delivered are unknown in this process. Use
                StatefulDataLoader of torchdata.
        """
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at a state, see ``Loader.load_state_dict``."""
        self._source.load_state_dict(state)


class _Batches(LoaderDataset):
    """The batches of a loader as samples."""

    def _find_rank(self) -> tuple[int, int]:
        # As in other pipelines of webdataset, which also reads the environment that launchers set.
        rank, world_size, _, _ = pytorch_worker_info()
        return rank, world_size

    def _samples(self, epoch: int, delivery: Delivery, workers: int) -> Iterator[Sample]:
        self._next = epoch, delivery.step + workers
        yield {"__key__": f"{epoch:06d}-{delivery.step:06d}", **delivery.batch}


class _Positions(_Batches):
    """The positions of a loader as samples. A state counts the positions of an incomplete batch."""

    def __init__(self, loader: Loader, *, rank: int | None = None, world_size: int | None = None) -> None:
        super().__init__(loader, rank=rank, world_size=world_size)
        # Both act on whole batches: a transform may change the number of
        # rows, and padding would repeat samples.
        if self.loader.transform or self.loader.options.remainder == "pad":
            raise ConfigError("a pipeline of positions cannot use the options transform and remainder='pad'")
        if self.loader.options.remainder == "auto":  # positions need not be divided evenly
            self.loader.options = replace(self.loader.options, remainder="short")

    def _start_at(self, epoch: int, step: int) -> None:
        super()._start_at(epoch, step)
        self._row = 0
        self._resume: tuple[int, int, int] = (epoch, step, 0)

    def __iter__(self) -> Iterator[Sample]:
        samples = super().__iter__()
        # Only the batch in which the state was saved has been delivered in part.
        self._row = self._resume[2] if self._next == self._resume[:2] else 0
        return samples

    def _samples(self, epoch: int, delivery: Delivery, workers: int) -> Iterator[Sample]:
        ids, batch = delivery.position_ids.tolist(), delivery.batch
        skipped = self._resume[2] if self._resume[:2] == (epoch, delivery.step) else 0
        for row in range(skipped, len(ids)):
            is_last = row + 1 == len(ids)
            # Before the sample is yielded, so that a state saved after it continues behind it.
            self._next = epoch, delivery.step + workers * is_last
            self._row = 0 if is_last else row + 1
            yield {"__key__": f"{ids[row]:09d}", **{name: array[row] for name, array in batch.items()}}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _ROW: self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        row = as_int(state.get(_ROW)) if isinstance(state, dict) else None
        if row is None or not 0 <= row < self.loader.options.batch_size:
            expected = "a state of a pipeline of positions, with the same batch_size"
            raise ConfigError("the state cannot be used", found=f"{_ROW}={row}", expected=expected)
        # A state of a loader, which refuses unknown keys. The call also
        # resets the row, which is therefore set after it.
        super().load_state_dict({name: value for name, value in state.items() if name != _ROW})
        self._row, self._resume = row, (state["epoch"], state["batch"], row)
