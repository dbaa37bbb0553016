"""Strict reading of the tar members of a shard, shared by all readers of shards.

Every size is checked against the size of the file before any bytes are read. The values of an
array are returned unchecked.
"""

from __future__ import annotations

import functools
import io
import math
import re
import tarfile
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError, Reason
from hexdata.storage import AnyPath

__all__ = [
    "HEADER_BYTES",
    "MAX_END_BYTES",
    "MemberHeader",
    "MemberReader",
    "archive_end",
    "broken_shard_error",
    "check_end",
    "member_headers",
    "npy_header",
    "parse_headers",
    "parse_npy_header",
]

_NPY_HEADER_BYTES: Final = 128
HEADER_BYTES: Final = tarfile.BLOCKSIZE + _NPY_HEADER_BYTES
"""Bytes of a member's tar header and npy header together. The numbers follow them."""
_NAME: Final = re.compile(rb"([0-9]{6,18})\.([a-z_]{1,40}|extra\.[A-Za-z_][A-Za-z0-9_]{0,62})\.npy\0*")
_SIZE: Final = re.compile(rb"([0-7]{11})[\0 ]")
_CHECKSUM: Final = re.compile(rb"([0-7]{6,7})[\0 ]{1,2}")
_OWNER: Final = re.compile(rb"(?:[0-7]{6,7}[\0 ]{1,2}){3}[0-7]{11}[\0 ]")
"""Mode, user, group and time of modification, which are not used, but tarfile stops at invalid ones."""
_NAMES: Final = re.compile(rb"[\x20-\x7e]{0,31}\0+[\x20-\x7e]{0,31}\0+[0-7\0 ]{16}")
"""User, group and device."""
_NPY: Final = re.compile(
    rb"\x93NUMPY\x01\x00v\x00\{'descr': '([<|][uif][1248])', 'fortran_order': False, "
    rb"'shape': \(((?:[0-9]{1,12}, ?)*(?:[0-9]{1,12})?)\), \} *\n"
)
_DTYPES: Final = frozenset({"|u1", "<u2", "<u4", "<i4", "<i8", "<f4", "<f8"})
_CHECKSUM_AT: Final = 148
"""Offset of the checksum in a tar header."""
_END_BYTES: Final = 2 * tarfile.BLOCKSIZE
"""Minimum number of zero bytes at the end of an archive."""
MAX_END_BYTES: Final = _END_BYTES + tarfile.RECORDSIZE
"""Upper bound, exclusive, of the number of zero bytes at the end of an archive."""
_CHUNK: Final = 1 << 20


class MemberHeader(NamedTuple):
    """The parsed headers of one member.

    Attributes:
        key: Key of the block or sample, decimal digits.
        field: Name of the field.
        dtype: NumPy type string of the array.
        shape: Shape of the array.
        begin: Byte offset of the numbers in the shard.
        bytes: Size of the numbers in bytes.
    """

    key: str
    field: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    bytes: int

    @property
    def name(self) -> str:
        """Name of the member in the tar file."""
        return f"{self.key}.{self.field}.npy"

    @property
    def end(self) -> int:
        """Byte offset of the next member in the shard."""
        return self.begin + self.bytes + self.padding

    @property
    def padding(self) -> int:
        """Number of zero bytes between the numbers and the next member."""
        return -(self.begin + self.bytes) % tarfile.BLOCKSIZE


def broken_shard_error(path: object, record: str, found: object, expected: object) -> FormatError:
    """Return the error for a shard whose structure is damaged.

    Args:
        path: Path of the shard.
        record: Member or byte at which the damage was found.
        found: The bytes or sizes found.
        expected: The bytes or sizes expected.
    """
    return FormatError(
        "the shard is truncated or altered",
        code=Reason.BROKEN_SHARD,
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint="Export the shards again.",
    )


