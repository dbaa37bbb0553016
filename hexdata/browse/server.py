"""The server of the page, on the loopback interface only."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from hexdata.browse.library import BrowseOptions, Library
from hexdata.errors import ConfigError
from hexdata.extras import installed_by
from hexdata.storage import AnyPath
from hexdata.store import Store

if TYPE_CHECKING:
    import uvicorn

LOOPBACK: Final = "127.0.0.1"
_PORT: Final = 8642
"""Port that is tried first, so that copied links are valid the next time."""


def browse_store(
    store: str | AnyPath,
    options: BrowseOptions | None = None,
    *,
    ready: Callable[[str], None] = print,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve a page on this machine that shows the games and positions of a store, until Ctrl-C.

    The store is opened by the first request, and only read.

    Args:
        store: Folder or address of the store.
        options: Port and memory. Default None: the defaults.
        ready: Called once with the address of the page (default: print it).
        note: Called when the store is opened (default: not called).

    Raises:
        ConfigError: The port is in use, or Starlette or uvicorn is not installed.
        StoreError: There is no store.
    """
    with _prepared(store, options or BrowseOptions(), note) as (server, listening, address):
        ready(address)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


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
    library = Library(opened.path, options, note)
    app = make_app(library, opened.path.resolve().name)
    quiet = {"log_level": "error", "access_log": False, "server_header": False}
    # A browser keeps its connections open, so Ctrl-C waits for them at most one second.
    config = uvicorn.Config(app, lifespan="off", ws="none", timeout_graceful_shutdown=1, **quiet)  # type: ignore[arg-type]
    with _listen(options.port) as listening:
        try:
            yield uvicorn.Server(config), listening, f"http://{LOOPBACK}:{listening.getsockname()[1]}/"
        finally:
            library.close()


def _listen(port: int | None) -> socket.socket:
    """Return a socket that listens on the loopback interface."""
    tried = _PORT if port is None else port
    listening = socket.socket()
    # Otherwise, connections of a page that has just ended would block its port for a minute.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, tried))
        # Before the address is printed: requests wait until the server runs.
        listening.listen(128)
    except OSError as error:
        listening.close()
        if port is None and error.errno == errno.EADDRINUSE:
            return _listen(0)
        fault = f"the page cannot be served at this port; found {tried}: {error.strerror}"
        raise ConfigError(fault, hint="Choose another --port.") from error
    return listening
