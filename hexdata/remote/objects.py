"""Objects: put whole and checked, put only if nobody else did, read with the tag that names their version.

An object appears when its upload ends, or not at all: that is the store's promise.
Nothing is renamed here.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from hexdata.errors import StoreError
from hexdata.remote.address import AnyPath

if TYPE_CHECKING:
    from upath import UPath

__all__ = [
    "Changed",
    "Tagged",
    "abort_uploads",
    "file_system",
    "is_passing",
    "objects_below",
    "open_binary",
    "patiently",
    "put_if",
    "read_tagged",
    "upload",
    "version_of",
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
_PRECONDITION: Final = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_NO_CONDITIONS: Final = ("NotImplemented", "501")
_MD5: Final = re.compile(r"[0-9a-f]{32}(-\d+)?")
_PART: Final = 8 << 20
"""Bytes that are sent or asked for at a time."""
_BUFFER: Final = 1 << 17
"""Bytes that are taken at a time from those that were asked for."""
_NUMBERS: Final = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    TimeoutError: errno.ETIMEDOUT,
}
"""Of errors that the libraries raise without a number. One without is the data's fault to Arrow and gzip."""


class Changed(Exception):  # noqa: N818 - no fault: what was read has been replaced since
    """An object is not the one that was expected: somebody else has put another."""


class Tagged(NamedTuple):
    """The bytes of an object, and the tag that names this version of it."""

    data: bytes
    tag: str | None


def file_system(path: UPath) -> Any:
    """Return the file system of a path: fsspec's, the one object that Python and DuckDB read through."""
    return path.fs


def _speaks_s3(system: Any) -> bool:
    return hasattr(system, "call_s3")


# --- errors that pass ---------------------------------------------------------------------------------


def code_of(error: BaseException) -> str:
    """Return the code by which S3 names an error, or nothing."""
    one: BaseException | None = error
    while one is not None:
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        one = one.__cause__
    return ""


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
        if type(error).__module__.partition(".")[0] not in ("aiohttp", "botocore", "aiobotocore"):
            raise
        raise OSError(errno.EIO, f"the object store: {_said(error)}") from error


@contextmanager
def _naming(path: UPath) -> Iterator[None]:
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


# --- writing ------------------------------------------------------------------------------------------


def upload(local: Path, target: UPath) -> None:
    """Put a file as an object, and see that the store has its bytes; repeated while errors may pass.

    Args:
        local: the file.
        target: where it goes; what is there is replaced.

    Raises:
        OSError: the store does not take it.
        StoreError: what the store has is not what was sent.
    """
    system = file_system(target)
    # In parts, of which two are under way: in memory are they alone.
    parts = {"chunksize": _PART, "max_concurrency": 2} if _speaks_s3(system) else {}

    def attempt() -> None:
        system.put_file(str(local), target.path, **parts)
        _require_same(local, target)

    with _naming(target):
        patiently(attempt)


def _require_same(local: Path, target: UPath) -> None:
    """Hold the object against the file: by size and the digest that the store names, else by reading it."""
    info, size = file_system(target).info(target.path), local.stat().st_size
    if info["size"] != size:
        raise _altered(target, f"{info['size']} bytes", f"{size} bytes")
    named = _digest_of(info)
    if named is None or named not in (_digest(local.open("rb"), "md5"), _digest_of_parts(local)):
        sent = _digest(local.open("rb"), "sha256")
        there = _digest(open_binary(target), "sha256")
        if sent != there:
            raise _altered(target, f"sha256 {there}", f"sha256 {sent}")


def _altered(target: UPath, found: str, expected: str) -> StoreError:
    return StoreError(
        "the object store does not hold what was sent",
        path=str(target),
        found=found,
        expected=expected,
        cure="Run the command again; if this repeats, something between here and the store alters files.",
    )


def _digest_of(info: dict[str, Any]) -> str | None:
    """Return the MD5 by which a store names an object, as hexadecimal text, if it does.

    Of one that came in parts, S3 names the MD5 of their MD5s, with a dash and their number. Under some keys
    of encryption it names neither.
    """
    tag = str(info.get("ETag", "")).strip('"')
    if _MD5.fullmatch(tag):
        return tag
    encoded = info.get("md5Hash") or (info.get("content_settings") or {}).get("content_md5")
    if isinstance(encoded, (bytes, bytearray)):
        return bytes(encoded).hex()
    try:
        return base64.b64decode(encoded).hex() if encoded else None
    except binascii.Error:
        return None


def _digest(opened: Any, name: str) -> str:
    digest = hashlib.new(name, usedforsecurity=False)
    with opened as file:
        while data := file.read(_PART):
            digest.update(data)
    return digest.hexdigest()


def _digest_of_parts(local: Path) -> str:
    """Return the name that S3 gives a file sent in parts of ``_PART`` bytes."""
    with local.open("rb") as file:
        digests = [
            hashlib.md5(data, usedforsecurity=False).digest() for data in iter(lambda: file.read(_PART), b"")
        ]
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


# --- reading ------------------------------------------------------------------------------------------


def open_binary(path: AnyPath, *, block: int = _PART) -> BufferedReader:
    """Open a file or an object to be read, from the front or by seeking.

    Of an object, so many bytes are asked for at a time, and kept until others are.

    Raises:
        OSError: it cannot be opened, or, later, read.
    """
    if isinstance(path, Path):
        return path.open("rb")
    with _naming(path):
        return open_object(file_system(path), path.path, block=block)


