"""IterableDataset over a ``Loader`` for a DataLoader, and helpers for ranks and worker processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from types import EllipsisType
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from torch import distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from hexdata.checks import unusable
from hexdata.errors import ConfigError
from hexdata.loader import Loader, Mixture
from hexdata.loader.epochs import Delivery
from hexdata.system import has_ended
from hexdata.torch.shared import SharedEpochCounter, SharedValue, iteration_id
from hexdata.torch.tensors import TensorBatch, WorkerBatch, as_tensors

# Workers of a killed trainer keep their memory until the next check, which costs next to nothing.
_CHECK_INTERVAL: Final = 1.0
"""Seconds between two checks whether the parent process is alive."""
# Nobody reads it: the parent that would is gone.
_EXIT_STATUS: Final = 1
_watching_pid: int | None = None
"""Process with a watching thread. A forked child inherits this variable, but not the thread."""


_Loader = TypeVar("_Loader", bound=Loader | Mixture)


class RankedLoader(Generic[_Loader]):
    """Base class of what delivers the batches of one rank of a ``Loader`` or ``Mixture``.

    Frameworks create the process group when the training begins. So unless the rank is given, it is taken
    from the process group as soon as there is one, until the first iteration begins.

    Args:
        loader: The loader or mixture.
        rank, world_size: Rank of this process and number of ranks (default None: those of the loader or, if
            it has one rank, those of torch.distributed at the first iteration).

    Raises:
        ConfigError: ``loader`` cannot be used, or only one of ``rank`` and ``world_size`` is given.
    """

    _kinds: ClassVar[tuple[type, ...]] = (Loader,)
    """Classes of which the loader may be."""

    def __init__(self, loader: _Loader, rank: int | None, world_size: int | None) -> None:
        if not isinstance(loader, self._kinds):
            expected = "a hexdata.Loader" + (" or a hexdata.loader.Mixture" if Mixture in self._kinds else "")
            raise unusable("loader", repr(loader), f"{expected}, as in TorchLoader(Loader(store))")
        # One alone would be combined with the other one of the process group, which may not fit.
        if (rank is None) != (world_size is None):
            raise ConfigError(f"rank={rank} and world_size={world_size} must be given together")
        # A loader that was made for several ranks has its rank already.
        self._finds_rank = rank is None and loader.options.world_size == 1
        self._has_begun = False
        self._loader: _Loader = loader
        if rank is not None and world_size is not None:
            self._loader = cast("_Loader", loader._for_rank(rank, world_size))

    @property
    def loader(self) -> _Loader:
        """The loader of this rank."""
        if self._finds_rank and not self._has_begun:
            rank, world_size = self._find_rank()
            if world_size > 1:
                self._loader = cast("_Loader", self._loader._for_rank(rank, world_size))
                self._finds_rank = False
        return self._loader

    def _find_rank(self) -> tuple[int, int]:
        """Return the rank of this process and the number of ranks."""
        # Builds of PyTorch without torch.distributed lack is_initialized.
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def _begin(self) -> None:
        """Keep the rank from here on. Call it at the beginning of each iteration.

        Raises:
            ConfigError: The process group was created after the first iteration, so every rank would receive
                all positions.
        """
        # Looks for the process group a last time, before `_has_begun` fixes the rank.
        _ = self.loader
        self._has_begun = True
        if self._finds_rank and (world_size := self._find_rank()[1]) > 1:
            reason = f"torch.distributed was initialised, with {world_size} ranks, after the first iteration"
            raise ConfigError(f"{reason}; make a new loader, or give rank and world_size")


class LoaderDataset(RankedLoader[Loader], IterableDataset[TensorBatch]):
    """A ``Loader`` as an IterableDataset of whole batches, for your own DataLoader.

    The DataLoader yields the loader's batches in order of their steps, for any number of workers. Each
    iteration runs the next epoch. With torchdata's StatefulDataLoader a loop can be stopped and resumed after
    any batch, with the same number of workers. ``TorchLoader`` is faster and records which batches were
    delivered.

    Example::

        dataset = LoaderDataset(Loader("store", batch_size=256, seed=1))
        for batch in DataLoader(dataset, batch_size=None, num_workers=2):
            train(batch["board"], batch["policy"], batch["value"])

    Args:
        loader: The loader. Its epoch and batch are where the first iteration starts. It is not modified.
        rank, world_size: Rank of this process and number of ranks (default None: those of the loader or, if
            it has one rank, those of torch.distributed at the first iteration).

    Raises:
        ConfigError: Only one of ``rank`` and ``world_size`` is given, or their values are invalid.
    """

    def __init__(self, loader: Loader, *, rank: int | None = None, world_size: int | None = None) -> None:
        super().__init__(loader, rank, world_size)
        options = self.loader.options
        # The dataset moves its loader from epoch to epoch, and the one that was given must not change.
        self._loader = self.loader._for_rank(options.rank, options.world_size)  # a copy
        # Each worker gets a pickled or forked copy of the dataset; only this memory is the same for all.
        self._counter = SharedEpochCounter()
        self._where = SharedValue(self.loader.options.where)
        self._iterations = 0
        self._start_at(self.loader.epoch, self.loader.batch)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, with the rank: a process that is not forked has no process group."""
        # The property finds the rank now, in the process that has the process group.
        return {**self.__dict__, "_loader": self.loader}

    def _start_at(self, epoch: int, step: int) -> None:
        """Set the start of the next iteration: of all workers or, in a worker, of this worker."""
        self._next = epoch, step
        self._latest_epoch = -1
        # StatefulDataLoader loads a state in each worker, which then has its own next batch.
        self._resumes = get_worker_info() is not None
        if not self._resumes:
            self._where.set(self.loader.options.where)
            self._counter.set(epoch, step)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, over all workers."""
        return len(self.loader)

    def set_epoch(self, epoch: int, *, where: str | EllipsisType | None = ...) -> None:
        """Start the next iteration at the first batch of ``epoch``, also in running workers.

        Args:
            epoch: Epoch, counted from 0.
            where: Condition that selects the positions from this epoch on; see ``Loader.set_epoch`` (default
                ``...``: the condition does not change).
        """
        self.loader.set_epoch(epoch, where=where)
        self._start_at(epoch, 0)

    def __iter__(self) -> Iterator[TensorBatch]:
        """Yield the batches of an epoch; in a worker, those of the worker.

        Raises:
            StoreError, FormatError: A shard differs from its manifest.
            ConfigError: torch.distributed was initialised after the first iteration.
        """
        info = get_worker_info()
        worker, workers, seed = (0, 1, 0) if info is None else (info.id, info.num_workers, info.seed)
        if info is None:
            self._begin()
        else:
            end_with_parent()
            # set_epoch may have changed the condition in the main process since this worker was started.
            if (where := self._where.get()) != self.loader.options.where:
                self.loader.set_epoch(self.loader.epoch, where=where)
        self._iterations += 1
        # A DataLoader gives worker w the seed s + w, and draws s for new
        # workers; persistent ones count their iterations.
        iteration = iteration_id(seed - worker, workers, self._iterations)
        ended = False
        if self._resumes:
            self._counter.record(worker, iteration, self._next[0])
        else:
            epoch, step = self._counter.begin(worker, iteration)
            # Worker w begins w steps after the first: a DataLoader takes one batch from each worker in turn.
            self._next = epoch, step + worker
            # The start is after the last batch of its epoch, as every worker
            # finds alike, so the next epoch begins.
            ended = 0 < self.loader.steps(epoch) == step
        self._resumes, self._latest_epoch = False, self._next[0]
        return self._run_next(worker, workers, iteration) if ended else self._run(*self._next, workers)

    def _run_next(self, worker: int, workers: int, iteration: int) -> Iterator[TensorBatch]:
        """Run the next epoch. It begins with the first ``next()``, since unused iterators do not count."""
        epoch = self._next[0] + 1
        self._counter.record(worker, iteration, epoch)
        self._next, self._latest_epoch = (epoch, worker), epoch
        yield from self._run(*self._next, workers)

    def _run(self, epoch: int, first: int, workers: int) -> Iterator[TensorBatch]:
        # There may be fewer batches left than workers.
        if first >= self.loader.steps(epoch):
            return
        self.loader.set_epoch(epoch, first)
        for delivery in self.loader._deliveries(first % workers, workers):
            yield from self._samples(epoch, delivery, workers)

    def _samples(self, epoch: int, delivery: Delivery, workers: int) -> Iterator[Any]:
        """Yield a delivery as one or several samples. ``_next`` is where to resume after each of them."""
        self._next = epoch, delivery.step + workers
        batch = as_tensors(delivery.batch)
        # Only batches that leave this process need the cheaper pickling.
        yield batch if get_worker_info() is None else WorkerBatch(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return a state of a ``Loader`` from which to resume after the last batch that this process yielded.

        In a worker, its next batch is the worker's next batch, as StatefulDataLoader requires.

        Raises:
            ConfigError: Workers have run, so the batches that were delivered are unknown in this process.
        """
        if get_worker_info() is None and self._counter.latest_epoch > self._latest_epoch:
            reason = "the dataset has no record of the batches that its workers delivered"
            raise ConfigError(f"{reason}; use hexdata.torch.TorchLoader or torchdata's StatefulDataLoader")
        epoch, step = self._next
        # The next step of a worker may be up to `workers` - 1 beyond the end of the epoch.
        self.loader.set_epoch(epoch, min(step, self.loader.steps(epoch)))
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at a state, see ``Loader.load_state_dict``."""
        self.loader.load_state_dict(state)
        # At the end of an epoch the loader is already in the next one; other workers may still have batches.
        self._start_at(state["epoch"], state["batch"])


def end_with_parent() -> None:
    """End this worker process within seconds after its parent process ends. Call it in the worker.

    A DataLoader worker whose parent has ended still waits until its messages are read. The pipe holds 64 kB,
    and other workers keep its reading end open, so a larger message blocks for ever. A thread therefore ends
    the process. Linux can send a signal when a parent ends, but it does so when the *thread* that started the
    worker ends.
    """
    global _watching_pid
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Persistent workers call this in every iteration, but need one thread.
    if _watching_pid != os.getpid():
        _watching_pid = os.getpid()
        threading.Thread(
            target=_wait_for_parent, args=(parent, os.getppid()), name="hexdata-parent", daemon=True
        ).start()


def _wait_for_parent(parent: BaseProcess, started_by: int) -> None:
    # Both checks are needed: a fork server outlives the parent, so the parent id of its workers stays the
    # same; forked workers hold each other's sentinel open, so the parent seems alive.
    while parent.is_alive() and not has_ended(started_by):
        parent.join(_CHECK_INTERVAL)
    # Not sys.exit, which ends only this thread; exit handlers could wait for the parent.
    os._exit(_EXIT_STATUS)
