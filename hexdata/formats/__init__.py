"""Readers of source files: each turns the bytes of one file into Arrow record batches.

Each format has its own module or package. A reader returns every record of its file, either as a position
or as a rejection with a reason. It never walks directories and never skips a record: ``convert`` does that.
"""

from __future__ import annotations

from typing import Final

from hexdata.errors import FormatError, Reason
from hexdata.formats.content import describe_content
from hexdata.formats.gunzip import GunzipFile, GunzipLimits
from hexdata.formats.registry import (
    BUILT_IN_FORMATS,
    ENTRY_POINT_GROUP,
    SourceFormat,
    expected_contents,
    find_format,
    source_formats,
)
from hexdata.formats.source import (
    BATCH_ROWS,
    SALVAGEABLE,
    FilePart,
    RawBatch,
    Rejection,
    SizeSelectingReader,
    SourceReader,
)
from hexdata.storage import AnyPath, storage_of

__all__ = [
    "BATCH_ROWS",
    "BUILT_IN_FORMATS",
    "ENTRY_POINT_GROUP",
    "PATTERNS",
    "SALVAGEABLE",
    "FilePart",
    "RawBatch",
    "Rejection",
    "SizeSelectingReader",
    "SourceFormat",
    "SourceReader",
    "expected_contents",
    "is_known_name",
    "known_patterns",
    "open_source",
    "source_formats",
]

PATTERNS: Final = tuple(pattern for each in BUILT_IN_FORMATS for pattern in each.patterns)
"""Name patterns, in lower case, of the files of the built-in formats, which are read in a folder."""

_HEAD_BYTES: Final = 65_536
_HEAD_LIMITS: Final = GunzipLimits(decompressed_bytes=_HEAD_BYTES, ratio=1, ratio_floor=_HEAD_BYTES)


def is_known_name(name: str) -> bool:
    """Return whether a file name matches a pattern of a format, in upper or lower case.

    Raises:
        ConfigError: The name matches no built-in format, and a format of another package is broken.
    """
    return any(each.has_name(name) for each in source_formats())


def known_patterns() -> tuple[str, ...]:
    """Return ``PATTERNS`` and the name patterns of the formats of other packages.

    Raises:
        ConfigError: A format of another package is broken.
    """
    return tuple(pattern for each in source_formats() for pattern in each.patterns)


def open_source(path: AnyPath, *, salvage: bool = False, part: FilePart | None = None) -> SourceReader:
    """Open a source file with the reader for its format.

    The format is detected from the first bytes of the content. The name matters only if the content does not
    tell: an empty ``.trmph`` file contains no games.

    Args:
        path: Local file or remote object. Remote objects are read piece by piece.
        salvage: If True, a damaged file yields the complete records before the damage instead of raising.
        part: Range of bytes to read of a text without gzip, such as TRMPH. Default None: the whole file.

    Returns:
        The open reader, a context manager. The batches of a reader of another package are checked.

    Raises:
        FormatError: "empty-file", "unknown-layout", "truncated" or "corrupt-gzip"; also "unknown-layout" if
            ``part`` is given and the format of the file is not ``appendable``.
        ConfigError: The file has no built-in format, and a format of another package is broken.
        OSError: The file cannot be opened.
    """
    head = _head(path)
    source_format = find_format(head, path.name, appendable=part is not None)
    if source_format is not None:
        reader = source_format.open(path, salvage=salvage, part=part)
        return reader if source_format in BUILT_IN_FORMATS else _checked(reader, source_format.name)
    raise FormatError(
        "the file has no known format" if head else "the file is empty",
        code=Reason.UNKNOWN_LAYOUT if head else Reason.EMPTY_FILE,
        path=path,
        found=describe_content(head) if head else None,
        expected=expected_contents(),
        hint="Save the text as UTF-8." if head.startswith((b"\xff\xfe", b"\xfe\xff")) else None,
    )


def _checked(reader: SourceReader, name: str) -> SourceReader:
    from hexdata.formats.checked import CheckedReader

    return CheckedReader(reader, name)


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
