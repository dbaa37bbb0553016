"""How much one legacy file may ask for. Values only: each reader of bytes checks its own."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["DEFAULT_LIMITS", "Limits"]


@dataclass(frozen=True)
class Limits:
    """Bounds on one file: far above what any real one needs, far below what would hurt the machine.

    A file that goes past one is refused with a FormatError whose code is named beside it.

    Raises:
        ValueError: if a bound is not positive.
    """

    decompressed_bytes: int = 1 << 40
    """``limit-size``: bytes of the whole pickle. Real ones have 2.1 kB a position."""
    ratio: int = 800
    """``limit-ratio``: decompressed to compressed bytes, looked at from ``ratio_floor`` on. Real files
    reach 135 (boards are mostly zeros); gzip itself cannot pass 1,032, which is what a bomb has."""
    ratio_floor: int = 64 << 20
    """Decompressed bytes up to which any ratio will do."""
    array_bytes: int = 1 << 20
    """``limit-array``: one array, or one byte string. A board of 26 by 26 in float64 has 10,816."""
    text_bytes: int = 1 << 20
    """``limit-text``: one text, UTF-8. Protocol 2 and older write array payloads as text."""
    integer_bytes: int = 64
    """``limit-integer``: one arbitrarily long integer."""
    stack: int = 1 << 16
    """``limit-stack``: objects on the stack, and open marks. Writers append lists by the thousand."""
    memo: int = 1 << 20
    """``limit-memo``: objects that the pickle may refer back to, finished examples not counted."""
    memo_text: int = 96 << 20
    """Characters of text out of finished examples that are kept for references; the oldest that was
    never referred to is forgotten first."""
    items: int = 4 << 20
    """``limit-items``: bytes of opcodes between two batches of examples; no object has fewer than one."""
    held_bytes: int = 64 << 20
    """``limit-held``: payload bytes between two batches of examples. A batch is 2.1 MB in real files."""
    nesting: int = 32
    """``limit-nesting``: depth of a value in the header or the metadata."""
    header_values: int = 1 << 17
    """``limit-header``: values in the header, counted as often as they are written out."""
    metadata_values: int = 1 << 12
    """The same for one record's metadata without columns of their own; past it, the record is rejected."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be positive, not {getattr(self, field.name)}")


DEFAULT_LIMITS = Limits()
