"""A ``Loader`` whose batches are prepared in DataLoader workers and delivered as tensors."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from multiprocessing import get_all_start_methods
from types import EllipsisType
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hexdata.checks import check_choice, check_count, unusable
from hexdata.errors import ConfigError, HexdataError
from hexdata.loader import Loader, Mixture
from hexdata.loader.epochs import Delivery, refuse_index
from hexdata.torch.dataset import RankedLoader, end_with_parent
from hexdata.torch.shared import SharedValue
from hexdata.torch.tensors import PIPE_BYTES, TensorBatch, WorkerBatch, as_tensors

_Source = TypeVar("_Source", bound=Loader | Mixture)

# A message arrives as a whole, so that more batches would delay the first one.
_MAX_STEPS: Final = 16
"""Largest number of batches in one message."""
_Message = list[Any]
"""Deliveries of steps of one worker, ``num_workers`` apart. The last item may be a HexdataError."""


class TensorLoader(RankedLoader[_Source], ABC):
    """Epochs, states and digests of a ``Loader`` or ``Mixture`` whose batches a subclass makes."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader!r})"

    @abstractmethod
    def _deliveries(self) -> Iterator[Delivery]:
        """Yield the batches of the rest of the loader's epoch."""

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, counted from 0."""
        return self.loader.epoch

    @property
    def batch(self) -> int:
        """Index of the next batch of the epoch."""
        return self.loader.batch

    @property
    def epoch_digest(self) -> str | None:
        """Digest of the positions that this rank received in the last complete epoch, or None.

        It is the ``epoch_digest`` of the loader; None for a mixture.
        """
        return self.loader.epoch_digest if isinstance(self.loader, Loader) else None

    def set_epoch(self, epoch: int, *, where: str | EllipsisType | None = ...) -> None:
        """Start the next iteration at the first batch of ``epoch``.

        Args:
            epoch: Epoch, counted from 0.
            where: Condition that selects the positions from this epoch on; see ``Loader.set_epoch`` (default
                ``...``: the condition does not change). A mixture keeps the conditions of its loaders.
        """
        if where is ...:
            self.loader.set_epoch(epoch)
        elif isinstance(self.loader, Loader):
            self.loader.set_epoch(epoch, where=where)
        else:
            raise ConfigError(f"where={where!r}: a mixture keeps the conditions of its loaders")

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch, as a dict for JSON."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a state; see ``Loader.load_state_dict``.

        The numbers of ranks and workers may differ from those of the run that saved the state.
        """
        self.loader.load_state_dict(state)

    __getitem__ = refuse_index

    def __len__(self) -> int:
        """Return the number of batches of an epoch, which is the same for every rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[TensorBatch]:
        """Yield the rest of the epoch, or the next epoch if no batches are left; then advance ``epoch``.

        Raises:
            StoreError, FormatError: A shard differs from its manifest.
            ConfigError: The epoch was changed during the iteration, or torch.distributed was initialised
                after the first iteration.
            RuntimeError: A worker process ended unexpectedly.
        """
        self._begin()
        # The main process alone counts batches: those that wait in queues have not been delivered.
        with self.loader._iteration():
            for delivery in self._deliveries():
                yield from self.loader._deliver(delivery)
            # A DataLoader ends without an error if its dataset does, so a
            # worker that ended early would go unnoticed.
            if self.loader.batch != len(self):
                raise HexdataError(f"the workers ended after {self.loader.batch} of {len(self)} batches")


class _MessageDataset(IterableDataset[_Message]):
    """The dataset in the workers of a ``TorchLoader``. The main process sets where each iteration starts."""

    def __init__(self, loader: Loader | Mixture) -> None:
        self._loader = loader
        self._start = SharedValue(self._position())

    def _position(self) -> tuple[int, int, str | None]:
        where = self._loader.options.where if isinstance(self._loader, Loader) else None
        return self._loader.epoch, self._loader.batch, where

    def prepare(self) -> None:
        """Set the start and the condition of the next iteration, also in running workers."""
        self._start.set(self._position())

    def __iter__(self) -> Iterator[_Message]:
        info = get_worker_info()
        assert info is not None
        # In the worker, before the first message that could block it.
        end_with_parent()
        made = self._make(info.id, info.num_workers)
        for first in made:
            steps = 1
            if isinstance(first, Delivery):
                steps = _steps_per_message(first.batch, self._loader.options.batch_size)
            yield [first, *islice(made, steps - 1)]

    def _make(self, worker: int, workers: int) -> Iterator[Delivery | HexdataError]:
        """Yield the worker's batches. Errors are yielded, since a DataLoader would keep only their text."""
        try:
            epoch, step, where = self._start.get()
            # Only if it has changed: applying a condition reads the labels of the whole split.
            if isinstance(self._loader, Loader) and where != self._loader.options.where:
                self._loader.set_epoch(epoch, step, where=where)
            else:
                self._loader.set_epoch(epoch, step)
            # The DataLoader asks worker 0 first, so worker 0 has the first step, whatever its number.
            for delivery in self._loader._deliveries((step + worker) % workers, workers):
                yield delivery._replace(batch=WorkerBatch(as_tensors(delivery.batch)))
        except HexdataError as error:
            yield error


