"""Sizes in bytes as text, such as 1GB."""

from __future__ import annotations

import re
from typing import Final

from hexdata.errors import ConfigError

__all__ = ["format_bytes", "format_duration", "parse_bytes"]

_UNITS: Final = {
    "b": 1,
    **{f"{letter}{b}": 1_000**i for i, letter in enumerate("kmgt", start=1) for b in ("", "b")},
    **{f"{letter}i{b}": 1_024**i for i, letter in enumerate("kmgt", start=1) for b in ("", "b")},
}
# Below 2^63, so that it fits into 64 bits in every library.
_LARGEST: Final = 10**18
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes of a size such as "1GB", "2G" or "700 MiB".

    kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB are powers of 1024. The B may be left out.
    A text without a unit is refused, because 2 may mean 2 GB. An int is a number of bytes.

    Raises:
        ConfigError: The text is not a size, or the size is too large.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    unit = match and _UNITS.get(match[2].lower())
    if not match or not unit:
        raise ConfigError(
            "not a size", found=repr(text), expected="a number and a unit, such as 1GB or 700MiB"
        )
    size = float(match[1]) * unit
    if size > _LARGEST:
        raise ConfigError("size too large", found=repr(text), expected="at most 1,000,000 TB")
    return int(size)


def format_bytes(size: float) -> str:
    """Return a size with three digits and a unit; units are powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # From 999.5 on, the size would be rounded to 1000 of this unit.
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    # From 100 on without a decimal, since ``.3g`` would print 1e+03 for sizes in TB.
    return f"{size:,.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """Return a duration as minutes and seconds, such as "1:07", or with hours, such as "2:01:07"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
