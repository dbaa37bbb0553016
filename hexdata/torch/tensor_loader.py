"""Base class of loaders that deliver the batches of a ``Loader`` as tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import EllipsisType
from typing import Any, Generic, Protocol, TypeVar

from hexdata.errors import ConfigError, HexdataError
from hexdata.loader import Loader, Mixture
from hexdata.loader.loader import refuse_index
from hexdata.torch.dataset import RankedLoader
from hexdata.torch.tensors import TensorBatch

__all__ = ["TensorLoader"]


class _HasBatch(Protocol):
    @property
    def batch(self) -> TensorBatch:
        """The batch."""


_Delivery = TypeVar("_Delivery", bound=_HasBatch)
_Source = TypeVar("_Source", Loader, Loader | Mixture)


class TensorLoader(RankedLoader[_Source], ABC, Generic[_Delivery, _Source]):
    """Epochs, states and digests of a ``Loader`` or ``Mixture`` whose batches a subclass makes.

    Args:
        loader: The loader or mixture.
        rank, world_size: Rank of this process and number of ranks (default None: those of the loader or, if
            it has one rank, those of torch.distributed at the first iteration).

    Raises:
        ConfigError: ``loader`` cannot be used, or only one of ``rank`` and ``world_size`` is given.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader!r})"

    @abstractmethod
    def _deliveries(self) -> Iterator[_Delivery]:
        """Yield the batches of the rest of the loader's epoch."""

    @abstractmethod
    def _record(self, delivery: _Delivery) -> None:
        """Count a batch as delivered."""

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
                ``...``: the condition does not change).
        """
        if isinstance(self.loader, Loader):
            self.loader.set_epoch(epoch, where=where)
        elif where is ...:
            self.loader.set_epoch(epoch)
        else:
            raise ConfigError(
                "a mixture keeps the conditions of its loaders",
                found=f"where={where!r}",
                hint="Change the condition of a loader, then make a new mixture.",
            )

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
        with self.loader.iteration() as epoch:
            options = self.loader.options
            for delivery in self._deliveries():
                self._record(delivery)
                yield delivery.batch
                if self.loader.epoch != epoch or self.loader.options is not options:
                    raise ConfigError("the epoch was changed while iterating", hint="Start a new iteration.")
            if self.loader.batch != len(self):
                raise HexdataError(
                    "the workers ended before the end of the epoch",
                    found=f"{self.loader.batch} batches",
                    expected=f"{len(self)} batches",
                )
