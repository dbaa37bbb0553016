"""Faults of an object store that pass, and those that do not: what is tried again, and how it is told.

Knows errors, and nothing of objects.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

__all__ = [
    "ATTEMPTS",
    "answer_of",
    "as_os_error",
    "code_of",
    "is_no_endpoint",
    "is_passing",
    "naming",
    "patiently",
]

ATTEMPTS: Final = 3
"""Of an operation, each of which is several of the store's own client."""
FIRST_WAIT: Final = 0.2
"""Seconds before the second attempt, doubled before each further one."""
LONGEST_WAIT: Final = 20.0
_PERMANENT: Final = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
)
_PASSING: Final = (
    *("500", "502", "503", "504", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"),
    *("RequestTimeTooSkewed", "Throttling", "ThrottlingException", "BadDigest", "OperationAborted"),
)
"""Codes of answers of S3 that are worth another attempt."""
_NEVER: Final = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""What the libraries raise of which another attempt changes nothing, by name."""
_NO_ENDPOINT: Final = "Invalid endpoint: "
"""How botocore begins what it says of one, in a plain ValueError."""
_NUMBERS: Final = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    TimeoutError: errno.ETIMEDOUT,
}
"""Of errors that the libraries raise without a number. One without is the data's fault to Arrow and gzip."""


def answer_of(error: BaseException) -> tuple[str, str]:
    """Return the code by which S3 names an error, and what it says of it; or nothing of either."""
    one: BaseException | None = error
    while one is not None:
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            said = response.get("Error", {})
            return str(said.get("Code", "")), str(said.get("Message", ""))
        one = one.__cause__
    return "", ""


def code_of(error: BaseException) -> str:
    """Return the code by which S3 names an error, or nothing."""
    return answer_of(error)[0]


def is_no_endpoint(error: BaseException) -> bool:
    """Say whether S3's library was given something for an endpoint that is no URL."""
    return isinstance(error, ValueError) and str(error).startswith(_NO_ENDPOINT)


def is_passing(error: BaseException) -> bool:
    """Say whether an error of an object store may be gone at the next attempt."""
    if isinstance(error, _PERMANENT) or not isinstance(error, Exception):
        return False
    if code := code_of(error):
        return code in _PASSING
    kind = type(error)
    if kind.__name__ in _NEVER or type(error.__cause__).__name__ in _NEVER:
        return False
    return isinstance(error, (OSError, TimeoutError, ConnectionError)) or kind.__module__.partition(".")[
        0
    ] in ("aiohttp", "botocore", "aiobotocore", "urllib3", "requests")


def patiently(what: Any, *arguments: Any, **named: Any) -> Any:
    """Call something until it succeeds or fails for good; the last error comes out as an ``OSError``.

    Raises:
        OSError: as the store gave it; what is no OSError yet is made one.
    """
    retrying = Retrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT) + wait_random(0, FIRST_WAIT),
        retry=retry_if_exception(is_passing),
        reraise=True,
    )
    with as_os_error():
        return retrying(what, *arguments, **named)


@contextmanager
def as_os_error() -> Iterator[None]:
    """Turn what the libraries of an object store raise into an OSError that says the same, with a number."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        number = next((code for kind, code in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
        raise OSError(number, _said(error)) from error
    except Exception as error:
        theirs = type(error).__module__.partition(".")[0] in ("aiohttp", "botocore", "aiobotocore")
        if not (theirs or is_no_endpoint(error)):
            raise
        raise OSError(errno.EIO, _said(error)) from error


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Let an OSError say of which object it is, as one of a file does."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
            error.strerror = os.strerror(error.errno) if error.errno == errno.ENOENT else error.strerror
        raise


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
