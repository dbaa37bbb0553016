"""Descriptions of files that have no known format, for messages."""

from __future__ import annotations

import codecs
from typing import Final

from hexdata.text import printable

__all__ = ["describe_content"]

_SHOWN: Final = 16
"""Number of characters or bytes of a file that a message shows."""
_TEXT: Final = 1024
"""Number of bytes from which a text is recognised."""
_SIGNATURES: Final = (
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"BZh", "a file compressed with bzip2"),
    (b"\xfd7zXZ\0", "a file compressed with xz"),
    (b"\x28\xb5\x2f\xfd", "a file compressed with zstd"),
    (b"\x89PNG\r\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"%PDF-", "a PDF document"),
    (b"\x7fELF", "a program"),
)
"""First bytes of files that may be given by mistake."""
_TAR: Final = (257, b"ustar")


def describe_content(head: bytes) -> str:
    """Return what a file contains, such as "a Parquet file", from its first bytes."""
    for signature, description in _SIGNATURES:
        if head.startswith(signature):
            return description
    start, signature = _TAR
    if head[start : start + len(signature)] == signature:
        return "a tar archive"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head[:_TEXT])
    except UnicodeDecodeError:
        text = "\0"
    if all(letter.isprintable() or letter in "\t\n\r" for letter in text):
        return f"a text that begins with '{printable(text.strip()[:_SHOWN])}'"
    return f"a file that begins with the bytes {head[:_SHOWN]!r}"
