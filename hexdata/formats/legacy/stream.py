"""The bytes of a pickle, read in pieces and without frames, for the unpickler and for runs.

The file is read in pieces of a fixed size, and each length in it is checked before memory is reserved. A
frame only says how many bytes Python's pickler had buffered, so FRAME opcodes are removed wherever one frame
follows another: examples are then contiguous.
"""

from __future__ import annotations

from collections import deque
from io import BytesIO
from typing import Final

import numpy as np

from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipFile
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, LegacyLimits

_PIECE: Final = 1 << 18
"""Bytes read from the source at a time: few enough to fit into the CPU cache."""
_LINE: Final = 1000
"""Maximum length in bytes of a module or name of protocols 2 and 3."""
_FRAME: Final = 0x95
_FRAME_BYTES: Final = 9
"""Bytes of a FRAME opcode, including its length."""

_LIMITS_OF: Final = dict.fromkeys(b"\x8a\x8b", Reason.LIMIT_INTEGER) | dict.fromkeys(
    b"X\x8c\x8d", Reason.LIMIT_TEXT
)
"""Limit on the size of the argument of an opcode, except for bytes."""


def looks_like_pickle(head: bytes) -> bool:
    """Return whether bytes begin like a pickle of protocol 2 to 5.

    Args:
        head: The first bytes of the file, decompressed; two are enough.
    """
    return head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"))


