"""Shared memory through which the main process and DataLoader workers agree on conditions and epochs.

Every worker has its own copy of the dataset; the processes share arrays and neither lock nor wait.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hexdata.checks import check_count
from hexdata.errors import ConfigError

# Room for longer conditions than the first one, since shared memory cannot grow while workers have it.
_VALUE_BYTES: Final = 64 << 10
# The memory is made before the number of workers is known: 8 bytes for each that there may be.
MAX_WORKERS: Final = 1024
# Epoch and id share one number of 64 bits, which is written at once,
# so no worker reads one without the other.
_ID_BITS: Final = 31
_MAX_EPOCH: Final = (1 << 31) - 1
"""Largest epoch that can be set: an entry has 32 bits for it, of which later epochs need some."""


class SharedValue:
    """A JSON value that the main process sets, while no iteration is running, and worker processes get.

    Args:
        value: The first value.
    """

    def __init__(self, value: Any) -> None:
        size = _VALUE_BYTES + len(json.dumps(value))
        self._text = torch.zeros(size, dtype=torch.uint8).share_memory_()
        self.set(value)

    def set(self, value: Any) -> None:
        """Set the value.

        Raises:
            ConfigError: It is too long, which only a condition can be.
        """
        text, size = json.dumps(value).encode("ascii"), len(self._text)
        if len(text) > size:
            raise ConfigError(f"where is too long for running workers: {len(text):,} of {size:,} bytes")
        # Filled up with spaces, which JSON ignores, so that nothing of a longer value remains.
        self._text.copy_(torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8))

    def get(self) -> Any:
        """Return the value."""
        return json.loads(self._text.numpy().tobytes())


def iteration_id(*facts: int) -> int:
    """Return a 31-bit hash that is equal in all workers of an iteration and differs in the next iteration."""
    return zlib.crc32(repr(facts).encode("ascii")) >> 1


class SharedEpochCounter:
    """Lets the workers of a DataLoader agree on the epoch of each iteration through shared memory.

    The first worker to begin an iteration takes the epoch after the latest one. Each other worker finds an
    entry with the same iteration id and an epoch above its own latest, and takes that epoch. Workers write
    only their own entry, so workers that begin at the same time find the same epoch.

    If some workers never began an iteration, because the loop over it was left early, its epoch is skipped,
    provided that the next iteration has another id.

    Entries 0 and 1 of the shared memory are the epoch and the first step of the last :meth:`set`. Entry 2 + w
    is -1, or the latest iteration of worker w: epoch · 2^31 + iteration id.
    """

    def __init__(self) -> None:
        self._memory = torch.zeros(2 + MAX_WORKERS, dtype=torch.int64).share_memory_()

    @property
    def _shared(self) -> npt.NDArray[np.int64]:
        array: npt.NDArray[np.int64] = self._memory.numpy()
        return array

    def set(self, epoch: int, step: int) -> None:
        """Set the epoch and first step of the next iteration. No iteration may be running.

        Raises:
            ConfigError: The entry of a worker cannot contain the epoch.
        """
        self._shared[:2] = check_count("epoch", epoch, 0, _MAX_EPOCH), step
        self._shared[2:] = -1

    @property
    def latest_epoch(self) -> int:
        """The latest epoch that a worker has begun since :meth:`set`; -1 if there is none."""
        return int(self._shared[2:].max()) >> _ID_BITS

    def begin(self, worker: int, iteration: int) -> tuple[int, int]:
        """Begin an iteration in one worker and return its epoch and first step.

        Args:
            worker: Index of the worker.
            iteration: The iteration's id, see :func:`iteration_id`.

        Raises:
            ConfigError: The index is ``MAX_WORKERS`` or more.
        """
        if worker >= MAX_WORKERS:
            raise ConfigError("too many workers", found=worker + 1, expected=f"up to {MAX_WORKERS}")
        entries = self._shared[2:].copy()
        epochs = entries >> _ID_BITS
        same = (entries & ((1 << _ID_BITS) - 1)) == iteration
        # Another worker has begun this iteration already, and chosen its epoch.
        ahead = epochs[same & (epochs > epochs[worker])]
        start_epoch, start_step = self._shared[:2].tolist()
        # Otherwise this worker is the first: the epoch after all that
        # have begun, at least the one that was set.
        epoch = int(ahead.max()) if len(ahead) else max(start_epoch, int(epochs.max()) + 1)
        self.record(worker, iteration, epoch)
        return epoch, start_step if epoch == start_epoch else 0

    def record(self, worker: int, iteration: int, epoch: int) -> None:
        """Store the epoch of a worker that did not get it from :meth:`begin`."""
        self._shared[2 + worker] = epoch << _ID_BITS | iteration
