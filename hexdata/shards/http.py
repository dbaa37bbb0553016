"""Shards on a web server, read with Python's own HTTP client."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse, InvalidURL
from typing import Final, NamedTuple, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from hexdata.retry import RetryPolicy
from hexdata.shards.sources import (
    WHOLE_FILE,
    ByteRange,
    check_file_size,
    check_stream_end,
    discard_bytes,
    missing_file_error,
    unreadable_file_error,
)
from hexdata.storage import READ_TIMEOUT, REQUESTS

__all__ = ["HttpSource"]

_MISSING: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
_ERRORS: Final = (OSError, HTTPException, ValueError)
"""Errors of requests. A ValueError reports an invalid URL or header."""
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

    url: str
    timeout: float = READ_TIMEOUT
    retry: RetryPolicy = REQUESTS

    def address(self, name: str) -> str:
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


class _HttpStream:
    """The bytes of one file, over one or more connections."""

    def __init__(self, source: HttpSource, name: str, part: ByteRange) -> None:
        self._source = source
        self._name = name
        self._address = source.address(name)
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

        try:
            return self._source.retry.call(attempt, is_temporary=_is_temporary)
        except _ERRORS as error:
            if isinstance(error, HTTPError) and error.code in _MISSING:
                raise missing_file_error(self._name, self._address) from None
            raise unreadable_file_error(self._address, error) from error

    def _read(self, size: int) -> bytes:
        response = self._response or self._connect()
        data = response.read(size)
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
        request = Request(self._address, headers=headers)  # noqa: S310 - make_source passes only http(s)
        response: HTTPResponse = urlopen(request, timeout=self._source.timeout)  # noqa: S310
        self._response = response
        sent = _sent_range(response)
        self._stop = sent.stop
        check_file_size(self._address, sent.file_size, size)
        if sent.start > self._offset:
            raise HTTPException(f"byte {self._offset} was requested, the response starts at {sent.start}")
        missing = discard_bytes(response.read, self._offset - sent.start)
        if missing:
            raise ConnectionError(f"the connection ended {missing} bytes before byte {self._offset}")
        return response


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
    if isinstance(error, (ValueError, InvalidURL)) or not isinstance(error, (OSError, HTTPException)):
        return False
    return not isinstance(error, HTTPError) or error.code in _BUSY or error.code >= 500
