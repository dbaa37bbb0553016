"""The bytes of a pickle, gunzipped piece by piece within limits. Never looks at what they mean."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from zlib_ng import gzip_ng, zlib_ng

from hexdata.errors import FormatError
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, Limits

__all__ = ["ByteSource", "PickleFile", "looks_like_pickle"]

_GZIP_MAGIC: Final = b"\x1f\x8b"

_TEXT_STARTS: Final = (b"}q", b"}(", b"}.", b"]q", b"](", b"].", b"(d", b"(l")
"""How a dict or a list begins under protocols 0 and 1, which do not name themselves."""


def looks_like_pickle(head: bytes) -> bool:
    """Say whether decompressed bytes begin like a pickle of protocol 0 to 5 that holds a dict or a list.

    Args:
        head: the first bytes of the file, gunzipped if it was gzipped; two are enough.
    """
    return (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1) or head.startswith(
        _TEXT_STARTS
    )


class ByteSource(Protocol):
    """What the pickle machine reads from."""

    def read(self, size: int) -> bytes:
        """Return at most ``size`` more bytes, none at the end."""


_INPUT: Final = 1 << 16
"""Compressed bytes that a :class:`_Gunzip` takes at a time."""
_OUTPUT: Final = 1 << 14
"""Decompressed bytes that it gives at a time."""


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
        while not piece:
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


class PickleFile:
    """A gzipped or plain file, open for reading; a context manager in the reader's hands.

    Several gzip members, one after the other, are read as one, and so is zero padding after the last;
    the checksums are verified. With ``salvage``, whatever decompresses before damage is given.
    """

    def __init__(self, path: Path, limits: Limits = DEFAULT_LIMITS, *, salvage: bool = False) -> None:
        self._limits = limits
        self._raw = path.open("rb")
        self._stream: io.BufferedIOBase | _Gunzip = self._raw
        self.offset = 0
        if self._raw.peek(2)[:2] != _GZIP_MAGIC:
            return
        if salvage:
            self._stream = _Gunzip(self._raw)
        else:
            self._stream = gzip_ng.GzipNGFile(fileobj=self._raw, mode="rb")  # type: ignore[no-untyped-call]

    def read(self, size: int) -> bytes:
        """Return at most ``size`` more bytes, none at the end.

        Raises:
            FormatError: "truncated" or "corrupt-gzip"; "limit-size" or "limit-ratio".
        """
        try:
            piece = self._stream.read(size)
        except EOFError:
            raise FormatError(
                "the gzip stream ends before its end marker",
                code="truncated",
                record=f"byte {self.offset} of the decompressed data",
                cure="Copy the file again, or leave it out.",
            ) from None
        except (zlib_ng.error, zlib.error, OSError) as error:  # type: ignore[misc]  # its stub hides that it is a class
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's error, not the data's
            raise FormatError(
                "the gzip stream is damaged",
                code="corrupt-gzip",
                record=f"byte {self.offset} of the decompressed data",
                found=str(error),
                cure="Copy the file again, or leave it out.",
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
        self._stream.close()
        self._raw.close()
