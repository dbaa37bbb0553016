"""From the bytes of one source file to Arrow record batches: the registry of formats.

Each format has its own file or folder. A reader never walks directories and never decides to skip: it
says what each record is, or why it cannot be one, and leaves the rest to ``convert``.
"""

from __future__ import annotations

from typing import Final

from hexdata.errors import FormatError
from hexdata.formats.gunzip import GunzipFile, GunzipLimits
from hexdata.formats.source import BATCH_ROWS, SALVAGEABLE, RawBatch, Rejection, SourceReader
from hexdata.remote import AnyPath, open_binary

__all__ = ["BATCH_ROWS", "SALVAGEABLE", "RawBatch", "Rejection", "SourceReader", "open_source"]

_HEAD_BYTES: Final = 65_536
_HEAD_LIMITS: Final = GunzipLimits(decompressed_bytes=_HEAD_BYTES, ratio=1, ratio_floor=_HEAD_BYTES)


def open_source(path: AnyPath, *, salvage: bool = False) -> SourceReader:
    """Open a source file with the reader that its content asks for; its name decides nothing.

    Args:
        path: the file, or the object, which is read piece by piece.
        salvage: of a damaged file, give the whole examples before the damage.

    Raises:
        FormatError: "empty-file", "unknown-layout", "truncated", "corrupt-gzip", or what the reader finds
            at once.
        OSError: the file cannot be opened.
    """
    from hexdata.formats.legacy import LegacyReader, looks_like_pickle
    from hexdata.formats.trmph import TrmphReader, looks_like_trmph

    head = _head(path)
    if looks_like_pickle(head):
        return LegacyReader(path, salvage=salvage)
    if looks_like_trmph(head) or (not head and ".trmph" in path.name):
        return TrmphReader(path, salvage=salvage)
    raise FormatError(
        "no reader knows this layout" if head else "the file is empty",
        code="unknown-layout" if head else "empty-file",
        path=path,
        found=f"a file that begins with {head[:16]!r}" if head else None,
        expected="a pickle or TRMPH games, gzipped or not",
    )


def _head(path: AnyPath) -> bytes:
    """Return the first bytes of a file, gunzipped if it is gzipped; of a damaged one, those before that."""
    head = b""
    with GunzipFile(open_binary(path, block=_HEAD_BYTES), _HEAD_LIMITS, salvage=True) as file:
        try:
            while piece := file.read(_HEAD_BYTES - len(head)):
                head += piece
        except FormatError as error:
            if not head:
                raise error.at(path) from None
    return head
