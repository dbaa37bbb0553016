"""What an object store raises, in the words of hexdata: what is wrong, at which address, what to do.

For the outermost layer: below it, faults stay the OSErrors that they are. Repeats nothing that is secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from hexdata.errors import HexdataError, StoreError
from hexdata.remote.patience import code_of

__all__ = ["is_fault", "telling"]


class _Fault(NamedTuple):
    reason: str
    cure: str


_NO_CREDENTIALS: Final = _Fault(
    "no credentials for the object store were found",
    "Set them in the environment or in a profile, as for any other tool.",
)
_REFUSED: Final = _Fault(
    "the object store does not accept the credentials",
    "See which ones the environment and the profile give, and whether they have expired.",
)
_DENIED: Final = _Fault(
    "the object store denies access",
    "See that these credentials may list, read and, to make something, write there.",
)
_NO_BUCKET: Final = _Fault("there is no such bucket", "See that the address is right, or make the bucket.")
_UNREACHABLE: Final = _Fault(
    "the object store does not answer",
    "See that the address, the network and the endpoint (of S3: AWS_ENDPOINT_URL) are right, and run the "
    "command again.",
)
_FAILED: Final = _Fault("the object store failed", "Run the command again.")

_CODES: Final = {
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "Forbidden": _DENIED,
    "403": _DENIED,
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
    "RefreshError": _REFUSED,
    "UnauthorizedSSOTokenError": _REFUSED,
}
"""By the name of the exception."""
_STATUSES: Final = {401: _REFUSED, 403: _DENIED}
"""By the number that the libraries of other stores than S3 give."""
_CLIENTS: Final = ("aiobotocore", "aiohttp", "botocore")
_ROOMS: Final = (*_CLIENTS, "adlfs", "azure", "gcsfs", "google", "s3fs")
"""Libraries whose exceptions are an object store's."""
_SECRET: Final = re.compile(r"(?<=://)[^/@\s]+@|(?<=[^\s?])\?[^\s\"'?]+=[^\s\"']*")
"""What may hold a secret: a URL's user and query."""
_LONGEST: Final = 300


@contextmanager
def telling(*places: object) -> Iterator[None]:
    """Let faults of an object store come out as errors that name an address and say what to do.

    Args:
        places: paths or texts that are worked on; where none is an address, nothing is done.

    Raises:
        StoreError: the object store cannot be used. Another error of hexdata's stays, and gets the cure.
    """
    address = next((str(place) for place in places if _is_address(place)), None)
    try:
        yield
    except Exception as error:
        fault = None if address is None else _fault_of(error)
        named = getattr(error, "filename", None)
        if fault is None:
            raise
        if isinstance(error, HexdataError):
            error.found = fault.reason if error.found is None else _shown(error.found)
            error.cure = fault.cure
            raise
        path = named if _is_address(named) else address
        raise StoreError(fault.reason, path=path, found=_shown(error), cure=fault.cure) from error


def _is_address(place: object) -> bool:
    return place is not None and not isinstance(place, Path) and "://" in str(place)


def is_fault(error: BaseException) -> bool:
    """Say whether an object store is at the root of an error, and not that something is not there."""
    return _fault_of(error) is not None


def _fault_of(error: BaseException) -> _Fault | None:
    """Say what an object store did, if that is at the root of an error."""
    found = None
    one: BaseException | None = error
    while one is not None:
        found = _named(one) or found  # the deepest knows most
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return found


def _named(error: BaseException) -> _Fault | None:
    if code := code_of(error):
        return None if code in _ABSENT else _CODES.get(code, _FAILED)
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
        return None if status == 404 else _STATUSES.get(status, _FAILED)
    return _UNREACHABLE if room in _CLIENTS else _FAILED


def _shown(found: object) -> str:
    """Return what was found as a line without secrets."""
    text = found.strerror if isinstance(found, OSError) and found.strerror else found
    line = _SECRET.sub("", " ".join(str(text).split()))
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
