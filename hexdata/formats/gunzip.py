"""The bytes of one file, gunzipped piece by piece within limits. Never looks at what they mean.

Every reader of a format that may be gzipped reads through here, so that none meets a bomb unguarded.
"""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass, fields
from typing import Any, BinaryIO, Final

from zlib_ng import gzip_ng, zlib_ng

from hexdata.errors import FormatError

__all__ = ["GunzipFile", "GunzipLimits"]

_MAGIC: Final = b"\x1f\x8b"
_INPUT: Final = 1 << 16
"""Compressed bytes that a :class:`_Gunzip` takes at a time."""
_OUTPUT: Final = 1 << 14
"""Decompressed bytes that it gives at a time."""


@dataclass(frozen=True)
class GunzipLimits:
    """How far one file may expand; each format knows what its real files need.

    Raises:
        ValueError: if a bound is not positive.
    """

    decompressed_bytes: int
    """``limit-size``: bytes of the whole file, gunzipped if it was gzipped."""
    ratio: int
    """``limit-ratio``: decompressed to compressed bytes, looked at from ``ratio_floor`` on. Gzip itself
    cannot pass 1,032, which is what a bomb has."""
    ratio_floor: int
    """Decompressed bytes up to which any ratio will do."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be positive, not {getattr(self, field.name)}")


class GunzipFile(io.RawIOBase):
    """A gzipped or plain file, open for reading; its content tells which.

    Several gzip members, one after the other, are read as one, and so is zero padding after the last;
    the checksums are verified.

    Args:
        raw: the file, open at its beginning; closed with this one.
        limits: how far it may expand.
        salvage: give whatever decompresses before damage.

    Attributes:
        offset: how many decompressed bytes have been read.
    """

    def __init__(self, raw: io.BufferedReader, limits: GunzipLimits, *, salvage: bool = False) -> None:
        self._limits = limits
        self._raw = raw
        self._stream: io.BufferedIOBase | _Gunzip = raw
        self.offset = 0
        if raw.peek(len(_MAGIC))[: len(_MAGIC)] != _MAGIC:
            return
        if salvage:
            self._stream = _Gunzip(raw)
        else:
            self._stream = gzip_ng.GzipNGFile(fileobj=raw, mode="rb")  # type: ignore[no-untyped-call]

    def readable(self) -> bool:
        """Say yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a writable buffer, as ``read`` does: what ``io.BufferedReader`` asks for."""
        view = memoryview(buffer).cast("B")
        piece = self.read(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` more bytes, none at the end; all, in pieces, if ``size`` is negative.

        Raises:
            FormatError: "truncated" or "corrupt-gzip"; "limit-size" or "limit-ratio".
        """
        if size < 0:
            return self.readall()
        try:
            piece = self._stream.read(size)
        except EOFError:
            raise FormatError(
                "the gzip stream ends before its end marker",
                code="truncated",
                record=f"byte {self.offset} of the decompressed data",
                hint="Copy the file again, or leave it out.",
            ) from None
        except (zlib_ng.error, zlib.error, OSError) as error:  # type: ignore[misc]  # its stub hides that it is a class
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's error, not the data's
            raise FormatError(
                "the gzip stream is damaged",
                code="corrupt-gzip",
                record=f"byte {self.offset} of the decompressed data",
                found=str(error),
                hint="Copy the file again, or leave it out.",
            ) from None
        self.offset += len(piece)
        self._check()
        return piece

    def _check(self) -> None:
        limits = self._limits
        if self.offset > limits.decompressed_bytes:
            raise FormatError(
                "decompresses to more than the limit",
                code="limit-size",
                found=f"more than {limits.decompressed_bytes:,} bytes",
            )
        if self._stream is not self._raw and self.offset > limits.ratio_floor:
            compressed = self._raw.tell()
            if self.offset > limits.ratio * compressed:
                raise FormatError(
                    "compressed far more tightly than training data can be",
                    code="limit-ratio",
                    found=f"{self.offset:,} bytes out of {compressed:,}",
                    expected=f"a ratio of at most {limits.ratio}",
                )

    def close(self) -> None:
        """Close the file; again does nothing."""
        super().close()
        self._stream.close()
        self._raw.close()


class _Gunzip:
    """Gunzips a file such that what comes before damage is not lost, more slowly than ``GzipNGFile`` does.

    That one decompresses into its caller's buffer, and what it had is gone when the input ends early.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._input = b""
        self._member = zlib.decompressobj(wbits=31)
        self._step = _OUTPUT

    def read(self, size: int) -> bytes:
        """Return at most ``size`` more bytes, none at the end; errors as ``GzipNGFile.read`` has them."""
        piece = b""
        while size and not piece:  # to zlib, a size of 0 is no bound at all
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
        """Decompress on; where corruption shows, less and less at a time, since an error gives nothing."""
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
        """Do nothing: the file below is not its own."""
