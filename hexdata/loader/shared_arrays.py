"""Arrays in a temporary file, so that several processes on a machine use one copy."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import BudgetError, HexdataError
from hexdata.storage.errors import translate_errors
from hexdata.system import available_memory
from hexdata.temporary import remove_abandoned, temporary_path

# The rest is for batches, and for what other processes take meanwhile.
_MEMORY_SHARE: Final = 0.8
"""Share of the available memory that arrays may take."""
# The size of a cache line, so that no number lies across two lines.
_ALIGNMENT: Final = 64
"""Alignment of each array in the file, in bytes."""


def allocate(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a large array of zeros, whose memory is taken as it is written.

    NumPy asks for huge pages. Where memory is fragmented, the kernel takes 2 s of CPU time to find these for
    600 MB, and 0.3 s for pages of the usual size; rows are gathered from both in the same time.
    """
    # At least one byte, because an empty map is an error.
    size = max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    if sys.platform == "win32":
        memory = mmap.mmap(-1, size)
    else:
        # Not shared, which is Python's default: forked workers would write into the windows of each other.
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux only
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.ndarray(shape, dtype, memory)


def require_memory(needed: int, reason: str, hint: str) -> None:
    """Check that arrays fit into the available memory, before they are made.

    Raises:
        BudgetError: They do not.
    """
    memory = int(available_memory() * _MEMORY_SHARE)
    if needed > memory:
        raise BudgetError.of_memory(reason, found=memory, expected=needed, hint=hint)


class SharedArrays:
    """Arrays written to a file in the system's temporary folder. Picklable; copies map the same file.

    The file is removed when the object that wrote it is deleted, or when its process ends. The file of a
    process that was killed is removed by the next one that starts. Processes that have mapped the arrays by
    then can go on using them.

    Args:
        arrays: The arrays by name.

    Raises:
        BudgetError: The disk of the temporary folder is full.
        StoreError: The temporary folder cannot be written to.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._layout = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        remove_abandoned()
        self._path = temporary_path("arrays")
        # Before the file exists, so that an error or a signal while it is written leaves nothing behind.
        self._remove = weakref.finalize(self, _remove_file, self._path, os.getpid())
        try:
            # A new file, for this user only: a prepared file or link of another user must not be followed.
            opener = partial(os.open, mode=0o600)
            with translate_errors(self._path), open(self._path, "xb", opener=opener) as file:
                for array in arrays.values():
                    file.write(bytes(-file.tell() % _ALIGNMENT))
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        except HexdataError:
            self._remove()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which does not remove the file."""
        # Without the finalizer, which only the process that wrote the file may run.
        return {"_layout": self._layout, "_path": self._path}

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays, mapped and read-only.

        Raises:
            FileNotFoundError: The process that wrote the file has ended or deleted the object.
        """
        with self._path.open("rb") as file:
            # The map stays valid after the file is closed and, on Unix, after it is removed.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        arrays: dict[str, npt.NDArray[Any]] = {}
        offset = 0
        for name, (dtype, shape) in self._layout.items():
            offset += -offset % _ALIGNMENT
            arrays[name] = np.ndarray(shape, dtype, data, offset)
            offset += arrays[name].nbytes
        return arrays


def _remove_file(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process also calls this when it ends
        with suppress(OSError):
            path.unlink()
