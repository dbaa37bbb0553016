"""Verified uploads of files, and clean-up of unfinished ones.

An object store makes an object visible only when its upload is complete.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from hexdata.errors import StoreError
from hexdata.retry import RetryPolicy, attempts_of
from hexdata.storage.base import Changed
from hexdata.storage.conditions import CONFLICT, write_if_unchanged
from hexdata.storage.errors import add_path_to_error
from hexdata.storage.reading import PART, file_system, open_object, speaks_s3
from hexdata.storage.retry import answer_of, code_of, with_retries
from hexdata.storage.sending import send_body

if TYPE_CHECKING:
    from upath import UPath

__all__ = ["abort_uploads", "upload"]

_MD5: Final = re.compile(r"[0-9a-f]{32}(-\d+)?")
_REFUSED: Final = ("AccessDenied", "403", "MethodNotAllowed", "405", "NotImplemented", "501")
"""Error codes of stores that do not let this process list or abort uploads."""
_refusing: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Buckets that have refused it, by file system."""
_PARTS_AT_A_TIME: Final = 2
"""Limits the memory of an upload."""
_RESTARTS: Final = RetryPolicy(attempts=5, first_wait=0.2, longest_wait=10.0, jitter=0.2)
"""Repetitions of a whole upload, after conflicts with other requests."""


class _Conflict(Exception):  # noqa: N818 - a signal, not an error
    """The store discarded all parts of an upload, because another request for the object was running."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def upload(local: Path, target: UPath, *, replace: bool = True) -> None:
    """Upload a file and verify the object. Temporary errors are retried.

    Args:
        local: File to upload.
        target: Address of the object.
        replace: Whether to replace an existing object, True by default. Otherwise an existing object must
            have the same bytes. Stores with conditional requests check this themselves.

    Raises:
        OSError: The upload failed.
        StoreError: The object differs from the file, or another process has removed the upload.
    """
    system = file_system(target)
    hint = "If it fails again, the connection to the store may corrupt data."
    with add_path_to_error(target):
        try:
            if speaks_s3(system):
                _RESTARTS.call(
                    lambda: _upload_s3(system, local, target.path, replace=replace),
                    is_temporary=lambda error: isinstance(error, _Conflict),
                )
            else:
                with_retries(system.put_file, str(local), target.path)
        except Changed:
            hint = "Another object exists: make sure that only one process writes to the store."
        except _Conflict as conflict:
            raise conflict.error from None
        try:
            with_retries(_require_same, local, target, hint)
        except FileNotFoundError as error:
            raise StoreError(
                "another process has removed this object or its unfinished upload",
                path=str(target),
                hint="Make sure that only one process writes to the store, and run the command again.",
            ) from error


def _upload_s3(system: Any, local: Path, path: str, *, replace: bool) -> None:
    """Upload a file in one request, or a larger one in parts.

    Raises:
        Changed: An object exists and ``replace`` is false, or the unfinished upload does not exist any more.
        OSError: A request failed.
        _Conflict: The upload must be started again.
    """
    bucket, key, _ = system.split_path(path)
    size = local.stat().st_size

    def call(method: str, **arguments: Any) -> Any:
        return with_retries(system.call_s3, method, Bucket=bucket, Key=key, **arguments)

    def transfer(method: str, body: bytes, **arguments: Any) -> Any:
        return with_retries(send_body, system, method, body, Bucket=bucket, Key=key, **arguments)

    def finish(**arguments: Any) -> None:
        """Send the request that makes the object visible."""
        if size < 2 * PART:
            transfer("put_object", local.read_bytes(), **arguments)
        else:
            with_retries(_complete, system, Bucket=bucket, Key=key, **uploaded, **arguments)

    def send(number: int) -> dict[str, Any]:
        with local.open("rb") as file:
            file.seek(number * PART)
            data = file.read(PART)
        sent = transfer("upload_part", data, UploadId=uploaded["UploadId"], PartNumber=number + 1)
        return {"PartNumber": number + 1, "ETag": sent["ETag"]}

    uploaded: dict[str, Any] = {}
    try:
        if size >= 2 * PART:
            uploaded["UploadId"] = call("create_multipart_upload")["UploadId"]
            with ThreadPoolExecutor(_PARTS_AT_A_TIME) as pool:
                uploaded["MultipartUpload"] = {"Parts": list(pool.map(send, range(-(-size // PART))))}
        if replace:
            finish()
        else:
            write_if_unchanged(system, path, None, lambda condition: finish(**condition))
    except BaseException as error:
        if isinstance(error, OSError) and code_of(error) == "NoSuchUpload":
            raise Changed(path) from error  # completed by an attempt whose answer was lost, or aborted
        if "UploadId" in uploaded and attempts_of(error) is None:  # else the store does not answer
            with suppress(OSError):
                system.call_s3(
                    "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=uploaded["UploadId"]
                )
        raise


def _complete(system: Any, **arguments: Any) -> None:
    """Complete an upload in parts.

    Raises:
        _Conflict: Another request for the object was running. Repeating this one would not help.
    """
    try:
        system.call_s3("complete_multipart_upload", **arguments)
    except OSError as error:
        if code_of(error) == CONFLICT:
            raise _Conflict(error) from None
        raise


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

    Call it only while no other process writes there. Stores other than S3 discard such parts themselves. If
    the store refuses to list or abort uploads, a warning says so, once per process.

    Raises:
        OSError: A request failed.
    """
    system = file_system(folder)
    bucket = folder.path.partition("/")[0]
    if not speaks_s3(system) or bucket in _refusing.get(system, ()):
        return 0
    aborted = 0
    try:
        for unfinished in _unfinished_uploads(system, folder):
            with suppress(FileNotFoundError):  # it has been completed or aborted since
                with_retries(system.call_s3, "abort_multipart_upload", **unfinished)
            aborted += 1
    except OSError as error:
        if code_of(error) not in _REFUSED:
            raise
        _refusing.setdefault(system, set()).add(bucket)
        found = ": ".join(answer_of(error))
        warnings.warn(
            f"{folder}: the object store refuses to list or abort unfinished uploads; found {found}. Killed "
            "runs may leave some, which may cost money: allow s3:ListBucketMultipartUploads and "
            "s3:AbortMultipartUpload, or let a lifecycle rule of the bucket remove them",
            stacklevel=2,
        )
    return aborted


def _unfinished_uploads(system: Any, folder: UPath) -> Iterator[dict[str, str]]:
    """Yield bucket, key and id of each unfinished upload below a folder."""
    bucket, key, _ = system.split_path(folder.path)
    request = {"Bucket": bucket, "Prefix": f"{key}/" if key else ""}
    while True:
        try:
            listed = with_retries(system.call_s3, "list_multipart_uploads", **request)
        except FileNotFoundError as error:
            if code_of(error) == "NoSuchUpload":  # the answer of rclone if there are none
                return
            raise
        for one in listed.get("Uploads", []):
            yield {"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
        if not listed.get("IsTruncated"):
            return
        request |= {"KeyMarker": listed["NextKeyMarker"], "UploadIdMarker": listed["NextUploadIdMarker"]}
