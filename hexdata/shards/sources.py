"""Sources of shards: a folder, on this machine or in an object store; a web server; or a command.

All are read as streams from an offset. A cache in front of a source is in ``cache``.
"""

from __future__ import annotations

import os
import re
import shlex
import string
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Thread
from typing import IO, Any, Final, NoReturn
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from hexdata.checks import check_location
from hexdata.errors import ConfigError, StoreError, without_secrets
from hexdata.retry import RetryPolicy
from hexdata.shards.manifest import MANIFEST_NAME, REPAIR_HINT
from hexdata.storage import AnyPath, as_path, storage_of
from hexdata.storage.address import credentials_error
from hexdata.store import Store
from hexdata.store.commands import manifest_kind, no_store_error
from hexdata.system import kill_group

_WEB: Final = ("http:", "https:")
_REQUEST_BYTES: Final = 8 << 20
"""Bytes per request to an object store."""
_READ_ERRORS: Final = (OSError, HTTPException, ValueError)
"""Errors of reading a source. A ValueError reports an invalid URL or header."""
_WAIT: Final = 60.0
_BYTES_PER_SECOND: Final = 4096
"""Seconds that a remote file may take, and the slowest rate at which its bytes may arrive."""
REMOTE_CHUNK: Final = 3 << 16
"""Bytes of a remote file that are awaited at once: fewer than must arrive within ``_WAIT``."""
_TIMEOUT: Final = 13.0
"""Seconds without a byte after which a connection to a web server counts as broken."""
_RETRY: Final = RetryPolicy(attempts=8, first_wait=0.5, longest_wait=5.0)
"""Attempts of a connection or a read. A read that succeeds starts a new count."""


@dataclass(frozen=True)
class ShardSource:
    """A folder of shards and their manifest. Picklable; keeps no file open.

    ``pipe:cat /data/{name}`` runs in a shell, with the name quoted. The command writes a whole shard: the
    bytes before a part are discarded.

    Attributes:
        location: Local folder; address of a folder in an object store; or a URL of a web server or a command,
            with ``{name}`` in place of the file name.
    """

    location: Path | str = field(repr=False)

    @property
    def folder(self) -> AnyPath | None:
        """The folder, local or in an object store; None for a URL or a command.

        It is made again at each use, since connections cannot be used after a fork.
        """
        has_name = isinstance(self.location, str) and self.location.startswith(("pipe:", *_WEB))
        return None if has_name else as_path(self.location)

    @property
    def is_local(self) -> bool:
        """Whether the shards are in a local folder."""
        return isinstance(self.location, Path)

    def address(self, name: str) -> str:
        """Return the path or URL of a file for messages, or the program of a command and the file's name."""
        if self.is_local:
            return str(Path(self.location, name))
        if str(self.location).startswith("pipe:"):
            return f"{without_secrets(str(self.location))} {name}"
        return f"{self.location}/{name}" if self.folder is not None else without_secrets(self._url(name))

    def _url(self, name: str) -> str:
        """Return the URL of a file. Spaces and non-ASCII characters are escaped."""
        # Punctuation stays, because the user has written a URL, whose
        # escapes and queries must not be escaped again.
        return quote(str(self.location).replace("{name}", quote(name)), safe=string.punctuation)

    def open(
        self, name: str, start: int = 0, stop: int | None = None, *, size: int | None = None
    ) -> ByteStream:
        """Open a file for reading. The stream is a context manager, which closes it or kills the command.

        Args:
            name: Plain file name.
            start: Offset of the first byte. Sources that can seek do not read the bytes before it.
            stop: Offset at which the caller stops reading; None for the end of the file (default). A hint for
                sources that request ranges: the stream may continue after it.
            size: Expected size of the whole file, if the source states it in advance. Default None: any.

        Raises:
            StoreError: The file is missing, has another size, or cannot be opened.
        """
        folder = self.folder
        if folder is None and str(self.location).startswith(_WEB):
            return _WebFile(self, name, start, self._url(name), stop, size)
        if folder is None:
            # Names come from a manifest, which may be a stranger's:
            # quoted, they cannot be part of the command.
            command = str(self.location).removeprefix("pipe:").replace("{name}", shlex.quote(name))
            return _Command(self, name, start, command)
        # A small part is fetched by one small request.
        length = _REQUEST_BYTES if stop is None else min(stop - start, _REQUEST_BYTES)
        try:
            file = storage_of(folder / name).open(block=length)
            # Seeking reads nothing, and finds a truncated shard before its bytes are fetched.
            found = file.seek(0, os.SEEK_END)
            file.seek(start)
        except _READ_ERRORS as error:
            self.fail(name, error)
        if size not in (None, found):
            file.close()
            raise altered_shard_error(self.address(name), f"{found} bytes", size)
        return ByteStream(self, name, start, file)

    def fail(self, name: str, error: Exception) -> NoReturn:
        """Raise the error for a file that cannot be read.

        Raises:
            StoreError: Always.
        """
        address, hint = self.address(name), "Check the address and whether the file can be read."
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            found = str(error) or repr(error)
            fault = StoreError("a file cannot be read", path=address, found=found, hint=hint)
        elif name != MANIFEST_NAME:
            fault = StoreError("the shard is missing", path=address, hint=REPAIR_HINT)
        elif isinstance(self.location, Path):
            fault = no_store_error(self.location, "a store or a folder of shards")
        else:
            hint = "Give the address of the folder that contains the manifest.json of the shards."
            fault = StoreError("no shard manifest", path=address, hint=hint)
        # The cause of an error is shown with it, so it is left out where it may contain a URL with secrets.
        raise fault from (None if self.folder is None else error)


