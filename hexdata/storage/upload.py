"""Verified uploads of files, and clean-up of unfinished ones.

An object store makes an object visible only when its upload is complete.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hexdata.errors import StoreError
from hexdata.storage.errors import add_path_to_error
from hexdata.storage.reading import PART, file_system, open_object, speaks_s3
from hexdata.storage.retry import code_of, with_retries

if TYPE_CHECKING:
    from upath import UPath

__all__ = ["NO_CONDITIONS", "PRECONDITION", "abort_uploads", "upload"]

PRECONDITION: Final = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
"""Error codes of S3 for a condition that is not met."""
NO_CONDITIONS: Final = ("NotImplemented", "501")
"""Error codes of stores without conditional puts."""
_MD5: Final = re.compile(r"[0-9a-f]{32}(-\d+)?")


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
            if code == "ConditionalRequestConflict" or (code in NO_CONDITIONS and how.pop("mode", None)):
                raise TimeoutError(
                    "the upload must be repeated, unconditionally if the store has no conditional puts"
                ) from error
            if not isinstance(error, FileExistsError) and code not in PRECONDITION:
                raise
            hint = "Another object exists: make sure that only one process writes to the store."
        _require_same(local, target, hint)

    with add_path_to_error(target):
        with_retries(attempt)


def _require_same(local: Path, target: UPath, hint: str) -> None:
    """Compare the size and digest of an object with a file. Without a reported digest, read the object."""
    system = file_system(target)
    info, size = system.info(target.path), local.stat().st_size
    if info["size"] != size:
        raise _altered(target, f"{info['size']} bytes", f"{size} bytes", hint)
    reported = _digest_of(info)
    if reported is None or reported not in (_digest(local.open("rb"), "md5"), _digest_of_parts(local)):
        sent = _digest(local.open("rb"), "sha256")
        stored = _digest(open_object(system, target.path, str(target)), "sha256")
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
        listed = with_retries(
            system.call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "", **marker
        )
        for one in listed.get("Uploads", []):
            with_retries(
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
