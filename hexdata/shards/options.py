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
"""A damaged shard raises an error, or is skipped with a warning."""
Check = Literal["sizes", "digests"]
"""What is compared with the manifest when shards are opened: file sizes only, or SHA-256 digests too."""
CacheFolder = str | Path | bool | None
"""Folder of the shard cache; True: the default folder, for object stores only; False or None: no cache."""
CACHE_SIZE: Final = 50_000_000_000
"""Default maximum size of the shard cache in bytes."""


@dataclass(frozen=True)
class CacheOptions:
    """Options for the local copies of remote shards.

    Attributes:
        cache: Folder of the copies. True (default): the default folder for shards in an object store, no
            cache for other sources. False or None: no cache.
        cache_size: Maximum size of the cache in bytes, or text such as "50GB", which is converted to bytes.
            Least recently used shards are evicted first. Default 50 GB.
        prefetch: In stream mode, number of shards to fetch ahead; 0 for none. None (default): the number of
            streams that the process reads, at least 2.

    Raises:
        ConfigError: A value is invalid.
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
        """The maximum size of the cache in bytes."""
        return parse_bytes(self.cache_size)


def _cache_bytes(value: int | str) -> int:
    try:
        size = parse_bytes(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise ConfigError("cache_size cannot be used", found=error.found, expected=error.expected) from None
    return check_count("cache_size", size, 1)
