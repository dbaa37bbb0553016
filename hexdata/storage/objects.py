"""Objects of an object store, through fsspec, whose client libraries repeat requests after temporary errors.

S3 compares tags itself, both when objects are read and when they are written (``If-Match``,
``If-None-Match``). In other stores tags are compared here before a write.
"""

from __future__ import annotations

import email.utils
import errno
import functools
import hashlib
import io
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hexdata.errors import StoreError
from hexdata.retry import RetryPolicy
from hexdata.storage.address import cache_folder
from hexdata.storage.errors import ONE_WRITER, Changed, ObjectStoreError, as_object_error, code_of
from hexdata.storage.local import HashingFile, Version
from hexdata.storage.lock import LOCK_NAME, hold_lease
from hexdata.temporary import temporary_folder

if TYPE_CHECKING:
    from upath import UPath

# S3 accepts parts of 5 MiB or more. Each open object keeps one such block in memory.
PART: Final = 8 << 20
"""Bytes per request and per uploaded part."""
_BUFFER: Final = 1 << 17
"""Bytes per read from the block that is in memory."""
_PARTS_AT_A_TIME: Final = 2
"""Limits the memory of an upload."""
# Longer than the six attempts of the S3 client, about a minute, so that its error is reported.
_SECONDS: Final = 120.0
"""Seconds that a request may take, with its repetitions, in addition to those for its bytes."""
_BYTES_PER_SECOND: Final = 100_000
_CONFLICTS: Final = RetryPolicy(attempts=8, first_wait=0.1, longest_wait=5.0)
"""Attempts to write while another conditional request for the same object is running."""
_CONFLICT: Final = "ConditionalRequestConflict"
_NOT_MET: Final = ("PreconditionFailed", "412", "409", "NoSuchKey", "404", "NoSuchUpload")
"""Error codes for a condition that is not met. A missing upload was completed by an earlier attempt."""

T = TypeVar("T")


