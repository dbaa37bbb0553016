"""Reading of ``.npz`` files from strangers: the arrays of a zip archive, some rows at a time.

An ``.npz`` file is a zip archive of NumPy arrays. No pickle is read, and nothing is allocated from a declared
size before it was compared with the size of the file. The members are decompressed together, row by row, so
that memory does not grow with them.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from tokenize import TokenError
from typing import IO, Any, Final, NamedTuple, Self

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipLimits, is_gzip
from hexdata.formats.legacy.allowlist import OBJECTS
from hexdata.storage import AnyPath, storage_of

LOCAL_HEADER: Final = b"PK\x03\x04"
_LOCAL_HEADER_BYTES: Final = 30
"""Fixed part of a local header, before the name of the member."""
_MAX_READ: Final = 1 << 20
"""Maximum number of bytes read from the file at a time. It bounds the size of the zip directory, too."""
_MAX_MEMBERS: Final = 32
"""Training data of KataGo have eight arrays; each member costs the reading of a header."""
_METHODS: Final = {(0, zipfile.ZIP_STORED), (0, zipfile.ZIP_DEFLATED)}
"""Not encrypted, and stored or deflated."""
_MAX_HEADER: Final = 1024
"""Maximum length of the header of an array, in which NumPy evaluates literals only. Headers of training data
have 50 to 246 bytes."""
_BAD_HEADER: Final = (ValueError, TypeError, TokenError, RecursionError, MemoryError, OverflowError)
"""Errors of NumPy on damaged or hostile headers of arrays."""
_DAMAGE: Final = (
    *_BAD_HEADER,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    struct.error,
    RuntimeError,
    LookupError,
)
"""Errors of ``zipfile`` and ``zlib`` on damaged or hostile archives."""


class _BoundedReads(io.BufferedReader):
    """A file that is never asked for more than ``_MAX_READ`` bytes, whatever an archive declares."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as ``io.BufferedReader`` does, or raise a ValueError for too many bytes."""
        most = _MAX_READ + 1
        data = super().read(most if size is None or size < 0 else min(size, most))
        if len(data) == most:
            raise ValueError(f"the zip directory is larger than {_MAX_READ:,} bytes")
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Seek as ``io.BufferedReader`` does. An offset that the system refuses is damage of the archive."""
        try:
            return super().seek(offset, whence)
        except OSError as error:
            if whence:  # zipfile expects it of an archive that is too short
                raise
            raise ValueError(str(error)) from None


class ArrayHeader(NamedTuple):
    """The header of an array."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]
    length: int
    """Bytes of the header."""

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class NpzFile:
    """The arrays of an ``.npz`` file, open for one pass over their rows. A context manager.

    Args:
        path: Local file or remote object.
        names: Names of all arrays that the file may contain, with or without ".npy". Default None: any.

    Attributes:
        headers: The header of each member, by name without ".npy"; the fault of members that are no arrays.
        arrays: Type and shape of a row of each array, by name; set by :meth:`select`.
        rows: Number of rows of the selected arrays.

    Raises:
        FormatError: "truncated" or "corrupt-zip" if the archive is damaged, or if members overlap;
            "unknown-layout" if it has too many members, a member twice, or one that is encrypted or
            compressed in an unknown way.
        OSError: The file cannot be read.
    """

    def __init__(self, path: AnyPath, names: Collection[str] | None = None) -> None:
        self.headers: dict[str, ArrayHeader | str] = {}
        self.arrays: dict[str, np.dtype[Any]] = {}
        self.rows = 0
        self._streams: dict[str, IO[bytes]] = {}
        head = storage_of(path).read_range(0, len(LOCAL_HEADER))
        if is_gzip(head):  # the end of an archive is read first
            raise FormatError("the archive is compressed with gzip", hint="Decompress it with gunzip.")
        with ExitStack() as stack, _translate_damage("the archive"):
            raw = storage_of(path).open(block=_MAX_READ).detach()
            archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(_BoundedReads(raw, _MAX_READ))))
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
            self._members = {info.filename.removesuffix(".npy"): info for info in infos}
            methods = {(info.flag_bits & 1, info.compress_type) for info in infos}
            unknown = self._members.keys() - (self._members if names is None else names)
            if unknown or len(infos) > min(len(self._members), _MAX_MEMBERS) or methods - _METHODS:
                reason = "the archive has other arrays, one twice, or one that is encrypted or not deflated"
                raise FormatError(reason, found=f"{len(infos)} members: {', '.join(self._members)[:80]!r}")
            # Members that share bytes can decompress to far more than the ratio of a single one allows.
            ends = [0, *(each.header_offset + _LOCAL_HEADER_BYTES + each.compress_size for each in infos)]
            starts = [*(each.header_offset for each in infos), storage_of(path).size() or 0]
            if any(start < end for start, end in zip(starts, ends, strict=True)):
                raise zipfile.BadZipFile("members overlap or exceed the file")
            if infos and head != LOCAL_HEADER:  # zipfile accepts bytes before the archive
                raise zipfile.BadZipFile(f"the file begins with {head!r}")
            for name, info in self._members.items():
                stream = self._streams[name] = stack.enter_context(archive.open(info))
                try:
                    if npy.read_magic(stream) != (1, 0):
                        raise ValueError("not an array of version 1.0")  # others may have longer headers
                    header = npy.read_array_header_1_0(stream, _MAX_HEADER)
                    self.headers[name] = ArrayHeader(*header, stream.tell())
                except _BAD_HEADER as error:
                    self.headers[name] = str(error)[:80]
            self._opened = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def select(self, needed: Sequence[str], limits: GunzipLimits) -> None:
        """Check the headers of all arrays, and select some for :meth:`blocks`.

        Args:
            needed: Names of the arrays that are read, which exist. The others are not decompressed.
            limits: Limits on the size of the arrays that are read, and on their compression ratio.

        Raises:
            FormatError: "unknown-layout" if an array is not of numbers in C order, or if the numbers of rows
                differ; "corrupt-array" if a header does not match the size of its member;
                "limit-size" or "limit-ratio".
        """
        chosen = [self._members[name] for name in needed]
        # zipfile never returns more than the declared bytes.
        limits.check_sizes(sum(each.file_size for each in chosen), sum(each.compress_size for each in chosen))
        counts = dict[str, int]()
        for name, header in self.headers.items():
            size, found = self._members[name].file_size, f"{name} {header}"
            if isinstance(header, str):
                raise FormatError("the header of an array is damaged", Reason.CORRUPT_ARRAY, found)
            # Rows must have cells: nothing would bound the number of rows without bytes.
            shape, is_fortran, dtype, start = header
            if dtype.kind not in "biuf" or is_fortran or not shape or min(shape) < 0 or 0 in shape[1:]:
                hint = OBJECTS if dtype.hasobject else None
                raise FormatError("an array is not rows of numbers in C order", found=found, hint=hint)
            with suppress(*_BAD_HEADER):  # a row may be too large for NumPy
                self.arrays[name] = np.dtype((dtype, shape[1:]))
            row_bytes = self.arrays[name].itemsize if name in self.arrays else -1
            if start + shape[0] * row_bytes != size:
                reason = f"an array has other bytes than its header states: {size:,}"
                raise FormatError(reason, Reason.CORRUPT_ARRAY, found)
            if name in needed:
                counts[name] = shape[0]
        if len(set(counts.values())) > 1:
            raise FormatError("the arrays have different numbers of rows", found=counts)
        self.rows = counts[needed[0]]
        self._streams = {name: self._streams[name] for name in needed}

    def blocks(self, rows: int) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
        """Read all rows of the selected arrays once.

        Args:
            rows: Number of rows to read at a time.

        Yields:
            The next rows of each array, by name. The last block may have fewer rows, and so has the block
            before damage.

        Raises:
            FormatError: "corrupt-zip": a member is damaged. Its checksum is compared after its last row.
            OSError: The file cannot be read.
        """
        for done in range(0, self.rows, rows):
            pieces: dict[str, npt.NDArray[Any]] = {}
            damage: FormatError | None = None
            # After damage of one array the others are still read: the rows before it are complete.
            for name, stream in self._streams.items():
                row, data = self.arrays[name], bytearray()
                wanted = min(rows, self.rows - done) * row.itemsize
                try:
                    with _translate_damage(f"{name}, row {done} or a later one"):
                        while len(data) < wanted:
                            # In pieces, so that those before damage are kept.
                            if not (piece := stream.read(min(wanted - len(data), _MAX_READ))):
                                raise EOFError("the array ends early")
                            data += piece
                except FormatError as error:
                    damage = damage or error
                # Of a damaged array, the last row may be incomplete.
                pieces[name] = np.frombuffer(data, row, len(data) // row.itemsize)
            if least := min(map(len, pieces.values())):
                yield {name: piece[:least] for name, piece in pieces.items()}
            if damage is not None:
                raise damage


@contextmanager
def _translate_damage(where: str) -> Iterator[None]:
    """Convert the errors of ``zipfile`` on damaged archives to a ``FormatError``."""
    try:
        yield
    except _DAMAGE as error:
        is_cut = isinstance(error, EOFError) or "not a zip file" in str(error)
        code = Reason.TRUNCATED if is_cut else Reason.CORRUPT_ZIP
        raise FormatError("the zip archive is damaged or cut", code, f"{where}: {error}") from None
