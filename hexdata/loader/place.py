"""Where the shards of a loader are: found from what people write, and put behind a cache where there is one.

Reads a store's manifest and no shard.
"""

from __future__ import annotations

from pathlib import Path

from hexdata.errors import ConfigError
from hexdata.formats.shard_manifest import ShardManifest
from hexdata.loader.cached import CachedSource
from hexdata.loader.object_source import ObjectSource
from hexdata.loader.options import LoaderOptions
from hexdata.loader.shard_cache import ShardCache
from hexdata.loader.shard_files import ShardPlace, shard_folder
from hexdata.loader.source import Source
from hexdata.loader.sources import FolderSource, make_source
from hexdata.remote import AnyPath, as_path, scratch_folder

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


def behind_cache(source: Source, manifest: ShardManifest, options: LoaderOptions) -> Source:
    """Return a source of the split's shards that keeps copies, if the options and the place ask for that.

    Raises:
        ConfigError: a cache for shards that are here.
        BudgetError: the cache is smaller than a shard.
    """
    asked = options.copies.cache
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
    entries = manifest.splits[options.split]
    cache = ShardCache(folder, options.copies.cache_bytes)
    cache.require_size(entries, together=False)
    by_name = {entry.name: entry for entry in entries}
    return CachedSource(source, cache, by_name, digests=options.check == "digests")


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
