"""Reading of objects with retries."""

from __future__ import annotations

import io
from io import BufferedReader
from typing import TYPE_CHECKING, Any, Final

from hexdata.storage.errors import add_path_to_error
from hexdata.storage.retry import code_of, with_retries

if TYPE_CHECKING:
    from upath import UPath

__all__ = [
    "PART",
    "file_system",
    "get_object",
    "list_objects",
    "object_info",
    "open_object",
    "speaks_s3",
]

PART: Final = 8 << 20
"""Bytes per request and per uploaded part."""
_LONGEST_REQUEST: Final = 120.0
"""Seconds that a request for at most ``PART`` bytes, or for a manifest, may take."""
_NO_REASON: Final = ("400", "401", "403")
"""Error codes of answers without a body, which are the status."""
_BUFFER: Final = 1 << 17
"""Bytes per read from the current block."""


def file_system(path: UPath) -> Any:
    """Return the fsspec file system of a path, which Python and DuckDB share. It retries nothing itself."""
    system = path.fs
    if speaks_s3(system):
        system.retries = 1
    return system


def speaks_s3(system: Any) -> bool:
    """Return whether a file system uses the S3 protocol."""
    return hasattr(system, "call_s3")


def object_info(system: Any, path: str, *, folders: bool = True) -> dict[str, Any]:
    """Return the properties of an object or folder: at least "size" in bytes, and "type".

    S3 answers a rejected HEAD request with a status alone. In this case the first byte is requested too,
    because that answer contains the reason.

    Args:
        system: File system of fsspec.
        path: Path in this file system.
        folders: Whether to look for a folder if there is no such object, which S3 needs another request for
            (default: True).

    Raises:
        FileNotFoundError: There is no such object or folder.
        OSError: The request failed.
    """
    try:
        info: dict[str, Any] = (
            with_retries(system.info, path) if folders else with_retries(_file_info, system, path)
        )
    except OSError as error:
        if speaks_s3(system) and code_of(error) in _NO_REASON:
            _raise_reason(system, path)
        raise
    return info


def _file_info(system: Any, path: str) -> Any:
    """Return the properties of an object as the file system does, with one request.

    Raises:
        FileNotFoundError: There is no such object.
    """
    bucket, key, _ = system.split_path(path) if speaks_s3(system) else ("", "", None)
    if not key:
        info = system.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return info
    found = system.call_s3("head_object", Bucket=bucket, Key=key)
    return {**found, "name": path, "size": found["ContentLength"], "type": "file"}


def _raise_reason(system: Any, path: str) -> None:
    """Raise the error of a request whose answer has a body, if it contains an error code."""
    bucket, key, _ = system.split_path(path)
    try:
        if key:
            with_retries(system.cat_file, path, start=0, end=1)
        else:
            with_retries(system.call_s3, "list_objects_v2", Bucket=bucket, MaxKeys=1)
    except FileNotFoundError:
        return
    except OSError as error:
        if code_of(error) not in (*_NO_REASON, "InvalidRange", "416"):
            raise


def get_object(
    system: Any, path: str, max_bytes: int | None = None, **arguments: Any
) -> tuple[bytes, dict[str, Any]]:
    """Return the content of an object of an S3 store and the headers of the answer, with one request.

    Args:
        system: File system of s3fs.
        path: Path in this file system.
        max_bytes: Number of bytes after which no more are read; None for all (default).
        arguments: Other arguments of the S3 client, such as ``Range``.

    Returns:
        The content, and the answer of the client, among it "ETag".

    Raises:
        FileNotFoundError: The object does not exist.
        OSError: The request failed.
    """
    from fsspec.asyn import sync  # type: ignore[import-untyped]  # loads fsspec

    bucket, key, _ = system.split_path(path)

    async def request() -> tuple[bytes, dict[str, Any]]:
        answer = await system._call_s3("get_object", Bucket=bucket, Key=key, **arguments)
        try:
            if max_bytes is None:
                return await answer["Body"].read(), answer
            data = b""
            while len(data) < max_bytes and (
                part := await answer["Body"].read(min(PART, max_bytes - len(data)))
            ):
                data += part
            return data, answer
        finally:
            answer["Body"].close()

    found: tuple[bytes, dict[str, Any]] = with_retries(sync, system.loop, request, timeout=_LONGEST_REQUEST)
    return found


