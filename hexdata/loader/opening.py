"""Opening of the data of a loader: a store without shards, or shards."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from hexdata.batch import required_members
from hexdata.errors import ConfigError, StoreError
from hexdata.loader.checkpoint import DataIdentity
from hexdata.loader.game_reader import open_unchanged, read_game_table, table_digest
from hexdata.loader.game_table import GameTable
from hexdata.loader.options import Mode, OnError, SplitOptions
from hexdata.loader.shard_table import SkippedShard, read_shard_table
from hexdata.progress import Progress
from hexdata.shards.blocks import POLICY_FIELDS, block_fields
from hexdata.shards.cache import AnySource, add_cache
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.reader import check_split, load_manifest
from hexdata.shards.sources import ShardSource, find_source
from hexdata.storage import AnyPath
from hexdata.storage.errors import fault_behind
from hexdata.store import Store

_TARGET_DTYPES: Final = {"visits": "<i4"}
"""Dtypes of optional columns of batches and therefore in a table of games. All others are float32."""


def find_data(location: str | AnyPath, mode: Mode | None) -> tuple[ShardSource | Store, Mode]:
    """Return the store of a location for games mode, otherwise the source of its shards; and the mode.

    Args:
        location: As for ``Loader``.
        mode: The mode; None for a store if it has no shards, otherwise for shards.

    Raises:
        ConfigError: The location cannot be used.
        StoreError: The location is not a store, or it has no shards, which the mode requires.
    """
    # find_source prefers shards to the tables of the same store.
    found = Store.open(location) if mode == "games" else find_source(location)
    if isinstance(found, Store):
        if mode not in ("games", None):
            found.require_stage("export")
        return found, "games"
    return found, mode or ("exact" if found.is_local else "stream")


class LoaderData(NamedTuple):
    """The data of a loader."""

    identity: DataIdentity
    """Identity of the split, without the selection."""
    board_size: int
    members: list[str]
    """Names of the members that batches need, and of the ids for the epoch digest."""
    table: GameTable | None = None
    """The rows of the split in memory; None in stream mode."""
    source: AnySource | None = None
    manifest: ShardManifest | None = None
    """The source of the shards, and their manifest; None in games mode."""
    skipped: Sequence[SkippedShard] = ()
    """Shards that were left out."""


def open_data(
    data: ShardSource | Store, location: str, options: SplitOptions, on_error: OnError, progress: Progress
) -> LoaderData:
    """Open the shards or the store of a loader, and read the split unless it is streamed.

    Args:
        data: The store or the source of the shards, from :func:`find_data`.
        location: Location as given, for messages.
        options: Options of the loader.
        on_error: "raise", or "skip" to leave out shards that cannot be used.
        progress: Receives progress while shards or games are read.

    Raises:
        StoreError, FormatError: A file is missing or damaged, or every shard was skipped.
        ConfigError: The split is unknown, or options contradict each other.
        BudgetError: The split does not fit into memory, or a shard not into the cache.
    """
    if isinstance(data, Store):
        return _open_games(data, options, progress)
    return _open_shards(data, location, options, on_error, progress)


def _open_games(store: Store, options: SplitOptions, progress: Progress) -> LoaderData:
    given = store.manifest.stages.get("shuffle", {}).get("choices", {})
    # A user who shuffled with `where` may expect it here too, but games
    # mode reads the tables from before the shuffle.
    choices = {name: value for name, value in given.items() if getattr(options, name, None) != value}
    if choices:
        warnings.warn(f"games mode does not apply the choices of the shuffle, {choices}", stacklevel=4)
    targets = store.manifest.targets
    # The size of boards does not affect the names. A table has fill rows in place of boards.
    stored = {*block_fields(1, with_policy=False, targets=targets), "fill", *POLICY_FIELDS} - {"board"}
    members = _members(options, stored, str(store.path))
    columns = {name: _TARGET_DTYPES.get(name, "<f4") for name in targets if name in members}
    # Conditions and weights may name any label; all other labels are in the table in any case.
    if options.where is not None or options.weights is not None or "value_sample_tier" in members:
        columns["value_sample_tier"] = "|u1"
    policies = "policy" in members
    table = read_game_table(store, options.split, columns, policies, options.check, progress)
    files = [len(store.manifest.files_in(table)) for table in ("games", "positions")]
    identity = DataIdentity(table_digest(store), files=files)
    table.open_store = partial(open_unchanged, store.path, identity.digest)
    return LoaderData(identity, table.board_size, members, table)


def _open_shards(
    source: ShardSource, location: str, options: SplitOptions, on_error: OnError, progress: Progress
) -> LoaderData:
    manifest, split = load_manifest(source), options.split
    members = _members(options, check_split(manifest, split, location), location)
    identity, shards = DataIdentity(manifest.digest), manifest.splits[split]
    if options.shards is not None:
        start, stop = map(int, options.shards)
        if stop > len(shards):
            raise ConfigError(f"{split} has {len(shards)} shards, not {start}-{stop - 1}", path=location)
        # The digest remains that of all shards; the state records the range separately.
        manifest = replace(manifest, splits={**manifest.splits, split: shards[start:stop]})
    cached = add_cache(source, manifest.splits[split], options)
    table, skipped = None, list[SkippedShard]()
    if options.mode != "stream":
        table, skipped = read_shard_table(cached, manifest, split, "policy" in members, on_error, progress)
        table.open_store = partial(_store_of_shards, source, identity.digest)
    return LoaderData(identity, manifest.board_size, members, table, cached, manifest, skipped)


def _members(options: SplitOptions, stored: Collection[str], location: str) -> list[str]:
    # Ids are always read: the epoch digest and the draws depend on them.
    return sorted({*required_members(options, stored, location), "position_id"})


def _store_of_shards(source: ShardSource, digest: str) -> Store | None:
    """Return the store that shards were exported from, if they are in its folder.

    Args:
        source: Source of the shards.
        digest: Digest of their manifest.
    """
    if source.folder is None:
        return None
    try:
        store = Store.open(source.folder.parent)
    except StoreError as error:
        # A failing object store does not show that there is no store.
        if fault_behind(error):
            raise
        return None
    # The store beside the shards may have been exported again since.
    return store if store.manifest.stages.get("export", {}).get("digest") == digest else None