class ByteStream(AbstractContextManager["ByteStream"]):
    """The bytes of one file, from some offset to its end. A context manager that closes the file.

    Args:
        source: Source of the file.
        name: Name of the file.
        start: The offset.
        file: The open file, whose next byte is that at ``start``; None if it is opened later.
    """

    def __init__(
        self, source: ShardSource, name: str, start: int, file: IO[bytes] | HTTPResponse | None
    ) -> None:
        self._source = source
        self._name = name
        self._file = file
        self._offset = start
        """Offset of the next byte to return."""
        self._at = start
        """Offset of the next byte that arrives. Those before the other offset are dropped."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, size: int, /) -> bytes:
        """Return ``size`` bytes, or fewer at the end of the file.

        Raises:
            StoreError: The source failed.
        """
        parts: list[bytes] = []
        stop = self._offset + size
        try:
            while self._offset < stop and (data := self._receive(stop - self._offset)):
                self._at += len(data)
                if self._at > self._offset:
                    self._offset = self._at
                    parts.append(data)
        except _READ_ERRORS as error:
            self._source.fail(self._name, error)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def finish(self) -> None:
        """Check that all bytes have been read, and that a command has succeeded.

        Raises:
            StoreError: There are more bytes, or the command that writes them failed.
        """
        if self.read(1):
            raise altered_shard_error(self._source.address(self._name), "more bytes")

    def close(self) -> None:
        """Close the file, or the connection or the process that sends it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _receive(self, size: int) -> bytes:
        """Return the next bytes that arrive, at most ``size``."""
        assert self._file is not None
        return self._file.read(size)


def make_source(location: str | AnyPath) -> ShardSource:
    """Return the source for a folder of shards.

    Args:
        location: Path of a local folder; address of a folder in an object store, ``s3://bucket/shards``; URL
            of a folder on a web server, ``https://host/shards``; or a command that writes the file
            ``{name}`` to its standard output, ``pipe:cat /data/{name}``. A web URL may also contain
            ``{name}``, for example before a query; without it, the name is appended.

    Raises:
        ConfigError: A pipe does not contain ``{name}``, or the address cannot be used.
    """
    check_location("store", location)
    text = str(location)
    scheme = re.match(r"(?i)(pipe|https?):", text)
    # A Path is local, even if its name begins like a URL.
    if scheme is None or isinstance(location, Path):
        folder = as_path(location)
        return ShardSource(folder if isinstance(folder, Path) else str(folder).rstrip("/"))
    text = scheme[0].lower() + text[scheme.end() :]
    if text.startswith("pipe:"):
        if "{name}" not in text:
            raise ConfigError("a pipe needs {name} in place of the shard's name", found=text)
        return ShardSource(text)
    with suppress(ValueError):  # of a bracket without its other one, or a port out of range
        parts = urlsplit(text)
        # Unquoted, because %40 may hide the @.
        if "@" in unquote(parts.netloc):
            raise credentials_error("a user and a password do")
        if parts.hostname and parts.port != 0:
            return ShardSource(text if "{name}" in text else f"{text.rstrip('/')}/{{name}}")
    raise ConfigError("the address has no valid host and port", found=text)


