"""Verified uploads, conditional puts and versioned reads of objects.

An object store makes an object visible only when its upload is complete.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hexdata.errors import StoreError
from hexdata.storage.address import AnyPath
from hexdata.storage.reading import PART, file_system, open_binary, speaks_s3
from hexdata.storage.retry import add_path, code_of, patiently

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


class Changed(Exception):  # noqa: N818 - a signal, not an error
    """Another process has replaced the object."""


class Tagged(NamedTuple):
    """The bytes of an object, and the tag of this version."""

    data: bytes
    tag: str | None


# --- writing ------------------------------------------------------------------------------------------


def upload(local: Path, target: UPath, *, replace: bool = True) -> None:
    """Upload a file and verify the object. Temporary errors are retried.

    Args:
        local: File to upload.
        target: Address of the object.
        replace: Whether to replace an existing object, True by default. Otherwise stores with the S3 protocol
            reject the upload if an object exists, and an existing object must have the same bytes.

    Raises:
        OSError: The upload failed.
        StoreError: The object differs from the file.
    """
    system = file_system(target)
    # Two parts at a time, to limit memory.
    how: dict[str, Any] = {"chunksize": PART, "max_concurrency": 2} if speaks_s3(system) else {}
    if speaks_s3(system) and not replace:
        how["mode"] = "create"

    def attempt() -> None:
        hint = "If it fails again, the connection to the store may corrupt data."
        try:
            system.put_file(str(local), target.path, **how)
        except OSError as error:
            code = code_of(error)
            if code == "ConditionalRequestConflict" or (code in _NO_CONDITIONS and how.pop("mode", None)):
                raise TimeoutError(
                    "the upload must be repeated, unconditionally if the store has no conditional puts"
                ) from error
            if not isinstance(error, FileExistsError) and code not in _PRECONDITION:
                raise
            hint = "Another object exists: make sure that only one process writes to the store."
        _require_same(local, target, hint)

    with add_path(target):
        patiently(attempt)


def _require_same(local: Path, target: UPath, hint: str) -> None:
    """Compare the size and digest of an object with a file. Without a reported digest, read the object."""
    info, size = file_system(target).info(target.path), local.stat().st_size
    if info["size"] != size:
        raise _altered(target, f"{info['size']} bytes", f"{size} bytes", hint)
    reported = _digest_of(info)
    if reported is None or reported not in (_digest(local.open("rb"), "md5"), _digest_of_parts(local)):
        sent = _digest(local.open("rb"), "sha256")
        stored = _digest(open_binary(target), "sha256")
        if sent != stored:
            raise _altered(target, f"sha256 {stored}", f"sha256 {sent}", hint)


def _altered(target: UPath, found: str, expected: str, hint: str) -> StoreError:
    return StoreError(
        "the uploaded object differs from the file",
        path=str(target),
        found=found,
        expected=expected,
        hint=f"Run the command again. {hint}",
    )


def _digest_of(info: dict[str, Any]) -> str | None:
    """Return the MD5 that a store reports for an object, in hexadecimal, or None.

    For an upload in parts, S3 reports the MD5 of the parts' MD5s, a dash and the number of parts. With some
    encryption settings it reports neither.
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
    """Return the digest that S3 reports for a file uploaded in parts of ``PART`` bytes."""
    with local.open("rb") as file:
        digests = [
            hashlib.md5(data, usedforsecurity=False).digest() for data in iter(lambda: file.read(PART), b"")
        ]
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def version_of(path: AnyPath) -> str:
    """Return a text that changes with the content of a file or an object; empty if it does not exist.

    For a file it contains size and time, for an object its tag or version number.

    Raises:
        OSError: The request failed.
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
    """Return the sizes of the objects below an address, by relative name, sorted.

    An object at the address itself has an empty name. Folder markers are omitted.

    Raises:
        OSError: The objects cannot be listed.
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
    """Read a small object and the tag of its version, which is None if the store has no tags.

    Raises:
        FileNotFoundError: The object does not exist.
        OSError: The request failed.
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
    """Put a small object if the stored version still has the given tag.

    Stores with the S3 protocol check this themselves. In a store without conditional puts the tag is compared
    first, so another process can still write between the comparison and the put.

    Args:
        path: Address of the object.
        data: Bytes to put.
        tag: Expected tag, or None if no object may exist.

    Returns:
        The new tag.

    Raises:
        Changed: The store has another version.
        OSError: The request failed.
    """
    system = file_system(path)

    def attempt() -> str | None:
        try:
            if speaks_s3(system) and (put := _put_s3(path, data, tag)) is not None:
                return put
            if _current_tag(path) != tag:
                raise Changed(str(path))
            system.pipe_file(path.path, data)
            return _current_tag(path)
        except Changed:
            current = _read_if_exists(path)
            if current is None or current.data != data:
                raise
            return current.tag  # written by an earlier attempt whose response was lost

    return patiently(attempt)  # type: ignore[no-any-return]


def _put_s3(path: UPath, data: bytes, tag: str | None) -> str | None:
    """Put conditionally; return the new tag, or None if the store has no conditional puts."""
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


def _current_tag(path: UPath) -> str | None:
    try:
        return _tag(file_system(path).info(path.path))
    except FileNotFoundError:
        return None


def _read_if_exists(path: UPath) -> Tagged | None:
    try:
        return read_tagged(path)
    except FileNotFoundError:
        return None


def remove_object(path: UPath) -> None:
    """Remove an object if it exists. ``UPath.unlink`` would interpret the name as a pattern.

    Raises:
        OSError: The request failed.
    """
    try:
        patiently(file_system(path).rm_file, path.path)
    except FileNotFoundError:
        return


def abort_uploads(folder: UPath) -> int:
    """Abort the unfinished multipart uploads below a folder; return their number.

    Call it only while no other process writes there. Stores other than S3 discard such parts themselves.

    Raises:
        OSError: A request failed.
    """
    system = file_system(folder)
    if not speaks_s3(system):
        return 0
    bucket, key, _ = system.split_path(folder.path)
    marker: dict[str, str] = {}
    aborted = 0
    while True:
        listed = patiently(
            system.call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "", **marker
        )
        for one in listed.get("Uploads", []):
            patiently(
                system.call_s3,
                "abort_multipart_upload",
                Bucket=bucket,
                Key=one["Key"],
                UploadId=one["UploadId"],
            )
            aborted += 1
        if not listed.get("IsTruncated"):
            return aborted
        marker = {"KeyMarker": listed["NextKeyMarker"], "UploadIdMarker": listed["NextUploadIdMarker"]}
