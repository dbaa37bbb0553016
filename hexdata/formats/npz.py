"""Reading of ``.npz`` files from strangers: the arrays of a zip archive, some rows at a time.

An ``.npz`` file is a zip archive of NumPy arrays. No pickle is read, and nothing is allocated from a declared
size before it was compared with the size of the file. The members are decompressed together, row by row, so
that memory does not grow with them.
"""

from __future__ import annotations

import ast
import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipLimits, is_gzip
from hexdata.storage import AnyPath, as_path, storage_of

__all__ = ["NpzArray", "NpzFile", "first_member"]

_LOCAL_HEADER: Final = b"PK\x03\x04"
_LOCAL_HEADER_BYTES: Final = 30
_ENCRYPTED: Final = 0x1
_COMPRESSION: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

_DTYPE: Final = re.compile(r"\|[biu]1|[<>][iu][248]|[<>]f[248]")
"""Types of the numbers in an array, as in its header."""

_MAX_READ: Final = 1 << 20
"""Maximum number of bytes read from the file at a time. It bounds the size of the zip directory, too."""
_MAX_MEMBERS: Final = 32
_MAX_HEADER: Final = 1024
"""Maximum length of the header of an array. Headers of training data have 50 to 246 bytes."""
_BLOCK: Final = 1 << 20
"""Bytes per request to an object store; several members are read at once, each with its own block."""

_DAMAGE: Final = (
    *(zipfile.BadZipFile, zlib.error, EOFError, struct.error, ValueError),
    *(RuntimeError, NotImplementedError, OverflowError, KeyError, IndexError),
)
"""Errors of ``zipfile`` and ``zlib`` on damaged or hostile archives."""


@dataclass(frozen=True)
class NpzArray:
    """The header of an array in the archive."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Number of rows, then the shape of a row."""

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def first_member(head: bytes) -> str | None:
    """Return the name of the first member of a zip archive, without ".npy".

    Args:
        head: The first bytes of a file.

    Returns:
        The name; None if the file is not a zip archive.
    """
    if not head.startswith(_LOCAL_HEADER) or len(head) < _LOCAL_HEADER_BYTES:
        return None
    length = int.from_bytes(head[26:28], "little")
    name = head[_LOCAL_HEADER_BYTES : _LOCAL_HEADER_BYTES + length]
    return name.decode("latin-1").removesuffix(".npy")