def find_source(location: str | AnyPath) -> ShardSource | Store:
    """Return the source of the shards of a store, or of a folder of shards; or a store without shards.

    Warns if a store has changed since its shards were written.

    Args:
        location: A store, local or in an object store; or as for :func:`make_source`.

    Raises:
        ConfigError: The location cannot be used.
    """
    source = make_source(location)
    folder = source.folder
    # A location may be a store, whose shards are in a folder of it, or the folder of the shards itself.
    if folder is None or (kind := manifest_kind(folder)) == "shards":
        return source
    shards = make_source(folder / "shards")
    # A damaged store stays an error, even if its shards could be read.
    if kind != "store" and manifest_kind(folder / "shards") == "shards":
        return shards  # the tables of the store were not copied
    store = Store.open(folder)
    if "export" not in store.manifest.stages:
        return store
    for stage in ("shuffle", "export"):
        try:
            store.require_stage(stage)
        except StoreError as error:
            # The shards themselves are complete, so training goes on with the older positions.
            warnings.warn(str(error), stacklevel=4)
    return shards


def altered_shard_error(address: str, found: object, expected: object = None) -> StoreError:
    """Return the error for a shard of which the size or the digest is wrong."""
    return StoreError(
        "the shard is truncated or altered", path=address, found=found, expected=expected, hint=REPAIR_HINT
    )


# --- files that arrive slowly -------------------------------------------------------------------------


class _TooSlowError(TimeoutError):
    """A source sends bytes, but too slowly. A repetition would not help."""


class _SlowFile(ByteStream):
    """A file that is read from front to back, in a limited time, without the pauses of the reader."""

    _waited = 0.0
    _received = 0

    def _receive(self, size: int) -> bytes:
        # Of the bytes before the offset, which are dropped, or of those from there on.
        return super()._receive(min((self._offset - self._at) or size, REMOTE_CHUNK))

    def _in_time(self, read: Callable[[int], bytes], size: int) -> bytes:
        """Return the next bytes, for which ``read`` may wait.

        It runs in a thread of its own, which is left alone if it takes too long: no timeout of the system
        covers a server that sends headers byte by byte, or a command on Windows.

        Raises:
            _TooSlowError: Reading has taken too long.
        """
        result: Future[bytes] = Future()

        def run() -> None:
            try:
                result.set_result(read(size))
            except BaseException as error:  # noqa: BLE001 - raised in the other thread
                result.set_exception(error)

        begun = time.monotonic()
        Thread(target=run, daemon=True).start()
        # The time for all bytes so far, less what was spent waiting.
        wait([result], _WAIT + self._received / _BYTES_PER_SECOND - self._waited)
        self._waited += time.monotonic() - begun
        if not result.done():
            raise _TooSlowError(f"only {self._received:,} bytes in {self._waited:.0f} s")
        data = result.result()
        self._received += len(data)
        return data


class _Command(_SlowFile):
    """The standard output of a command, which is killed when it is closed, with its child processes."""

    def __init__(self, source: ShardSource, name: str, start: int, command: str) -> None:
        # The shell leads a new process group, so that all processes that it starts can be killed with it.
        # Without a buffer, whose lock a thread that still reads would hold when the pipe is closed.
        self._process = Popen(command, shell=True, stdout=PIPE, bufsize=0, start_new_session=True)  # noqa: S602 - as documented
        super().__init__(source, name, start, self._process.stdout)
        self._at = 0

    def finish(self) -> None:
        super().finish()
        if status := self._process.wait():
            reason, hint = "the command that writes the shard failed", "Run it in a shell to see the reason."
            address = self._source.address(self._name)
            raise StoreError(reason, path=address, found=f"exit status {status}", expected=0, hint=hint)

    def close(self) -> None:
        """Kill the command if it still runs."""
        with self._process:  # closes the pipe at last, and waits
            if self._process.poll() is None:
                # A part was read, and the command still writes the rest.
                kill_group(self._process)

    def _receive(self, size: int) -> bytes:
        return self._in_time(super()._receive, size)


