"""Finds the shards of a loader: the source, the manifest, and the cache in front of a remote source."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from hexdata.checks import check_location
from hexdata.errors import ConfigError, StoreError
from hexdata.schema import is_target
from hexdata.shards.blocks import block_fields, fields_of_members
from hexdata.shards.cache import CachedSource, ShardCache
from hexdata.shards.command import CommandSource
from hexdata.shards.http import HttpSource
from hexdata.shards.manifest import MANIFEST_NAME, REPAIR_HINT, ShardEntry, ShardManifest
from hexdata.shards.objects import ObjectSource
from hexdata.shards.options import CacheOptions
from hexdata.shards.sources import FolderSource, ShardSource
from hexdata.storage import AnyPath, as_path, cache_folder, is_fault, storage_of
from hexdata.storage.address import PROTOCOLS, credentials_error
from hexdata.store import Store
from hexdata.store.location import classify
from hexdata.strict_json import MAX_JSON_BYTES

__all__ = ["add_cache", "check_split", "find_source", "load_manifest", "make_source", "require_mappable"]

_CHUNK: Final = 1 << 20
_URL: Final = re.compile(r"(pipe):|([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_NAME_FIELD: Final = "{name}"


def make_source(location: str | AnyPath) -> ShardSource:
    """Return the source for a folder of shards.

    Args:
        location: Path of a local folder; address of a folder in an object store, ``s3://bucket/shards``; URL
            of a folder on a web server, ``https://host/shards``; or a command that writes the file
            ``{name}`` to its standard output, ``pipe:cat /data/{name}``. A web URL may also contain
            ``{name}``, for example before a query; without it, the name is appended.

    Raises:
        ConfigError: A pipe does not contain ``{name}``, or the address cannot be used.
    """
    check_location("store", location)
    if isinstance(location, Path):
        return FolderSource(location)
    text = str(location)
    url = _URL.match(text)
    scheme = "" if url is None else (url[1] or url[2]).lower()
    if scheme in PROTOCOLS and "{" in text:
        raise ConfigError(
            "the address of an object store cannot contain {name}",
            found=text,
            hint="Give the folder of the shards.",
        )
    if scheme in ("", "file", *PROTOCOLS):
        return _folder_source(as_path(text))
    if scheme == "pipe":
        if _NAME_FIELD not in text:
            raise ConfigError(
                "a pipe needs {name} in place of the shard's name",
                found=text,
                hint="Write {name} where the command has the name of the file.",
            )
        return CommandSource(text)
    template = text if _NAME_FIELD in text else f"{text.rstrip('/')}/{_NAME_FIELD}"
    if scheme in ("http", "https"):
        _check_web_address(text)
    return HttpSource(template) if scheme in ("http", "https") else CommandSource(template)


def _check_web_address(text: str) -> None:
    parts = urlsplit(text)
    if "@" in unquote(parts.netloc):
        raise credentials_error("a user and a password do")
    try:
        fine = bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError("the address has no valid host and port", found=text)


def _folder_source(folder: AnyPath) -> FolderSource | ObjectSource:
    return FolderSource(folder) if isinstance(folder, Path) else ObjectSource.of(folder)


def find_source(location: str | AnyPath) -> ShardSource | Store:
    """Return the source of the shards of a store, or of a folder of shards; or a store without shards.

    Warns if a store has changed since its shards were written.

    Args:
        location: A store, local or in an object store; or as for :func:`make_source`.

    Raises:
        ConfigError: The location cannot be used.
    """
    source = make_source(location)
    if isinstance(source, FolderSource):
        folder: AnyPath = source.folder
    elif isinstance(source, ObjectSource):
        folder = source.path
    else:
        return source
    try:
        store = Store.open(folder)
    except StoreError as error:  # not a store; perhaps a folder of shards without one
        if is_fault(error):  # further requests would fail too, after their own retries
            raise
        if isinstance(folder, Path):
            found = classify(folder).kind
            if classify(folder / "shards").kind == "shards" and found not in ("store", "shards"):
                return FolderSource(folder / "shards")  # the tables of the store were not copied
            if found != "shards":
                raise
            return source
        return _folder_source(folder / "shards" if _has_shards(folder) else folder)
    if "export" not in store.manifest.stages:
        return store
    for stage in ("shuffle", "export"):
        try:
            store.require_stage(stage)
        except StoreError as error:
            warnings.warn(str(error), stacklevel=4)
    return _folder_source(folder / "shards")


def _has_shards(folder: AnyPath) -> bool:
    try:
        return storage_of(folder / "shards" / MANIFEST_NAME).exists()
    except OSError:  # reading the manifest will raise a clear error
        return False


def load_manifest(source: ShardSource) -> ShardManifest:
    """Read and check the manifest of a source.

    Raises:
        StoreError: As for :meth:`ShardManifest.load`, or the source fails.
    """
    with source.open(MANIFEST_NAME) as stream:
        data = bytearray()
        while len(data) <= MAX_JSON_BYTES and (part := stream.read(_CHUNK)):
            data += part
        if len(data) <= MAX_JSON_BYTES:
            stream.finish()
    return ShardManifest.loads(bytes(data), source.address(MANIFEST_NAME))


def check_split(manifest: ShardManifest, split: str, location: str) -> list[str]:
    """Check that a split can be loaded, and return the sorted fields of its blocks, with dense policies.

    Args:
        manifest: The shard manifest.
        split: Name of the split.
        location: Location of the shards, for messages.

    Raises:
        ConfigError: The split does not exist, or the shards have the layout ``samples``.
        StoreError: The fields are not those of this version of hexdata.
    """
    if manifest.layout != "blocks":
        raise ConfigError(
            "the loader reads shards of blocks",
            path=location,
            found=f"layout {manifest.layout}",
            hint="Run `hexdata export` with --layout blocks.",
        )
    if split not in manifest.splits:
        splits = ", ".join(manifest.splits)
        raise ConfigError("no such split in the shards", path=location, found=split, expected=splits)
    shards = manifest.splits[split]
    if not shards:
        return []
    known = block_fields(
        manifest.board_size,
        with_policy="policy_row" in shards[0].offsets,
        targets=[name for name in manifest.fields if is_target(name)],
        schema_version=manifest.schema_version,
    )
    for shard in shards:
        if shard.offsets.keys() != known.keys():
            record = f"fields of {shard.name}"
            raise _wrong_fields_error(location, record, sorted(shard.offsets), sorted(known))
    for name, spec in known.items():
        if manifest.fields.get(name) != spec:
            raise _wrong_fields_error(location, f"field {name}", manifest.fields.get(name), spec)
    return fields_of_members(known)


def _wrong_fields_error(location: str, record: str, found: object, expected: object) -> StoreError:
    return StoreError(
        "the shard manifest describes blocks with other fields",
        path=location,
        record=record,
        found=found,
        expected=expected,
        hint=REPAIR_HINT,
    )


def add_cache(source: ShardSource, entries: Sequence[ShardEntry], options: CacheOptions) -> ShardSource:
    """Return a source that keeps local copies of shards, or ``source`` itself if it needs no cache.

    Args:
        source: Source of the shards.
        entries: The shards that are read.
        options: Folder and size of the cache.

    Raises:
        ConfigError: A cache is given for shards in a local folder.
        BudgetError: The cache is smaller than the largest shard.
    """
    cache = options.cache
    if cache is None or cache is False or (cache is True and not isinstance(source, ObjectSource)):
        return source
    if isinstance(source, FolderSource):
        raise ConfigError(
            "shards in a local folder need no cache",
            path=source.folder,
            found=f"cache={str(cache)!r}",
            hint="Remove the option cache (--cache).",
        )
    folder = cache_folder("shards") if cache is True else Path(cache).absolute()
    shard_cache = ShardCache(folder, options.cache_bytes)
    shard_cache.require_size(entries, together=False)
    return CachedSource(source, shard_cache, {entry.name: entry for entry in entries})


def require_mappable(source: ShardSource) -> FolderSource | CachedSource:
    """Return the source if its shards can be mapped into memory, as exact mode does.

    Raises:
        ConfigError: The shards are remote and there is no cache.
    """
    if isinstance(source, (FolderSource, CachedSource)):
        return source
    raise ConfigError(
        "exact mode maps shards into memory",
        found=source.address(""),
        expected="a local folder, or a cache for copies",
        hint="Give a folder as cache (--cache), copy the shards to this machine, or use mode='stream'.",
    )