@functools.lru_cache(maxsize=1 << 14)
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the npy 1.0 header of an array in C order.

    It has 128 bytes, so that the numbers of a tar member are aligned.

    Args:
        dtype: NumPy type string of the array.
        shape: Shape of the array.
    """
    buffer = io.BytesIO()
    facts = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()


@functools.lru_cache(maxsize=1 << 10)
def _header_template(digits: int, field: str, dtype: str, shape: tuple[int, ...]) -> tuple[bytes, int, bytes]:
    """Return the headers of a member whose key is ``digits`` zeros, as (bytes before, checksum, bytes after).

    The bytes before the checksum start after the key.
    """
    npy = npy_header(dtype, shape)
    info = tarfile.TarInfo(f"{'0' * digits}.{field}.npy")
    info.size = len(npy) + math.prod(shape) * int(dtype[2])
    header = info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    return header[digits:_CHECKSUM_AT], int(header[_CHECKSUM_AT : _CHECKSUM_AT + 6], 8), header[155:] + npy


def member_headers(key: str, field: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the tar header and the npy header of a member, 640 bytes, as ``ShardWriter`` writes them.

    Args:
        key: Key of the block or sample, decimal digits.
        field: Name of the field.
        dtype: NumPy type string of the array.
        shape: Shape of the array.
    """
    between, checksum, rest = _header_template(len(key), field, dtype, shape)
    digits = key.encode("ascii")
    return b"%b%b%06o\0%b" % (digits, between, checksum + sum(digits) - len(digits) * ord("0"), rest)


@functools.lru_cache(maxsize=256)
def parse_npy_header(header: bytes) -> tuple[str, tuple[int, ...]]:
    """Return the (dtype, shape) of an npy header of 128 bytes.

    Raises:
        ValueError: The bytes are not what :func:`npy_header` returns for any array of a shard.
    """
    match = _NPY.fullmatch(header)
    if match is None:
        raise ValueError(f"the npy header {header[:_NPY_HEADER_BYTES]!r}")
    dtype = match[1].decode("ascii")
    shape = tuple(int(length) for length in re.findall(rb"[0-9]+", match[2]))
    if dtype not in _DTYPES or npy_header(dtype, shape) != header:
        raise ValueError(f"the npy header {header!r}")
    return dtype, shape


def _parse_tar_header(header: bytes) -> tuple[str, str, int]:
    """Return (key, field, size) of a tar header.

    Raises:
        ValueError: It is not the USTAR header of a plain file ``KEY.FIELD.npy``.
    """
    checksum = _CHECKSUM.fullmatch(header[148:156])
    if checksum is None or int(checksum[1], 8) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise ValueError("no tar header: its checksum is wrong")
    name = _NAME.fullmatch(header[:100])
    if name is None or any(header[345:500]):
        raise ValueError(f"a member {header[:100].rstrip(bytes(1))!r}")
    if header[156:157] != tarfile.REGTYPE or header[257:265] != tarfile.POSIX_MAGIC:
        raise ValueError(f"a member of type {header[156:157]!r} and magic {header[257:265]!r}")
    size = _SIZE.fullmatch(header[124:136])
    if size is None:
        raise ValueError(f"a size of {header[124:136]!r}")
    owner, names, link = header[100:124] + header[136:148], header[265:345], header[157:257]
    if not _OWNER.fullmatch(owner) or not _NAMES.fullmatch(names) or any(link):
        raise ValueError("no tar header: its mode, owner, time, link or device is invalid")
    return name[1].decode("ascii"), name[2].decode("ascii"), int(size[1], 8)


def parse_headers(
    headers: bytes, begin: int, stop: int, path: object, record: str | None = None
) -> MemberHeader:
    """Parse the tar header and the npy header of a member.

    Args:
        headers: Both headers, 640 bytes.
        begin: Byte offset of the headers in the shard.
        stop: Byte offset in the shard at which its members end at the latest.
        path: Path of the shard, for messages.
        record: Name of the expected member, for messages. None names the byte offset instead.

    Returns:
        The parsed headers.

    Raises:
        FormatError: The headers are not as ``ShardWriter`` writes them, or the member ends after ``stop``.
    """
    location = record or f"byte {begin}"
    try:
        key, field, size = _parse_tar_header(headers[: tarfile.BLOCKSIZE])
    except ValueError as error:
        expected = "the USTAR header of a plain file KEY.FIELD.npy, or the end of the archive"
        raise broken_shard_error(path, location, error, expected) from None
    name = record or f"{key}.{field}.npy"
    if not _NPY_HEADER_BYTES <= size <= stop - begin - tarfile.BLOCKSIZE:
        limit = max(stop - begin - tarfile.BLOCKSIZE, 0)
        raise broken_shard_error(path, name, f"a size of {size} bytes", f"{_NPY_HEADER_BYTES} to {limit}")
    try:
        dtype, shape = parse_npy_header(headers[tarfile.BLOCKSIZE :])
    except ValueError as error:
        raise broken_shard_error(path, name, error, "an npy 1.0 header of 128 bytes") from None
    numbers = math.prod(shape) * int(dtype[2])
    if numbers != size - _NPY_HEADER_BYTES:
        raise broken_shard_error(
            path, name, f"{size - _NPY_HEADER_BYTES} bytes of numbers", f"{numbers} for {shape}"
        )
    return MemberHeader(key, field, dtype, shape, begin + HEADER_BYTES, numbers)


