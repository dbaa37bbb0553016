"""Retries of object store requests, and conversion of client errors to OSErrors."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from hexdata.errors import without_secrets
from hexdata.retry import RetryPolicy, attempts_of, copy_attempts
from hexdata.text import printable

__all__ = [
    "CONNECT_TIMEOUT",
    "READ_TIMEOUT",
    "REQUESTS",
    "SendTimeoutError",
    "answer_of",
    "as_os_error",
    "code_of",
    "is_invalid_endpoint",
    "is_temporary",
    "log_retry",
    "with_retries",
]

CONNECT_TIMEOUT: Final = 5.0
"""Seconds after which an attempt to connect fails."""
READ_TIMEOUT: Final = 13.0
"""Seconds without a byte, sent or received, after which a request fails."""
REQUESTS: Final = RetryPolicy(attempts=20, first_wait=0.2, longest_wait=5.0, jitter=0.2, deadline=30.0)
"""Retries of one request. The client libraries of S3 and HTTP retry nothing themselves."""
_PERMANENT: Final = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
)
_TEMPORARY: Final = (
    *("InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "BadDigest", "IncompleteBody"),
    *("Throttling", "ThrottlingException", "TooManyRequests", "XAmzContentSHA256Mismatch"),
    *("ConditionalRequestConflict", "OperationAborted"),
)
"""Error codes of S3 that are retried."""
_TEMPORARY_STATUSES: Final = (429, 500, 502, 503, 504)
"""HTTP statuses that are retried with any error code."""
_CONNECTION: Final = (
    *("HTTPClientError", "EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"),
    *("IncompleteReadError", "ResponseParserError", "ResponseStreamingError", "MetadataRetrievalError"),
)
"""Names of botocore's exceptions, and their base classes, that are retried."""
_INVALID_ENDPOINT: Final = "Invalid endpoint: "
"""Start of the message in botocore's ValueError for an invalid endpoint."""
_NUMBERS: Final = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    TimeoutError: errno.ETIMEDOUT,
}
"""Numbers for errors without one, which Arrow and gzip would attribute to damaged data."""


class SendTimeoutError(TimeoutError):
    """A store has accepted a connection, but no bytes of a request."""


def _response_of(error: BaseException) -> dict[str, Any]:
    """Return the answer of S3 that an error or one of its causes contains, or an empty dict."""
    one: BaseException | None = error
    while one is not None:
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return response
        one = one.__cause__
    return {}


def answer_of(error: BaseException) -> tuple[str, str]:
    """Return the error code and message of S3, or two empty texts."""
    said = _response_of(error).get("Error", {})
    return str(said.get("Code", "")), str(said.get("Message", ""))


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
        return code in _TEMPORARY or _status_of(error) in _TEMPORARY_STATUSES
    library = type(error).__module__.partition(".")[0]
    if library in ("botocore", "aiobotocore"):
        return any(base.__name__ in _CONNECTION for base in type(error).__mro__)
    if isinstance(error, OSError) and error.__cause__ is not None:  # of a client library, converted
        return is_temporary(error.__cause__)
    return isinstance(error, OSError) or library in ("aiohttp", "urllib3", "requests")


def _status_of(error: BaseException) -> int:
    """Return the HTTP status of an answer of S3, or 0."""
    response = _response_of(error)
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def with_retries(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call a function, and call it again after temporary errors, as ``REQUESTS`` says.

    Args:
        function: Function to call.
        arguments: Its positional arguments.
        keywords: Its keyword arguments.

    Returns:
        The result of the function.

    Raises:
        OSError: The last attempt failed, or has just failed for another request without an answer. Errors of
            the client library are converted.
    """
    _silence.require_none()
    try:
        with as_os_error():
            request = partial(function, *arguments, **keywords)
            result = REQUESTS.call(request, is_temporary=is_temporary, log=log_retry)
    except OSError as error:
        _silence.record(error)
        raise
    _silence.record(None)
    return result


_logged: list[float] = []
"""When the last line about a retry was logged, if there is one."""


def log_retry(message: str) -> None:
    """Log that a request is tried again: to standard error, unless the program configures ``logging``.

    Lines within 30 seconds after another are left out: they are about the same failure.

    Args:
        message: What failed. Secrets of addresses in it are removed.
    """
    now = time.monotonic()
    if not _logged or now - _logged[0] > (REQUESTS.deadline or 0):
        _logged[:] = [now]
        logging.getLogger("hexdata").warning("%s", printable(without_secrets(message)))


class _Silence:
    """The last request that failed without an answer, after long waits.

    Requests that follow at once, such as those of a thread with the next file, fail without another wait.
    """

    _SECONDS: Final = 5.0

    def __init__(self) -> None:
        self._last: tuple[float, OSError] | None = None

    def record(self, error: OSError | None) -> None:
        """Record the error of a request, or None for an answer."""
        attempts = None if error is None or code_of(error) else attempts_of(error)
        is_silent = attempts is not None and attempts.seconds > self._SECONDS
        self._last = (time.monotonic(), error) if is_silent and error is not None else None

    def require_none(self) -> None:
        """Raise the error of another request again, if it is recent."""
        if self._last is not None and time.monotonic() - self._last[0] < self._SECONDS:
            error = self._last[1]
            raise OSError(error.errno, error.strerror) from error


_silence = _Silence()


@contextmanager
def as_os_error() -> Iterator[None]:
    """Convert errors of the client libraries to OSErrors with a number and the same message."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            if error.errno is not None:
                raise
            number = next((code for kind, code in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
        else:
            from_client = type(error).__module__.partition(".")[0] in ("aiohttp", "botocore", "aiobotocore")
            if not (from_client or is_invalid_endpoint(error)):
                raise
            number = errno.EIO
        converted = OSError(number, _text_of(error))
        copy_attempts(converted, error)
        raise converted from error


def _text_of(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
