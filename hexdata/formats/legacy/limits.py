"""How much one legacy file may ask for. Values only: each reader of bytes checks its own."""

from __future__ import annotations

from dataclasses import dataclass

from hexdata.formats.gunzip import GunzipLimits

__all__ = ["DEFAULT_LIMITS", "Limits"]


@dataclass(frozen=True)
class Limits(GunzipLimits):
    """Bounds on one file: far above what any real one needs, far below what would hurt the machine.

    A file that goes past one is refused with a FormatError whose code is named beside it.

    Raises:
        ValueError: if a bound is not positive.
    """

    decompressed_bytes: int = 1 << 40
    """Real pickles have 2.1 kB a position."""
    ratio: int = 800
    """Real files reach 135: boards are mostly zeros."""
    ratio_floor: int = 64 << 20
    array_bytes: int = 1 << 20
    """``limit-array``: one array, or one byte string. A board of 26 by 26 in float64 has 10,816."""
    text_bytes: int = 1 << 20
    """``limit-text``: one text, UTF-8. Protocol 2 and older write array payloads as text."""
    integer_bytes: int = 64
    """``limit-integer``: one arbitrarily long integer."""
    stack: int = 1 << 16
    """``limit-stack``: objects on the stack, and open marks. Writers append lists by the thousand."""
    memo: int = 1 << 18
    """``limit-memo``: objects that the pickle may refer back to, finished examples not counted."""
    memo_bytes: int = 32 << 20
    """Bytes of small objects of finished examples that are kept for references: the oldest that was never
    referred to is forgotten first. ``limit-memo``: bytes of those that were referred to."""
    items: int = 2 << 20
    """``limit-items``: bytes of opcodes between two batches of examples; no object has fewer than one."""
    held_bytes: int = 32 << 20
    """``limit-held``: bytes of payload and of containers between two batches of examples. A batch is 2.1 MB
    in real files."""
    nesting: int = 32
    """``limit-nesting``: depth of a value in the header or the metadata."""
    header_values: int = 1 << 17
    """``limit-header``: values in the header, counted as often as they are written out."""
    header_bytes: int = 4 << 20
    """``limit-header``: bytes of the texts among them, keys included."""
    layouts: int = 512
    """``limit-layouts``: different layouts of examples. Real files have one to three."""
    metadata_keys: int = 1 << 10
    """``metadata-size``: keys in one record's metadata."""
    metadata_values: int = 1 << 12
    """``metadata-size``: values in one record's metadata without columns of their own."""
    metadata_bytes: int = 1 << 16
    """``metadata-size``: bytes of the JSON text of that metadata, or of the keys of the metadata."""
    metadata_mean: int = 1 << 10
    """``metadata-size``: bytes of JSON text a record, on average over the records read together. Later
    stages hold 65,536 records at once."""

    @property
    def metadata_expected(self) -> str:
        """How much metadata a record may have, in words."""
        return (
            f"expected at most {self.metadata_keys:,} keys, {self.metadata_values:,} values and "
            f"{self.metadata_bytes:,} bytes, {self.nesting} levels deep"
        )


DEFAULT_LIMITS = Limits()
