"""Objects of an object store, through fsspec, with retries."""

from __future__ import annotations

import email.utils
import errno
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hexdata.storage.base import Changed, HashingFile, HeldLock, Storage, Tagged
from hexdata.storage.cache_dir import cache_folder
from hexdata.storage.conditions import current_tag, guards_writes, tag_of, write_if_unchanged
from hexdata.storage.errors import add_path_to_disk_full, add_path_to_error
from hexdata.storage.lock import LOCK_NAME, Lease, kernel_lock, machine_id
from hexdata.storage.reading import (
    PART,
    file_system,
    get_object,
    list_objects,
    object_info,
    open_object,
    speaks_s3,
)
from hexdata.storage.retry import code_of, is_temporary, with_retries
from hexdata.storage.upload import abort_uploads, upload
from hexdata.temporary import remove_abandoned, temporary_folder

if TYPE_CHECKING:
    from upath import UPath

__all__ = ["ObjectStorage"]

_KEYS_PER_REMOVAL: Final = 1000
"""Maximum number of objects that S3 removes with one request."""


@dataclass(frozen=True)
class ObjectStorage(Storage):
    """An object, or the objects below a prefix that ends with a slash."""

    path: UPath
    memory: ClassVar[int] = 48 << 20
    keeps_work: ClassVar[bool] = False

    @property
    def _system(self) -> Any:
        return file_system(self.path)

    def exists(self) -> bool:
        """Return whether the object, or any object below it, exists."""
        try:
            object_info(self._system, self.path.path)
        except FileNotFoundError:
            return False
        return True

    def size(self) -> int | None:
        """Return the size of the object in bytes, or None if there is no such object."""
        try:
            return int(object_info(self._system, self.path.path, folders=False)["size"])
        except FileNotFoundError:
            return None

    def is_folder(self) -> bool:
        """Return False: objects below an address do not prevent an object at this address."""
        return False

    def version(self) -> str:
        """Return the tag or version number, else size and time; empty if the object does not exist."""
        try:
            info = object_info(self._system, self.path.path, folders=False)
        except FileNotFoundError:
            return ""
        return tag_of(info) or f"{info['size']} {info.get('LastModified') or info.get('created')}"

    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of the objects below the address, by relative name, sorted."""
        root = self.path.path.rstrip("/")
        found = list_objects(self._system, root, recursive=True)
        if not found and (size := self.size()) is not None:
            return {"": size}
        sizes = {
            key.removeprefix(f"{root}/"): info["size"]
            for key, info in found.items()
            if info["type"] == "file" and not key.endswith("/")
        }
        return dict(sorted(sizes.items()))

    def names(self) -> list[str]:
        """Return the names directly below the address, sorted."""
        root = self.path.path.rstrip("/")
        found = list_objects(self._system, root, recursive=False)
        return sorted(name for key in found if (name := key.removeprefix(f"{root}/")))

    def free_space(self) -> None:
        """Return None: an object store has no limit."""

    def work_path(self, name: str, purpose: str) -> Path:  # noqa: ARG002
        """Return the folder of this address in the cache folder for ``purpose``."""
        return cache_folder(purpose, self.path)

    def open(self, *, block: int = PART) -> BufferedReader:
        """Open the object for reading and seeking, with ``block`` bytes per request."""
        return open_object(self._system, self.path.path, str(self.path), block=block)

    def blocks(self) -> Iterator[bytes]:
        """Yield the content in blocks of 8 MiB, with one request for each."""
        system, path = self._system, self.path.path
        if not speaks_s3(system):
            yield from super().blocks()
            return
        with add_path_to_error(self.path):
            try:
                data, answer = get_object(system, path, Range=f"bytes=0-{PART - 1}")
            except OSError as error:
                if _is_empty_range(error):  # the object is empty
                    return
                raise
            size = int(answer.get("ContentRange", f"/{len(data)}").rpartition("/")[2])
            condition = {"IfMatch": answer["ETag"]} if answer.get("ETag") else {}
            offset = 0
            while data:
                yield data
                offset += len(data)
                if offset == size:
                    return
                end = min(offset + PART, size) - 1
                data = get_object(system, path, Range=f"bytes={offset}-{end}", **condition)[0]
            raise OSError(errno.EIO, f"the answer ends after {offset:,} of {size:,} bytes")

    @property
    def local(self) -> None:
        """None: an object has no local path."""

    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of the object, or fewer if it is shorter."""
        with add_path_to_error(self.path):
            found: bytes = with_retries(self._system.cat_file, self.path.path, start=start, end=stop)
        return found

    def read_tail(self, count: int) -> bytes:
        """Return the last ``count`` bytes of the object, or all if it is shorter."""
        system, path = self._system, self.path.path
        with add_path_to_error(self.path):
            if not speaks_s3(system):
                found: bytes = with_retries(system.tail, path, count)
                return found
            try:
                return get_object(system, path, Range=f"bytes=-{count}")[0]
            except OSError as error:
                if not _is_empty_range(error):
                    raise
            return get_object(system, path)[0][-count:]  # it is empty, or, for rclone, shorter

    def read_tagged(self, max_bytes: int) -> Tagged:
        """Read the object, at most ``max_bytes``, and the tag of its version."""
        if speaks_s3(self._system):
            data, answer = get_object(self._system, self.path.path, max_bytes)
            return Tagged(data, tag_of(answer))
        return with_retries(self._read_tagged, max_bytes)  # type: ignore[no-any-return]

    def _read_tagged(self, max_bytes: int) -> Tagged:
        info = object_info(self._system, self.path.path)
        tag = tag_of(info)
        part = {"start": 0, "end": max_bytes} if info["size"] > max_bytes else {}
        data: bytes = self._system.cat_file(self.path.path, **part)
        if tag_of(self._system.info(self.path.path)) != tag:
            raise TimeoutError(f"{self.path}: replaced while it was being read")
        return Tagged(data, tag)

    @contextmanager
    def publish(self, *, replace: bool = True, sync: bool = True) -> Iterator[HashingFile]:  # noqa: ARG002
        """Write a temporary local file, upload it and compare the object with it. ``sync`` has no effect."""
        with temporary_folder("upload", cache_folder("temporary")) as folder, add_path_to_disk_full(folder):
            local = folder / "object"
            with local.open("xb") as opened, HashingFile(opened) as file:
                yield file
            upload(local, self.path, replace=replace)

    def put(self, data: bytes, tag: str | None) -> str | None:
        """Put a small object if the stored version still has the given tag; return the new tag.

        Stores with the S3 protocol check this themselves. In a store without conditional puts the tag is
        compared first, so another process can still write between the comparison and the put.

        Raises:
            Changed: The store has another version.
            OSError: The request failed.
        """
        system, path = self._system, self.path.path

        def request(condition: dict[str, str]) -> str | None:
            if speaks_s3(system):
                bucket, key, _ = system.split_path(path)
                put = with_retries(
                    system.call_s3, "put_object", Bucket=bucket, Key=key, Body=data, **condition
                )
                return str(put["ETag"])
            with_retries(system.pipe_file, path, data)
            return current_tag(system, path)

        try:
            return write_if_unchanged(system, path, tag, request)
        except Changed:
            try:
                current = self.read_tagged(len(data) + 1)  # a longer object must differ
            except FileNotFoundError:
                current = None
            if current is None or current.data != data:
                raise
            return current.tag  # written by an earlier attempt whose response was lost

    def append(self, line: bytes, *, max_bytes: int) -> None:
        """Replace the object by its last ``max_bytes`` bytes and the line."""
        try:
            before = self.read_tail(max_bytes)
        except FileNotFoundError:
            before = b""
        with self.publish() as file:
            file.write(before + line)

    def extend(self, data: bytes, size: int) -> bool:  # noqa: ARG002
        """Return False: an object cannot be extended."""
        return False

    @contextmanager
    def lock(self, stage: str, folders: Iterable[str], *, shares_work: bool) -> Iterator[HeldLock]:  # noqa: ARG002
        """Hold a lease, and a kernel lock that shows at once when a process of this machine has ended."""
        folder = cache_folder("locks")
        folder.mkdir(parents=True, exist_ok=True)
        with kernel_lock(cache_folder("locks", self.path), self.path, stage):
            machine = machine_id(folder)
            work = "store" if shares_work else machine
            file = ObjectStorage(self.path / LOCK_NAME)
            lease = Lease(self.path, file, file.age, file.guards_writes, stage, machine, work)
            with lease.held():
                yield HeldLock(lease.require, lease.has_current_work)

    def guards_writes(self, data: bytes) -> bool:
        """Return whether the store rejects writes of this object if their condition is not met.

        Args:
            data: Current content of the object, which is written again if the store ignores conditions.
        """
        return guards_writes(self._system, self.path.path, data)

    def age(self) -> float:
        """Return the age of the object in seconds, by the store's own clock if it is available."""
        if not speaks_s3(self._system):
            return float(time.time() - with_retries(self._system.modified, self.path.path).timestamp())
        bucket, key, _ = self._system.split_path(self.path.path)
        found = with_retries(self._system.call_s3, "head_object", Bucket=bucket, Key=key)
        now = email.utils.parsedate_to_datetime(found["ResponseMetadata"]["HTTPHeaders"]["date"])
        return float((now - found["LastModified"]).total_seconds())

    def find_writer(self) -> None:
        """Return None: a reader cannot tell a current lease from one that has just ended."""

    def remove(self, before_request: Callable[[], None] = lambda: None) -> None:
        """Remove the object if it exists. ``UPath.unlink`` would interpret the name as a pattern."""

        def request() -> None:
            before_request()
            self._system.rm_file(self.path.path)

        try:
            with_retries(request)
        except FileNotFoundError:
            return

    def remove_tree(
        self,
        before_request: Callable[[], None] = lambda: None,
        *,
        durable: bool = False,  # noqa: ARG002
        known: Iterable[str] = (),
    ) -> None:
        """Remove all objects below the address, with one request for many objects if the store allows it."""
        root = self.path.path.rstrip("/")
        listed = [key for key in list_objects(self._system, self.path.path, recursive=True) if key]
        keys = list(dict.fromkeys([*listed, *(f"{root}/{name}" for name in known)]))
        if not speaks_s3(self._system):
            for key in keys:
                ObjectStorage(self.path / key.removeprefix(root).lstrip("/")).remove(before_request)
            return
        for start in range(0, len(keys), _KEYS_PER_REMOVAL):
            self._remove_keys(keys[start : start + _KEYS_PER_REMOVAL], before_request)

    def _remove_keys(self, keys: list[str], before_request: Callable[[], None]) -> None:
        """Remove objects of an S3 store with one request."""
        bucket = self._system.split_path(self.path.path)[0]
        names = [{"Key": key.removeprefix(f"{bucket}/")} for key in keys]

        def request() -> None:
            before_request()
            answer = self._system.call_s3(
                "delete_objects", Bucket=bucket, Delete={"Objects": names, "Quiet": True}
            )
            for error in answer.get("Errors", []):
                number = errno.EACCES if error.get("Code") == "AccessDenied" else errno.EIO
                raise OSError(number, f"{error.get('Key')}: {error.get('Code')}: {error.get('Message')}")

        with add_path_to_error(self.path):
            with_retries(request)
        self._system.invalidate_cache()

    def remove_unfinished(self, folders: Iterable[str] | None = None) -> None:  # noqa: ARG002
        """Abort unfinished uploads, and remove the local files of uploads of killed processes."""
        remove_abandoned(cache_folder("temporary"))
        abort_uploads(self.path)

    def unreplaceable(self) -> list[str]:
        """Return the relative names of the objects below the address."""
        root = self.path.path.rstrip("/")
        found = list_objects(self._system, root, recursive=True)
        return sorted(key.removeprefix(f"{root}/") for key in found if not key.endswith("/"))

    def query_filesystem(self) -> Any:
        """Return a read-only file system that caches the properties of objects."""
        from hexdata.storage.query_filesystem import QueryFileSystem  # loads fsspec

        return QueryFileSystem(self._system, self.path.protocol)

    def is_temporary(self, error: BaseException) -> bool:
        """Return whether the object store may answer later, so that nothing is known about the object."""
        return is_temporary(error)


def _is_empty_range(error: OSError) -> bool:
    """Return whether a store has no byte of a requested range."""
    return code_of(error) in ("InvalidRange", "416")
