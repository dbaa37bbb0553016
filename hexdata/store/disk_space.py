"""Errors for full or failing disks with the path, the free space and a hint.

Nothing here frees disk space or retries an operation.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hexdata.errors import BudgetError, StoreError
from hexdata.retry import is_transient
from hexdata.storage import AnyPath, error_number, is_address, is_disk_full, is_fault, storage_of
from hexdata.units import format_bytes

__all__ = [
    "disk_error_hint",
    "disk_full",
    "is_disk_failure",
    "system_message",
    "translate_disk_full",
    "translate_temporary_disk_full",
]

_RUN_AGAIN: Final = "Free disk space and run the command again. It continues where it stopped."
"""Hint for an interrupted stage."""
_HINTS: Final = {
    "EROFS": "Mount the disk for writing, or copy the store to a writable disk, and run the command again.",
    "EMFILE": "Raise the limit of open files (`ulimit -n`) and run the command again.",
    "ENFILE": "Close other programs that hold many files open, and run the command again.",
    "EACCES": "Check the permissions of the file and its folder, and run the command again.",
    "EPERM": "Check the permissions of the file and its folder, and run the command again.",
    "ENOLCK": "Use a file system that supports file locks, and run the command again.",
    **dict.fromkeys(
        ("EEXIST", "EINVAL", "EISDIR", "ELOOP", "ENOTDIR"),
        "Something else has the name of a file or folder of hexdata. Move it and run the command again.",
    ),
}
"""Hints for disk errors other than a full disk."""
_FAILURES: Final = (errno.EMFILE, errno.ENFILE, errno.ENODEV)
"""Errors on reading that say nothing about the file, besides temporary ones."""
_CHECK_DISK: Final = "Check the disk and its connection and run the command again."
_TEMPORARY: Final = (
    "Free disk space there, or set TMPDIR to a folder on another disk, and run the command again."
)
"""Hint for a command that writes only temporary files."""


def disk_full(
    reason: str, path: AnyPath | str, found: str, *, needed: str | None = None, hint: str = _RUN_AGAIN
) -> BudgetError:
    """Return the error for insufficient disk space."""
    return BudgetError(reason, path=path, found=found, expected=needed, hint=hint)


@contextmanager
def translate_disk_full(location: AnyPath, hint: str = _RUN_AGAIN) -> Iterator[None]:
    """Convert operating system errors of a full or failing disk into errors with a path and a hint.

    Other errors and errors of an object store pass unchanged.

    Args:
        location: Path to name if the system's error has none.
        hint: What to do (default: free disk space and run the command again).

    Raises:
        BudgetError: The disk is full, the quota is used up or the file has reached its maximum size.
        StoreError: A file cannot be read or written for another reason.
    """
    try:
        yield
    except OSError as error:
        if is_fault(error) or is_address(error.filename):
            raise  # an object store failed
        path = _error_path(error) or location
        if is_disk_full(error):
            raise _disk_full_error(error, path, hint) from error
        remedy = disk_error_hint(error)
        if remedy is None or is_address(location):
            raise
        raise StoreError(
            "the system cannot read or write this file",
            path=path,
            found=system_message(error),
            hint=remedy if hint is _RUN_AGAIN else hint,
        ) from error


@contextmanager
def translate_temporary_disk_full() -> Iterator[None]:
    """Convert disk-full errors below the system's temporary folder; other errors pass unchanged.

    Raises:
        BudgetError: The disk of the temporary folder is full.
    """
    try:
        yield
    except OSError as error:
        path = _error_path(error) if is_disk_full(error) else None
        if path is None or not path.is_relative_to(tempfile.gettempdir()):
            raise
        raise _disk_full_error(error, path, _TEMPORARY) from error


def disk_error_hint(error: OSError) -> str | None:
    """Return what to do about a disk error other than a full disk; None for other errors."""
    number = error_number(error) or 0
    is_of_disk = is_transient(error) or number in (errno.ENODEV, errno.ENXIO)
    return _HINTS.get(errno.errorcode.get(number, ""), _CHECK_DISK if is_of_disk else None)


def is_disk_failure(error: OSError) -> bool:
    """Return whether the disk or the system failed to read a file that may be whole.

    A missing file, a broken link or a file without permission is no such failure.
    """
    return is_transient(error) or error_number(error) in _FAILURES


def system_message(error: OSError) -> str:
    """Return the system's text for an error, without the file if the error already names it."""
    found, plain = error.strerror or str(error), os.strerror(error.errno or 0)
    return plain if error.filename is not None and plain in found else found  # DuckDB's text has the file


def _error_path(error: OSError) -> Path | None:
    """Return the file named in an error; None if it has no name, as with a file descriptor."""
    return (
        Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes | os.PathLike) else None
    )


def _disk_full_error(error: OSError, path: AnyPath, hint: str) -> BudgetError:
    found, free = system_message(error), storage_of(path).free_space()
    if free is not None:
        found += f", {format_bytes(free)} free"
    return disk_full("the disk is full", path, found, hint=hint)
