"""Incremental decompression of one gzipped or plain file, within limits.

Every reader of a format that may be gzipped uses this module, so that all are protected against gzip bombs.
"""

from __future__ import annotations

import codecs
import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from zlib_ng import zlib_ng

from hexdata.errors import FormatError, Reason

_INPUT: Final = 1 << 16
"""Compressed bytes that are read at a time."""
_BUFFER: Final = 1 << 14
"""Bytes of the read buffer of a text."""
_OUTPUT: Final = 1 << 18
"""Maximum number of decompressed bytes of one step, which bounds the memory that a gzip bomb takes."""
_SMALLER: Final = {_OUTPUT: 1 << 9, 1 << 9: 1}
"""Size of the next steps after one that met damage: few are short, as each takes about a microsecond."""


@dataclass(frozen=True)
class GunzipLimits:
    """Limits on the decompression of one file; each format sets its own."""

    decompressed_bytes: int
    """``limit-size``: maximum size of the decompressed file in bytes."""
    ratio: int
    """``limit-ratio``: maximum ratio of decompressed to compressed bytes, checked above ``ratio_floor``.
    Gzip cannot exceed 1,032, the ratio of a gzip bomb."""
    ratio_floor: int
    """Number of decompressed bytes up to which any ratio is accepted."""

    def check_sizes(self, decompressed: int, compressed: int) -> None:
        """Raise a FormatError, "limit-size" or "limit-ratio", if a file, or its beginning, exceeds it."""
        if decompressed > self.decompressed_bytes:
            raise FormatError(f"more than {self.decompressed_bytes:,} decompressed bytes", Reason.LIMIT_SIZE)
        if decompressed > max(self.ratio_floor, self.ratio * compressed):
            reason = f"more than {decompressed:,} bytes, compressed at more than {self.ratio}:1"
            raise FormatError(reason, Reason.LIMIT_RATIO, expected="a lower ratio, as that of training data")


def is_gzip(head: bytes) -> bool:
    """Return whether a file is gzipped, from its first two bytes or more."""
    return head.startswith(b"\x1f\x8b")


def is_utf16(head: bytes) -> bool:
    """Return whether a text begins with a byte order mark of UTF-16."""
    return head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def has_returns(text: bytes) -> bool:
    """Return whether carriage returns alone separate the lines of a text, or of its beginning or end."""
    lines = text.rstrip() if b"\r" in text else b""
    return b"\r" in lines and b"\n" not in lines and b"\0" not in lines


def has_lines(head: bytes) -> bool:
    """Return whether the bytes of a text are its lines, so that a part of it can be read alone."""
    return not (is_gzip(head) or is_utf16(head))