class NpzFile:
    """The arrays of an ``.npz`` file, open for one pass over their rows. A context manager.

    Args:
        path: Local file or remote object.
        names: Names of all arrays that the file may contain, with or without ".npy".
        needed: Those that are read. The others are checked up to their header, but not decompressed.
        limits: Limits on the declared size of all arrays, and on the compression ratio of those that are
            read.

    Attributes:
        arrays: Header of each array of the file, by name. All have the same number of rows.
        rows: This number.

    Raises:
        FormatError: "truncated" or "corrupt-zip" if the archive is damaged; "unknown-layout" if it contains
            another member, a member twice, or one that is encrypted or compressed in an unknown way, if an
            array is missing, or if the numbers of rows differ; "corrupt-array" if a header does not match the
            size of its member; "limit-size" or "limit-ratio".
        OSError: The file cannot be read.
    """

    def __init__(
        self, path: str | AnyPath, names: Collection[str], needed: Sequence[str], limits: GunzipLimits
    ) -> None:
        self.path = as_path(path)
        self._stack = ExitStack()
        self._streams: dict[str, IO[bytes]] = {}
        self.arrays: dict[str, NpzArray] = {}
        try:
            self._open(names, needed, limits)
        except BaseException:
            self._stack.close()
            raise
        self.rows = self.arrays[needed[0]].shape[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, names: Collection[str], needed: Sequence[str], limits: GunzipLimits) -> None:
        head = storage_of(self.path).read_range(0, len(_LOCAL_HEADER))
        if is_gzip(head):
            raise FormatError(
                "the archive is compressed with gzip",
                expected="a zip archive, *.npz",
                hint="Decompress it with gunzip.",
            )
        archive = self._archive()
        members = _check_members(archive, names, storage_of(self.path).size() or 0)
        for name in needed:
            if name not in members:
                raise FormatError(
                    "the archive lacks an array",
                    found=", ".join(sorted(members)) or "no array",
                    expected=name,
                )
        if head != _LOCAL_HEADER:  # zipfile accepts bytes before the archive
            raise FormatError(
                "the file does not begin with a zip archive",
                code=Reason.CORRUPT_ZIP,
                found=repr(head),
                expected=repr(_LOCAL_HEADER),
                hint="Copy the file again, or exclude it.",
            )
        _check_sizes([*members.values()], [members[name] for name in needed], limits)
        for name, info in members.items():
            # Each array that is read has its own file object, so that reading ahead is not in vain.
            source = self._archive() if name in needed else archive
            with _translate_damage(name):
                stream = self._stack.enter_context(source.open(info))
                self.arrays[name] = _read_header(stream, info)
            if name in needed:
                self._streams[name] = stream
            else:
                stream.close()
        counts = {name: array.shape[0] for name, array in self.arrays.items()}
        if len(set(counts.values())) > 1:
            raise FormatError(
                "the arrays have different numbers of rows",
                found=", ".join(f"{count:,} in {name}" for name, count in sorted(counts.items())),
            )

    def _archive(self) -> zipfile.ZipFile:
        file = self._stack.enter_context(storage_of(self.path).open(block=_BLOCK))
        with _translate_damage():
            return self._stack.enter_context(zipfile.ZipFile(_BoundedReads(file)))

    def blocks(self, rows: int) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
        """Read all rows of the needed arrays once.

        Args:
            rows: Number of rows to read at a time.

        Yields:
            The next rows of each needed array, by name. The last block may have fewer rows, and so has the
            block before damage.

        Raises:
            FormatError: "corrupt-zip": a member is damaged. Its checksum is compared after its last row.
            OSError: The file cannot be read.
        """
        done = 0
        while done < self.rows:
            count = min(rows, self.rows - done)
            pieces: dict[str, npt.NDArray[Any]] = {}
            damage: FormatError | None = None
            for name, stream in self._streams.items():
                array = self.arrays[name]
                data = bytearray()
                try:
                    with _translate_damage(name, f"row {done} or a later one"):
                        _read_into(data, stream, count * array.row_bytes)
                except FormatError as error:
                    damage = damage or error
                whole = len(data) // array.row_bytes
                del data[whole * array.row_bytes :]
                pieces[name] = np.frombuffer(data, array.dtype).reshape(whole, *array.shape[1:])
            count = min(map(len, pieces.values()))
            if count:
                yield {name: piece[:count] for name, piece in pieces.items()}
            if damage is not None:
                raise damage
            done += count


