"""Objects: put whole and checked, put only if nobody else did, read with the tag that names their version.

An object appears when its upload ends, or not at all: that is the store's promise.
Nothing is renamed here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hexdata.errors import StoreError
from hexdata.remote.address import AnyPath
from hexdata.remote.patience import code_of, naming, patiently
from hexdata.remote.reading import PART, file_system, open_binary, speaks_s3

if TYPE_CHECKING:
    from upath import UPath

__all__ = [
    "Changed",
    "Tagged",
    "abort_uploads",
    "objects_below",
    "put_if",
    "read_tagged",
    "remove_object",
    "upload",
    "version_of",
]

_PRECONDITION: Final = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_NO_CONDITIONS: Final = ("NotImplemented", "501")
_MD5: Final = re.compile(r"[0-9a-f]{32}(-\d+)?")


class Changed(Exception):  # noqa: N818 - no fault: what was read has been replaced since
    """An object is not the one that was expected: somebody else has put another."""


class Tagged(NamedTuple):
    """The bytes of an object, and the tag that names this version of it."""

    data: bytes
    tag: str | None


# --- writing ------------------------------------------------------------------------------------------


def upload(local: Path, target: UPath, *, replace: bool = True) -> None:
    """Put a file as an object, and see that the store has its bytes; repeated while errors may pass.

    Args:
        local: the file.
        target: where it goes.
        replace: what is there; else S3, and stores that speak as it does, put it only where nothing is,
            and the object that is there must be the same.

    Raises:
        OSError: the store does not take it.
        StoreError: what the store has is not what was sent.
    """
    system = file_system(target)
    # In parts, of which two are under way: in memory are they alone.
    how: dict[str, Any] = {"chunksize": PART, "max_concurrency": 2} if speaks_s3(system) else {}
    if speaks_s3(system) and not replace:
        how["mode"] = "create"

    def attempt() -> None:
        hint = "If this repeats, something between here and the store alters files."
        try:
            system.put_file(str(local), target.path, **how)
        except OSError as error:
            code = code_of(error)
            if code == "ConditionalRequestConflict" or (code in _NO_CONDITIONS and how.pop("mode", None)):
                raise TimeoutError("to be put again, without a condition if there are none") from error
            if not isinstance(error, FileExistsError) and code not in _PRECONDITION:
                raise
            hint = "Something else is there: see that only one process writes to a store."
        _require_same(local, target, hint)

    with naming(target):
        patiently(attempt)


def _require_same(local: Path, target: UPath, hint: str) -> None:
    """Hold the object against the file: by size and the digest that the store names, else by reading it."""
    info, size = file_system(target).info(target.path), local.stat().st_size
    if info["size"] != size:
        raise _altered(target, f"{info['size']} bytes", f"{size} bytes", hint)
    named = _digest_of(info)
    if named is None or named not in (_digest(local.open("rb"), "md5"), _digest_of_parts(local)):
        sent = _digest(local.open("rb"), "sha256")
        there = _digest(open_binary(target), "sha256")
        if sent != there:
            raise _altered(target, f"sha256 {there}", f"sha256 {sent}", hint)


def _altered(target: UPath, found: str, expected: str, hint: str) -> StoreError:
    return StoreError(
        "the object store does not hold what was sent",
        path=str(target),
        found=found,
        expected=expected,
        hint=f"Run the command again. {hint}",
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
        while data := file.read(PART):
            digest.update(data)
    return digest.hexdigest()


def _digest_of_parts(local: Path) -> str:
    """Return the name that S3 gives a file sent in parts of ``PART`` bytes."""
    with local.open("rb") as file:
        digests = [
            hashlib.md5(data, usedforsecurity=False).digest() for data in iter(lambda: file.read(PART), b"")
        ]
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


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

    def attempt() -> str | None:
        try:
            if speaks_s3(system) and (put := _put_s3(path, data, tag)) is not None:
                return put
            if _tag_now(path) != tag:
                raise Changed(str(path))
            system.pipe_file(path.path, data)
            return _tag_now(path)
        except Changed:
            there = _now(path)
            if there is None or there.data != data:
                raise
            return there.tag  # it is ours: the answer to an earlier attempt was lost

    return patiently(attempt)  # type: ignore[no-any-return]


def _put_s3(path: UPath, data: bytes, tag: str | None) -> str | None:
    """Put with a condition; return the new tag, or None if the store knows no conditions."""
    bucket, key, _ = file_system(path).split_path(path.path)
    condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
    try:
        answer = file_system(path).call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)
    except (OSError, RuntimeError) as error:
        code = code_of(error)
        if code == "NoSuchBucket":
            raise
        if isinstance(error, (FileExistsError, FileNotFoundError)) or code in _PRECONDITION:
            raise Changed(str(path)) from error
        if code in _NO_CONDITIONS:
            return None
        raise
    return str(answer["ETag"])


def _tag_now(path: UPath) -> str | None:
    try:
        return _tag(file_system(path).info(path.path))
    except FileNotFoundError:
        return None


def _now(path: UPath) -> Tagged | None:
    try:
        return read_tagged(path)
    except FileNotFoundError:
        return None


def remove_object(path: UPath) -> None:
    """Remove an object, if it is there. A path's own ``unlink`` takes its name for a pattern.

    Raises:
        OSError: the store does not do it.
    """
    try:
        patiently(file_system(path).rm_file, path.path)
    except FileNotFoundError:
        return


def abort_uploads(folder: UPath) -> int:
    """End the uploads in parts below a folder that nobody will finish; return how many there were.

    Call it only while no other process writes there. Other stores than S3 forget such parts by themselves.

    Raises:
        OSError: the store does not answer.
    """
    system = file_system(folder)
    if not speaks_s3(system):
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