class GunzipFile(io.RawIOBase):
    """A gzipped or plain file, open for reading. Gzip is detected from the first bytes.

    Consecutive gzip members are read as one stream, zero padding after the last one is ignored, and the
    checksums are verified.

    Args:
        raw: The file, open at its beginning. It is closed together with this object.
        limits: Limits on the decompressed size and on the compression ratio.
        salvage: If True, all bytes that can be decompressed before damage are returned. A damaged file is
            read three times.

    Attributes:
        offset: Number of decompressed bytes read so far.
    """

    def __init__(self, raw: io.BufferedReader, limits: GunzipLimits, *, salvage: bool = False) -> None:
        self._limits, self._raw, self._salvage = limits, raw, salvage
        # The reader of zlib decompresses into the buffer of the caller.
        self._reader: Any = zlib_ng._GzipReader(raw, _INPUT) if is_gzip(raw.peek(2)) else raw
        self._step = _OUTPUT
        self._passed = 0  # bytes to pass over, which the first reader returned
        self._damage: FormatError | None = None
        self.offset = 0

    def readable(self) -> bool:
        """Return True, as ``io.RawIOBase`` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read up to ``len(buffer)`` bytes into a writable buffer and return their number.

        Raises:
            FormatError: "truncated", "corrupt-gzip", "limit-size" or "limit-ratio".
            OSError: The file below cannot be read.
        """
        return self._read(memoryview(buffer).cast("B"))

    def _read(self, view: memoryview, count: int = 0) -> int:
        """Read decompressed bytes into a buffer, which has ``count`` of them, and return their number."""
        try:
            while self._passed:
                size = self._reader.readinto(bytearray(min(self._passed, _OUTPUT)))
                if not size:
                    raise EOFError  # the file was cut meanwhile
                self._passed -= size
            while count < len(view) and self._damage is None:
                size = self._reader.readinto(view[count : count + self._step])
                count += size
                if not size or self._step == _OUTPUT:
                    break
        except (EOFError, zlib_ng.error, zlib.error, gzip.BadGzipFile) as error:  # type: ignore[misc]  # hidden in its stub
            if self._salvage and self._step > 1:
                # A call of zlib that meets damage loses the bytes that it has decompressed before it, so the
                # last calls read one byte. Of the last byte of a member, Python's reader compares the
                # checksum with the next call.
                self._raw.seek(0)
                self._reader, self._step = gzip._GzipReader(self._raw), _SMALLER[self._step]
                self._passed = self.offset + count
                return self._read(view, count)
            code = Reason.TRUNCATED if isinstance(error, EOFError) else Reason.CORRUPT_GZIP
            reason = "the gzip stream is damaged or ends before its end marker"
            found = f"the damage after {self.offset + count:,} unpacked bytes"
            # Raised by the next call, too: after wrong checksums, zlib would read the next member.
            self._damage = FormatError(reason, code, found)
        if self._damage is not None and not count:
            raise self._damage
        if count == len(view):
            self._step = _OUTPUT  # Python's reader accepts what zlib does not, such as checksums of headers
        self.offset += count
        # Checked after each step, so that a bomb exceeds a limit by one step at most.
        self._limits.check_sizes(self.offset, self._raw.tell())
        return count

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        super().close()
        self._raw.close()


class _Converted(io.RawIOBase):
    """A file whose pieces are converted.

    Args:
        file: The file.
        convert: Returns a piece as it is to be read. Called with an empty one at the end.
    """

    def __init__(self, file: io.BufferedReader, convert: Callable[[bytes], bytes]) -> None:
        self._file, self._convert = file, convert
        self._left = b""  # what did not fit into the last buffer

    def readable(self) -> bool:
        """Return True, as ``io.RawIOBase`` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read up to ``len(buffer)`` bytes into a writable buffer and return their number."""
        while not self._left:
            piece = self._file.read1(_BUFFER)
            self._left = self._convert(piece)  # nothing, if the piece is a part of a letter
            if not piece:
                break
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def text_of(raw: Any) -> io.BufferedReader:
    """Return a text in UTF-8 whose lines end with line feeds.

    A text with a byte order mark of UTF-16 is decoded. If carriage returns alone separate its lines, they
    become line feeds. Other files are not changed.

    Args:
        raw: The file, such as a ``GunzipFile``, of which nothing has been read.

    Raises:
        FormatError: As of ``GunzipFile.readinto``.
    """
    file = io.BufferedReader(raw, _BUFFER)
    head = file.peek()
    if is_utf16(head):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        return text_of(_Converted(file, lambda piece: decoder.decode(piece, not piece).encode()))
    if has_returns(head):
        return io.BufferedReader(_Converted(file, lambda piece: piece.replace(b"\r", b"\n")), _BUFFER)
    return file


def read_lines(raw: Any, most: int, stop: int = sys.maxsize) -> Iterator[tuple[bytes, int]]:
    """Yield each line of a text, without a byte order mark, and its number of bytes in the text.

    Args:
        raw: The text, as for :func:`text_of`.
        most: Number of bytes up to which lines are complete. Of a longer one, one byte more is held.
        stop: Offset at which the text ends.
    """
    file, at = text_of(raw), 0
    while at < stop and (line := file.readline(min(stop - at, most + 1))):
        rest, begin = line, at
        at += len(line)
        # The rest of a long line is read and dropped, so that memory does not depend on the text.
        while len(rest) > most and not rest.endswith(b"\n"):
            rest = file.readline(min(stop - at, most + 1))
            at += len(rest)
        yield line if begin else line.removeprefix(codecs.BOM_UTF8), at - begin
