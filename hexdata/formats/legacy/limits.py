"""Limits on the resources that one legacy file may use. The modules that read the file check them."""

from __future__ import annotations

from dataclasses import dataclass

from hexdata.formats.gunzip import GunzipLimits

__all__ = ["DEFAULT_LIMITS", "LegacyLimits"]


@dataclass(frozen=True)
class LegacyLimits(GunzipLimits):
    """Limits for one legacy file.

    They are far above the needs of real files and far below what would exhaust the machine. A file that
    exceeds a limit is refused with a FormatError; its code is given with each limit. The exception is
    ``metadata-size``: it rejects single records.

    Raises:
        ValueError: A limit is not positive.
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
    """``limit-text``: bytes of one text in UTF-8. Protocols 0 to 2 write array payloads as text."""
    integer_bytes: int = 64
    """``limit-integer``: bytes of one integer of arbitrary length."""
    stack: int = 1 << 16
    """``limit-stack``: number of objects on the stack, and of open marks. Writers append a thousand list
    items at a time."""
    memo: int = 1 << 18
    """``limit-memo``: number of objects that the pickle may refer back to, without finished examples."""
    memo_bytes: int = 32 << 20
    """Bytes of small objects of finished examples that are kept for references. Above it, the oldest objects
    that were never referred to are dropped. ``limit-memo``: bytes of the objects that were referred to."""
    items: int = 2 << 20
    """``limit-items``: bytes of opcodes between two batches of examples. Every object has at least one."""
    held_bytes: int = 32 << 20
    """``limit-held``: bytes of payloads, containers and memo entries between two batches of examples. A batch
    of a real file has 2.1 MB."""
    nesting: int = 32
    """``limit-nesting``: nesting depth of a value in the header. In metadata: ``metadata-size``."""
    header_values: int = 1 << 17
    """``limit-header``: number of values in the header. A shared value counts each time it is written."""
    header_bytes: int = 4 << 20
    """``limit-header``: characters of the texts in the header, including keys."""
    layouts: int = 512
    """``limit-layouts``: number of different layouts of examples. Real files have one to three."""
    metadata_keys: int = 1 << 10
    """``metadata-size``: number of keys in the metadata of one record."""
    metadata_values: int = 1 << 12
    """``metadata-size``: number of values in the metadata of one record that are stored in ``metadata``."""
    metadata_bytes: int = 1 << 16
    """``metadata-size``: bytes of the JSON text in ``metadata``, or characters of all its keys."""
    metadata_mean: int = 1 << 10
    """``metadata-size``: average bytes of JSON text per record, over the records of one block, in addition to
    ``metadata_bytes``. Later stages hold 65,536 records in memory."""

    @property
    def metadata_expected(self) -> str:
        """The limits on the metadata of one record, in words for messages."""
        return (
            f"expected at most {self.metadata_keys:,} keys, {self.metadata_values:,} values and "
            f"{self.metadata_bytes:,} bytes, {self.nesting} levels deep"
        )


DEFAULT_LIMITS = LegacyLimits()
