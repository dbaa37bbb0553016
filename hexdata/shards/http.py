"""Shards on a web server, read with Python's own HTTP client."""

from __future__ import annotations

import functools
import io
import re
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from typing import Any, Final, NamedTuple, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from hexdata.errors import StoreError, without_secrets
from hexdata.retry import RetryPolicy, copy_attempts
from hexdata.shards.sources import (
    WHOLE_FILE,
    ByteRange,
    Pace,
    TooSlowError,
    check_file_size,
    check_stream_end,
    discard_bytes,
    missing_file_error,
    unreadable_file_error,
)
from hexdata.storage import READ_TIMEOUT, REQUESTS, log_retry

__all__ = ["HttpSource"]

_MISSING: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_ERRORS: Final = (OSError, HTTPException, ValueError)
"""Errors of requests. A ValueError reports an invalid URL or header."""
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_MAX_REDIRECTS: Final = 5
_MAX_HEADERS: Final = 1 << 20
"""Maximum bytes before the content of a response."""
_BUSY: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)

T = TypeVar("T")


@dataclass(frozen=True)
class HttpSource:
    """Shards behind a URL that contains ``{name}``.

    A part of a shard is requested with a Range header. If the server ignores it and sends the whole shard,
    the bytes before the part are read and discarded. A broken connection is resumed at the byte where it
    broke.

    Attributes:
        url: URL with ``{name}`` in place of the file name.
        timeout: Seconds without a byte after which a connection counts as broken.
        retry: Retries of a connection or a read. A read that succeeds starts a new count.
    """

    url: str = field(repr=False)
    timeout: float = READ_TIMEOUT
    retry: RetryPolicy = REQUESTS

    def address(self, name: str) -> str:
        """Return the URL of a file for messages, without its query."""
        return without_secrets(self.url_of(name))

    def url_of(self, name: str) -> str:
        """Return the URL of a file. Spaces and non-ASCII characters are escaped."""
        return quote(self.url.replace("{name}", quote(name)), safe=string.punctuation)

    @contextmanager
    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> Iterator[_HttpStream]:
        """Request a file; see :meth:`ShardSource.open`."""
        stream = _HttpStream(self, name, part)
        try:
            yield stream
        finally:
            stream.close()


class _TimedFile(io.RawIOBase):
    """The bytes of a connection, which end if the server sends them too slowly or too many headers."""

    def __init__(self, file: io.RawIOBase, pace: Pace) -> None:
        self._file, self._pace = file, pace
        self.limit: int | None = _MAX_HEADERS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        begun = time.monotonic()
        count = self._file.readinto(buffer) or 0
        self._pace.add(begun, count)
        if self.limit is not None:
            self.limit -= count
            if self.limit < 0:
                raise HTTPException(f"the headers have more than {_MAX_HEADERS:,} bytes")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(HTTPResponse):
    """A response that is read with a :class:`Pace`."""

    def __init__(self, sock: Any, *args: Any, pace: Pace, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self._timed = _TimedFile(sock.makefile("rb", buffering=0), pace)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        """Read the headers."""
        super().begin()
        self._timed.limit = None


class _NoRedirects(HTTPRedirectHandler):
    """Leaves redirections to :meth:`_HttpStream._request`: urllib would follow them to FTP servers."""

    def _refuse(self, *_: Any) -> None:
        """Return None, after which urllib raises an HTTPError."""

    http_error_301 = http_error_302 = http_error_303 = http_error_307 = http_error_308 = _refuse  # type: ignore[assignment]


def _open(request: Request, timeout: float, pace: Pace) -> HTTPResponse:
    """Send a request and return the response, whose headers and content are read with ``pace``."""

    class Response(_Response):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, pace=pace, **named)

    class Plain(HTTPConnection):
        response_class = Response

    class Secure(HTTPSConnection):
        response_class = Response

    class PlainHandler(HTTPHandler):
        def http_open(self, req: Request) -> HTTPResponse:
            return self.do_open(Plain, req)

    class SecureHandler(HTTPSHandler):
        def https_open(self, req: Request) -> HTTPResponse:
            return self.do_open(Secure, req)

    opener = build_opener(_NoRedirects, PlainHandler, SecureHandler)
    response: HTTPResponse = opener.open(request, timeout=timeout)
    return response