def archive_end(offset: int) -> bytes:
    """Return the end of an archive whose last member ends at ``offset``: zeros up to a whole tar record."""
    end = offset + _END_BYTES
    return bytes(_END_BYTES + -end % tarfile.RECORDSIZE)


def check_end(rest: bytes, length: int, size: int, path: object) -> None:
    """Check that a shard ends with 1,024 zero bytes, padded with zeros to a whole tar record.

    Args:
        rest: The bytes after the last member, or the first ``MAX_END_BYTES`` of them.
        length: Number of bytes after the last member.
        size: Size of the shard in bytes.
        path: Path of the shard, for messages.

    Raises:
        FormatError: It does not.
    """
    if not _END_BYTES <= length < MAX_END_BYTES or any(rest) or size % tarfile.RECORDSIZE:
        raise broken_shard_error(path, "end of archive", f"{length} bytes", "zeros up to a whole record")


class MemberReader:
    """Sequential reader of the members of a shard, or of a part of it.

    Call ``next_header``, then ``read_array`` or ``skip``, until ``next_header`` returns None.

    Args:
        read: Called with a number of bytes, returns at most that many bytes of the shard, none at the end.
        start: Byte offset at which ``read`` begins. A member must begin there.
        stop: Byte offset at which the last member to read ends; ``size`` for all members.
        size: Size of the shard in bytes.
        path: Path of the shard, for messages.
    """

    def __init__(
        self, read: Callable[[int], bytes], start: int, stop: int, size: int, path: str | AnyPath
    ) -> None:
        self._read = read
        self._offset = start
        self._stop = stop
        self._whole = stop == size
        self._path = path
        self._header: MemberHeader | None = None

    def next_header(self, record: str | None = None) -> MemberHeader | None:
        """Return the headers of the next member; None at the end, after all bytes have been read.

        Args:
            record: Name of the expected member, for messages. None names the byte offset instead.

        Raises:
            FormatError: The shard is truncated or altered.
        """
        if self._offset == self._stop and not self._whole:
            return None
        begin = self._offset
        header = self._take(tarfile.BLOCKSIZE, f"byte {begin}")
        if self._whole and not any(header):
            self._read_end()
            return None
        npy = self._take(min(_NPY_HEADER_BYTES, self._stop - self._offset), f"byte {begin}")
        self._header = parse_headers(header + npy, begin, self._stop, self._path, record)
        return self._header

    def read_array(self) -> npt.NDArray[Any]:
        """Return the array of the member whose headers were read last, as a read-only view of its bytes.

        Raises:
            FormatError: The shard is truncated, or the padding after the numbers is not zero.
        """
        header = self._last()
        data = self._take(header.bytes, header.name)
        self._read_padding(header)
        return np.frombuffer(data, header.dtype).reshape(header.shape)

    def skip(self) -> None:
        """Read and discard the numbers of the member whose headers were read last.

        Raises:
            FormatError: The shard is truncated, or the padding after the numbers is not zero.
        """
        header = self._last()
        left = header.bytes
        while left:
            left -= len(self._take(min(left, _CHUNK), header.name))
        self._read_padding(header)

    def _last(self) -> MemberHeader:
        assert self._header is not None, "call next_header first"
        header, self._header = self._header, None
        return header

    def _read_padding(self, header: MemberHeader) -> None:
        if any(self._take(header.padding, header.name)):
            raise broken_shard_error(self._path, header.name, "other bytes after the numbers", "zeros")

    def _read_end(self) -> None:
        rest = bytes(tarfile.BLOCKSIZE)
        while len(rest) < MAX_END_BYTES and (data := self._read(MAX_END_BYTES - len(rest))):
            rest += data
            self._offset += len(data)
        check_end(rest, len(rest), self._offset, self._path)

    def _take(self, count: int, record: str) -> bytes:
        """Return exactly ``count`` bytes."""
        parts, left = [], count
        while left:
            data = self._read(left)
            if not data:
                raise broken_shard_error(self._path, record, f"{count - left} bytes", f"{count} bytes")
            parts.append(data)
            left -= len(data)
        self._offset += count
        return parts[0] if len(parts) == 1 else b"".join(parts)
