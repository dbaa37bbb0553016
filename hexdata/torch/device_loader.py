"""A ``Loader`` in games mode whose batches are made on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hexdata.errors import ConfigError
from hexdata.loader import Loader
from hexdata.loader.checkpoint import STEP_SHIFT, digest_key
from hexdata.loader.row_filter import RowSubset
from hexdata.loader.schedule import EpochSchedule
from hexdata.order import derive_key
from hexdata.torch.device_table import DeviceSubset, DeviceTable
from hexdata.torch.order import DevicePermutation, sort_key
from hexdata.torch.tensor_loader import TensorLoader
from hexdata.torch.tensors import TensorBatch, check_device

__all__ = ["DeviceLoader"]

_CPU_ROWS: Final = (1 << 16, 1 << 12)
"""Number of positions whose rows are found together, and whose batches are made together, on a CPU."""
_ACCELERATOR_ROWS: Final = (1 << 20, 1 << 16)
"""The same on an accelerator, where each operation takes some microseconds to start."""


class _DeviceDelivery(NamedTuple):
    """A batch, and what it adds to the digest of the epoch."""

    step: int
    key_sum: Tensor
    """Sum of the sort keys of the digest, one int64 on the device."""
    batch: TensorBatch


class DeviceLoader(TensorLoader[_DeviceDelivery, Loader]):
    """A ``Loader`` in games mode that makes whole batches on a device, from games that are stored there.

    It is used like its loader, and its batches equal those of the loader bit for bit, as tensors on the
    device. The order, the boards, the symmetries, the value weights and the digest are computed on the
    device; the host only starts the operations. States are interchangeable with those of the loader.

    Several consecutive batches are made together and share memory, so keeping one batch keeps up to 65,536
    positions or, if it is larger, one batch.

    For n = 13 a million games take 170 MB of the device's memory for the fill rows, and 20 to 30 MB for
    their labels, depending on the fields. A million positions that belong to no game take as much. Value
    sample tiers take one byte per position, selections two. Making float32 boards with policies takes an
    estimated 300 MB in addition.

    Example::

        loader = DeviceLoader(Loader("store", mode="games", batch_size=256, seed=1), "cuda")
        for batch in loader:
            train(batch["board"], batch["policy"], batch["value"])

    Args:
        loader: The loader, in games mode. The ``DeviceLoader`` starts at the loader's epoch and batch. Do not
            iterate the loader itself any more.
        device: The device, its name or its index (default "cuda").
        rank, world_size: Rank of this process and number of ranks (default None: those of the loader or, if
            it has one rank, those of torch.distributed at the first iteration).

    Attributes:
        device: The device.

    Raises:
        ConfigError: The loader is not in games mode, the device cannot be used, or only one of ``rank`` and
            ``world_size`` is given.
        BudgetError: The games do not fit into the memory of the device.
    """

    def __init__(
        self,
        loader: Loader,
        device: torch.device | str | int = "cuda",
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(loader, rank, world_size)
        options, games = self.loader.options, self.loader.games
        if games is None:
            raise ConfigError(
                "a DeviceLoader requires a loader in games mode",
                found=f"mode={options.mode!r}",
                hint="Make the loader with mode='games', or use TorchLoader.",
            )
        if self.loader.transform:
            raise ConfigError(
                "a DeviceLoader cannot apply a transform, because it makes the batches on the device",
                hint="Apply the function to the batches of the DeviceLoader, or use TorchLoader.",
            )
        self.device = _usable_device(device)
        self._table = DeviceTable(games, options.batch, options.seed, self.device)
        self._rows_on_device: tuple[RowSubset | None, DeviceSubset | None] = (None, None)
        self._open_epoch()
        self._data_digest = self.loader.state_dict()["digest"]

    def _open_epoch(self) -> None:
        """Make the schedule of the loader's epoch, and copy its rows to the device if they have changed."""
        self._schedule = EpochSchedule(self.loader.positions, self.loader.options)
        rows = self.loader.epoch_rows(self.loader.epoch)
        if rows is not self._rows_on_device[0]:
            self._rows_on_device = (None, None)  # frees the memory of the device
            self._rows_on_device = (rows, None if rows is None else DeviceSubset(rows, self.device))
        self._subset = self._rows_on_device[1]

    def _record(self, delivery: _DeviceDelivery) -> None:
        self.loader.record_sum(delivery.step, delivery.key_sum)

    def _deliveries(self) -> Iterator[_DeviceDelivery]:
        self._open_epoch()
        epoch, first, batch_size = self.loader.epoch, self.loader.batch, self.loader.options.batch_size
        even, last = self._even_steps(), self._schedule.steps - 1
        order = self._order(epoch)
        rows_together, batches_together = _CPU_ROWS if self.device.type == "cpu" else _ACCELERATOR_ROWS
        for steps in _split_range(range(first, even), rows_together // batch_size):
            rows = self._rows(self._even_indices(steps), order)
            for own in _split_range(steps, batches_together // batch_size):
                start = (own.start - steps.start) * batch_size
                yield from self._make(own, rows[start : start + len(own) * batch_size], batch_size, epoch)
        if max(first, even) <= last:
            part = self._schedule.slice_at(last)
            indices = torch.arange(part.start, part.stop, device=self.device)
            if part.padding:
                repeated = torch.arange(part.padding.start, part.padding.stop, device=self.device)
                indices = torch.cat([indices, repeated % self._schedule.positions])
            rows = self._rows(indices, order)
            yield from self._make(range(last, last + 1), rows, part.stop - part.start, epoch)

    def _order(self, epoch: int) -> DevicePermutation | None:
        options = self.loader.options
        if not options.shuffle:
            return None
        key = derive_key(options.seed, "epoch", epoch)
        return DevicePermutation(self._schedule.positions, key, self.device)

    def _even_steps(self) -> int:
        """Return the number of steps whose batches have ``batch_size`` positions without padding."""
        steps = self._schedule.steps
        if not steps:
            return 0
        last = self._schedule.slice_at(steps - 1)
        return steps - (last.stop - last.start < self.loader.options.batch_size)

    def _even_indices(self, steps: range) -> Tensor:
        """Return the indices in the epoch's order of this rank's positions at even steps."""
        options = self.loader.options
        starts = torch.arange(steps.start, steps.stop, device=self.device) * options.global_batch
        own = torch.arange(options.batch_size, device=self.device) + options.rank * options.batch_size
        return (starts[:, None] + own).view(-1)

    def _rows(self, indices: Tensor, order: DevicePermutation | None) -> Tensor:
        """Return the rows of the split at indices of the epoch's order."""
        ordered = indices if order is None else order.take(indices)
        return ordered if self._subset is None else self._subset.rows(ordered)

    def _make(self, steps: range, rows: Tensor, counted: int, epoch: int) -> Iterator[_DeviceDelivery]:
        """Yield the batches of steps, made together.

        Args:
            steps: The steps.
            rows: Their rows, the same number for each step.
            counted: Number of positions of each step that are not padding.
            epoch: The epoch.
        """
        positions = self._table.positions(rows, epoch)
        batch, size = positions.batch(), len(rows) // len(steps)
        if self.loader.options.remainder == "pad":
            numbers = torch.arange(size, device=self.device)
            batch["padding"] = (numbers >= counted).repeat(len(steps))
        ids = positions.position_id.view(len(steps), size)[:, :counted]
        offsets = torch.arange(steps.start, steps.stop, device=self.device) << STEP_SHIFT
        sums = sort_key(ids + offsets[:, None], digest_key(self._data_digest, epoch)).sum(dim=1)
        parts = zip(*(tensor.split(size) for tensor in batch.values()), strict=True)
        for step, key_sum, part in zip(steps, sums.unbind(), parts, strict=True):
            yield _DeviceDelivery(step, key_sum, dict(zip(batch, part, strict=True)))


def _split_range(steps: range, length: int) -> Iterator[range]:
    """Yield consecutive parts of a range, of at most ``length`` numbers but at least one."""
    length = max(1, length)
    return (steps[start : start + length] for start in range(0, len(steps), length))


def _usable_device(given: Any) -> torch.device:
    """Return a device on which a tensor can be made.

    Raises:
        ConfigError: There is none.
    """
    expected, hint = "a device of this machine", "Use device='cpu', or TorchLoader."
    device = check_device(given)
    if device is None:
        raise ConfigError("device cannot be used", found="None", expected=expected, hint=hint)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            "device cannot be used", found=f"{device}: {reason}", expected=expected, hint=hint
        ) from error
    return device
