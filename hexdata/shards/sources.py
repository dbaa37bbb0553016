"""Where shards are read from: a folder, a web server, the output of a command; object stores are next door.

Opens bytes and says what is wrong with the place they come from. Never looks into them, never writes.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from subprocess import Popen
from typing import IO, Final, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, url2pathname, urlopen

from webdataset.gopen import Pipe, gopen

from hexdata.checks import check_location
from hexdata.errors import ConfigError, StoreError
from hexdata.shards.manifest import MANIFEST_NAME, ShardManifest
from hexdata.shards.member_check import HINT
from hexdata.shards.objects import ObjectSource
from hexdata.shards.source import (
    WHOLE,
    FileStream,
    Part,
    Source,
    check_size,
    expect_end,
    missing,
    unreachable,
)
from hexdata.storage import AnyPath, open_file
from hexdata.storage.address import PROTOCOLS

__all__ = ["CommandSource", "FolderSource", "HttpSource", "load_manifest", "make_source"]

_CHUNK: Final = 1 << 20
_URL: Final = re.compile(r"(pipe|file):|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_FIELD: Final = "{name}"
_GONE: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_BUSY: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)

T = TypeVar("T")


def make_source(place: str | AnyPath) -> Source:
    """Return the source that a path or a URL names.

    ``s3://bucket/shards`` names a folder in an object store, ``https://host/shards`` and other URLs one
    elsewhere; ``pipe:cat /data/{name}`` is a command that writes the shard ``name`` to its standard output.
    A URL too, but for an object store's, may hold ``{name}``, say before a query.

    Raises:
        ConfigError: a pipe without ``{name}``, or an address that cannot be used.
    """
    if isinstance(place, Path):
        return FolderSource(place)
    check_location("store", place)
    place = str(place)
    if not _URL.match(place):
        return FolderSource(Path(place))
    if place.partition(":")[0].lower() in PROTOCOLS:
        return ObjectSource.at(place)
    if place.startswith("file:"):
        return FolderSource(Path(url2pathname(urlsplit(place).path)))
    if place.startswith("pipe:"):
        if _FIELD not in place:
            raise ConfigError(
                "a pipe must say where the shard's name goes",
                found=place,
                hint=f"Write {_FIELD} in its place, as in 'pipe:cat /data/{_FIELD}'.",
            )
        return CommandSource(place)
    template = place if _FIELD in place else f"{place.rstrip('/')}/{_FIELD}"
    return HttpSource(template) if re.match("https?:", place, re.IGNORECASE) else CommandSource(template)


def load_manifest(source: Source) -> ShardManifest:
    """Read and check the manifest of a source.

    Raises:
        StoreError: as ``ShardManifest.load``, or the source fails.
    """
    with source.open(MANIFEST_NAME) as stream:
        data = b"".join(iter(functools.partial(stream.read, _CHUNK), b""))
        stream.finish()
    return ShardManifest.loads(data, source.address(MANIFEST_NAME))


# --- a folder -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderSource:
    """Shards in a local folder."""

    folder: Path

    def address(self, name: str) -> str:
        """Return the path."""
        return str(self.folder / name)

    @contextmanager
    def open(self, name: str, part: Part = WHOLE) -> Iterator[FileStream]:
        """Open the file at byte ``start``; see ``Source``."""
        address = self.address(name)
        try:
            file = open_file(self.folder / name)
        except FileNotFoundError:
            raise missing(name, address) from None
        except OSError as error:
            raise unreachable(address, error) from error
        with file:
            check_size(address, file.seek(0, 2), part.size)
            file.seek(part.start)
            yield FileStream(file, address)

    def find_fault(self, name: str, size: int) -> StoreError | None:
        """Return what is wrong with a file that is missing or has another size, without reading it."""
        try:
            check_size(self.address(name), (self.folder / name).stat().st_size, size)
        except FileNotFoundError:
            return missing(name, self.address(name))
        except OSError as error:
            return unreachable(self.address(name), error)
        except StoreError as error:
            return error
        return None


# --- a web server -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HttpSource:
    """Shards behind a URL with ``{name}`` in it, read with Python's own client.

    A part of a shard is asked for by a Range header; a server that does not know it sends the whole
    shard, and what comes before the part is read for nothing. A connection that breaks is taken up
    again at the byte where it broke.

    Attributes:
        url: the template.
        timeout: seconds without a byte after which a connection counts as broken.
        attempts: how often in a row a request may fail without having brought a byte.
        pause: seconds before the second attempt, twice as many before each further one.
    """

    url: str
    timeout: float = 60.0
    attempts: int = 4
    pause: float = 0.5

    def address(self, name: str) -> str:
        """Return the URL; spaces and letters that a URL cannot have are escaped."""
        return quote(self.url.replace(_FIELD, quote(name)), safe=string.punctuation)

    @contextmanager
    def open(self, name: str, part: Part = WHOLE) -> Iterator[_HttpStream]:
        """Ask the server for the bytes; see ``Source``."""
        stream = _HttpStream(self, name, part)
        try:
            yield stream
        finally:
            stream.close()


class _HttpStream:
    """One file over as many connections as it takes."""

    def __init__(self, source: HttpSource, name: str, part: Part) -> None:
        self._source = source
        self._name = name
        self._address = source.address(name)
        self._part = part
        self._place = part.start
        self._end: int | None = None
        self._response: HTTPResponse | None = None
        self._attempt(self._connect)

    def read(self, size: int, /) -> bytes:
        return self._attempt(functools.partial(self._read, size))

    def finish(self) -> None:
        expect_end(self, self._address)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _attempt(self, action: Callable[[], T]) -> T:
        """Return what the action returns, trying again while the failure may pass."""
        failures = 0
        while True:
            try:
                return action()
            except (OSError, HTTPException, ValueError) as error:  # the last of what is no URL or no number
                self.close()
                failures += 1
                if isinstance(error, HTTPError) and error.code in _GONE:
                    raise missing(self._name, self._address) from None
                if failures >= self._source.attempts or not _may_pass(error):
                    raise unreachable(self._address, error) from error
            time.sleep(self._source.pause * 2 ** (failures - 1))

    def _read(self, size: int) -> bytes:
        response = self._response or self._connect()
        data = response.read(size)
        if not data and self._end is not None and self._place < self._end:
            raise ConnectionError(f"the connection ended at byte {self._place} of {self._end}")
        self._place += len(data)
        return data

    def _connect(self) -> HTTPResponse:
        """Ask for the bytes from the present place on, and go there."""
        headers = {"Accept-Encoding": "identity"}
        stop, size = self._part.stop, self._part.size
        if self._place or stop not in (None, size):
            last = "" if stop is None else stop - 1
            headers["Range"] = f"bytes={self._place}-{last}"
        request = Request(self._address, headers=headers)  # noqa: S310 - make_source lets http(s) through
        response: HTTPResponse = urlopen(request, timeout=self._source.timeout)  # noqa: S310
        self._response = response
        first, self._end, whole = _extent(response)
        check_size(self._address, whole, size)
        left = self._place - first
        if left < 0:
            raise HTTPException(f"asked for byte {self._place}, the server began at {first}")
        while left:
            data = response.read(min(left, _CHUNK))
            if not data:
                raise ConnectionError(f"the connection ended {left} bytes before byte {self._place}")
            left -= len(data)
        return response


def _extent(response: HTTPResponse) -> tuple[int, int | None, int | None]:
    """Return (first byte, end, size of the whole file) of an answer, as far as the server says."""
    part = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
    if response.status == HTTPStatus.PARTIAL_CONTENT and part:
        return int(part[1]), int(part[2]) + 1, None if part[3] == "*" else int(part[3])
    length = response.headers.get("Content-Length")
    size = None if length is None else int(length)
    return 0, size, size


def _may_pass(error: Exception) -> bool:
    """Say whether a request is worth repeating: one that the server refuses, or without sense, is not."""
    if isinstance(error, (ValueError, InvalidURL)):
        return False
    return not isinstance(error, HTTPError) or error.code in _BUSY or error.code >= 500


# --- the output of a command --------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandSource:
    """Shards as a command writes them, and whatever else webdataset's ``gopen`` opens with a command.

    ``pipe:cat /data/{name}`` runs in a shell, with the name quoted; ``gs://bucket/{name}`` runs gsutil,
    and so on. A command gives a whole shard: what comes before a part is read for nothing.
    """

    url: str

    def address(self, name: str) -> str:
        """Return the URL, with the name in it."""
        return self.url.replace(_FIELD, shlex.quote(name) if self.url.startswith("pipe:") else name)

    @contextmanager
    def open(self, name: str, part: Part = WHOLE) -> Iterator[_CommandStream]:
        """Start the command; see ``Source``. Left before its end, it is killed."""
        address = self.address(name)
        stream = _CommandStream(_start(address), address)
        try:
            stream.skip(part.start)
            yield stream
        finally:
            stream.close()


def _start(address: str) -> Pipe:
    """Start the command of a pipe, or that webdataset has for a URL.

    A pipe's is the leader of a group, so that all that its shell has started can be ended with it.
    """
    try:
        if address.startswith("pipe:"):
            command = address.removeprefix("pipe:")
            return Pipe(command, mode="rb", shell=True, start_new_session=True)  # noqa: S604 - as documented
        opened = gopen(address, "rb")
    except (OSError, ValueError) as error:
        raise unreachable(address, error) from error
    if not isinstance(opened, Pipe):
        raise ConfigError("webdataset opens this without a command", found=address, expected="pipe:COMMAND")
    return opened


class _CommandStream:
    """What a command writes.

    webdataset's own ``Pipe`` looks at the exit status when it happens to be there at a read, and takes
    a command that was stopped on purpose for one that failed; so the process is waited for here.
    """

    def __init__(self, opened: Pipe, address: str) -> None:
        self._opened = opened  # which closes its stream when it is collected
        self._process: Popen[bytes] = opened.proc
        self._output: IO[bytes] = opened.stream
        self._address = address

    def read(self, size: int, /) -> bytes:
        return self._output.read(size)

    def skip(self, count: int) -> None:
        """Read ``count`` bytes for nothing."""
        left = count
        while left:
            data = self._output.read(min(left, _CHUNK))
            if not data:
                self.finish()
                raise StoreError(
                    "a shard is cut", path=self._address, found=f"{count - left} bytes", hint=HINT
                )
            left -= len(data)

    def finish(self) -> None:
        expect_end(self, self._address)
        status = self._process.wait()
        if status:
            raise StoreError(
                "the command that gives the shard failed",
                path=self._address,
                found=f"exit status {status}",
                expected=0,
                hint="Run it in a shell to see why.",
            )

    def close(self) -> None:
        if self._process.poll() is None:
            if os.getpgid(self._process.pid) == self._process.pid:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._output.close()
        self._process.wait()
