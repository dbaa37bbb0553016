"""A ``Loader`` whose batches are made on a device, from a split that is stored there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hexdata.batch import make_batch
from hexdata.checks import unusable
from hexdata.errors import ConfigError
from hexdata.loader import Loader
from hexdata.loader.checkpoint import STEP_SHIFT, digest_key
from hexdata.loader.epochs import Delivery
from hexdata.loader.exact import ExactEpoch
from hexdata.loader.row_filter import Rows
from hexdata.torch.arrays import TorchArrays, sort_key
from hexdata.torch.loader import TensorLoader
from hexdata.torch.tensors import TensorBatch, check_device


class DeviceLoader(TensorLoader[Loader]):
    """A ``Loader`` in games or exact mode that makes whole batches on a device, where the split is stored.

    It is used like its loader, and its batches equal those of the loader bit for bit, as tensors on the
    device. The order, the boards, the symmetries, the value weights and the digest are computed on the
    device; the host starts the operations, and waits only for the number of entries of sparse policies.
    States are interchangeable with those of the loader.

    Several consecutive batches are made together and share memory, so keeping one batch keeps up to 65,536
    positions or, if it is larger, one batch.

    For n = 13 a million games take 170 MB of the device's memory for the fill rows, and 20 to 30 MB for
    their labels, depending on the fields. A million positions of shards, or that belong to no game, take 45
    to 71 MB. Value sample tiers take one byte per position, selections four. Making float32 boards with
    policies takes an estimated 500 MB in addition.

    Example::

        loader = DeviceLoader(Loader("store", mode="games", batch_size=256, seed=1), "cuda")
        for batch in loader:
            train(batch["board"], batch["policy"], batch["value"])

    Args:
        loader: The loader, in games or exact mode. The ``DeviceLoader`` starts at the loader's epoch and
            batch. Do not iterate the loader itself any more.
        device: The device, its name or its index (default "cuda").
        rank, world_size: Rank of this process and number of ranks (default None: those of the loader or, if
            it has one rank, those of torch.distributed at the first iteration).

    Attributes:
        device: The device.

    Raises:
        ConfigError: The loader is in stream mode or has a transform, the device cannot be used, or only one
            of ``rank`` and ``world_size`` is given.
        BudgetError: The positions do not fit into the memory of the device.
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
        data = self.loader._data
        if data.table is None:
            raise ConfigError("a DeviceLoader requires mode='games' or 'exact'; or use TorchLoader")
        # A transform is a function of NumPy arrays.
        if self.loader.transform:
            raise ConfigError("a DeviceLoader cannot apply a transform; apply it to its batches")
        self.device = _usable_device(device)
        self._ops, self._members = TorchArrays(self.device), data.members
        self._data_digest = data.identity.digest
        self._table = data.table.on(self._ops, self._members)
        # The rows of the last epoch, None for all, and their copy on the device.
        self._rows: tuple[Rows | None, Any] = (None, None)
        # Rows of a selection are copied now, so that a device without enough memory is found before training.
        self._open_epoch()
        # An empty batch, so that constants are copied to the device now too.
        self._make_batch(self._table.take(self._ops.arange(0, 0), self._members))

    def _open_epoch(self) -> ExactEpoch:
        """Return the loader's epoch on the device; its rows are copied if they have changed."""
        opened = self.loader._open(self.loader.epoch)
        assert isinstance(opened, ExactEpoch)
        rows = opened.subset
        # By identity: the selection is one object for all epochs, with weights each epoch has its own.
        if rows is not self._rows[0]:
            self._rows = (None, None)  # frees the memory of the device
            self._rows = (rows, None if rows is None else self._ops.put_all({"rows": rows})["rows"])
        return ExactEpoch(self._table, self._rows[1], self._members, self.loader.options, self.loader.epoch)

    def _make_batch(self, block: Mapping[str, Any]) -> TensorBatch:
        options, n = self.loader.options, self.loader.board_size
        return make_batch(block, options, n, seed=options.seed, epoch=self.loader.epoch, ops=self._ops)

    def _deliveries(self) -> Iterator[Delivery]:
        opened, epoch, options = self._open_epoch(), self.loader.epoch, self.loader.options
        for part in opened.parts(range(self.loader.batch, opened.steps)):
            block, steps = part.read(), part.steps
            batch = self._make_batch(block)
            size, ids = len(block["position_id"]) // len(steps), block["position_id"]
            # Padding is at the end of a batch, so that a slice leaves it out of the digest.
            counted = size if part.padding is None else size - int(part.padding.sum())
            if options.last_batch == "pad":
                numbers = torch.arange(size, device=self.device)
                batch["padding"] = (numbers >= counted).repeat(len(steps))
            offsets = torch.arange(steps.start, steps.stop, device=self.device) << STEP_SHIFT
            # The numbers that EpochDigest adds up on the host, summed per step and
            # left on the device until they are asked for.
            keys = ids.view(len(steps), size)[:, :counted] + offsets[:, None]
            sums = sort_key(keys, digest_key(self._data_digest, epoch)).sum(dim=1)
            # A rank may have no position of the last step; split refuses a size of 0.
            parts = zip(*(tensor.split(size) if size else [tensor] for tensor in batch.values()), strict=True)
            for step, key_sum, own in zip(steps, sums.unbind(), parts, strict=True):
                yield Delivery(step, dict(zip(batch, own, strict=True)), key_sum=key_sum)


def _usable_device(given: Any) -> torch.device:
    """Return a device on which a tensor can be made.

    Raises:
        ConfigError: There is none.
    """
    expected = "a device of this machine; or use device='cpu', or TorchLoader"
    device = check_device(given)
    if device is None:
        raise unusable("device", "None", expected)
    try:
        # A name such as "cuda:7" is valid on every machine, until a tensor is made there.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # Builds of PyTorch without a device raise any of these.
        reason = str(error).partition("\n")[0]
        raise unusable("device", f"{device}: {reason}", expected) from error
    return device