def list_objects(system: Any, folder: str, *, recursive: bool) -> dict[str, dict[str, Any]]:
    """List the objects of a folder, with the retries of each request.

    Args:
        system: File system of fsspec.
        folder: Path of the folder in this file system.
        recursive: Whether to list the objects in subfolders too. Otherwise, subfolders are listed as such.

    Returns:
        The properties, by path: at least "name", "size" in bytes, and "type" ("file" or "directory"). Empty
        if the folder does not exist. An object at the path itself is not listed.

    Raises:
        FileNotFoundError: The bucket does not exist.
        OSError: A request failed.
    """
    folder = folder.rstrip("/")
    if not speaks_s3(system):
        try:
            found = with_retries(system.find if recursive else system.ls, folder, detail=True)
        except FileNotFoundError:
            return {}
        listed = found.values() if isinstance(found, dict) else found
        return {one["name"]: one for one in listed if one["name"].rstrip("/") != folder}
    bucket, key, _ = system.split_path(folder)
    request = {"Bucket": bucket, "Prefix": f"{key}/" if key else ""} | (
        {} if recursive else {"Delimiter": "/"}
    )
    objects: dict[str, dict[str, Any]] = {}
    while True:
        page = with_retries(system.call_s3, "list_objects_v2", **request)
        for one in page.get("CommonPrefixes", []):
            name = f"{bucket}/{one['Prefix'].rstrip('/')}"
            objects[name] = {"name": name, "size": 0, "type": "directory"}
        for one in page.get("Contents", []):
            name = f"{bucket}/{one['Key']}"
            objects[name] = {**one, "name": name, "size": one["Size"], "type": "file"}
            if "ETag" in one:
                objects[name]["ETag"] = _quoted(one["ETag"])
        if not page.get("IsTruncated"):
            break
        request["ContinuationToken"] = page["NextContinuationToken"]
    return objects


def _quoted(tag: str) -> str:
    """Return a tag as in the answers to other requests; rclone lists tags without their quotes."""
    return f'"{tag}"' if tag and not tag.endswith('"') else tag


def open_object(
    system: Any, path: str, name: str, *, block: int = PART, info: dict[str, Any] | None = None
) -> BufferedReader:
    """Open an object of a file system for reading and seeking.

    Args:
        system: File system of fsspec.
        path: Path in this file system.
        name: Name of the object for error messages.
        block: Bytes per request, 8 MiB by default. The last block is kept in memory.
        info: Properties of the object, if already known. They save a request, and any other version of the
            object is rejected.

    Raises:
        OSError: It cannot be opened or, later, read.
    """
    with add_path_to_error(name):
        if info is None and speaks_s3(system):
            info = object_info(system, path)
        known = {"size": info["size"]} if info is not None and speaks_s3(system) else {}
        opened = with_retries(system.open, path, "rb", block_size=block, cache_type="readahead", **known)
    if known and info is not None:
        opened.details = info
        if info.get("ETag"):  # s3fs omits this condition if the size is given
            opened.read_kw = {**opened.read_kw, "IfMatch": info["ETag"]}
    return BufferedReader(_RetryingReader(opened, name), _BUFFER)


class _RetryingReader(io.RawIOBase):
    """Raw reader of an object opened by fsspec, which retries failed reads."""

    def __init__(self, opened: Any, name: str) -> None:
        self._opened = opened
        self._name = name

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a writable buffer; return the number of bytes, 0 at the end."""
        view = memoryview(buffer).cast("B")
        with add_path_to_error(self._name):
            data: bytes = with_retries(self._opened.read, len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset and return it."""
        return int(self._opened.seek(offset, whence))

    def tell(self) -> int:
        """Return the current offset."""
        return int(self._opened.tell())

    def close(self) -> None:
        """Close the object. Repeated calls have no effect."""
        super().close()
        self._opened.close()
