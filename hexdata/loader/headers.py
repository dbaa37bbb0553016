"""The headers of a shard's members, held against what the manifest says stands there.

A block's numbers are found through an offset; the headers before them tell whether they are the right
ones. Never reads the numbers themselves: only a digest of the whole shard tells whether those changed.
"""

from __future__ import annotations

import math
import tarfile
from typing import Final, NamedTuple, Protocol

import numpy as np

from hexdata.errors import FormatError
from hexdata.formats.shards import FieldSpec, npy_header

__all__ = ["HEADER_BYTES", "HINT", "Member", "altered", "check_member", "policy_count"]

HINT: Final = "Run `hexdata verify`, then `hexdata export` again."
_NPY_HEADER_BYTES: Final = 128
HEADER_BYTES: Final = tarfile.BLOCKSIZE + _NPY_HEADER_BYTES
"""Bytes of the tar header and the npy header, which end where a block's numbers begin."""
_NAME: Final = slice(0, 100)
_SIZE: Final = slice(124, 136)


def altered(path: str, record: str, found: object, expected: object) -> FormatError:
    """Return the error for a place in a shard where something else stands."""
    return FormatError(
        "the shard is not what the manifest says",
        code="broken-shard",
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint=HINT,
    )


class Bytes(Protocol):
    """A mapped file: a slice of it is bytes."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


class Member(NamedTuple):
    """One field of one block: the shard it is in, what it must be called, and where its numbers begin."""

    shard: str
    key: int
    field: str
    offset: int

    @property
    def name(self) -> str:
        """The member's name in the tar file."""
        return f"{self.key:06d}.{self.field}.npy"

    def headers(self, data: Bytes) -> bytes:
        """Return the headers before the numbers."""
        return data[self.offset - HEADER_BYTES : self.offset]

    def altered(self, found: object, expected: object) -> FormatError:
        """Return the error that names this member."""
        return altered(self.shard, self.name, found, expected)


def check_member(data: Bytes, member: Member, spec: FieldSpec, rows: int) -> None:
    """See that the headers are those of this member with so many rows, all of them in the file.

    Raises:
        FormatError: they are not.
    """
    headers = member.headers(data)
    name = headers[_NAME].rstrip(b"\0")
    if name != member.name.encode("ascii"):
        raise member.altered(f"a header of {name!r}", "its own")
    expected = npy_header(spec.dtype, (rows, *spec.shape))
    if headers[tarfile.BLOCKSIZE :] != expected:
        raise member.altered(f"the npy header {headers[tarfile.BLOCKSIZE :]!r}", expected)
    itemsize = np.dtype(spec.dtype).itemsize
    end = member.offset + rows * math.prod(spec.shape) * itemsize
    if end > len(data) or member.offset % itemsize:
        raise member.altered(f"numbers up to byte {end}", f"whole numbers in {len(data)} bytes")


def policy_count(data: Bytes, member: Member, spec: FieldSpec) -> int:
    """Return how many rows a member has whose length the manifest does not tell, by its tar header.

    Raises:
        FormatError: it is no header, or not of whole rows.
    """
    size = member.headers(data)[_SIZE].rstrip(b"\0 ")
    width = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
    try:
        rows, rest = divmod(int(size, 8) - _NPY_HEADER_BYTES, width)
    except ValueError:
        raise member.altered(f"a size of {size!r}", "an octal number") from None
    if rows < 0 or rest:
        raise member.altered(f"{int(size, 8)} bytes", f"{_NPY_HEADER_BYTES} and rows of {width}")
    return rows
