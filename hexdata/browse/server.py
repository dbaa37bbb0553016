"""The server of the page, on the loopback interface only."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hexdata.browse.library import BrowseLimits, Library
from hexdata.checks import check_fields
from hexdata.errors import ConfigError
from hexdata.extras import installed_by
from hexdata.storage import AnyPath
from hexdata.store import Store

if TYPE_CHECKING:
    import uvicorn

__all__ = ["BrowseOptions", "browse_store", "serving"]

LOOPBACK: Final = "127.0.0.1"
_PORT: Final = 8642
"""Port that is tried first, so that copied links are valid the next time."""


@dataclass(frozen=True)
class BrowseOptions:
    """Options of :func:`browse_store`.

    Attributes:
        port: Port of the page, 0 for any free one. Default None: 8642, or any free one if it is in use.
        memory: Total memory in bytes. Default 1 GB.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The memory is too small.
    """

    port: int | None = None
    memory: int = 1_000_000_000

    def __post_init__(self) -> None:
        check_fields(self, {"port": 0, "memory": 0})
        if self.port is not None and self.port > 65_535:
            raise ConfigError("port is too large", found=self.port, expected="at most 65535")
        BrowseLimits(self.memory)


def browse_store(
    store: str | AnyPath,
    options: BrowseOptions | None = None,
    *,
    ready: Callable[[str], None] = print,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve a page on this machine that shows the games and positions of a store, until Ctrl-C.

    The index of the store is built in the background if there is none in the cache folder. The store is only
    read.

    Args:
        store: Folder or address of the store.
        options: Port and memory. Default None: the defaults.
        ready: Called once with the address of the page (default: print it).
        note: Called with each step of building the index (default: not called).

    Raises:
        ConfigError: The port is in use, or Starlette or uvicorn is not installed.
        StoreError: There is no store.
    """
    with _prepared(store, options or BrowseOptions(), note) as (server, listening, address):
        ready(address)
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            return


@contextmanager
def serving(store: str | AnyPath, options: BrowseOptions | None = None) -> Iterator[str]:
    """Serve the page from a thread while the context is open, and yield its address.

    Raises:
        ConfigError, StoreError: As for :func:`browse_store`.
    """
    with _prepared(store, options or BrowseOptions(port=0), lambda _: None) as (server, listening, address):
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield address
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _prepared(
    store: str | AnyPath, options: BrowseOptions, note: Callable[[str], None]
) -> Iterator[tuple[uvicorn.Server, socket.socket, str]]:
    with installed_by("browse", "the page of a store"):
        import uvicorn
    from hexdata.browse.app import make_app

    opened = Store.open(store)
    library = Library(opened.path, BrowseLimits(options.memory), note)
    config = uvicorn.Config(
        make_app(library, opened.path.resolve().name),
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    with _listen(options.port) as listening:
        try:
            library.start()
            yield uvicorn.Server(config), listening, f"http://{LOOPBACK}:{listening.getsockname()[1]}/"
        finally:
            library.close()


def _listen(port: int | None) -> socket.socket:
    """Return a socket that listens on the loopback interface."""
    for tried in (_PORT, 0) if port is None else (port,):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((LOOPBACK, tried))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if port is not None or error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    "the page cannot be served at this port",
                    found=f"{tried}: {error.strerror}",
                    hint="Choose another --port.",
                ) from error
            continue
        return listening
    raise AssertionError("port 0 is always free")