class _HttpStream:
    """The bytes of one file, over one or more connections."""

    def __init__(self, source: HttpSource, name: str, part: ByteRange) -> None:
        self._source = source
        self._name = name
        self._address, self._url = source.address(name), source.url_of(name)
        self._pace = Pace(source.retry.deadline)
        self._part = part
        self._offset = part.start
        self._stop: int | None = None
        """Offset at which the current response ends, if the server states it."""
        self._response: HTTPResponse | None = None
        self._retry(self._connect)

    def read(self, size: int, /) -> bytes:
        return self._retry(functools.partial(self._read, size))

    def finish(self) -> None:
        check_stream_end(self, self._address)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _retry(self, action: Callable[[], T]) -> T:
        """Return the result of an action, which is repeated after a temporary failure."""

        def attempt() -> T:
            try:
                return action()
            except BaseException as error:
                if isinstance(error, HTTPError):
                    error.close()  # it holds the connection of the refused request
                self.close()
                raise

        def log(message: str) -> None:
            log_retry(f"{self._address}: {message}")

        try:
            return self._source.retry.call(attempt, is_temporary=_is_temporary, log=log)
        except _ERRORS as error:
            failed = self._error(error)
        raise failed  # not within the handler: the text of the cause may contain the URL

    def _error(self, error: Exception) -> StoreError:
        if isinstance(error, HTTPError) and error.code in _MISSING:
            return missing_file_error(self._name, self._address)
        found = unreadable_file_error(self._address, error)
        copy_attempts(found, error)
        return found

    def _read(self, size: int) -> bytes:
        response = self._response or self._connect()
        data = response.read1(size)
        if not data and self._stop is not None and self._offset < self._stop:
            raise ConnectionError(f"the connection ended at byte {self._offset} of {self._stop}")
        self._offset += len(data)
        return data

    def _connect(self) -> HTTPResponse:
        """Request the bytes from the current offset on, and return the response at that offset."""
        headers = {"Accept-Encoding": "identity"}
        stop, size = self._part.stop, self._part.file_size
        if self._offset or stop not in (None, size):
            last = "" if stop is None else stop - 1
            headers["Range"] = f"bytes={self._offset}-{last}"
        response = self._response = self._request(headers)
        sent = _sent_range(response)
        self._stop = sent.stop
        check_file_size(self._address, sent.file_size, size)
        if sent.start > self._offset:
            raise HTTPException(f"byte {self._offset} was requested, the response starts at {sent.start}")
        missing = discard_bytes(response.read1, self._offset - sent.start)
        if missing:
            raise ConnectionError(f"the connection ended {missing} bytes before byte {self._offset}")
        return response

    def _request(self, headers: dict[str, str]) -> HTTPResponse:
        """Return the response to a request, after at most five redirections to web servers."""
        url = self._url
        for _ in range(_MAX_REDIRECTS + 1):
            try:
                request = Request(url, headers=headers)  # noqa: S310 - the schemes are checked
                return _open(request, self._source.timeout, self._pace)
            except HTTPError as error:
                target = error.headers.get("Location")
                if error.code not in _REDIRECTS or target is None:
                    raise
                error.close()
            url = quote(urljoin(url, target), safe=string.punctuation)
            if urlsplit(url).scheme not in ("http", "https"):
                raise HTTPException(f"the server redirects to {urlsplit(url).scheme}:")
        raise HTTPException(f"the server redirects more than {_MAX_REDIRECTS} times")


class _SentRange(NamedTuple):
    """The bytes of a file in a response; None where the server does not state a number."""

    start: int
    stop: int | None
    file_size: int | None


def _sent_range(response: HTTPResponse) -> _SentRange:
    part = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
    if response.status == HTTPStatus.PARTIAL_CONTENT and part:
        return _SentRange(int(part[1]), int(part[2]) + 1, None if part[3] == "*" else int(part[3]))
    length = response.headers.get("Content-Length")
    size = None if length is None else int(length)
    return _SentRange(0, size, size)


def _is_temporary(error: BaseException) -> bool:
    """Return whether a request may succeed if repeated: not if it is invalid or the server refuses it."""
    if isinstance(error, (ValueError, InvalidURL, TooSlowError)) or type(error) is HTTPException:
        return False
    if not isinstance(error, (OSError, HTTPException)):
        return False
    return not isinstance(error, HTTPError) or error.code in _BUSY or error.code >= 500
