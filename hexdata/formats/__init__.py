"""Readers of source files: each turns the bytes of one file into Arrow record batches.

Each format has its own module or package. A reader returns every record of its file, either as a position
or as a rejection with a reason. It never walks directories and never skips a record: ``convert`` does that.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipFile, GunzipLimits
from hexdata.formats.source import (
    BATCH_ROWS,
    SALVAGEABLE,
    FilePart,
    RawBatch,
    Rejection,
    SourceReader,
)
from hexdata.storage import AnyPath, storage_of

__all__ = [
    "BATCH_ROWS",
    "PATTERNS",
    "SALVAGEABLE",
    "FilePart",
    "RawBatch",
    "Rejection",
    "SourceReader",
    "is_known_name",
    "open_source",
]

PATTERNS: Final = ("*.trmph", "*.trmph.gz", "*.pkl.gz", "*.pkl", "*.pickle.gz", "*.pickle")
"""Name patterns, in lower case, of the files that are read in a folder. A new format adds its own."""

_HEAD_BYTES: Final = 65_536
_HEAD_LIMITS: Final = GunzipLimits(decompressed_bytes=_HEAD_BYTES, ratio=1, ratio_floor=_HEAD_BYTES)


def is_known_name(name: str) -> bool:
    """Return whether a file name matches ``PATTERNS``, in upper or lower case."""
    return any(fnmatchcase(name.lower(), pattern) for pattern in PATTERNS)


def open_source(path: AnyPath, *, salvage: bool = False, part: FilePart | None = None) -> SourceReader:
    """Open a source file with the reader for its format.

    The format is detected from the first bytes of the content. The name matters only if the file is empty:
    an empty ``.trmph`` file holds no games.

    Args:
        path: Local file or remote object. Remote objects are read piece by piece.
        salvage: If True, a damaged file yields the complete records before the damage instead of raising.
        part: Range of bytes to read of a TRMPH text without gzip. Default None: the whole file.

    Returns:
        The open reader, a context manager.

    Raises:
        FormatError: "empty-file", "unknown-layout", "truncated" or "corrupt-gzip"; also "unknown-layout" if
            ``part`` is given and the file is not TRMPH.
        OSError: The file cannot be opened.
    """
    from hexdata.formats.legacy import LegacyReader, looks_like_pickle
    from hexdata.formats.trmph import TrmphReader, looks_like_trmph

    head = _head(path)
    if part is None and looks_like_pickle(head):
        return LegacyReader(path, salvage=salvage)
    if looks_like_trmph(head) or (not head and ".trmph" in path.name):
        return TrmphReader(path, salvage=salvage, part=part)
    raise FormatError(
        "the file has no known format" if head else "the file is empty",
        code=Reason.UNKNOWN_LAYOUT if head else Reason.EMPTY_FILE,
        path=path,
        found=f"a file that begins with {head[:16]!r}" if head else None,
        expected="a pickle or TRMPH games, gzipped or not",
    )


def _head(path: AnyPath) -> bytes:
    """Return the first bytes of a file, decompressed; of a damaged file, those before the damage."""
    head = b""
    with GunzipFile(storage_of(path).open(block=_HEAD_BYTES), _HEAD_LIMITS, salvage=True) as file:
        try:
            while piece := file.read(_HEAD_BYTES - len(head)):
                head += piece
        except FormatError as error:
            if not head:
                raise error.at(path) from None
    return head