class _WebFile(_SlowFile):
    """A file on a web server, over one or more connections.

    A part is requested with a Range header, which a server may ignore or refuse. A broken connection is
    resumed at the byte where it broke.
    """

    def __init__(
        self, source: ShardSource, name: str, start: int, url: str, stop: int | None, size: int | None
    ) -> None:
        super().__init__(source, name, start, None)
        self._url, self._stop, self._size = url, stop, size
        self._ranges = True
        """Whether parts are requested; False after such a request was refused."""

    def _receive(self, size: int) -> bytes:
        return _RETRY.call(partial(self._attempt, size), is_temporary=_is_temporary)

    def _attempt(self, size: int) -> bytes:
        try:
            return self._in_time(self._read, size)
        except _TooSlowError:
            self._file = None  # a thread still reads from it
            raise
        except HTTPError as error:
            error.close()  # it holds the connection of the refused request
            if error.code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                raise FileNotFoundError from None
            if self._range is None or _is_temporary(error):
                raise
            self._ranges = False
            return self._attempt(size)
        except BaseException:
            self.close()
            raise

    def _read(self, size: int) -> bytes:
        response = self._file = self._file or self._connect()
        data = super()._receive(size)
        # http.client returns nothing at a broken connection, as at the end, but bytes are still missing.
        if not data and isinstance(response, HTTPResponse) and response.length:
            raise ConnectionError(f"the connection ended at byte {self._at}")
        return data

    @property
    def _range(self) -> str | None:
        """The bytes to request; None for a whole file, which needs no range."""
        if not self._ranges or (not self._offset and self._stop is None):
            return None
        return f"bytes={self._offset}-{'' if self._stop is None else self._stop - 1}"

    def _connect(self) -> HTTPResponse:
        """Request the bytes from the current offset on, and return the response."""
        # Not compressed: offsets and sizes are those of the file.
        headers = {"Accept-Encoding": "identity"} | ({"Range": self._range} if self._range else {})
        request = Request(self._url, headers=headers)  # noqa: S310 - ``make_source`` has checked the scheme
        response: HTTPResponse = build_opener(_Redirects).open(request, timeout=_TIMEOUT)
        self._file = response  # which is closed after an error
        sent = re.match(r"bytes (\d+)-\d+/(\d*)", response.headers.get("Content-Range", ""))
        if sent and response.status == HTTPStatus.PARTIAL_CONTENT:
            self._at, total = int(sent[1]), sent[2] and int(sent[2])
        else:
            self._at, total = 0, response.length
        if total and total != (self._size or total):
            raise altered_shard_error(self._source.address(self._name), f"{total} bytes", self._size)
        # Earlier bytes can be dropped, missing ones not be made up.
        if self._at > self._offset:
            raise HTTPException(f"byte {self._offset} was requested, the response starts at {self._at}")
        return response


def _is_temporary(error: BaseException) -> bool:
    """Return whether a request may succeed if repeated: not if it is invalid or the server refuses it."""
    if isinstance(error, ValueError | InvalidURL | _TooSlowError | FileNotFoundError):
        return False
    if isinstance(error, HTTPError):
        if error.code == HTTPStatus.NOT_IMPLEMENTED:  # as some servers answer a Range header
            return False
        return error.code in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or error.code >= 500
    # An HTTPException itself is one of this module: what the server sends is not what was requested.
    return isinstance(error, OSError | HTTPException) and type(error) is not HTTPException


class _Redirects(HTTPRedirectHandler):
    """Follows redirections to web servers only, without reading their content."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        """Return the request for the new address; raise if it is not that of a web server, such as file:."""
        fp.close()  # the base class reads the answer to its end if it is open
        if not newurl.startswith(_WEB):
            raise HTTPException(f"the server redirects to {newurl.partition(':')[0]}:")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
