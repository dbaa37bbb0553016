"""Arrays in a temporary file, so that several processes on a machine use one copy."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import BudgetError, ConfigError
from hexdata.storage import is_disk_full
from hexdata.system import OPEN_IN_PLACE, lock_file, remove_locked

__all__ = ["SharedArrays"]

_ALIGNMENT: Final = 64
"""Alignment of each array in the file, in bytes."""
_PREFIX: Final = "hexdata-"
_SUFFIX: Final = ".arrays"


class SharedArrays:
    """Arrays written to a file in the system's temporary folder. Picklable; copies map the same file.

    The file is removed when the object that wrote it is deleted, or when its process ends. The file of a
    process that was killed is removed when the next file is written. Processes that have mapped the arrays by
    then can go on using them.

    Args:
        arrays: The arrays by name.

    Raises:
        BudgetError: The disk of the temporary folder is full.
        ConfigError: The temporary folder cannot be written to.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._layout = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        folder = Path(tempfile.gettempdir())
        _remove_abandoned(folder)
        try:
            number, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder)
        except OSError as error:
            raise _folder_error(folder, arrays, error) from error
        self._path = Path(name)
        file = os.fdopen(number, "wb")
        self._remove = weakref.finalize(self, _remove_file, self._path, os.getpid(), file)
        try:
            with suppress(OSError):  # file systems without locks
                lock_file(file, shared=True, wait=True)  # marks the file as in use by a running process
            for array in arrays.values():
                file.write(bytes(-file.tell() % _ALIGNMENT))
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
        except OSError as error:
            self._remove()
            raise _folder_error(folder, arrays, error) from error

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


def _remove_file(path: Path, owner: int, file: BinaryIO) -> None:
    if os.getpid() == owner:  # a forked process also calls this when it ends
        with suppress(OSError):  # a full disk: the rest of the buffer cannot be written
            file.close()
        with suppress(OSError):
            path.unlink()


def _remove_abandoned(folder: Path) -> None:
    """Remove the files of processes that were killed."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):  # in use, of another user, or already removed
            number = os.open(path, os.O_RDONLY | OPEN_IN_PLACE)
            with os.fdopen(number, "rb") as file:
                lock_file(file)
                if os.fstat(number).st_size:  # otherwise it may have just been created
                    remove_locked(file, path)


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
