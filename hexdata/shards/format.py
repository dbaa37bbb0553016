"""Training shards: WebDataset tar files in which each sample is a block of positions.

Converts arrays to bytes and bytes to arrays. The order, the splits and the paths are chosen elsewhere.

A member is a tar header, the npy header of an array, its numbers, and zeros up to 512 bytes. All headers are
those that ``tarfile`` and NumPy make of the name and the type. A reader makes them again of what it has found
and compares them as a whole, so that a header has no field that two programs could interpret differently.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final

import numpy as np

from hexdata.shards.blocks import Block, block_length
from hexdata.shards.manifest import ShardEntry, broken_shard
from hexdata.storage import AnyPath, as_path, storage_of

# NumPy pads headers to a multiple of 64 bytes; with these dtypes and shapes it is always 128.
_NPY_HEADER_BYTES: Final = 128
_HEADER_BYTES: Final = tarfile.BLOCKSIZE + _NPY_HEADER_BYTES
"""Bytes of a member's tar header and npy header together. The numbers follow them."""
# Keys have at least 6 digits; 18 digits always fit into 64 bits.
_NAME: Final = re.compile(rb"([0-9]{6,18})\.([a-z_]{1,40}|extra\.[A-Za-z_][A-Za-z0-9_]{0,62})\.npy\0")
# The dtypes are those of FIELDS.
_NPY: Final = re.compile(
    rb"\x93NUMPY\x01\x00v\x00\{'descr': '(\|u1|<u2|<u4|<i4|<i8|<f4|<f8)', 'fortran_order': False, "
    rb"'shape': \(((?:[0-9]{1,12}, ?)*(?:[0-9]{1,12})?)\), \} *\n"
)
_CHECKSUM: Final = slice(148, 154)
"""The checksum in a tar header, as octal digits."""
_END_BYTES: Final = 2 * tarfile.BLOCKSIZE
"""Minimum number of zero bytes at the end of an archive."""
_ALTERED: Final = "the shard is truncated or altered"
_MAX_BYTES: Final = 1 << 30
"""Maximum size of the arrays of one block in bytes. A sparse file can claim any size."""
_MAX_MEMBERS: Final = 64
"""Maximum number of members of one block."""
MAX_BLOCK_BYTES: Final = _MAX_BYTES + (1 << 17)
"""More bytes than a block takes with its headers and the end of the archive."""