def open_object(
    system: Any, path: str, *, block: int = _PART, info: dict[str, Any] | None = None
) -> BufferedReader:
    """Open an object of a file system, as :func:`open_binary` does.

    Args:
        system: fsspec's.
        path: in it.
        block: bytes that are asked for at a time.
        info: what the store has said of the object, if it has: it is then not asked again, and another
            version of the object is not read.

    Raises:
        OSError: it cannot be opened, or, later, read.
    """
    known = {"size": info["size"]} if info is not None and _speaks_s3(system) else {}
    opened = patiently(system.open, path, "rb", block_size=block, cache_type="readahead", **known)
    if known:
        opened.details = info
    return BufferedReader(_Reading(opened), _BUFFER)


class _Reading(io.RawIOBase):
    """An object that fsspec has opened; what it cannot give now, it is asked for again."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a writable buffer; return how many bytes, 0 at the end."""
        view = memoryview(buffer).cast("B")
        piece: bytes = patiently(self._opened.read, len(view))
        view[: len(piece)] = piece
        return len(piece)

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        return int(self._opened.seek(place, whence))

    def tell(self) -> int:
        """Return the place."""
        return int(self._opened.tell())

    def close(self) -> None:
        """Let go of the object; again does nothing."""
        super().close()
        self._opened.close()


def version_of(path: AnyPath) -> str:
    """Return what changes when the content of a file or an object does; nothing if it is not there.

    Of a file its size and time, of an object the tag, or the number of the version, that the store names.

    Raises:
        OSError: it cannot be asked for.
    """
    try:
        if isinstance(path, Path):
            status = path.stat()
            return f"{status.st_size} {status.st_mtime_ns}"
        info = patiently(file_system(path).info, path.path)
    except FileNotFoundError:
        return ""
    return _tag(info) or f"{info['size']} {info.get('LastModified') or info.get('created')}"


def objects_below(folder: UPath) -> dict[str, int]:
    """Return the sizes of the objects below an address, by their names from there on, sorted.

    An object at the very address is named by no text; one that only marks a folder is left out.

    Raises:
        OSError: they cannot be listed.
    """
    system = file_system(folder)
    root = folder.path.rstrip("/")
    found = patiently(system.find, root, detail=True)
    sizes = {
        key.removeprefix(root).lstrip("/"): info["size"]
        for key, info in found.items()
        if info["type"] == "file" and not key.endswith("/")
    }
    return dict(sorted(sizes.items()))


def read_tagged(path: UPath) -> Tagged:
    """Read a small object whole, with the tag of the version that was read; None if the store has no tags.

    Raises:
        FileNotFoundError: there is none.
        OSError: the store does not give it.
    """
    system = file_system(path)

    def attempt() -> Tagged:
        tag = _tag(system.info(path.path))
        data: bytes = system.cat_file(path.path)
        if _tag(system.info(path.path)) != tag:
            raise TimeoutError(f"{path}: replaced while it was being read")
        return Tagged(data, tag)

    return patiently(attempt)  # type: ignore[no-any-return]


def _tag(info: dict[str, Any]) -> str | None:
    tag = info.get("ETag") or info.get("etag") or info.get("generation")
    return None if tag is None else str(tag)


def put_if(path: UPath, data: bytes, tag: str | None) -> str | None:
    """Put a small object if the store still has the version of this tag, or none if the tag is None.

    S3 decides that itself, and so do stores that speak as it does. Where a store has no conditional put,
    the tag is compared before, which leaves a moment between the two.

    Returns:
        The new tag.

    Raises:
        Changed: the store has another version.
        OSError: the store does not take it.
    """
    system = file_system(path)

    def attempt() -> None:
        try:
            if not (_speaks_s3(system) and _put_s3(path, data, tag)):
                if _tag_now(path) != tag:
                    raise Changed(str(path))
                system.pipe_file(path.path, data)
        except Changed:
            if not _is_there(path, data):  # else it is ours: the answer to an earlier attempt was lost
                raise

    patiently(attempt)
    return _tag_now(path)


def _put_s3(path: UPath, data: bytes, tag: str | None) -> bool:
    """Put with a condition; return whether the store knows conditions."""
    bucket, key, _ = file_system(path).split_path(path.path)
    condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
    try:
        file_system(path).call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)
    except (OSError, RuntimeError) as error:
        code = code_of(error)
        if code == "NoSuchBucket":
            raise
        if isinstance(error, (FileExistsError, FileNotFoundError)) or code in _PRECONDITION:
            raise Changed(str(path)) from error
        if code in _NO_CONDITIONS:
            return False
        raise
    return True


def _tag_now(path: UPath) -> str | None:
    try:
        return _tag(file_system(path).info(path.path))
    except FileNotFoundError:
        return None


def _is_there(path: UPath, data: bytes) -> bool:
    try:
        return bool(file_system(path).cat_file(path.path) == data)
    except FileNotFoundError:
        return False


def abort_uploads(folder: UPath) -> int:
    """End the uploads in parts below a folder that nobody will finish; return how many there were.

    Call it only while no other process writes there. Other stores than S3 forget such parts by themselves.

    Raises:
        OSError: the store does not answer.
    """
    system = file_system(folder)
    if not _speaks_s3(system):
        return 0
    bucket, key, _ = system.split_path(folder.path)
    place: dict[str, str] = {}
    ended = 0
    while True:
        listed = patiently(
            system.call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "", **place
        )
        for one in listed.get("Uploads", []):
            patiently(
                system.call_s3,
                "abort_multipart_upload",
                Bucket=bucket,
                Key=one["Key"],
                UploadId=one["UploadId"],
            )
            ended += 1
        if not listed.get("IsTruncated"):
            return ended
        place = {"KeyMarker": listed["NextKeyMarker"], "UploadIdMarker": listed["NextUploadIdMarker"]}