class _BoundedReads(io.RawIOBase):
    """A file that is never asked for more than ``_MAX_READ`` bytes, whatever an archive declares."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def readable(self) -> bool:
        """Return True, as ``io.RawIOBase`` requires."""
        return True

    def seekable(self) -> bool:
        """Return True, as ``zipfile`` requires."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes; all the rest if ``size`` is negative or None.

        Raises:
            ValueError: These are more than ``_MAX_READ``.
        """
        wanted = _MAX_READ + 1 if size is None or size < 0 else size
        data = self._file.read(min(wanted, _MAX_READ + 1))
        if len(data) > _MAX_READ:
            raise ValueError(f"the zip directory is larger than {_MAX_READ:,} bytes")
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset and return it.

        Raises:
            ValueError: The offset is negative or too large for a file.
        """
        if not (whence or 0 <= offset < 1 << 62):
            raise ValueError(f"invalid offset {offset}")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the current offset."""
        return self._file.tell()


@contextmanager
def _translate_damage(name: str | None = None, record: str | None = None) -> Iterator[None]:
    """Convert the errors of ``zipfile`` on damaged archives to a ``FormatError``."""
    try:
        yield
    except FormatError:
        raise
    except _DAMAGE as error:
        text = str(error)
        cut = "not a zip file" in text or isinstance(error, EOFError)
        raise FormatError(
            "the zip archive ends early" if cut else "the zip archive is damaged",
            code=Reason.TRUNCATED if cut else Reason.CORRUPT_ZIP,
            record=record,
            found=f"{name}: {text}" if name else text,
            hint="Copy the file again, or exclude it.",
        ) from None


def _check_members(
    archive: zipfile.ZipFile, names: Collection[str], file_bytes: int
) -> dict[str, zipfile.ZipInfo]:
    """Return the members by name, without ".npy".

    Raises:
        FormatError: "unknown-layout" or "corrupt-zip": a member is unknown or not usable.
    """
    infos = archive.infolist()
    if len(infos) > _MAX_MEMBERS:
        raise FormatError(
            "the archive has too many members", found=len(infos), expected=f"at most {_MAX_MEMBERS}"
        )
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename.removesuffix(".npy")
        if name not in names or info.orig_filename != info.filename:
            raise FormatError(
                "the archive has an unknown member",
                found=repr(info.orig_filename[:80]),
                expected=", ".join(sorted(names)),
            )
        if name in members:
            raise FormatError("the archive contains an array twice", found=name)
        if info.flag_bits & _ENCRYPTED:
            raise FormatError("an array of the archive is encrypted", found=name)
        if info.compress_type not in _COMPRESSION:
            raise FormatError(
                "an array of the archive is compressed in an unknown way",
                found=f"{name}, method {info.compress_type}",
                expected="stored or deflated",
            )
        members[name] = info
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        start, end = end, info.header_offset + _LOCAL_HEADER_BYTES + info.compress_size
        if info.header_offset < start or end > file_bytes:
            raise FormatError(
                "members of the archive overlap or exceed the file",
                code=Reason.CORRUPT_ZIP,
                found=f"{info.filename} at bytes {info.header_offset:,} to {end:,}",
                expected=f"bytes {start:,} to {file_bytes:,}",
            )
    return members


def _check_sizes(
    members: Sequence[zipfile.ZipInfo], needed: Sequence[zipfile.ZipInfo], limits: GunzipLimits
) -> None:
    """Check the declared sizes; ``zipfile`` never returns more bytes than these.

    Raises:
        FormatError: "limit-size" or "limit-ratio".
    """
    declared = sum(info.file_size for info in members)
    if declared > limits.decompressed_bytes:
        raise FormatError(
            "the arrays exceed the size limit",
            code=Reason.LIMIT_SIZE,
            found=f"{declared:,} bytes",
            expected=f"at most {limits.decompressed_bytes:,}",
        )
    size, compressed = sum(i.file_size for i in needed), sum(i.compress_size for i in needed)
    if size > limits.ratio_floor and size > limits.ratio * compressed:
        raise FormatError(
            "the compression ratio is too high for training data",
            code=Reason.LIMIT_RATIO,
            found=f"{size:,} bytes from {compressed:,}",
            expected=f"a ratio of at most {limits.ratio}",
        )


def _read_header(stream: IO[bytes], info: zipfile.ZipInfo) -> NpzArray:
    """Read the header of an array and compare it with the size of its member.

    Raises:
        FormatError: "corrupt-array", or "unknown-layout" if it is not an array of numbers in C order.
    """
    start = stream.read(10)
    length = int.from_bytes(start[8:10], "little")
    if start[:8] != b"\x93NUMPY\x01\x00" or length > _MAX_HEADER:
        raise FormatError(
            "a member is not an array of version 1.0",
            code=Reason.CORRUPT_ARRAY,
            found=f"{info.filename} begins with {start!r}",
        )
    text = bytearray()
    _read_into(text, stream, length)
    try:  # only literals are evaluated
        header = ast.literal_eval(text.decode("latin-1").strip(" \n"))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        header = None
    found = f"{info.filename}: {bytes(text[:80])!r}, in {info.file_size:,} bytes"
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise FormatError("the header of an array is damaged", code=Reason.CORRUPT_ARRAY, found=found)
    descr, shape = header["descr"], header["shape"]
    if (
        not (isinstance(descr, str) and _DTYPE.fullmatch(descr) and isinstance(shape, tuple) and shape)
        or header["fortran_order"] is not False
        or any(type(length) is not int or length < 0 for length in shape)
        or 0 in shape[1:]
    ):
        raise FormatError(
            "an array of the archive has an unknown layout",
            found=found,
            expected="rows of numbers in C order",
        )
    array = NpzArray(np.dtype(descr), shape)
    if 10 + length + shape[0] * array.row_bytes != info.file_size:
        raise FormatError(
            "the header of an array does not match its size", code=Reason.CORRUPT_ARRAY, found=found
        )
    return array


def _read_into(data: bytearray, stream: IO[bytes], count: int) -> None:
    """Append the next ``count`` bytes to ``data``, which keeps those before damage.

    Raises:
        EOFError: There are fewer.
    """
    while len(data) < count:
        piece = stream.read(min(count - len(data), _MAX_READ))
        if not piece:
            raise EOFError("the array ends early")
        data += piece