def _steps_per_message(batch: Any, batch_size: int) -> int:
    """Return the number of batches per message. A message takes some 100 µs, whatever its size."""
    row_bytes = sum(tensor.element_size() * math.prod(tensor.shape[1:]) for tensor in batch.values())
    return max(1, min(_MAX_STEPS, PIPE_BYTES // (row_bytes * batch_size)))


class TorchLoader(TensorLoader[_Source]):
    """A ``Loader`` or ``Mixture`` whose batches are prepared in worker processes and delivered as tensors.

    It is used like its loader: iterating delivers the rest of the epoch and then advances ``epoch``. If the
    epoch has no batches left, it delivers the next epoch, so a loop may also take exactly ``len(loader)``
    batches. Batches that workers prepared but did not deliver are delivered by the next iteration. Batches
    and their order are the same for any number of workers. A state can be resumed with another number of
    workers and, with the same global batch, of ranks.

    Example::

        loader = TorchLoader(Loader("store", batch_size=256, seed=1), num_workers=2)
        for batch in loader:
            train(batch["board"], batch["policy"], batch["value"])

    Args:
        loader: The loader or mixture. The ``TorchLoader`` starts at its epoch and batch. Do not iterate the
            loader itself any more.
        num_workers: Number of worker processes (default 0: batches are prepared in this process).
        rank, world_size: Rank of this process and number of ranks (default None: those of the loader or, if
            it has one rank, those of torch.distributed at the first iteration).
        pin_memory: Whether to deliver batches in pinned memory, for ``to_device``, if there is a CUDA device
            (default None: yes).
        prefetch_factor: Number of messages that each worker prepares in advance (default 4). A message is one
            batch, or up to 16 small batches.
        persistent_workers: Whether to keep the workers between epochs (default True).
        multiprocessing_context: Start method of the workers, "fork", "spawn" or "forkserver" (default None:
            Python's default).

    Raises:
        ConfigError: An option has an invalid value.
    """

    _kinds = (Loader, Mixture)

    def __init__(
        self,
        loader: _Source,
        *,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int = 4,
        persistent_workers: bool = True,
        multiprocessing_context: str | None = None,
    ) -> None:
        num_workers = check_count("num_workers", num_workers, 0)
        prefetch_factor = check_count("prefetch_factor", prefetch_factor, 1)
        for name, value in (
            ("pin_memory", False if pin_memory is None else pin_memory),
            ("persistent_workers", persistent_workers),
        ):
            if not isinstance(value, bool):
                raise unusable(name, repr(value), "True or False")
        if multiprocessing_context is not None:
            check_choice("multiprocessing_context", multiprocessing_context, get_all_start_methods())
        super().__init__(loader, rank, world_size)
        self._num_workers = num_workers
        # Pinned memory exists only with CUDA; a DataLoader would warn that it has none.
        self._pin_memory = pin_memory is not False and torch.cuda.is_available()
        self._worker_options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
        }
        self._messages: list[DataLoader[_Message]] = []
        """The DataLoader of the workers, if there is one."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the workers: a copy starts its own."""
        return {**self.__dict__, "_messages": []}

    def _deliveries(self) -> Iterator[Delivery]:
        if not self._num_workers:
            for delivery in self.loader._deliveries():
                batch = as_tensors(delivery.batch)
                if self._pin_memory:
                    batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
                yield delivery._replace(batch=batch)
            return
        if not self._messages:  # here, because the rank may be unknown before the first iteration
            self._dataset = _MessageDataset(self.loader)
            made = DataLoader(
                self._dataset,
                # Whole batches are made by the loader; the DataLoader passes them on.
                batch_size=None,
                collate_fn=list,  # the default would convert the contents of the messages
                pin_memory=self._pin_memory,
                **self._worker_options,
            )
            self._messages.append(made)
            # A DataLoader that is collected as a part of a cycle has lost the queues through which it ends
            # its workers, and waits 5 s for each. So it is not in the cycle, and is freed before the rest.
            weakref.finalize(self, self._messages.clear).atexit = False
        # Before iter(), which makes persistent workers begin the next iteration.
        self._dataset.prepare()
        yield from _order_by_step(iter(self._messages[0]), self._num_workers)


def _order_by_step(messages: Iterator[_Message], workers: int) -> Iterator[Delivery]:
    """Yield the deliveries of the messages in order of their steps.

    Messages arrive from the workers in turn, and worker w has every ``workers``-th step.
    """
    # One message of each worker has the steps s, s + 1 … in its first
    # items, the next ones in its second items.
    while one_of_each := list(islice(messages, workers)):
        for delivery in chain.from_iterable(zip_longest(*one_of_each)):
            if isinstance(delivery, HexdataError):
                raise delivery
            # zip_longest fills up the messages of workers that have fewer steps left.
            if delivery is not None:
                yield delivery