# --- headers ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1 << 12)  # almost all blocks have the same shapes
def _template(digits: int, field: str, dtype: str, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """Return the headers of a member whose key is this number of zeros, and the checksum in them."""
    npy = io.BytesIO()
    np.lib.format.write_array_header_1_0(npy, {"descr": dtype, "fortran_order": False, "shape": shape})
    info = tarfile.TarInfo(f"{'0' * digits}.{field}.npy")
    info.size = _NPY_HEADER_BYTES + _size_of(dtype, shape)
    header = info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    return header + npy.getvalue(), int(header[_CHECKSUM], 8)


def _make_headers(key: bytes, field: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the tar header and the npy header of a member."""
    zeros, checksum = _template(len(key), field, dtype, shape)
    # The checksum of a tar header is the sum of its bytes, so it changes by what the digits add to zeros.
    checksum += sum(key) - len(key) * ord("0")
    after_key = zeros[len(key) : _CHECKSUM.start]
    return b"%b%b%06o%b" % (key, after_key, checksum, zeros[_CHECKSUM.stop :])


@functools.lru_cache(maxsize=1 << 12)
def _parse_npy(header: bytes) -> tuple[str, tuple[int, ...]] | None:
    """Return the dtype and the shape in an npy header; None if no array of a shard has such a header."""
    found = _NPY.fullmatch(header)
    if found is None:
        return None
    shape = tuple(map(int, re.findall(rb"[0-9]+", found[2])))
    # No tar header states a larger size, and NumPy multiplies the other lengths of an empty array.
    is_bounded = math.prod(length or 1 for length in shape) <= _MAX_BYTES
    return (found[1].decode("ascii"), shape) if is_bounded else None


def _size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of an array."""
    return math.prod(shape) * int(dtype[2])


def archive_end(offset: int) -> bytes:
    """Return the end of an archive whose last member ends at ``offset``: zeros up to a whole tar record."""
    # As tarfile and GNU tar write it: two zero blocks, then zeros up to a record of 10,240 bytes.
    end = offset + _END_BYTES
    return bytes(_END_BYTES + -end % tarfile.RECORDSIZE)


# --- writing ------------------------------------------------------------------------------------------


class ShardWriter:
    """Writes one tar shard sequentially.

    The archive is plain USTAR without times and owners, so the same arrays always result in the same bytes.

    Attributes:
        file: The file, which must be at its beginning. The caller closes it.
        positions: Number of positions written.
        bytes: Number of bytes written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.positions = self.bytes = 0
        self._blocks: list[tuple[int, Any]] = []
        """The byte at which each block begins, and the SHA-256 of the bytes from there on."""

    def write_block(self, key: int, arrays: Block) -> None:
        """Append one block, with sparse policies.

        Args:
            key: Number of the block, ascending over the whole split.
            arrays: Its members.
        """
        self._blocks.append((self.bytes, hashlib.sha256()))
        # A fixed order, so that equal arrays give equal bytes.
        for name in sorted(arrays):
            # Little-endian on every machine.
            array = np.asarray(arrays[name], arrays[name].dtype.newbyteorder("<"), order="C")
            self._write(_make_headers(b"%06d" % key, name, array.dtype.str, array.shape))
            self._write(array.reshape(-1).view(np.uint8).data)
            # The next tar header begins at a multiple of 512 bytes.
            self._write(bytes(-self.bytes % tarfile.BLOCKSIZE))
        self.positions += block_length(arrays)

    def close(self) -> None:
        """Write the end of the archive, zeros up to a whole tar record. The file stays open."""
        self._write(archive_end(self.bytes))

    def entry(self, name: str, sha256: str) -> ShardEntry:
        """Return the manifest entry of the shard. Call it after :meth:`close`.

        Args:
            name: Final file name of the shard.
            sha256: SHA-256 of the file, in hexadecimal.
        """
        blocks = [(offset, digest.hexdigest()) for offset, digest in self._blocks]
        return ShardEntry(name, self.positions, self.bytes, sha256, blocks)

    def _write(self, data: Any) -> None:
        self.file.write(data)
        self._blocks[-1][1].update(data)
        self.bytes += len(data)


# --- reading ------------------------------------------------------------------------------------------


def read_blocks(path: str | AnyPath) -> Iterator[tuple[str, Block]]:
    """Read the blocks of a shard in order.

    Stricter than ``tarfile``, which takes a broken header for the end of the archive: every byte up to the
    end of the file is checked. The values of the arrays are not checked; use ``check_block`` for that.

    Args:
        path: The shard.

    Yields:
        As :func:`parse_blocks`.

    Raises:
        FormatError: As for :func:`parse_blocks`.
    """
    with storage_of(as_path(path)).open() as file:
        yield from parse_blocks(file.read, 0, path)


def parse_blocks(
    read: Callable[[int], bytes | memoryview], begin: int, path: object, *, is_end: bool = True
) -> Iterator[tuple[str, Block]]:
    """Parse the blocks of a shard, or of a part of it.

    Args:
        read: Returns the next bytes, at most the given number.
        begin: Offset of the first byte in the shard, where a block begins.
        path: Path of the shard, for messages.
        is_end: Whether the shard ends with these bytes. Default True. False: a block does.

    Yields:
        (key, block) of each block. The arrays are read-only, the policies sparse.

    Raises:
        FormatError: The bytes are truncated or altered; names the shard, and the member or the byte. Blocks
            yielded before are then invalid.
    """
    at, key = begin, ""
    block: Block = {}
    # A zero block begins the end of the archive; no bytes at all are a part that ends with a block.
    while any((headers := bytes(read(_HEADER_BYTES)))[: tarfile.BLOCKSIZE]):
        new_key, field, dtype, shape = _parse_headers(headers, at, path)
        # A block ends where the key changes, as in WebDataset.
        if block and new_key != key:
            yield key, block
            block = {}
        key, name, size = new_key, f"{new_key}.{field}.npy", _size_of(dtype, shape)
        if field in block:
            raise broken_shard(_ALTERED, path, name, "the member twice", "once")
        # Before the numbers are read: a header may claim more bytes than there is memory.
        total = size + sum(array.nbytes for array in block.values())
        if total > _MAX_BYTES or len(block) == _MAX_MEMBERS:
            found = f"{len(block) + 1} members of {total:,} bytes"
            raise broken_shard(_ALTERED, path, key, found, f"{_MAX_MEMBERS} of {_MAX_BYTES:,} at most")
        at += _HEADER_BYTES + size
        padding = -at % tarfile.BLOCKSIZE
        data = read(size + padding)
        # The padding is covered by no checksum of tar, and could hide other bytes.
        if len(data) < size + padding or bytes(data[size:]) != bytes(padding):
            raise broken_shard(_ALTERED, path, name, "other bytes after the numbers", "zeros")
        at += padding
        block[field] = np.frombuffer(data, dtype, math.prod(shape)).reshape(shape)
    # Also the length of the end is compared: tarfile would ignore members that are appended after it.
    end = archive_end(at) if is_end else b""
    if headers + bytes(read(len(end))) != end:
        expected = "zeros up to a whole record" if is_end else "the next block"
        raise broken_shard(_ALTERED, path, "end of archive", "other bytes", expected)
    # The last block only after the end is checked, so that a truncated shard is not taken for a whole one.
    if block:
        yield key, block


def _parse_headers(headers: bytes, at: int, path: object) -> tuple[str, str, str, tuple[int, ...]]:
    """Return key, field, dtype and shape of a member from its headers, which begin at an offset of a shard.

    Raises:
        FormatError: ``ShardWriter`` writes no such bytes.
    """
    name, npy = _NAME.match(headers), _parse_npy(headers[tarfile.BLOCKSIZE :])
    if name and npy:
        key, field = name[1], name[2].decode("ascii")
        # As bytes, so that every field of a header that is not parsed is compared, too.
        if headers == _make_headers(key, field, *npy):
            return key.decode("ascii"), field, *npy
    shown = f"{headers[:100].rstrip(bytes(1))!r} and {headers[tarfile.BLOCKSIZE :].rstrip()!r}"
    expected = "the tar and npy headers of an array KEY.FIELD.npy"
    raise broken_shard(_ALTERED, path, f"byte {at}", shown, expected)
