"""A server or command that never ends, or sends a byte at a time, neither fills memory nor stops a loader."""

from __future__ import annotations

import itertools
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from hexdata.errors import HexdataError
from hexdata.loader import Loader
from hexdata.retry import RetryPolicy
from hexdata.shards import reader, sources

OK = b"HTTP/1.1 200 OK\r\n"
BLOCK = b"[" * (1 << 16)


def drip(data: bytes) -> Iterator[bytes]:
    """Yield bytes, ten in a second."""
    for byte in data:
        time.sleep(0.1)
        yield bytes([byte])


def redirect(target: str) -> bytes:
    """Return the headers of a redirection."""
    return f"HTTP/1.1 302 Found\r\nLocation: {target}\r\n".encode()


ANSWERS: dict[str, Callable[[], Iterator[bytes]]] = {
    "endless content": lambda: itertools.chain([OK + b"\r\n"], itertools.repeat(BLOCK)),
    "endless content that claims to end": lambda: itertools.chain(
        [OK + b"Content-Length: 999999999999\r\n\r\n"], itertools.repeat(BLOCK)
    ),
    "endless chunks": lambda: itertools.chain(
        [OK + b"Transfer-Encoding: chunked\r\n\r\n"], itertools.repeat(b"10000\r\n" + BLOCK + b"\r\n")
    ),
    "endless header": lambda: itertools.chain([OK + b"X: "], itertools.repeat(BLOCK)),
    "endless headers": lambda: itertools.chain([OK], itertools.repeat(b"X: y\r\n")),
    "endless interim responses": lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "slow content": lambda: itertools.chain([OK + b"\r\n"], drip(BLOCK)),
    "slow headers": lambda: drip(OK + b"X: y\r\n" * 1000),
    "silence": lambda: iter([b""]),
    "endless error": lambda: itertools.chain([b"HTTP/1.1 500 No\r\n\r\n"], itertools.repeat(BLOCK)),
    "redirection to itself": lambda: iter([redirect("/x") + b"Content-Length: 0\r\n\r\n"]),
    "redirection with endless content": lambda: itertools.chain(
        [redirect("/x") + b"\r\n"], itertools.repeat(BLOCK)
    ),
    "redirection to a file": lambda: iter([redirect("file:///etc/hostname") + b"\r\n"]),
    "redirection to FTP": lambda: iter([redirect("ftp://127.0.0.1:9/x") + b"\r\n"]),
}
COMMANDS = {
    "endless command": "pipe:yes # {name}",
    "endless zeros": "pipe:cat /dev/zero # {name}",
    "silent command": "pipe:sleep 100 # {name}",
    "silent command that leaves its process group": "pipe:setsid sleep 100 # {name}",
    "slow command": "pipe:while echo '['; do sleep 0.1; done # {name}",
}


@contextmanager
def serving(answer: Callable[[], Iterator[bytes]]) -> Iterator[tuple[str, list[int]]]:
    """Serve one answer to every request; yield the address, and a list with an item for each request."""
    requests: list[int] = []
    ended = threading.Event()

    def handle(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            requests.append(1)
            for data in answer():
                connection.sendall(data)
                if ended.is_set():
                    return
            if answer is ANSWERS["silence"]:
                ended.wait(300)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                connection.settimeout(300)
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/shards", requests
        finally:
            ended.set()
            listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each read a part of a second, and the manifest 5 MB."""
    monkeypatch.setattr(sources, "_WAIT", 0.4)
    monkeypatch.setattr(sources, "_TIMEOUT", 0.4)
    monkeypatch.setattr(sources, "_RETRY", RetryPolicy(attempts=2, first_wait=0.0))
    monkeypatch.setattr(reader, "MAX_JSON_BYTES", 5_000_000)


def require_an_error(location: str) -> str:
    """Require that a loader fails soon and in little memory; return the message."""
    begun = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(HexdataError) as caught:
            Loader(location)
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begun < 90
    return str(caught.value)


@pytest.mark.parametrize("name", ANSWERS)
def test_every_read_from_a_server_ends(name: str) -> None:
    with serving(ANSWERS[name]) as (address, requests):
        require_an_error(address)
        assert len(requests) <= 2 * 6  # attempts, each with five redirections


@pytest.mark.parametrize("name", COMMANDS)
def test_every_read_from_a_command_ends(name: str) -> None:
    require_an_error(COMMANDS[name])


def test_a_redirection_is_followed_at_most_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_WAIT", 300.0)
    monkeypatch.setattr(sources, "_TIMEOUT", 300.0)
    with serving(ANSWERS["redirection to itself"]) as (address, requests):
        assert "infinite loop" in require_an_error(address)
        assert len(requests) <= 6
