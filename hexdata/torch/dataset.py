"""A loader as an IterableDataset for DataLoader."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
from torch import distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from hexdata.errors import ConfigError
from hexdata.loader import Loader
from hexdata.torch.epoch_counter import TURNS_SIZE, Turns, mark_of
from hexdata.torch.tensors import TensorBatch, WorkerBatch, as_tensors

__all__ = ["LoaderDataset", "check_alone", "end_with_parent", "loader_of_rank"]

_SECONDS_BETWEEN: Final = 1.0
_STATUS: Final = 1
_watched: int | None = None
"""The process that is watched over: a fork has this variable and no thread."""


def loader_of_rank(loader: Loader, rank: int | None, world_size: int | None) -> Loader:
    """Return the loader of this rank: the one asked for, the loader's own, or torch.distributed's."""
    given: Any = loader
    if not isinstance(given, Loader):
        hint = "Make one first, as in TorchLoader(Loader(store))."
        raise ConfigError("loader cannot be used", found=repr(loader), expected="a hexdata.Loader", hint=hint)
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together", found=f"{rank} and {world_size}")
    if rank is not None and world_size is not None:
        return loader.for_rank(rank, world_size)
    if loader.options.world_size == 1 and _world_size() > 1:
        return loader.for_rank(dist.get_rank(), dist.get_world_size())
    return loader


def _world_size() -> int:
    """Return the ranks of torch.distributed; 1 where it is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_alone(loader: Loader, asked: int | None) -> None:
    """See that a loader is alone because it was made so, and not because it was made too early.

    Raises:
        ConfigError: torch.distributed was initialised later: every rank would get everything.
    """
    if asked is None and loader.options.world_size == 1 and _world_size() > 1:
        raise ConfigError(
            "torch.distributed was initialised after the loader was made",
            found="a loader of 1 rank",
            expected=_world_size(),
            hint="Call init_process_group first, or give rank and world_size.",
        )


class LoaderDataset(IterableDataset[TensorBatch]):
    """A ``Loader`` as PyTorch's IterableDataset of whole batches, for a DataLoader of one's own.

    ``DataLoader(LoaderDataset(loader), batch_size=None, num_workers=2)`` delivers the batches of the
    loader in the order of their steps, whatever the number of workers. Each iteration runs the next
    epoch. With torchdata's StatefulDataLoader a loop can be stopped and resumed at any batch, with the
    same number of workers. ``TorchLoader`` is faster, and knows which batches were delivered.

    Args:
        loader: the loader; where it stands is where the first iteration starts. It is not changed.
        rank, world_size: this process among those that train together. None: those of the loader or, if
            it has but one rank, those of torch.distributed.

    Raises:
        ConfigError: only one of rank and world_size is given, or they have no meaning.
    """

    def __init__(self, loader: Loader, *, rank: int | None = None, world_size: int | None = None) -> None:
        own = loader_of_rank(loader, rank, world_size)
        self.loader = own.for_rank(own.options.rank, own.options.world_size)
        self._asked = world_size
        self._words = torch.empty(TURNS_SIZE, dtype=torch.int64).share_memory_()
        self._iterations = 0
        self._stand_at(self.loader.epoch, self.loader.batch)

    @property
    def _turns(self) -> Turns:
        return Turns(self._words.numpy())

    def _stand_at(self, epoch: int, step: int) -> None:
        """Let the next iteration start there: of all workers or, in a worker, of this one."""
        self._next = epoch, step
        self._ran = -1
        self._resumes = get_worker_info() is not None
        if not self._resumes:
            self._turns.set(epoch, step)

    def __len__(self) -> int:
        """Return the batches of a whole epoch, over all workers."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration run ``epoch`` from its first batch, in workers that run already too."""
        self.loader.set_epoch(epoch)
        self._stand_at(epoch, 0)

    def __iter__(self) -> Iterator[TensorBatch]:
        """Run an epoch: all of it, or in a worker this worker's part.

        Raises:
            StoreError, FormatError: a shard is not what the manifest says.
            ConfigError: torch.distributed was initialised after the dataset was made.
        """
        info = get_worker_info()
        worker, workers, seed = (0, 1, 0) if info is None else (info.id, info.num_workers, info.seed)
        if info is None:
            check_alone(self.loader, self._asked)
        else:
            end_with_parent()
        self._iterations += 1
        mark = mark_of(seed - worker, workers, self._iterations)
        ended = False
        if self._resumes:
            self._turns.note(worker, mark, self._next[0])
        else:
            epoch, step = self._turns.take(worker, mark)
            self._next = epoch, step + worker
            ended = 0 < len(self) == step
        self._resumes, self._ran = False, self._next[0]
        return self._run_next(worker, workers, mark) if ended else self._run(*self._next, workers)

    def _run_next(self, worker: int, workers: int, mark: int) -> Iterator[TensorBatch]:
        """Run the next epoch, counted only once a batch is asked for: some make iterators and drop them."""
        epoch = self._next[0] + 1
        self._turns.note(worker, mark, epoch)
        self._next, self._ran = (epoch, worker), epoch
        yield from self._run(*self._next, workers)

    def _run(self, epoch: int, first: int, workers: int) -> Iterator[TensorBatch]:
        if first >= len(self):
            return
        self.loader.set_epoch(epoch, first)
        for delivery in self.loader.deliveries(first % workers, workers):
            self._next = epoch, delivery.step + workers
            batch = as_tensors(delivery.batch)
            yield batch if get_worker_info() is None else WorkerBatch(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a ``Loader`` that goes on after the batch this process yielded last.

        In a worker: with that worker's next batch, as StatefulDataLoader wants it.

        Raises:
            ConfigError: workers have run, and which of their batches were delivered is not known here.
        """
        if get_worker_info() is None and self._turns.latest > self._ran:
            raise ConfigError(
                "a dataset does not know which batches its workers delivered",
                hint="Use hexdata.torch.TorchLoader, or torchdata's StatefulDataLoader.",
            )
        epoch, step = self._next
        self.loader.set_epoch(epoch, min(step, len(self)))
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from a state, as ``Loader.load_state_dict`` does."""
        self.loader.load_state_dict(state)
        # At the end of an epoch the loader is in the next one, but other workers may have batches left.
        self._stand_at(state["epoch"], state["batch"])


def end_with_parent() -> None:
    """End this worker process within seconds after its parent process has ended; call it in the worker.

    A DataLoader's worker that notices the end of its parent still waits until its messages are read. The
    pipe holds only 64 kB of them, and the workers themselves keep its reading end open, so a larger message
    blocks for ever. A thread therefore ends the process. It does not use the signal that Linux sends when a
    parent dies, as that comes when the *thread* ends that started the worker.
    """
    global _watched
    parent = multiprocessing.parent_process()
    assert parent is not None
    if _watched != os.getpid():
        _watched = os.getpid()
        threading.Thread(
            target=_watch, args=(parent, os.getppid()), name="hexdata-parent", daemon=True
        ).start()


def _watch(parent: BaseProcess, started_by: int) -> None:
    # A fork server lives on with its workers; forked workers hold each other's sign that the parent lives.
    while parent.is_alive() and os.getppid() == started_by:
        parent.join(_SECONDS_BETWEEN)
    os._exit(_STATUS)
