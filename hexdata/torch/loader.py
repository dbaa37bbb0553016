"""A loader whose batches are prepared in DataLoader workers."""

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
from hexdata.loader import Loader
from hexdata.torch.dataset import check_alone, end_with_parent, loader_of_rank
from hexdata.torch.tensors import PIPE_BYTES, TensorBatch, WorkerBatch, as_tensors

__all__ = ["TorchLoader"]

_MOST_STEPS: Final = 16


@dataclass(frozen=True)
class _Parcel:
    """A batch on its way from a worker; see ``loader.Delivery``."""

    step: int
    position_ids: npt.NDArray[np.int64]
    batch: TensorBatch

    def pin_memory(self) -> _Parcel:
        """Return it in pinned memory; a DataLoader calls this in a thread of its own."""
        return replace(self, batch={name: tensor.pin_memory() for name, tensor in self.batch.items()})


_Message = list[_Parcel | HexdataError]
"""Steps of one worker, in their order, each ``num_workers`` after the one before; an error ends them."""


class _Messages(IterableDataset[_Message]):
    """What the workers of a ``TorchLoader`` run; the main process alone says from where."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._place = torch.zeros(2, dtype=torch.int64).share_memory_()

    def start_at(self, epoch: int, step: int) -> None:
        """Let the next iteration start there, in workers that run already too."""
        self._place.copy_(torch.tensor([epoch, step]))

    def __iter__(self) -> Iterator[_Message]:
        info = get_worker_info()
        assert info is not None
        end_with_parent()
        parcels = self._parcels(info.id, info.num_workers)
        for parcel in parcels:
            steps = 1
            if isinstance(parcel, _Parcel):
                steps = _steps_a_message(parcel.batch, self._loader.options.batch_size)
            yield [parcel, *islice(parcels, steps - 1)]

    def _parcels(self, worker: int, workers: int) -> Iterator[_Parcel | HexdataError]:
        """Yield the batches; an error travels as an object, since a DataLoader would keep its text alone."""
        try:
            epoch, step = self._place.tolist()
            self._loader.set_epoch(epoch, step)
            # Messages are asked for from worker 0 on, so worker 0 has the first step, wherever that is.
            for delivery in self._loader.deliveries((step + worker) % workers, workers):
                yield _Parcel(delivery.step, delivery.position_ids, WorkerBatch(as_tensors(delivery.batch)))
        except HexdataError as error:
            yield error


def _steps_a_message(batch: TensorBatch, batch_size: int) -> int:
    """Return how many such batches travel in one message: a message costs some 100 µs, whatever it holds."""
    row = sum(tensor.element_size() * math.prod(tensor.shape[1:]) for tensor in batch.values())
    return max(1, min(_MOST_STEPS, PIPE_BYTES // (row * batch_size)))


class TorchLoader:
    """A ``Loader`` that works in DataLoader workers, pins memory, and delivers dicts of tensors.

    It stands where its loader stands and is used like it: iterating runs the epoch to its end, from the
    next batch on that was not delivered, then advances ``epoch``; after the last batch of an epoch it runs
    the next one, also for a loop that takes exactly ``len(loader)`` batches. Batches that workers have
    prepared but nobody was given come again. The batches and their order do not depend on the number of
    workers, and a state resumes with another number of them and, at the same global batch, of ranks.

    Args:
        loader: the loader; from here on iterate this one in its place.
        num_workers: processes that prepare batches; 0 prepares them in this one.
        rank, world_size: this process among those that train together. None: those of the loader or, if
            it has but one rank, those of torch.distributed.
        pin_memory: deliver in pinned memory, for ``to_device``; None: if there is a CUDA device.
        prefetch_factor: messages that each worker prepares ahead: of one batch, or of up to 16 small ones.
        persistent_workers: keep the workers from one epoch to the next.
        multiprocessing_context: how workers start: "fork", "spawn", "forkserver"; None: Python's default.

    Attributes:
        loader: the loader of this rank.

    Raises:
        ConfigError: an option has no meaning.
    """

    def __init__(
        self,
        loader: Loader,
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
        self.loader = loader_of_rank(loader, rank, world_size)
        self._asked = world_size
        self._num_workers = num_workers
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        if num_workers:
            self._messages = _Messages(self.loader)
            self._batches = DataLoader(
                self._messages,
                batch_size=None,
                num_workers=num_workers,
                collate_fn=list,  # it would look into the messages
                pin_memory=self._pin_memory,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                multiprocessing_context=multiprocessing_context,
            )

    @property
    def epoch(self) -> int:
        """The epoch that iterating runs, counted from 0."""
        return self.loader.epoch

    @property
    def epoch_digest(self) -> str | None:
        """The digest of what this rank got in the epoch that ended last; see ``Loader.epoch_digest``."""
        return self.loader.epoch_digest

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch`` from its first batch."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, JSON-able: the batches delivered count, and no others."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, also of other numbers of ranks and workers; see ``Loader.load_state_dict``."""
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        """Return the batches of a whole epoch, the same for every rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[TensorBatch]:
        """Deliver the rest of the epoch, or all of the next one if nothing is left; then advance ``epoch``.

        Raises:
            StoreError, FormatError: a shard is not what the manifest says.
            ConfigError: the loader was sent elsewhere while iterating, or torch.distributed was
                initialised after it was made.
            RuntimeError: a worker died.
        """
        check_alone(self.loader, self._asked)
        with self.loader.iteration() as epoch:
            for parcel in self._parcels():
                self.loader.record(parcel.step, parcel.position_ids)
                yield parcel.batch
                if self.loader.epoch != epoch:
                    raise ConfigError("the epoch was changed while iterating", hint="Start a new iteration.")
            if self.loader.batch != len(self):
                raise HexdataError("the workers ended early", found=self.loader.batch, expected=len(self))

    def _parcels(self) -> Iterator[_Parcel]:
        if not self._num_workers:
            for delivery in self.loader.deliveries():
                parcel = _Parcel(delivery.step, delivery.position_ids, as_tensors(delivery.batch))
                yield parcel.pin_memory() if self._pin_memory else parcel
            return
        self._messages.start_at(self.loader.epoch, self.loader.batch)
        yield from _in_order(iter(self._batches), self._num_workers)


def _in_order(messages: Iterator[_Message], workers: int) -> Iterator[_Parcel]:
    """Yield by step what comes in messages, one a worker in turn: worker w has every ``workers``-th step."""
    while turn := list(islice(messages, workers)):
        for parcel in chain.from_iterable(zip_longest(*turn)):
            if isinstance(parcel, HexdataError):
                raise parcel
            if parcel is not None:
                yield parcel
