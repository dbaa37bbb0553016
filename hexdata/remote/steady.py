"""A file system for queries over objects that stay as they are meanwhile: none is asked for twice.

DuckDB asks for an object's size and time whenever it opens one, which it does several times. Only reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import SEEK_SET, BufferedReader
from typing import Any, Final

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

from hexdata.remote.patience import patiently
from hexdata.remote.reading import open_object

__all__ = ["SteadyFileSystem"]

_UNFINISHED: Final = "/."
"""In the key of what lies in a hidden folder, which may change while a query runs."""

_KEPT: Final = ("name", "size", "type", "ETag", "LastModified")
"""Of what is listed, since there may be very many."""


class SteadyFileSystem(AbstractFileSystem):  # type: ignore[misc]  # of which no types are known
    """Reads through another file system, and remembers what that says of objects.

    Of what lies in a hidden folder nothing is remembered. DuckDB turns an exception into its text, so the
    first one is kept as ``failure``.

    Args:
        system: of an object store.
        protocol: by which queries name its objects, as ``s3``: a library may know it by several, of which
            DuckDB would take the first.
    """

    cachable = False

    def __init__(self, system: Any, protocol: str) -> None:
        super().__init__()
        self.protocol = protocol
        self._strip_protocol = system._strip_protocol
        self._system = system
        self.failure: BaseException | None = None
        self._known: dict[str, dict[str, Any]] = {}
        self._listed: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the first exception of those that go through here."""
        try:
            yield
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return what the store says of an object. With the first of a folder, all are listed.

        Raises:
            FileNotFoundError: there is none.
            OSError: the store does not answer.
        """
        with self.watching():
            return self._find(path)

    def _find(self, path: str) -> dict[str, Any]:
        key = self._strip_protocol(path)
        if _UNFINISHED in key:
            found: dict[str, Any] = patiently(self._system.info, key)
            return found
        folder = key.rpartition("/")[0]
        if key not in self._known and folder not in self._listed:
            listed = patiently(self._system.ls, folder, detail=True)
            self._known |= {
                one["name"]: {name: one[name] for name in _KEPT if name in one}
                for one in listed
                if one["type"] == "file"
            }
            self._listed.add(folder)
        if key not in self._known:  # it has been made since, or is not there
            self._known[key] = patiently(self._system.info, key)
        return self._known[key]

    def exists(self, path: str, **_: Any) -> bool:
        """Say whether there is an object.

        Raises:
            OSError: the store does not answer.
        """
        with self.watching():
            try:
                self._find(path)
            except FileNotFoundError:
                return False
            return True

    def modified(self, path: str) -> Any:
        """Return the time of an object."""
        with self.watching():
            return self._find(path).get("LastModified") or patiently(self._system.modified, path)

    def ls(self, path: str, detail: bool = True, **named: Any) -> Any:
        """List a folder, as the store has it now."""
        with self.watching():
            return patiently(self._system.ls, path, detail=detail, **named)

    def glob(self, path: str, **named: Any) -> Any:
        """Return the objects that a pattern means."""
        if any(character in path for character in "*?["):
            with self.watching():
                return patiently(self._system.glob, path, **named)
        return [self._strip_protocol(path)] if self.exists(path) else []

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        """Open an object to be read. Each thread keeps one block of it, whatever the store's default is."""
        if mode != "rb":
            raise NotImplementedError(f"{path}: objects are only read here")
        info = self.info(path)
        return _Shared(self, lambda: open_object(self._system, path, path, info=info))


class _Shared:
    """An open object that threads share: each has its own place in it, and its own block.

    DuckDB seeks and then reads, and several of its threads do so with one handle. Its threads are known by
    their numbers, as what Python keeps for such a thread is gone between two calls.
    """

    def __init__(self, system: SteadyFileSystem, opening: Callable[[], BufferedReader]) -> None:
        self._system = system
        self._opening = opening
        self._opened: dict[int, BufferedReader] = {}

    def _own(self) -> BufferedReader:
        number = threading.get_ident()
        if number not in self._opened:
            self._opened[number] = self._opening()
        return self._opened[number]

    def read(self, size: int = -1) -> bytes:
        """Read so many bytes, or all, from this thread's place on."""
        with self._system.watching():
            return self._own().read(size)

    def seek(self, place: int, whence: int = SEEK_SET) -> int:
        """Go to a place with this thread."""
        with self._system.watching():
            return self._own().seek(place, whence)

    def tell(self) -> int:
        """Return this thread's place."""
        return self._own().tell()

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def close(self) -> None:
        """Let go of the object."""
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()
