"""Where the shards of a loader are: found from what people write, and put behind a cache where there is one.

Reads a store's manifest and no shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hexdata.errors import ConfigError
from hexdata.shards.cache import ShardCache
from hexdata.shards.cached_source import CachedSource
from hexdata.shards.files import ShardPlace, shard_folder
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.objects import ObjectSource
from hexdata.shards.options import CacheOptions
from hexdata.shards.source import Source
from hexdata.shards.sources import FolderSource, make_source
from hexdata.storage import AnyPath, as_path, scratch_folder

__all__ = ["behind_cache", "find_source", "place_to_map"]


def find_source(store: str | AnyPath) -> Source:
    """Return where the shards are, given a store or a folder of shards, here or in an object store, or a URL.

    Raises:
        ConfigError: it is no place that shards can be in.
        StoreError: it is a store that was not exported.
    """
    source = make_source(store)
    if isinstance(source, FolderSource):
        return make_source(shard_folder(source.folder))
    if isinstance(source, ObjectSource):
        return make_source(shard_folder(as_path(source.folder)))
    return source


def behind_cache(
    source: Source, entries: Sequence[ShardEntry], options: CacheOptions, *, digests: bool
) -> Source:
    """Return a source that keeps local copies of shards, or ``source`` itself if it needs no cache.

    Args:
        source: the source of the shards.
        entries: the shards that are read.
        options: folder and size of the cache.
        digests: check the SHA-256 digest of each copy.

    Raises:
        ConfigError: a cache is given for shards in a local folder.
        BudgetError: the cache is smaller than the largest shard.
    """
    asked = options.cache
    if asked is None or asked is False or (asked is True and not isinstance(source, ObjectSource)):
        return source
    if isinstance(source, FolderSource):
        raise ConfigError(
            "shards in a local folder need no cache",
            path=source.folder,
            found=f"cache={str(asked)!r}",
            hint="Leave cache (--cache) out.",
        )
    folder = scratch_folder("shards") if asked is True else Path(asked).absolute()
    cache = ShardCache(folder, options.cache_bytes)
    cache.require_size(entries, together=False)
    return CachedSource(source, cache, {entry.name: entry for entry in entries}, digests=digests)


def place_to_map(source: Source) -> ShardPlace:
    """Return where exact mode maps shards from.

    Raises:
        ConfigError: they are elsewhere, and there is no cache.
    """
    if isinstance(source, FolderSource):
        return source.folder
    if isinstance(source, CachedSource):
        return source
    raise ConfigError(
        "exact mode maps shards into memory",
        found=source.address(""),
        expected="a local folder, or a cache for copies",
        hint="Give a folder as cache (--cache), copy the shards here, or use mode='stream'.",
    )
