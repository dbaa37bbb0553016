"""Arrays in a temporary file, so that several processes on a machine use one copy."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import BudgetError, ConfigError
from hexdata.storage import is_disk_full
from hexdata.system import OPEN_IN_PLACE
from hexdata.temporary import remove_abandoned, temporary_path

__all__ = ["SharedArrays"]

_ALIGNMENT: Final = 64
"""Alignment of each array in the file, in bytes."""


class SharedArrays:
    """Arrays written to a file in the system's temporary folder. Picklable; copies map the same file.

    The file is removed when the object that wrote it is deleted, or when its process ends. The file of a
    process that was killed is removed by the next one that starts. Processes that have mapped the arrays by
    then can go on using them.

    Args:
        arrays: The arrays by name.

    Raises:
        BudgetError: The disk of the temporary folder is full.
        ConfigError: The temporary folder cannot be written to.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._layout = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        remove_abandoned()
        self._path = temporary_path("arrays")
        self._remove = weakref.finalize(self, _remove_file, self._path, os.getpid())
        try:
            number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_IN_PLACE, 0o600)
            with os.fdopen(number, "wb") as file:
                for array in arrays.values():
                    file.write(bytes(-file.tell() % _ALIGNMENT))
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        except OSError as error:
            self._remove()
            raise _folder_error(self._path.parent, arrays, error) from error

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which does not remove the file."""
        return {"_layout": self._layout, "_path": self._path}

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays, mapped and read-only.

        Raises:
            FileNotFoundError: The process that wrote the file has ended or deleted the object.
        """
        with self._path.open("rb") as file:
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


def _folder_error(
    folder: Path, arrays: Mapping[str, npt.NDArray[Any]], error: OSError
) -> BudgetError | ConfigError:
    if is_disk_full(error):
        return BudgetError(
            "the temporary folder has no space for the arrays that processes share",
            path=folder,
            expected=f"{sum(array.nbytes for array in arrays.values()):,} bytes",
            hint="Set TMPDIR to a folder with more space.",
        )
    return ConfigError(
        "the temporary folder cannot be written to",
        path=folder,
        found=error.strerror or str(error),
        hint="Set TMPDIR to a folder that this process can write to.",
    )
