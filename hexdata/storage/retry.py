"""Retries of object store requests, and conversion of client errors to OSErrors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from hexdata.retry import RetryPolicy

__all__ = [
    "REQUESTS",
    "answer_of",
    "as_os_error",
    "code_of",
    "is_invalid_endpoint",
    "is_temporary",
    "with_retries",
]

REQUESTS: Final = RetryPolicy(attempts=3, first_wait=0.2, longest_wait=20.0, jitter=0.2)
"""Retries of one operation. In each attempt the client library makes several requests."""
_PERMANENT: Final = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
)
_TEMPORARY: Final = (
    *("500", "502", "503", "504", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"),
    *("RequestTimeTooSkewed", "Throttling", "ThrottlingException", "BadDigest", "OperationAborted"),
    "ConditionalRequestConflict",
)
"""Error codes of S3 that are retried."""
_NEVER: Final = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""Names of client exceptions that are never retried."""
_INVALID_ENDPOINT: Final = "Invalid endpoint: "
"""Start of the message in botocore's ValueError for an invalid endpoint."""
_NUMBERS: Final = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    TimeoutError: errno.ETIMEDOUT,
}
"""Numbers for errors without one, which Arrow and gzip would attribute to damaged data."""


def answer_of(error: BaseException) -> tuple[str, str]:
    """Return the error code and message of S3, or two empty texts."""
    one: BaseException | None = error
    while one is not None:
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            said = response.get("Error", {})
            return str(said.get("Code", "")), str(said.get("Message", ""))
        one = one.__cause__
    return "", ""


def code_of(error: BaseException) -> str:
    """Return the error code of S3, or an empty text."""
    return answer_of(error)[0]


def is_invalid_endpoint(error: BaseException) -> bool:
    """Return whether an error reports an S3 endpoint that is not a URL."""
    return isinstance(error, ValueError) and str(error).startswith(_INVALID_ENDPOINT)


def is_temporary(error: BaseException) -> bool:
    """Return whether an error of an object store may be temporary."""
    if isinstance(error, _PERMANENT) or not isinstance(error, Exception):
        return False
    if code := code_of(error):
        return code in _TEMPORARY
    kind = type(error)
    if kind.__name__ in _NEVER or type(error.__cause__).__name__ in _NEVER:
        return False
    return isinstance(error, (OSError, TimeoutError, ConnectionError)) or kind.__module__.partition(".")[
        0
    ] in ("aiohttp", "botocore", "aiobotocore", "urllib3", "requests")


def with_retries(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call a function, and call it again after temporary errors, as ``REQUESTS`` says.

    Args:
        function: Function to call.
        arguments: Its positional arguments.
        keywords: Its keyword arguments.

    Returns:
        The result of the function.

    Raises:
        OSError: The last attempt failed. Errors of the client library are converted.
    """
    with as_os_error():
        return REQUESTS.call(partial(function, *arguments, **keywords), is_temporary=is_temporary)


@contextmanager
def as_os_error() -> Iterator[None]:
    """Convert errors of the client libraries to OSErrors with a number and the same message."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        number = next((code for kind, code in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
        raise OSError(number, _text_of(error)) from error
    except Exception as error:
        from_client = type(error).__module__.partition(".")[0] in ("aiohttp", "botocore", "aiobotocore")
        if not (from_client or is_invalid_endpoint(error)):
            raise
        raise OSError(errno.EIO, _text_of(error)) from error


def _text_of(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
