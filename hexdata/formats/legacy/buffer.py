"""Read buffer over the bytes of a pickle. Does not interpret opcodes.

The source is read in pieces of a fixed size, so a false length in a pickle reserves no memory.
"""

from __future__ import annotations

from typing import Final

from hexdata.errors import FormatError, Reason
from hexdata.formats.legacy.limits import LegacyLimits
from hexdata.formats.legacy.source import ByteSource

__all__ = ["ReadBuffer"]

_PIECE: Final = 1 << 18
"""Bytes read from the source at a time: few enough to fit into the CPU cache."""
_MARGIN: Final = 16
"""Bytes that are in the buffer whenever an opcode starts. No opcode has a longer argument of fixed size."""
_LONGEST_ANCHORED: Final = 1 << 20
"""Maximum distance in bytes from the anchor to ``pos``. Beyond it the anchor is removed."""


class ReadBuffer:
    """A buffer ``buf`` over a source, read up to the index ``pos``.

    Reading another piece discards the bytes before ``pos``, or before ``anchor`` if that is set.
    """

    def __init__(self, source: ByteSource, limits: LegacyLimits) -> None:
        self.limits = limits
        self.buf = b""
        self.pos = 0
        self.origin = 0
        """Offset of the first byte of ``buf`` in the source: ``origin + pos`` is that of the next byte."""
        self.anchor = -1
        """Index in ``buf`` from which bytes are kept; -1 if none. It is adjusted when ``buf`` moves."""
        self._source = source
        self._safe = 0  # an opcode that starts before this index is in buf with its fixed-size argument
        self._at_end = False

    @property
    def offset(self) -> int:
        """Offset of the next byte in the source."""
        return self.origin + self.pos

    def more(self) -> bool:
        """Append the next piece of the source to ``buf``; return False at the end of the source.

        Raises:
            FormatError: "truncated", if the source has ended and all of ``buf`` is read; or a limit is
                exceeded.
        """
        self.check_limits()
        piece = b"" if self._at_end else self._source.read(_PIECE)
        if not piece:
            self._at_end = True
            self.refresh()
            if self.pos >= len(self.buf):
                raise self.truncated()
            return False
        if self.pos - self.anchor > _LONGEST_ANCHORED:
            self.anchor = -1
        keep = self.pos if self.anchor < 0 else self.anchor
        self.buf = self.buf[keep:] + piece
        self.pos -= keep
        self.origin += keep
        self.anchor = min(self.anchor, 0)
        self.refresh()
        return True

    def refresh(self) -> None:
        """Update the index up to which opcodes can be read without another piece."""
        self._safe = len(self.buf) - (0 if self._at_end else _MARGIN)

    def check_limits(self) -> None:
        """Check the limits of a subclass. Called before each piece is read."""

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes. The caller checks ``size`` against a limit first.

        Raises:
            FormatError: "truncated", if the source ends before; or a limit is exceeded.
        """
        end = self.pos + size
        while end > len(self.buf):
            if not self.more():
                raise self.truncated()
            end = self.pos + size
        raw = self.buf[self.pos : end]
        self.pos = end
        return raw

    def uint(self, size: int) -> int:
        """Return the next ``size`` bytes as a little-endian unsigned integer, an argument of fixed size.

        Raises:
            FormatError: "truncated", if ``buf`` ends before.
        """
        end = self.pos + size
        if end > len(self.buf):
            raise self.truncated()
        value = int.from_bytes(self.buf[self.pos : end], "little")
        self.pos = end
        return value

    def line(self, limit: int) -> bytes:
        """Return the bytes before the next line feed, and skip the line feed.

        Raises:
            FormatError: "limit-text", if the line is longer than ``limit`` bytes; "truncated", if the source
                ends before.
        """
        while (end := self.buf.find(b"\n", self.pos)) < 0 and len(self.buf) - self.pos <= limit:
            if not self.more():
                raise self.truncated()
        if end < 0 or end - self.pos > limit:
            raise self.limit_exceeded(Reason.LIMIT_TEXT, "a line is longer than the limit", limit)
        line = self.buf[self.pos : end]
        self.pos = end + 1
        return line

    def at_end(self) -> bool:
        """Return whether all bytes have been read. May consume one byte of the source."""
        return self.pos >= len(self.buf) and (self._at_end or not self._source.read(1))

    def truncated(self) -> FormatError:
        """Return the error for a source that ends too early."""
        return FormatError(
            "the pickle is truncated",
            code=Reason.TRUNCATED,
            record=f"byte {self.origin + len(self.buf)}",
            hint="Copy the file again, or exclude it.",
        )

    def corrupt(self, reason: str, found: object = None) -> FormatError:
        """Return the error for bytes that no pickler writes."""
        return FormatError(
            f"not a valid pickle: {reason}",
            code=Reason.CORRUPT_PICKLE,
            record=f"byte {self.offset}",
            found=found,
        )

    def limit_exceeded(self, code: Reason, reason: str, limit: int, found: int | None = None) -> FormatError:
        """Return the error for an exceeded limit."""
        return FormatError(
            reason,
            code=code,
            record=f"byte {self.offset}",
            found=None if found is None else f"{found:,}",
            expected=f"at most {limit:,}",
        )
