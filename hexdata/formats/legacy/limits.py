"""Limits on the resources that one legacy file may use. The modules that read the file check them.

``LegacyLimits`` are those on a pickle as a whole, which another format sets higher. The constants are those
on headers and examples. ``metadata-size`` rejects single records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipLimits


@dataclass(frozen=True)
class LegacyLimits(GunzipLimits):
    """Limits for one legacy file.

    They are far above the needs of real files and far below what would exhaust the machine. A file that
    exceeds a limit is refused with a FormatError; its code is given with each limit.
    """

    decompressed_bytes: int = 1 << 40
    """``limit-size``: size of the decompressed file in bytes. Real pickles have 2.1 kB per position."""
    ratio: int = 800
    """``limit-ratio``: ratio of decompressed to compressed bytes. Boards are mostly zeros, so real files
    reach 135."""
    ratio_floor: int = 64 << 20
    """Number of decompressed bytes up to which any ratio is accepted."""
    array_bytes: int = 1 << 20
    """``limit-array``: bytes of one array or byte string. A board of 32 by 32 in float64 has 16,384."""
    text_bytes: int = 1 << 20
    """``limit-text``: bytes of one text in UTF-8. Protocol 2 writes array payloads as text."""
    integer_bytes: int = 64
    """``limit-integer``: bytes of one integer of arbitrary length."""
    stack: int = 1 << 16
    """``limit-stack``: number of objects on the stack, and of open marks. Writers append a thousand list
    items at a time."""
    memo: int = 1 << 18
    """``limit-memo``: number of objects that the pickle may refer back to, without finished examples."""
    memo_bytes: int = 32 << 20
    """Bytes of small objects of finished examples that are kept for references. Above twice as many, those
    that were not used for the longest time are dropped."""
    items: int = 2 << 20
    """``limit-items``: bytes of opcodes between two examples. Every object has at least one."""
    held_bytes: int = 32 << 20
    """``limit-held``: bytes of payloads, containers and memo entries between two examples."""

    def check(self, code: Reason, size: int) -> None:
        """Raise a FormatError if ``size`` exceeds the limit with this reason code."""
        name = code.removeprefix("limit-")
        check_size(code, size, getattr(self, name if hasattr(self, name) else f"{name}_bytes"))


def check_size(code: Reason, size: int, most: int) -> None:
    """Raise a FormatError with a reason code if ``size`` exceeds a limit."""
    if size > most:
        raise FormatError(f"the pickle exceeds the limit {code}", code, f"{size:,}", f"at most {most:,}")


DEFAULT_LIMITS = LegacyLimits()

MOST_NESTED: Final = 32
"""``limit-nesting``: nesting depth of a value in the header. In metadata: ``metadata-size``."""
HEADER_VALUES: Final = 1 << 17
"""``limit-header``: number of values in the header. A shared value counts each time it is written."""
HEADER_BYTES: Final = 4 << 20
"""``limit-header``: characters of the texts in the header, including keys."""
MOST_LAYOUTS: Final = 512
"""``limit-layouts``: number of different layouts of examples, each of which takes milliseconds, even if it is
rejected. Real files have one to three."""
METADATA_KEYS: Final = 1 << 10
"""``metadata-size``: number of keys in the metadata of one record."""
METADATA_VALUES: Final = 1 << 12
"""``metadata-size``: number of values in the metadata of one record that are stored in ``metadata``."""
METADATA_BYTES: Final = 1 << 16
"""``metadata-size``: bytes of the JSON text in ``metadata``, or characters of all its keys."""
METADATA_MEAN: Final = 1 << 10
"""``metadata-size``: average bytes of JSON text per record, over the records of one block, in addition to
``METADATA_BYTES``. Later stages hold 65,536 records in memory."""
