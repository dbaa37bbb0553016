"""Shards in an object store (``s3://…``, ``gs://…``, ``az://…``), read a range of bytes at a time.

Requests are retried after temporary errors. The client library takes credentials from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

from hexdata.shards.sources import (
    WHOLE_FILE,
    ByteRange,
    check_file_size,
    check_stream_end,
    missing_file_error,
    unreadable_file_error,
)
from hexdata.storage import RemotePath, as_path, file_system, object_info, with_retries

__all__ = ["ObjectSource"]

_REQUEST_BYTES: Final = 8 << 20
"""Bytes per request. After a broken connection, the whole request is repeated."""


@dataclass(frozen=True)
class ObjectSource:
    """Shards in a folder of an object store.

    Attributes:
        folder: Address of the folder.
    """

    folder: str
    _opened: tuple[int, RemotePath] | None = field(default=None, init=False, repr=False, compare=False)
    """Process id and path of the folder. A connection cannot be used after a fork."""

    @classmethod
    def of(cls, folder: RemotePath) -> ObjectSource:
        """Return the source of a folder, with the connections of its path."""
        source = cls(str(folder))
        source._keep_open(folder)
        return source

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the connections."""
        return {**self.__dict__, "_opened": None}

    @property
    def path(self) -> RemotePath:
        """The folder as a path, opened once per process; its threads share the connections."""
        if self._opened is None or self._opened[0] != os.getpid():
            path = cast(RemotePath, as_path(self.folder))
            self._keep_open(path)
            return path
        return self._opened[1]

    def _keep_open(self, path: RemotePath) -> None:
        file_system(path)
        object.__setattr__(self, "_opened", (os.getpid(), path))

    def address(self, name: str) -> str:
        """Return the address of an object."""
        return f"{self.folder.rstrip('/')}/{name}"

    @contextmanager
    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> Iterator[_ObjectStream]:
        """Request the size of an object, then its bytes as they are read; see :meth:`ShardSource.open`."""
        yield _ObjectStream(self.path / name, name, self.address(name), part)


class _ObjectStream:
    """The bytes of one object."""

    def __init__(self, path: RemotePath, name: str, address: str, part: ByteRange) -> None:
        self._system = file_system(path)
        self._key = path.path
        self._address = address
        try:
            self._size = int(object_info(self._system, self._key)["size"])
        except FileNotFoundError:
            raise missing_file_error(name, address) from None
        except OSError as error:
            raise unreadable_file_error(address, error) from error
        check_file_size(address, self._size, part.file_size)
        self._stop = self._size if part.stop is None else min(part.stop, self._size)
        self._offset = part.start
        """Offset of the next request."""
        self._unread = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        if not self._unread and self._offset < self._size:
            self._unread = memoryview(self._request())
            self._offset += len(self._unread)
        data, self._unread = bytes(self._unread[:size]), self._unread[size:]
        return data

    def finish(self) -> None:
        check_stream_end(self, self._address)

    def _request(self) -> bytes:
        """Return the next bytes: up to the end of the part, or, after it, to the end of the object."""
        end = self._stop if self._offset < self._stop else self._size
        try:
            data: bytes = with_retries(self._get, self._offset, min(end, self._offset + _REQUEST_BYTES))
        except OSError as error:
            raise unreadable_file_error(self._address, error) from error
        return data

    def _get(self, start: int, stop: int) -> bytes:
        data: bytes = self._system.cat_file(self._key, start=start, end=stop)
        if len(data) != stop - start:
            raise ConnectionError(
                f"{len(data)} bytes received, {stop - start} requested, from byte {start} on"
            )
        return data
