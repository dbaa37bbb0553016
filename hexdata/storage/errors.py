"""Errors of disks and object stores: their paths, and the messages with a hint that users see.

Every failed request is an ``ObjectStoreError`` with the text of the client library, so that inner layers do
not take it for damaged data. Only the outermost layers make a message of it, with ``translate_errors``.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hexdata.errors import BudgetError, StoreError, without_secrets
from hexdata.retry import DISK_FULL, error_number
from hexdata.storage.address import AnyPath
from hexdata.units import format_bytes

RUN_AGAIN: Final = (
    "Free disk space there (TMPDIR moves temporary files), and run the command again to resume."
)
"""Hint for an interrupted stage."""
ONE_WRITER: Final = "Make sure that only one process writes to the store, and run the command again."
VERIFY_HINT: Final = "Run `hexdata verify` to list the faults."
_CHECK_DISK: Final = "Check the disk and the permissions, and run the command again."
_CHECK_STORE: Final = "Check the address, the credentials, the network and the endpoint (AWS_ENDPOINT_URL)."
_LONGEST: Final = 300
"""Maximum number of characters of a library's text."""


class Changed(Exception):  # noqa: N818 - a signal, not an error
    """Another process has replaced the object."""


class ObjectStoreError(OSError):
    """A request to an object store failed, after the retries of its client library.

    A missing object is a FileNotFoundError instead.
    """

    gave_up = True  # the library has repeated the request, so no ``RetryPolicy`` does


@contextmanager
def add_path_to_error(path: object) -> Iterator[None]:
    """Add a path to OSErrors without one, as those of read, write, fsync, flock and Arrow."""
    try:
        yield
    except OSError as error:
        if error.errno is None and (number := error_number(error)) is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def as_object_error(path: object) -> Iterator[None]:
    """Convert the errors of a client library, of any class, to a FileNotFoundError or ObjectStoreError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FileNotFoundError) and code_of(error) != "NoSuchBucket":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        # fsspec replaces the error of the client by a shorter one, which has it as its cause.
        text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        text = without_secrets(text)[:_LONGEST]
        # A number also tells that this is not an error of Arrow or gzip about the content of a file.
        number = errno.EACCES if isinstance(error, PermissionError) else errno.EIO
        raise ObjectStoreError(number, text, str(path)) from error


def code_of(error: BaseException | None) -> str:
    """Return the error code of S3, such as "NoSuchBucket", in an error or one of its causes; or ""."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


@contextmanager
def translate_errors(location: AnyPath | None = None) -> Iterator[None]:
    """Turn errors of a failing object store or disk into errors with a path and a hint.

    Args:
        location: Path to name if an error of a disk has none. None (default): such errors pass unchanged.

    Raises:
        BudgetError: The disk is full, the quota is used up or the file has reached its maximum size.
        StoreError: The object store failed, also if that has caused another error of hexdata; or a file
            cannot be read or written for another reason.
    """
    try:
        yield
    except Exception as error:
        if fault := fault_behind(error):
            reason, found = "the object store failed", fault.strerror
            raise StoreError(reason, path=fault.filename, found=found, hint=_CHECK_STORE) from error
        if location is None or not isinstance(error, OSError):
            raise
        named, found = error.filename, system_message(error)
        # A file descriptor, which is a number, is no name.
        path = Path(os.fsdecode(named)) if isinstance(named, str | bytes | os.PathLike) else location
        if error_number(error) in DISK_FULL:
            if (free := free_space(path)) is not None:
                found += f", {format_bytes(free)} free"
            raise BudgetError("the disk is full", path=path, found=found, hint=RUN_AGAIN) from error
        if (remedy := disk_error_hint(error)) is None or is_address(location):
            raise
        raise StoreError("cannot be read or written", path=path, found=found, hint=remedy) from error


def disk_error_hint(error: OSError) -> str | None:
    """Return what to do about an error of a disk or a file; None for a missing file and for other errors."""
    others = FileNotFoundError | NotADirectoryError | BrokenPipeError
    return None if error_number(error) is None or isinstance(error, others) else _CHECK_DISK


def system_message(error: OSError) -> str:
    """Return the system's text for an error, without the file if the error already names it."""
    found, plain = error.strerror or str(error), os.strerror(error.errno or 0)
    return plain if error.filename is not None and plain in found else found  # DuckDB's text has the file


def free_space(path: AnyPath) -> int | None:
    """Return the free bytes on the disk of a file or folder, which need not exist; None for an object."""
    if not isinstance(path, Path):
        return None
    # A file to be written does not exist yet; an existing folder above it is on the same disk.
    above = (path.absolute(), *path.absolute().parents)
    return shutil.disk_usage(next(each for each in above if each.exists())).free


def is_address(path: object) -> bool:
    """Return whether a path or text is the address of an object."""
    return path is not None and "://" in str(path)


def fault_behind(error: BaseException | None) -> ObjectStoreError | None:
    """Return the failure of an object store that has caused an error. A missing object is not one."""
    while error is not None and not isinstance(error, ObjectStoreError):
        if isinstance(error, Changed):
            return None  # the store has answered that a condition is not met
        # As in Python's tracebacks: ``from None`` hides the context.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error
