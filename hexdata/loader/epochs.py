"""Epochs of batches, one after the other: position, iteration and ranks of ``Loader`` and ``Mixture``."""

from __future__ import annotations

import copy
from abc import ABCMeta, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Self

from hexdata.batch import Batch
from hexdata.checks import check_count
from hexdata.errors import ConfigError
from hexdata.loader.checkpoint import EpochDigest
from hexdata.loader.options import MAX_EPOCH, TransformFunction


class Delivery(NamedTuple):
    """A batch, and what is counted when it has been delivered."""

    step: int
    """Step of the epoch, counted from 0."""
    batch: Any
    """The batch: arrays or tensors by name."""
    position_ids: Any = None
    """Ids of the positions of the batch, without padding: int64, at most (B,). None for a mixture."""
    key_sum: Any = None
    """What ``EpochDigest.add_sum`` adds, in place of the ids: a tensor of a device."""


def refuse_index(loader: object, index: object) -> NoReturn:
    """Raise ConfigError. A DataLoader of PyTorch would ask for batches by index."""
    reason = f"a loader has no batch at an index, as in {type(loader).__name__}[{index}]"
    raise ConfigError(f"{reason}; for PyTorch, use hexdata.torch.TorchLoader")


class ListedNames(ABCMeta):
    """Metaclass whose classes list in ``dir`` and ``help`` what users call: no private and special names."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name[0] != "_"]


class EpochLoader(metaclass=ListedNames):
    """Base class of loaders, which deliver the steps of an epoch and then those of the next one.

    A subclass defines the number of steps of an epoch and makes their batches.
    """

    options: Any
    """The options, with those of ``RankedOptions``."""
    transform: TransformFunction | None
    _digest: EpochDigest | None = None
    """Digest of the epoch so far; None if it is unknown. A mixture has none."""
    _epoch: int
    _batch: int

    @abstractmethod
    def steps(self, epoch: int) -> int:
        """Return the number of batches of an epoch, which is the same for every rank."""

    @abstractmethod
    def _make(self, epoch: int, steps: range) -> Iterator[Delivery]:
        """Yield this rank's batches at ascending steps of an epoch."""

    __getitem__ = refuse_index

    def __len__(self) -> int:
        """Return the number of batches of the epoch. With ``weights`` it may differ by one between epochs."""
        return self.steps(self._epoch)

    @property
    def epoch(self) -> int:
        """The current epoch, from 0. It advances after its last batch."""
        return self._epoch

    @property
    def batch(self) -> int:
        """Index of the next batch of the epoch."""
        return self._batch

    def set_epoch(self, epoch: int, batch: int = 0) -> None:
        """Start the next iteration at a batch (default 0) of an epoch, counted from 0, at most 2^61.

        Raises:
            ConfigError: ``epoch`` is out of range, or ``batch`` is not within the epoch.
        """
        epoch, batch = check_count("epoch", epoch, 0, MAX_EPOCH), check_count("batch", batch, 0)
        if batch > (steps := self.steps(epoch)):
            raise ConfigError(f"batch {batch} is beyond the end of epoch {epoch}, which has {steps}")
        self._move_to(epoch, batch)

    def _for_rank(self, rank: int, world_size: int) -> Self:
        """Return a loader for another rank, at the same position. It shares the positions in memory.

        Within an epoch, ``world_size`` must stay the same.
        """
        epoch, batch = self._next_batch()
        # Step t covers batch_size * world_size positions: with another
        # world size, the same step begins elsewhere.
        if batch and world_size != (before := self.options.world_size):
            reason = f"world_size {before} cannot become {world_size} within epoch {epoch}"
            raise ConfigError(f"{reason}; make a loader with it, and load the state")
        # A shallow copy, so that all ranks of a process use one table of positions.
        other = copy.copy(self)
        other.options = replace(self.options, rank=rank, world_size=world_size)
        other._move_to(epoch, batch)
        return other

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch, or the next epoch if no batches are left; then advance ``epoch``."""
        with self._iteration():
            for delivery in self._deliveries():
                yield from self._deliver(delivery)

    def _deliveries(self, worker: int = 0, workers: int = 1) -> Iterator[Delivery]:
        """Yield this rank's batches at the steps t with t mod ``workers`` = ``worker``, as iterating does.

        The position of the loader does not change.
        """
        if not 0 <= worker < workers:
            raise ConfigError(f"worker {worker} must be below the number of workers, {workers}")
        epoch, step = self._next_batch()
        # The first step from `step` on that is equal to `worker` modulo `workers`.
        return self._make(epoch, range(step + (worker - step) % workers, self.steps(epoch), workers))

    @contextmanager
    def _iteration(self) -> Iterator[None]:
        """Return a context manager that ends a complete epoch when it is entered and when it is left."""
        # A loop may have stopped after exactly the last batch; the epoch then ends when the next loop begins.
        self._end_complete_epoch()
        epoch, steps = self._epoch, len(self)
        try:
            yield
        finally:
            # Also if the consumer leaves the loop during the last batch,
            # so that `epoch` has advanced after it.
            if (self._epoch, self._batch) == (epoch, steps):
                self._end_epoch()

    def _deliver(self, delivery: Delivery) -> Iterator[Any]:
        """Count a batch as delivered and yield it, once, within :meth:`_iteration`."""
        epoch, options = self._epoch, self.options
        # Counted before it is yielded: a state saved inside the loop body resumes after this batch.
        self._batch += 1
        if self._digest and delivery.key_sum is not None:
            self._digest.add_sum(delivery.key_sum)
        elif self._digest:
            self._digest.add(delivery.step, delivery.position_ids)
        yield delivery.batch
        # After set_epoch or load_state_dict in the loop body, the next batch of this iteration is no longer
        # the next one of the loader.
        if (self._epoch, self._batch) != (epoch, delivery.step + 1) or self.options is not options:
            reason = "the position of the loader was changed while iterating; start a new iteration"
            raise ConfigError(reason, found=f"batch {self._batch} of epoch {self._epoch}")

    def _transformed(self, batch: Batch, step: int, epoch: int) -> Batch:
        """Return a batch after the transform, if there is one.

        Raises:
            ConfigError: The function raised an exception, or it did not return a mapping of arrays.
        """
        if self.transform is None:
            return batch
        record = f"batch {step} of epoch {epoch}"
        try:
            result = self.transform(batch)
        except Exception as error:
            # Any error of the user's function is reported with the batch that it was called for.
            found = f"{type(error).__name__}: {error}"
            raise ConfigError("transform raised an exception", record=record, found=found) from error
        if isinstance(result, Mapping) and all(
            isinstance(name, str) and hasattr(array, "dtype") and hasattr(array, "shape")
            for name, array in result.items()
        ):
            return dict(result)
        found, expected = repr(result)[:80], "a mapping of names to arrays"
        raise ConfigError("transform returned no batch", record=record, found=found, expected=expected)

    def _next_batch(self) -> tuple[int, int]:
        """Return the epoch and the index of the next batch."""
        # An epoch without batches counts as not yet run; otherwise it would
        # end before it begins. _iteration ends it.
        return (self._epoch + 1, 0) if 0 < len(self) == self._batch else (self._epoch, self._batch)

    def _end_complete_epoch(self) -> None:
        if self._next_batch() != (self._epoch, self._batch):
            self._end_epoch()

    def _end_epoch(self) -> None:
        """Advance ``epoch`` after all its batches were delivered."""
        self._move_to(self._epoch + 1)

    def _move_to(self, epoch: int, batch: int = 0) -> None:
        self._epoch, self._batch = epoch, batch
