"""Paths for OSErrors without one, and translation of object store errors into hexdata errors with a hint.

Only the outermost layer translates; inner layers raise OSErrors. Secrets are removed from messages.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from hexdata.errors import HexdataError, StoreError, without_secrets
from hexdata.retry import copy_attempts, error_number, is_disk_full, with_attempts
from hexdata.storage.retry import SendTimeoutError, answer_of, code_of, is_invalid_endpoint, is_temporary

__all__ = [
    "Changed",
    "add_path_to_disk_full",
    "add_path_to_error",
    "error_number",
    "is_address",
    "is_disk_full",
    "is_fault",
    "translate_errors",
]


class Changed(Exception):  # noqa: N818 - a signal, not an error
    """Another process has replaced the object."""


class _Fault(NamedTuple):
    """A kind of fault. ``found`` precedes the store's own message; None omits that message."""

    reason: str
    hint: str
    found: str | None = ""


_NO_CREDENTIALS: Final = _Fault(
    "the object store needs credentials",
    "Set them in the environment or in a profile, as for any other tool.",
    "none: ",
)
_REFUSED: Final = _Fault(
    "the object store does not accept the credentials",
    "Check the credentials in the environment and the profile, and whether they have expired.",
)
_EXPIRED: Final = _Fault(
    "the credentials for the object store have expired",
    "Renew them, for AWS with `aws sso login` or a new session token, and run the command again.",
)
_UNKNOWN_KEY: Final = _Fault(
    "the object store does not know the access key",
    "Check the access key in the environment or the profile, and that it belongs to this endpoint.",
)
_WRONG_SECRET: Final = _Fault(
    "the secret key does not match the access key",
    "Check the secret key in the environment or the profile.",
)
_SKEWED: Final = _Fault(
    "the clock of this machine differs too much from that of the object store",
    "Set the clock, for example with NTP, and run the command again.",
)
_REGION: Final = _Fault(
    "the bucket is in another region",
    "Set the region (for S3: AWS_DEFAULT_REGION) or the endpoint to that of the bucket.",
)
_DENIED: Final = _Fault(
    "the object store denies access",
    "Check that these credentials allow listing, reading and, to change the store, writing.",
)
_NO_BUCKET: Final = _Fault("there is no such bucket", "Check the address, or create the bucket.", None)
_REACHING: Final = (
    "Check the address, the network and the endpoint (for S3: AWS_ENDPOINT_URL), and run the command again."
)
_UNREACHABLE: Final = _Fault("the object store does not answer", _REACHING)
_SLOW: Final = _Fault("the object store does not answer in time", _REACHING)
_NO_NAME: Final = _Fault(
    "the host name of the object store is unknown",
    "Check the endpoint (for S3: AWS_ENDPOINT_URL) or the region, and that this machine can "
    "resolve host names.",
)
_NO_ENDPOINT: Final = _Fault(
    "the endpoint of the object store is not a valid URL",
    "Set it (for S3: AWS_ENDPOINT_URL) to a URL such as http://10.0.0.5:9000.",
)
_FAILED: Final = _Fault(
    "the object store failed at every attempt", "Run the command again later; completed work is kept."
)
_OTHER: Final = _Fault(
    "the object store rejected a request",
    "Read its message, and check that the store supports this operation.",
)

_CODES: Final = {
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "Forbidden": _DENIED,
    "403": _DENIED,
    "401": _REFUSED,
    "AuthorizationHeaderMalformed": _REGION,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "IllegalLocationConstraintException": _REGION,
    "InvalidAccessKeyId": _UNKNOWN_KEY,
    "InvalidClientTokenId": _UNKNOWN_KEY,
    "InvalidToken": _REFUSED,
    "PermanentRedirect": _REGION,
    "RequestTimeTooSkewed": _SKEWED,
    "SignatureDoesNotMatch": _WRONG_SECRET,
    "TokenRefreshRequired": _EXPIRED,
    "NoSuchBucket": _NO_BUCKET,
}
"""Faults by the error code of S3."""
_ABSENT: Final = ("NoSuchKey", "NotFound", "404")
"""Error codes of missing objects, which are not faults."""
_KINDS: Final = {
    "CredentialRetrievalError": _NO_CREDENTIALS,
    "DefaultCredentialsError": _NO_CREDENTIALS,
    "NoCredentialsError": _NO_CREDENTIALS,
    "PartialCredentialsError": _NO_CREDENTIALS,
    "ProfileNotFound": _NO_CREDENTIALS,
    "SSOError": _NO_CREDENTIALS,
    "TokenRetrievalError": _NO_CREDENTIALS,
    "ClientAuthenticationError": _REFUSED,
    "ClientConnectorDNSError": _NO_NAME,
    "ClientPayloadError": _FAILED,
    "ConnectTimeoutError": _SLOW,
    "ConnectionTimeoutError": _SLOW,
    "ContentLengthError": _FAILED,
    "IncompleteReadError": _FAILED,
    "ReadTimeoutError": _SLOW,
    "RefreshError": _REFUSED,
    "SocketTimeoutError": _SLOW,
    "UnauthorizedSSOTokenError": _EXPIRED,
}
"""Faults by the name of the exception."""
_STATUSES: Final = {401: _REFUSED, 403: _DENIED}
"""Faults by the HTTP status, for stores other than S3."""
_CLIENTS: Final = ("aiobotocore", "aiohttp", "botocore")
_LIBRARIES: Final = (*_CLIENTS, "adlfs", "azure", "gcsfs", "google", "s3fs")
"""Libraries whose exceptions are faults of an object store."""
_LONGEST: Final = 300


