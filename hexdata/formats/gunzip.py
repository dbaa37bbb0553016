"""Incremental decompression of one gzipped or plain file, within limits.

Every reader of a format that may be gzipped uses this module, so that all are protected against gzip bombs.
"""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass, fields
from typing import Any, BinaryIO, Final

from zlib_ng import gzip_ng, zlib_ng

from hexdata.errors import FormatError, Reason

__all__ = ["GunzipFile", "GunzipLimits", "is_gzip"]

_MAGIC: Final = b"\x1f\x8b"
_INPUT: Final = 1 << 16
"""Compressed bytes that a :class:`_Gunzip` reads at a time."""
_OUTPUT: Final = 1 << 14
"""Maximum number of decompressed bytes that it returns at a time."""


@dataclass(frozen=True)
class GunzipLimits:
    """Limits on the decompression of one file; each format sets its own.

    Raises:
        ValueError: A limit is not positive.
    """

    decompressed_bytes: int
    """``limit-size``: maximum size of the decompressed file in bytes."""
    ratio: int
    """``limit-ratio``: maximum ratio of decompressed to compressed bytes, checked above ``ratio_floor``.
    Gzip cannot exceed 1,032, the ratio of a gzip bomb."""
    ratio_floor: int
    """Number of decompressed bytes up to which any ratio is accepted."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be positive, not {getattr(self, field.name)}")


def is_gzip(head: bytes) -> bool:
    """Return whether a file is gzipped.

    Args:
        head: The first two bytes of the file, or more.
    """
    return head.startswith(_MAGIC)


class GunzipFile(io.RawIOBase):
    """A gzipped or plain file, open for reading. Gzip is detected from the first bytes.

    Consecutive gzip members are read as one stream, zero padding after the last one is ignored, and the
    checksums are verified.

    Args:
        raw: The file, open at its beginning. It is closed together with this object.
        limits: Limits on the decompressed size and on the compression ratio.
        salvage: If True, all bytes that can be decompressed before damage are returned, at lower speed.

    Attributes:
        offset: Number of decompressed bytes read so far.
    """

    def __init__(self, raw: io.BufferedReader, limits: GunzipLimits, *, salvage: bool = False) -> None:
        self._limits = limits
        self._raw = raw
        self._stream: io.BufferedIOBase | _Gunzip = raw
        self.offset = 0
        if not is_gzip(raw.peek(len(_MAGIC))):
            return
        if salvage:
            self._stream = _Gunzip(raw)
        else:
            self._stream = gzip_ng.GzipNGFile(fileobj=raw, mode="rb")  # type: ignore[no-untyped-call]

    def readable(self) -> bool:
        """Return True, as ``io.RawIOBase`` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read up to ``len(buffer)`` bytes into a writable buffer and return their number.

        Raises:
            FormatError: As for :meth:`read`.
        """
        view = memoryview(buffer).cast("B")
        piece = self.read(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` decompressed bytes, none at the end; all the rest if ``size`` is negative.

        Raises:
            FormatError: "truncated", "corrupt-gzip", "limit-size" or "limit-ratio".
            OSError: The file below cannot be read.
        """
        if size < 0:
            return self.readall()
        try:
            piece = self._stream.read(size)
        except EOFError:
            raise FormatError(
                "the gzip stream ends before its end marker",
                code=Reason.TRUNCATED,
                record=f"byte {self.offset} of the decompressed data",
                hint="Copy the file again, or exclude it.",
            ) from None
        except (zlib_ng.error, zlib.error, OSError) as error:  # type: ignore[misc]  # its stub hides that it is a class
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk, not of the data
            raise FormatError(
                "the gzip stream is damaged",
                code=Reason.CORRUPT_GZIP,
                record=f"byte {self.offset} of the decompressed data",
                found=str(error),
                hint="Copy the file again, or exclude it.",
            ) from None
        self.offset += len(piece)
        self._check()
        return piece

    def _check(self) -> None:
        limits = self._limits
        if self.offset > limits.decompressed_bytes:
            raise FormatError(
                "the decompressed file exceeds the size limit",
                code=Reason.LIMIT_SIZE,
                found=f"more than {limits.decompressed_bytes:,} bytes",
            )
        if self._stream is not self._raw and self.offset > limits.ratio_floor:
            compressed = self._raw.tell()
            if self.offset > limits.ratio * compressed:
                raise FormatError(
                    "the compression ratio is too high for training data",
                    code=Reason.LIMIT_RATIO,
                    found=f"{self.offset:,} bytes from {compressed:,}",
                    expected=f"a ratio of at most {limits.ratio}",
                )

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        super().close()
        self._stream.close()
        self._raw.close()


class _Gunzip:
    """Decompresses a gzip file without losing the bytes before damage.

    It is slower than ``GzipNGFile``, which discards the bytes it has already decompressed when it raises.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._input = b""
        self._member = zlib.decompressobj(wbits=31)
        self._step = _OUTPUT

    def read(self, size: int) -> bytes:
        """Return at most ``size`` more bytes, none at the end; raise as ``GzipNGFile.read`` does."""
        piece = b""
        while size and not piece:  # zlib takes a size of 0 as unlimited
            self._input = self._input or self._raw.read(_INPUT)
            at_end = not self._input
            if self._member.eof:
                self._input = self._input.lstrip(b"\0")
                if at_end:
                    break
                if not self._input:
                    continue
                self._member = zlib.decompressobj(wbits=31)
            piece = self._decompress(min(size, self._step))
            if at_end and not piece and not self._member.eof:
                raise EOFError
        return piece

    def _decompress(self, size: int) -> bytes:
        """Return up to ``size`` more bytes. After an error, retry with half the size, down to one byte.

        zlib returns nothing from a call that fails, so smaller steps get closer to the damage.
        """
        before = self._member.copy()
        try:
            piece: bytes = self._member.decompress(self._input, size)
        except zlib.error:
            if size == 1:
                raise
            self._member, self._step = before, size // 2
            return self._decompress(self._step)
        member = self._member
        self._input = member.unused_data if member.eof else member.unconsumed_tail
        return piece

    def close(self) -> None:
        """Do nothing: :class:`GunzipFile` closes the file below."""
