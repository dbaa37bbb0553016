"""What an object store raises, in the words of hexdata: what is wrong, at which address, what to do.

For the outermost layer: below it, faults stay the OSErrors that they are. Repeats nothing that is secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from hexdata.errors import HexdataError, StoreError
from hexdata.remote.address import without_secrets
from hexdata.remote.patience import answer_of, code_of, is_no_endpoint, is_passing

__all__ = ["is_fault", "telling"]


class _Fault(NamedTuple):
    """A kind of fault: what is wrong, what to do, and, if anything, what the store's own words follow."""

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
    "See which ones the environment and the profile give, and whether they have expired.",
)
_DENIED: Final = _Fault(
    "the object store denies access",
    "See that these credentials may list, read and, to make something, write there.",
)
_NO_BUCKET: Final = _Fault(
    "there is no such bucket", "See that the address is right, or make the bucket.", None
)
_REACHING: Final = (
    "See that the address, the network and the endpoint (of S3: AWS_ENDPOINT_URL) are right, and run the "
    "command again."
)
_UNREACHABLE: Final = _Fault("the object store does not answer", _REACHING)
_SLOW: Final = _Fault("the object store does not answer in time", _REACHING)
_NO_NAME: Final = _Fault(
    "the object store's name leads nowhere",
    "See that the endpoint (of S3: AWS_ENDPOINT_URL) or the region is right, and that this machine can "
    "look up names.",
)
_NO_ENDPOINT: Final = _Fault(
    "the object store's endpoint is no URL",
    "Set it (of S3: AWS_ENDPOINT_URL) to one such as http://10.0.0.5:9000.",
)
_FAILED: Final = _Fault(
    "the object store failed at every attempt", "Run the command again later; what is done stays done."
)
_OTHER: Final = _Fault(
    "the object store does not do what it was asked",
    "See what it says, and whether it does all that is asked of it.",
)

_CODES: Final = {
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "Forbidden": _DENIED,
    "403": _DENIED,
    "401": _REFUSED,
    "ExpiredToken": _REFUSED,
    "InvalidAccessKeyId": _REFUSED,
    "InvalidClientTokenId": _REFUSED,
    "InvalidToken": _REFUSED,
    "SignatureDoesNotMatch": _REFUSED,
    "TokenRefreshRequired": _REFUSED,
    "NoSuchBucket": _NO_BUCKET,
}
"""By the code that S3 gives."""
_ABSENT: Final = ("NoSuchKey", "NotFound", "404")
"""Codes that say no more than that something is not there, which is no fault."""
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
    "UnauthorizedSSOTokenError": _REFUSED,
}
"""By the name of the exception."""
_STATUSES: Final = {401: _REFUSED, 403: _DENIED}
"""By the number that the libraries of other stores than S3 give."""
_CLIENTS: Final = ("aiobotocore", "aiohttp", "botocore")
_ROOMS: Final = (*_CLIENTS, "adlfs", "azure", "gcsfs", "google", "s3fs")
"""Libraries whose exceptions are an object store's."""
_LONGEST: Final = 300


@contextmanager
def telling(*places: object) -> Iterator[None]:
    """Let faults of an object store come out as errors that name an address and say what to do.

    Args:
        places: paths or texts that are worked on; where none is an address, nothing is done.

    Raises:
        StoreError: the object store cannot be used. Another error of hexdata's that stems from this stays
            what it is, with these words.
    """
    address = next((str(place) for place in places if _is_address(place)), None)
    try:
        yield
    except Exception as error:
        told = None if address is None else _told_by(error)
        if told is None:
            raise
        fault, said = told
        found = None if fault.found is None else fault.found + _shown(said)
        if isinstance(error, HexdataError):
            error.reason, error.found, error.expected, error.hint = fault.reason, found, None, fault.hint
            error.path = error.path or address
            raise
        named = getattr(error, "filename", None)
        path = named if _is_address(named) else address
        raise StoreError(fault.reason, path=path, found=found, hint=fault.hint) from error


def _is_address(place: object) -> bool:
    return place is not None and not isinstance(place, Path) and "://" in str(place)


def is_fault(error: BaseException) -> bool:
    """Say whether an object store is at the root of an error, and not that something is not there."""
    return _told_by(error) is not None


def _told_by(error: BaseException) -> tuple[_Fault, BaseException] | None:
    """Return what an object store did, if that is at the root of an error, and who has words for it."""
    fault, said = None, error
    one: BaseException | None = error
    while one is not None:
        if named := _named(one):
            said = one if fault is None else said  # the outermost says it best
            fault = named  # the deepest knows most
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return None if fault is None else (fault, said)


def _named(error: BaseException) -> _Fault | None:
    if code := code_of(error):
        return None if code in _ABSENT else _CODES.get(code, _FAILED if is_passing(error) else _OTHER)
    if is_no_endpoint(error):
        return _NO_ENDPOINT
    kind = type(error)
    room = kind.__module__.partition(".")[0]
    if room not in _ROOMS:
        return None
    if kind.__name__ in _KINDS:
        return _KINDS[kind.__name__]
    # Of Azure, of aiohttp (whose ``code`` warns), of Google.
    status = next(
        (found for name in ("status_code", "status", "code") if (found := getattr(error, name, None))), None
    )
    if isinstance(status, int):
        return None if status == 404 else _STATUSES.get(status, _FAILED if status >= 500 else _OTHER)
    return _UNREACHABLE if room in _CLIENTS else _FAILED


def _shown(error: BaseException) -> str:
    """Return what was said, as a line without secrets."""
    code, message = answer_of(error)
    text = f"{code}{'' if code.isdigit() else ':'} {message}" if code and message else code
    line = without_secrets(text or str(error)) or type(error).__name__
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
