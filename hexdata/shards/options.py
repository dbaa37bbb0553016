"""Options for reading shards: how they are checked and where copies are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hexdata.checks import check_count
from hexdata.errors import ConfigError
from hexdata.storage import local_path
from hexdata.units import parse_bytes

__all__ = ["CACHE_SIZE", "CacheFolder", "CacheOptions", "Check", "OnError"]

OnError = Literal["raise", "skip"]
"""Whether a damaged shard raises an error or is left out of the epoch with a warning."""
Check = Literal["sizes", "digests"]
"""Whether only the sizes of shards are compared with the manifest, or also their SHA-256 digests."""
CacheFolder = str | Path | bool | None
"""Folder of the shard cache; True: the default folder, for object stores only; False or None: no cache."""
CACHE_SIZE: Final = 50_000_000_000
"""Default maximum size of the shard cache in bytes."""


@dataclass(frozen=True)
class CacheOptions:
    """Where copies of shards that lie elsewhere are kept, and how many are fetched ahead.

    ``cache_size`` may be given as text, such as "50GB"; it is kept as bytes.

    Raises:
        ConfigError: if one has no meaning.
    """

    cache: CacheFolder = True
    cache_size: int | str = CACHE_SIZE
    prefetch: int | None = None

    def __post_init__(self) -> None:
        if not (self.cache is None or isinstance(self.cache, (bool, str, Path))) or self.cache == "":
            raise ConfigError("cache cannot be used", found=repr(self.cache), expected="a folder or None")
        if isinstance(self.cache, str):
            folder = local_path(self.cache, "a cache of shards", "Give a folder as cache (--cache).")
            object.__setattr__(self, "cache", str(folder))
        object.__setattr__(self, "cache_size", _cache_bytes(self.cache_size))
        if self.prefetch is not None:
            object.__setattr__(self, "prefetch", check_count("prefetch", self.prefetch, 0))

    @property
    def cache_bytes(self) -> int:
        """The size as a number."""
        return parse_bytes(self.cache_size)


def _cache_bytes(value: int | str) -> int:
    try:
        size = parse_bytes(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise ConfigError("cache_size cannot be used", found=error.found, expected=error.expected) from None
    return check_count("cache_size", size, 1)