@dataclass(frozen=True)
class ObjectStorage:
    """An object, or the objects below a prefix that ends with a slash. See :class:`LocalStorage`."""

    path: UPath

    @property
    def local(self) -> None:
        """None: an object has no local path."""

    # --- requests -------------------------------------------------------------------------------------

    @property
    def _is_s3(self) -> bool:
        return self.path.protocol == "s3"

    def _ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the file system of fsspec with this path."""
        with as_object_error(self.path):
            return getattr(file_system(self.path), method)(self.path.path, *arguments, **named)

    def _ask_s3(self, method: str, *, size: int, **arguments: Any) -> dict[str, Any]:
        """Send a request for this object with the S3 client; return the answer, with its content as ``data``.

        Args:
            method: Method of the client.
            size: Bytes that are sent or received.
            arguments: Arguments besides the bucket and the key.
        """
        from aiohttp import ClientPayloadError
        from fsspec.asyn import sync  # type: ignore[import-untyped]  # loads fsspec

        system = file_system(self.path)
        bucket, _, key = str(self.path.path).partition("/")

        async def request() -> dict[str, Any]:
            # botocore repeats requests, but not those whose answer, content or error, breaks off.
            for is_last in (False, False, True):
                answer: dict[str, Any] = {}
                try:
                    answer = dict(await system._call_s3(method, Bucket=bucket, Key=key, **arguments))
                    if "Body" in answer:
                        async with answer["Body"] as body:
                            answer["data"] = await body.read()
                    return answer
                except Exception as error:
                    if is_last or not (answer or isinstance(error, ClientPayloadError)):
                        raise
            raise AssertionError

        with as_object_error(self.path):
            return dict(sync(system.loop, request, timeout=_seconds(size)))

    def info(self) -> dict[str, Any]:
        """Return the properties of the object, such as "size".

        Raises:
            FileNotFoundError: There is no such object. S3 needs one request also then.
        """
        if self._is_s3:
            answer = self._ask_s3("head_object", size=0)
            return {**answer, "size": answer["ContentLength"]}
        found: dict[str, Any] = self._ask("info")
        if found["type"] != "file":  # objects below the address
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        return found

    def listing(self, *, recursive: bool) -> dict[str, dict[str, Any]]:
        """Return the properties of the objects below the address, by their names relative to it, sorted.

        An object at the address itself has an empty name if there is none below.

        Args:
            recursive: Whether to list objects in subfolders; otherwise, subfolders are listed as such.
        """
        try:
            found = self._ask("find" if recursive else "ls", detail=True)
        except FileNotFoundError:
            return {}
        infos = found.values() if isinstance(found, dict) else found
        own = str(self.path.path).rstrip("/")
        if found and list(found) == [own]:
            return {"": found[own]}
        return {
            info["name"].removeprefix(f"{own}/"): info
            for info in sorted(infos, key=lambda info: str(info["name"]))
            if info["name"].startswith(f"{own}/") and info["name"] != f"{own}/"
        }

    # --- properties -----------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return whether the object, or any object below it, exists."""
        with suppress(FileNotFoundError):
            return bool(self._ask("info"))
        return False

    def size(self) -> int | None:
        """Return the size of the object in bytes, or None if there is no such object."""
        with suppress(FileNotFoundError):
            return int(self.info()["size"])
        return None

    def version(self) -> Version | None:
        """Return the tag of the object; None if it does not exist or has none."""
        with suppress(FileNotFoundError):
            if tag := tag_of(self.info()):
                return Version(tag)
        return None

    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of the objects below the address, by relative name, sorted.

        Empty objects that mark a folder are omitted.
        """
        return {
            name: int(one["size"])
            for name, one in self.listing(recursive=True).items()
            if one["type"] == "file" and (one["size"] or not name.endswith("/"))
        }

    def names(self) -> list[str]:
        """Return the names directly below the address, sorted."""
        return [name.rstrip("/") for name in self.listing(recursive=False)]

    # --- reading --------------------------------------------------------------------------------------

    def open(self, *, block: int = PART) -> BufferedReader:
        """Open one version of the object for reading and seeking, with ``block`` bytes per request."""
        info = self.info()
        # With the tag: from S3, all parts are of the version that was opened, or the request fails.
        read = functools.partial(self.read_version, tag_of(info))
        return BufferedReader(ObjectReader(read, int(info["size"]), block), _BUFFER)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of the object, or fewer if it is shorter."""
        return self._read(start, stop)[0]

    def read_tagged(self, max_bytes: int) -> tuple[bytes, str | None]:
        """Return at most ``max_bytes`` bytes of the object, and the tag of its version for :meth:`put`."""
        return self._read(0, max_bytes)

    def read_version(self, tag: str | None, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of the version with a tag, which must have them.

        Raises:
            ObjectStoreError: The object has been replaced, or the request failed.
        """
        data = self._read(start, stop, tag)[0] if start < stop else b""
        if len(data) != stop - start:
            found = f"{len(data):,} of {stop - start:,} bytes from {start:,} on: the object was replaced"
            raise ObjectStoreError(errno.EIO, found, str(self.path))
        return data

    def _read(self, start: int, stop: int, tag: str | None = None) -> tuple[bytes, str | None]:
        """Return a range of the object and its tag; of S3, of the version with the given tag only."""
        if not self._is_s3:
            tag = tag_of(self.info())  # before the bytes: if replaced meanwhile, ``put`` refuses the tag
            return self._ask("cat_file", start=start, end=stop), tag
        part = {"Range": f"bytes={start}-{stop - 1}"} | ({"IfMatch": tag} if tag else {})
        try:
            answer = self._ask_s3("get_object", size=stop - start, **part)
        except OSError as error:
            if code_of(error) not in ("InvalidRange", "416"):
                raise
            return b"", tag_of(self.info())  # the object ends before
        return answer["data"], tag_of(answer)

    # --- writing --------------------------------------------------------------------------------------

    @contextmanager
    def publish(self, *, replace: bool = True, sync: bool = True) -> Iterator[HashingFile]:  # noqa: ARG002
        """Write a temporary local file and upload it. The client sends checksums, which the store compares.

        Args:
            replace: Whether to overwrite an existing object with other content (default: True). False
                protects an object from a process that has lost the store's lock without noticing.
            sync: No effect.

        Raises:
            StoreError: Another object exists and ``replace`` is false.
        """
        with temporary_folder("upload", cache_folder("temporary")) as folder:
            local = folder / "object"
            # The object is uploaded when it is complete, so that an error of the caller publishes nothing.
            with HashingFile(io.FileIO(local, "x")) as file:
                yield file
                size = file.tell()
            options: dict[str, Any] = {}
            if self._is_s3:
                options = {"chunksize": PART, "max_concurrency": _PARTS_AT_A_TIME}
                options |= {"mode": "overwrite" if replace else "create", "timeout": _seconds(size)}
            try:
                # Only the S3 client has a condition for uploads, the mode "create".
                if not (replace or self._is_s3) and self.exists():
                    raise Changed(str(self.path))
                self._write_if_unchanged(lambda: self._upload(local, **options))
            except Changed:  # by an attempt whose answer was lost, a killed run, or another process
                with self.open() as stored:
                    is_same = hashlib.file_digest(stored, "sha256").hexdigest() == file.sha256
                if not is_same:
                    reason = "the object differs from what was written"
                    raise StoreError(reason, path=self.path, hint=ONE_WRITER) from None

    def _upload(self, local: Path, **options: Any) -> None:
        with as_object_error(self.path):
            file_system(self.path).put_file(str(local), self.path.path, **options)

    def put(self, data: bytes, tag: str | None) -> str | None:
        """Put a small object if the stored version still has the given tag; return the new tag.

        In a store other than S3, another process can still write between the comparison of the tags and the
        put.

        Args:
            data: New content.
            tag: Expected tag, or None if no object may exist.

        Raises:
            Changed: The store has another version.
            OSError: The request failed.
        """
        try:
            if self._is_s3:
                condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
                put = functools.partial(self._ask_s3, "put_object", size=len(data), Body=data, **condition)
                return tag_of(self._write_if_unchanged(put))
            if self.version() != (Version(tag) if tag else None):
                raise Changed(str(self.path))
            self._ask("pipe_file", data)
            return tag_of(self.info())
        except Changed:
            with suppress(FileNotFoundError):
                current, new_tag = self.read_tagged(len(data) + 1)  # a longer object must differ
                if current == data:
                    return new_tag  # written by an earlier attempt whose answer was lost
            raise

    def _write_if_unchanged(self, request: Callable[[], T]) -> T:
        """Return the result of a request that writes the object on a condition.

        Raises:
            Changed: The condition is not met.
        """
        try:
            return _CONFLICTS.call(request, is_temporary=lambda error: code_of(error) == _CONFLICT)
        except OSError as error:
            if code_of(error) in _NOT_MET:
                raise Changed(str(self.path)) from error
            raise

    # --- locking --------------------------------------------------------------------------------------

    def lock(self, stage: str, _folders: Iterable[str]) -> AbstractContextManager[Callable[[], None]]:
        """Hold a lease. See :meth:`LocalStorage.lock`."""
        return hold_lease(self.path, ObjectStorage(self.path / LOCK_NAME), stage)

    def age(self) -> float:
        """Return the age of the object in seconds, by the store's own clock if it is available."""
        if not self._is_s3:
            return float(time.time() - self._ask("modified").timestamp())
        found = self._ask_s3("head_object", size=0)
        now = email.utils.parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        return float((now - found["LastModified"]).total_seconds())

    # --- removing -------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove the object if it exists."""
        with suppress(FileNotFoundError):
            self._ask("rm_file")

    def remove_tree(self, require: Callable[[], None] | None = None) -> None:
        """Remove all objects below the address."""
        for name in filter(None, self.listing(recursive=True)):
            if require is not None:
                require()
            ObjectStorage(self.path / name).remove()

    def remove_unfinished(self, folders: Iterable[str] | None = None) -> None:
        """Do nothing: unfinished uploads in parts are left to a lifecycle rule of the bucket."""


def file_system(path: UPath) -> Any:
    """Return the fsspec file system of a path. s3fs repeats nothing itself, because botocore does."""
    system = path.fs
    system.retries = 1
    return system


def tag_of(info: dict[str, Any]) -> str | None:
    """Return the tag in the properties of an object, or None if there is none."""
    if tag := info.get("ETag"):
        return '"' + str(tag).strip('"') + '"'  # rclone lists tags without their quotes
    found = info.get("etag") or info.get("generation") or info.get("created")
    return None if found is None else str(found)


def _seconds(size: int) -> float:
    """Return the time that a request may take. aiohttp waits forever for a server that stops reading."""
    return _SECONDS + size / _BYTES_PER_SECOND


class ObjectReader(io.RawIOBase):
    """Reads one version of an object, ahead by one block.

    Args:
        read: Returns the bytes from an offset to another.
        size: Size of the object.
        block: Bytes to request in addition to those that are asked for.
        user: Returns the user of the reader, each of whom has an offset and a block. Default: always 0.
    """

    def __init__(
        self, read: Callable[..., bytes], size: int, block: int = PART, user: Callable[[], int] = int
    ) -> None:
        from fsspec.caching import ReadAheadCache  # type: ignore[import-untyped]  # loads fsspec

        self._size = size
        self._user = user
        self._offsets: dict[int, int] = {}
        self._blocks: dict[int, Any] = defaultdict(lambda: ReadAheadCache(block, read, size))

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset."""
        return self._offsets.get(self._user(), 0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._offsets[self._user()] = start + offset
        return start + offset

    def readinto(self, buffer: Any) -> int:
        """Fill a writable buffer from the offset on; return the number of bytes."""
        start = self.tell()
        stop = max(start, min(start + len(buffer), self._size))
        if stop > start:
            buffer[: stop - start] = self._blocks[self._user()]._fetch(start, stop)
        self._offsets[self._user()] = stop
        return stop - start

    def close(self) -> None:
        """Release the blocks."""
        self._blocks.clear()
        super().close()
