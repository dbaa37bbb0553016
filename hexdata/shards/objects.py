"""Shards in an object store: ``s3://…``, ``gs://…``, ``az://…``, read a range of bytes at a time.

Asks again while an error may pass. Never writes, and never keeps or tells a credential: the store's own
library finds those in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hexdata.errors import ConfigError
from hexdata.shards.source import WHOLE, Part, check_size, expect_end, missing, unreachable
from hexdata.storage import RemotePath, as_path, file_system, patiently

__all__ = ["ObjectSource"]

_RANGE: Final = 8 << 20
"""Bytes that are asked for at once, and asked for again where a connection breaks in the middle of them."""


@dataclass(frozen=True)
class ObjectSource:
    """Shards in a folder of an object store.

    Attributes:
        folder: its address.
    """

    folder: str
    _opened: tuple[int, RemotePath] | None = field(default=None, init=False, repr=False, compare=False)
    """The process that opened it, as what it opened is of no use after a fork, and the folder."""

    @classmethod
    def at(cls, address: str) -> ObjectSource:
        """Return the source at an address.

        Raises:
            ConfigError: it is no address, or the library for it is not installed.
        """
        if "{" in address:
            raise ConfigError(
                "an address in an object store has no {name}", found=address, hint="Give the folder alone."
            )
        return cls(str(as_path(address)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what is open."""
        return {**self.__dict__, "_opened": None}

    def address(self, name: str) -> str:
        """Return the object's address."""
        return f"{self.folder.rstrip('/')}/{name}"

    @contextmanager
    def open(self, name: str, part: Part = WHOLE) -> Iterator[_ObjectStream]:
        """Ask for the object's size, and then for its bytes as they are read; see ``Source``."""
        yield _ObjectStream(self._path / name, name, self.address(name), part)

    @property
    def _path(self) -> RemotePath:
        """The folder, opened once in each process: its threads share the connections."""
        if self._opened is None or self._opened[0] != os.getpid():
            path = as_path(self.folder)
            assert not isinstance(path, Path)
            file_system(path)
            object.__setattr__(self, "_opened", (os.getpid(), path))
            return path
        return self._opened[1]


class _ObjectStream:
    """One object, from some byte on."""

    def __init__(self, path: RemotePath, name: str, address: str, part: Part) -> None:
        self._system = file_system(path)
        self._key = path.path
        self._address = address
        try:
            self._size = int(patiently(self._system.info, self._key)["size"])
        except FileNotFoundError:
            raise missing(name, address) from None
        except OSError as error:
            raise unreachable(address, error) from error
        check_size(address, self._size, part.size)
        self._stop = self._size if part.stop is None else min(part.stop, self._size)
        self._next = part.start
        self._range = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        if not self._range and self._next < self._size:
            self._range = memoryview(self._ask())
            self._next += len(self._range)
        data, self._range = bytes(self._range[:size]), self._range[size:]
        return data

    def finish(self) -> None:
        expect_end(self, self._address)

    def _ask(self) -> bytes:
        """Return the next range, up to the end of what is wanted: that may be passed, but seldom is."""
        end = self._stop if self._next < self._stop else self._size
        try:
            data: bytes = patiently(self._get, self._next, min(end, self._next + _RANGE))
        except OSError as error:
            raise unreachable(self._address, error) from error
        return data

    def _get(self, start: int, stop: int) -> bytes:
        data: bytes = self._system.cat_file(self._key, start=start, end=stop)
        if len(data) != stop - start:
            raise ConnectionError(f"{len(data)} bytes came of {stop - start} from byte {start} on")
        return data