@contextmanager
def add_path_to_error(path: object) -> Iterator[None]:
    """Add a path to OSErrors without one, as those of read, write, fsync, flock, Arrow and of requests."""
    try:
        yield
    except OSError as error:
        if error.errno is None and (number := error_number(error)) is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
            error.strerror = os.strerror(error.errno) if error.errno == errno.ENOENT else error.strerror
        raise


@contextmanager
def add_path_to_disk_full(path: object) -> Iterator[None]:
    """Add a path to disk-full errors without one. Those of libraries that write, for example, have none."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error) and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def translate_errors(*paths: object) -> Iterator[None]:
    """Translate faults of an object store into errors with an address and a hint.

    Args:
        paths: Paths or texts in use. If none is an address, errors are not translated.

    Raises:
        StoreError: The object store cannot be used. A hexdata error caused by a fault keeps its type and gets
            the translated message.
    """
    address = next((str(path) for path in paths if is_address(path)), None)
    try:
        yield
    except Exception as error:
        found_fault = None if address is None else _fault_behind(error)
        if found_fault is None:
            raise
        fault, origin = found_fault
        found = None if fault.found is None else with_attempts(fault.found + _message_of(origin), error)
        if isinstance(error, HexdataError):
            error.reason, error.found, error.expected, error.hint = fault.reason, found, None, fault.hint
            error.path = error.path or address
            copy_attempts(error, error)
            raise
        filename = getattr(error, "filename", None)
        path = filename if is_address(filename) else address
        translated = StoreError(fault.reason, path=path, found=found, hint=fault.hint)
        copy_attempts(translated, error)
        raise translated from error


def is_address(path: object) -> bool:
    """Return whether a path or text is the address of an object."""
    return path is not None and "://" in str(path)


def is_fault(error: BaseException) -> bool:
    """Return whether a fault of an object store caused an error. A missing object is not a fault."""
    return _fault_behind(error) is not None


def _fault_behind(error: BaseException) -> tuple[_Fault, BaseException] | None:
    """Return the fault that caused an error, and the exception with the clearest message, or None."""
    fault, origin = None, error
    one: BaseException | None = error
    while one is not None and not isinstance(one, Changed):
        if known := _fault_of(one):
            origin = one if fault is None else origin  # the outermost has the clearest message
            fault = known  # the innermost is the most specific
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return None if fault is None else (fault, origin)


def _fault_of(error: BaseException) -> _Fault | None:
    """Return the kind of fault of one exception, without its causes; None if it is not a fault."""
    if code := code_of(error):
        return None if code in _ABSENT else _CODES.get(code, _FAILED if is_temporary(error) else _OTHER)
    if is_invalid_endpoint(error):
        return _NO_ENDPOINT
    if isinstance(error, SendTimeoutError):
        return _SLOW
    kind = type(error)
    library = kind.__module__.partition(".")[0]
    if library not in _LIBRARIES:
        return None
    if kind.__name__ in _KINDS:
        return _KINDS[kind.__name__]
    # Attributes of Azure, aiohttp (whose ``code`` emits a warning) and Google, in this order.
    status = next(
        (found for name in ("status_code", "status", "code") if (found := getattr(error, name, None))), None
    )
    if isinstance(status, int):
        return None if status == 404 else _STATUSES.get(status, _FAILED if status >= 500 else _OTHER)
    return _UNREACHABLE if library in _CLIENTS else _FAILED


def _message_of(error: BaseException) -> str:
    """Return the message of an error as one line without secrets."""
    code, message = answer_of(error)
    text = f"{code}{'' if code.isdigit() else ':'} {message}" if code and message else code
    line = without_secrets(" ".join((text or str(error)).split())) or type(error).__name__
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
