"""A ``Loader`` whose batches are prepared in DataLoader workers and delivered as tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from multiprocessing import get_all_start_methods
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hexdata.checks import check_choice, check_count
from hexdata.errors import ConfigError, HexdataError
from hexdata.loader import Loader, Mixture
from hexdata.torch.dataset import end_with_parent
from hexdata.torch.shared_condition import SharedCondition
from hexdata.torch.tensor_loader import TensorLoader
from hexdata.torch.tensors import PIPE_BYTES, TensorBatch, WorkerBatch, as_tensors

__all__ = ["TorchLoader"]

_MAX_STEPS: Final = 16
"""Largest number of batches in one message."""


@dataclass(frozen=True)
class _TensorDelivery:
    """A ``loader.Delivery`` whose batch consists of tensors."""

    step: int
    position_ids: npt.NDArray[np.int64]
    batch: TensorBatch

    def pin_memory(self) -> _TensorDelivery:
        """Return the delivery in pinned memory. A DataLoader calls this in a thread."""
        return replace(self, batch={name: tensor.pin_memory() for name, tensor in self.batch.items()})


_Message = list[_TensorDelivery | HexdataError]
"""Consecutive steps of one worker, ``num_workers`` apart. An error is the last item."""


class _MessageDataset(IterableDataset[_Message]):
    """The dataset in the workers of a ``TorchLoader``. The main process sets where each iteration starts."""

    def __init__(self, loader: Loader | Mixture) -> None:
        self._loader = loader
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._condition = SharedCondition(loader) if isinstance(loader, Loader) else None

    def prepare(self) -> None:
        """Set the start and the condition of the next iteration, also in running workers."""
        if self._condition and isinstance(self._loader, Loader):
            self._condition.share(self._loader)
        self._start.copy_(torch.tensor([self._loader.epoch, self._loader.batch]))

    def __iter__(self) -> Iterator[_Message]:
        info = get_worker_info()
        assert info is not None
        end_with_parent()
        deliveries = self._deliveries(info.id, info.num_workers)
        for delivery in deliveries:
            steps = 1
            if isinstance(delivery, _TensorDelivery):
                steps = _steps_per_message(delivery.batch, self._loader.options.batch_size)
            yield [delivery, *islice(deliveries, steps - 1)]

    def _deliveries(self, worker: int, workers: int) -> Iterator[_TensorDelivery | HexdataError]:
        """Yield the worker's batches. Errors are yielded, since a DataLoader would keep only their text."""
        try:
            epoch, step = self._start.tolist()
            if self._condition and isinstance(self._loader, Loader):
                self._condition.follow(self._loader)
            self._loader.set_epoch(epoch, step)
            # The DataLoader asks worker 0 first, so worker 0 has the first step, whatever its number.
            for number, ids, batch in self._loader.deliveries((step + worker) % workers, workers):
                yield _TensorDelivery(number, ids, WorkerBatch(as_tensors(batch)))
        except HexdataError as error:
            yield error


def _steps_per_message(batch: TensorBatch, batch_size: int) -> int:
    """Return the number of batches per message. A message takes some 100 µs, whatever its size."""
    row_bytes = sum(tensor.element_size() * math.prod(tensor.shape[1:]) for tensor in batch.values())
    return max(1, min(_MAX_STEPS, PIPE_BYTES // (row_bytes * batch_size)))


class TorchLoader(TensorLoader[_TensorDelivery, Loader | Mixture]):
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
        loader: Loader | Mixture,
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
        for name, value in (("pin_memory", pin_memory), ("persistent_workers", persistent_workers)):
            if not (isinstance(value, bool) or (value is None and name == "pin_memory")):
                raise ConfigError(f"{name} cannot be used", found=repr(value), expected="True or False")
        if multiprocessing_context is not None:
            check_choice("multiprocessing_context", multiprocessing_context, get_all_start_methods())
        super().__init__(loader, rank, world_size)
        self._num_workers = num_workers
        self._pin_memory = pin_memory is not False and torch.cuda.is_available()
        self._worker_options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
        }
        self._messages: DataLoader[_Message] | None = None

    def _record(self, delivery: _TensorDelivery) -> None:
        self.loader.record(delivery.step, delivery.position_ids)

    def _deliveries(self) -> Iterator[_TensorDelivery]:
        if self._num_workers:
            if self._messages is None:  # here, because the rank may be unknown before the first iteration
                self._dataset = _MessageDataset(self.loader)
                self._messages = DataLoader(
                    self._dataset,
                    batch_size=None,
                    collate_fn=list,  # the default would convert the contents of the messages
                    pin_memory=self._pin_memory,
                    **self._worker_options,
                )
            self._dataset.prepare()
            yield from _order_by_step(iter(self._messages), self._num_workers)
            return
        for step, ids, batch in self.loader.deliveries():
            delivery = _TensorDelivery(step, ids, as_tensors(batch))
            yield delivery.pin_memory() if self._pin_memory else delivery


def _order_by_step(messages: Iterator[_Message], workers: int) -> Iterator[_TensorDelivery]:
    """Yield the deliveries of the messages in order of their steps.

    Messages arrive from the workers in turn, and worker w has every ``workers``-th step.
    """
    while one_of_each := list(islice(messages, workers)):
        for delivery in chain.from_iterable(zip_longest(*one_of_each)):
            if isinstance(delivery, HexdataError):
                raise delivery
            if delivery is not None:
                yield delivery