class PickleStream:
    """A buffer ``buf`` over a file, read up to the index ``pos``.

    The unpickler calls :meth:`tell` before each opcode, and :meth:`read` and :meth:`readline` for its parts.
    If the file is damaged, the bytes before the damage are read first. Between two opcodes, ``RunFinder`` may
    read ``buf`` and call :meth:`skip`.

    Args:
        source: The file.
        limits: Limits of the file.

    Attributes:
        buf: Bytes of the pickle without frames, as far as they are needed. Each piece has a new buffer, as
            runs are views of the former ones.
        pos: Index in ``buf`` of the next byte.
        opcode: The opcode whose argument is read next.
        payload: Bytes of the arrays and texts that were read since the unpickler reset it.
    """

    def __init__(self, source: GunzipFile | BytesIO, limits: LegacyLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.buf = memoryview(b"")
        self.pos = 0
        self.opcode = 0
        self.payload = 0
        self._source = source
        self._base = 0  # number of bytes before buf, without the FRAME opcodes that were removed
        self._removed = 0  # bytes of FRAME opcodes removed before pos
        self._raw = b""  # bytes of the file that are not in buf yet
        self._error: FormatError | None = None  # of the file, after the bytes that were read
        self._frame_ends: deque[int] = deque()  # ends of the frames that are not read yet, counted as _base

    @property
    def offset(self) -> int:
        """Number of bytes of the file before the next one."""
        return self._base + self.pos + self._removed

    def tell(self) -> int:
        """Return the number of bytes before the next one, without frames. Called before each opcode.

        Raises:
            FormatError: "corrupt-pickle": The last opcode crosses the end of a frame. The two unpicklers of
                Python read such a pickle differently.
        """
        position = self._base + self.pos
        while self._frame_ends and self._frame_ends[0] <= position:
            if self._frame_ends[0] != position:
                raise self.corrupt("a frame ends within an opcode")
            self._leave_frame()
        return position

    def _leave_frame(self) -> None:
        self._frame_ends.popleft()
        self._removed += _FRAME_BYTES if self._frame_ends else 0  # the opcode of the next frame was removed

    def skip(self, size: int, length: int, starts: frozenset[int]) -> int:
        """Skip ``size`` bytes of ``buf``: examples of ``length`` bytes with opcodes at ``starts``.

        Returns:
            The number of bytes that were skipped: fewer, if a frame ends within an opcode of an example.
        """
        start = self._base + self.pos
        while self._frame_ends and (end := self._frame_ends[0] - start) < size:
            if end % length not in starts:
                size = end // length * length
                break
            self._leave_frame()
        self.pos += size
        return size

    def enter_frame(self) -> None:
        """Begin a frame, as a FRAME opcode requests whose length is read next.

        Raises:
            FormatError: "corrupt-pickle".
        """
        length = self.read(_FRAME_BYTES - 1)
        if self._frame_ends:
            raise self.corrupt("a frame begins within another")
        self._raw = bytes(self.buf[self.pos :]) + self._raw
        self.buf = self.buf[: self.pos]
        self._begin_frame(self._base + self.pos, length)

    def _begin_frame(self, start: int, length: bytes | memoryview) -> None:
        if not any(length):
            raise self.corrupt("an empty frame")  # millions of them would fit into a small gzip file
        self._frame_ends.append(start + int.from_bytes(length, "little"))

    def since(self, position: int) -> bytes:
        """Return the bytes from a former result of :meth:`tell` up to ``pos``; none if ``buf`` lacks them."""
        return bytes(self.buf[position - self._base : self.pos]) if position >= self._base else b""

    def fill(self) -> bool:
        """Replace ``buf`` by the bytes after ``pos`` and the next piece of the file.

        Returns:
            False at the end of the file, and at damage.

        Raises:
            FormatError: "corrupt-pickle".
        """
        rest, raw, piece = self.buf[self.pos :], self._raw, 0
        self._base, self.pos = self._base + self.pos, 0
        # A FRAME opcode may be cut between two pieces, so at least one must be complete.
        needs_piece = len(raw) < _FRAME_BYTES and self._error is None
        # The bytes of an array are not set to 0 before they are written, unlike those of a bytearray.
        buf = np.empty(len(rest) + len(raw) + _PIECE * needs_piece, np.uint8).data
        end = at = len(rest)
        stop = end + len(raw)
        buf[:end], buf[end:stop] = rest, raw
        try:
            if needs_piece:
                piece = self._source.readinto(buf[stop:])
        except FormatError as error:
            self._error = error
        stop += piece
        has_bytes = at < stop
        while at < stop:
            # Bytes are moved up to the end of the frame; the FRAME opcode after it is left out.
            left = self._frame_ends[-1] - self._base - end if self._frame_ends else stop
            if left == 0 and buf[at] == _FRAME and (piece or stop - at >= _FRAME_BYTES):
                if stop - at < _FRAME_BYTES:
                    break  # its length is in the next piece
                self._begin_frame(self._base + end, buf[at + 1 : at + _FRAME_BYTES])
                at += _FRAME_BYTES
                continue
            # Texts of 64 kB and more are written after a frame, without one.
            size = min(left, stop - at) if left > 0 else stop - at
            if at > end:
                buf[end : end + size] = buf[at : at + size]
            end, at = end + size, at + size
        self.buf, self._raw = buf[:end], bytes(buf[at:stop])
        return has_bytes

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes.

        Raises:
            FormatError: "truncated", if the file ends before; "limit-array", "limit-text" or "limit-integer".
        """
        if size > self.limits.integer_bytes:  # the smallest limit
            self.limits.check(_LIMITS_OF.get(self.opcode, Reason.LIMIT_ARRAY), size)
            self.payload += size
        while self.pos + size > len(self.buf):
            if not self.fill():
                raise self.truncated()
        self.pos += size
        return self.buf[self.pos - size : self.pos].tobytes()

    def read_opcode(self) -> int:
        """Return the next byte.

        Raises:
            FormatError: "truncated", if the file ends before.
        """
        while self.pos >= len(self.buf):
            if not self.fill():
                raise self.truncated()
        self.opcode = self.buf[self.pos]
        self.pos += 1
        return self.opcode

    def readline(self) -> bytes:
        """Return the bytes up to the next line feed.

        Raises:
            FormatError: "truncated", "limit-text" or "corrupt-pickle".
        """
        while True:
            line, feed, _ = bytes(self.buf[self.pos : self.pos + _LINE + 1]).partition(b"\n")
            if feed or len(line) > _LINE:
                break
            if not self.fill():
                raise self.truncated()
        if not feed:
            raise FormatError(f"a line is longer than {_LINE:,} bytes", Reason.LIMIT_TEXT)
        self.pos += len(line) + 1
        return line + feed

    def peek(self) -> bytes:
        """Return the next byte; none at the end of the file."""
        while self.pos >= len(self.buf) and self.fill():
            pass
        return bytes(self.buf[self.pos : self.pos + 1])

    def finish(self) -> None:
        """Check that the pickle, which ends here, fills its frame and the file.

        Raises:
            FormatError: "trailing-data" or "corrupt-pickle".
        """
        record = f"byte {self.offset}"
        if self.peek():
            hint = "hexdata reads one pickle per file. Split the file so that no data is lost."
            reason = "more data after the end of the pickle"
            raise FormatError(reason, Reason.TRAILING_DATA, record=record, hint=hint)
        if self._error is not None:
            raise self._error
        self.tell()
        if self._frame_ends:
            raise self.corrupt("the pickle ends before its frame")

    def truncated(self) -> FormatError:
        """Return the error for a file that ends too early, or that is damaged after the bytes before."""
        record, hint = f"byte {self.offset + len(self.buf) - self.pos}", "Copy the file again, or exclude it."
        return self._error or FormatError(
            "the pickle is truncated", Reason.TRUNCATED, record=record, hint=hint
        )

    def corrupt(self, reason: str, found: object = None) -> FormatError:
        """Return the error for bytes that no pickler writes."""
        record, reason = f"byte {self.offset}", f"not a valid pickle: {reason}"
        return FormatError(reason, Reason.CORRUPT_PICKLE, found, record=record)
