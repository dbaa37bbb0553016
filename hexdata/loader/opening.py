"""Opening of the data of a loader: a store without shards, or shards."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final, get_args

from hexdata.batch import check_stored_fields, required_members
from hexdata.checks import check_choice
from hexdata.errors import ConfigError, StoreError
from hexdata.loader.exact import SelectedRows
from hexdata.loader.game_reader import read_game_table
from hexdata.loader.game_table import GameTable
from hexdata.loader.options import LoaderOptions, Mode, shard_range
from hexdata.loader.row_filter import OpenStore
from hexdata.loader.stored_columns import open_unchanged, table_digest
from hexdata.loader.weights import Weights, align_weights
from hexdata.progress import SILENT, Progress
from hexdata.shards.blocks import POLICY_FIELDS, block_fields
from hexdata.shards.cache import CachedSource
from hexdata.shards.files import MappableSource
from hexdata.shards.locate import find_source
from hexdata.shards.manifest import REPAIR_HINT, ShardManifest
from hexdata.shards.mapped import MappedShards
from hexdata.shards.objects import ObjectSource
from hexdata.shards.read_ahead import ReadAhead
from hexdata.shards.sources import FolderSource, ShardSource
from hexdata.storage import AnyPath, as_path, is_fault
from hexdata.store import Store
from hexdata.units import format_bytes

__all__ = [
    "all_members",
    "default_mode",
    "find_data",
    "open_game_rows",
    "open_shard_rows",
    "store_of_shards",
    "with_shards",
]


_TARGET_DTYPES: Final = {"visits": "<i4"}
"""Dtypes of optional columns of batches and therefore in a table of games. All others are float32."""


def find_data(location: str | AnyPath, mode: Mode | None) -> ShardSource | Store:
    """Return the store of a location for games mode, otherwise the source of its shards.

    Args:
        location: As for ``Loader``.
        mode: The mode; None for a store if it has no shards, otherwise for shards.

    Raises:
        ConfigError: The location cannot be used.
        StoreError: The location is not a store, or it has no shards, which the mode requires.
    """
    if mode is not None:
        check_choice("mode", mode, get_args(Mode))
    if mode == "games":
        return Store.open(location)
    found = find_source(location)
    if isinstance(found, Store) and mode is not None:
        found.require_stage("export")
    return found


def default_mode(data: ShardSource | Store) -> Mode:
    """Return the mode for a location if none is given."""
    if isinstance(data, Store):
        return "games"
    return "exact" if isinstance(data, FolderSource) else "stream"


def all_members(options: LoaderOptions, stored: Collection[str], location: str) -> list[str]:
    """Return the sorted names of the members that batches need, and of the ids for the epoch digest.

    Args:
        options: Options of the loader.
        stored: Names of the stored members.
        location: Location of the store, for messages.

    Raises:
        ConfigError: The batches need a field that is not stored.
    """
    check_stored_fields(options.batch.fields, stored, location)
    return sorted({*required_members(options.batch, stored), "position_id"})


def with_shards(manifest: ShardManifest, options: LoaderOptions, location: str) -> ShardManifest:
    """Return the manifest with only the shards of the split that ``options.shards`` selects.

    Args:
        manifest: The manifest of all shards. It has the split.
        options: Options of the loader.
        location: Location of the shards, for messages.

    Raises:
        ConfigError: The split has fewer shards.
    """
    if options.shards is None:
        return manifest
    start, stop = shard_range(options.shards)
    shards = manifest.splits[options.split]
    if stop > len(shards):
        raise ConfigError(
            f"the split {options.split} has fewer shards",
            path=location,
            found=f"shards {start}-{stop - 1}",
            expected=f"shards from 0 to {len(shards) - 1}" if shards else "no option shards, as it has none",
        )
    return manifest.with_shards(options.split, start, stop)


def open_game_rows(
    store: Store, options: LoaderOptions, progress: Progress = SILENT, weights: Weights | None = None
) -> tuple[SelectedRows, GameTable]:
    """Read the games of a split.

    Args:
        store: The store.
        options: Options of the loader.
        progress: Receives progress while files are checked and games are read (default: no reports).
        weights: Weights of the positions (default: none).

    Returns:
        The selected rows, and the table that contains all rows.

    Raises:
        StoreError: A file is missing or damaged.
        ConfigError: The split is unknown, an option requires shards, the condition ``where`` is invalid, or
            no position is selected.
        BudgetError: The table does not fit into memory.
    """
    if options.on_error != "raise":
        raise ConfigError(
            "games mode has no shards to skip",
            found=f"on_error={options.on_error!r}",
            expected="'raise'",
            hint="Leave out on_error, or load shards with mode='exact'.",
        )
    given = store.manifest.stages.get("shuffle", {}).get("choices", {})
    choices = {name: value for name, value in given.items() if getattr(options, name, None) != value}
    if choices:
        warnings.warn(
            f"games mode does not apply the choices of the shuffle, {choices}; give where and "
            "dedup to the loader",
            stacklevel=4,
        )
    targets = store.manifest.targets
    stored = block_fields(1, with_policy=False, targets=targets)
    fields = {*stored, "fill", *POLICY_FIELDS} - {"board"}
    members = all_members(options, fields, str(store.path))
    tiers = options.where is not None or options.weights is not None or "value_sample_tier" in members
    table = read_game_table(
        store,
        options.split,
        tiers=tiers,
        targets={name: _TARGET_DTYPES.get(name, "<f4") for name in targets if name in members},
        policies="policy" in members,
        check=options.check,
        progress=progress,
    )
    open_store = partial(open_unchanged, store.path, table_digest(store))
    row_weights = None if weights is None else align_weights(table, weights)
    return SelectedRows(table, members, options, weights=row_weights, open_store=open_store), table


def store_of_shards(source: ShardSource, digest: str) -> Store | None:
    """Return the store that shards were exported from, if they are in its folder.

    Args:
        source: Source of the shards.
        digest: Digest of their manifest.
    """
    shards = source.source if isinstance(source, CachedSource) else source
    if not isinstance(shards, FolderSource | ObjectSource):
        return None
    try:
        store = Store.open(as_path(shards.folder).parent)
    except StoreError as error:
        if is_fault(error):
            raise
        return None
    return store if store.manifest.stages.get("export", {}).get("digest") == digest else None


def open_shard_rows(
    source: MappableSource,
    manifest: ShardManifest,
    members: Sequence[str],
    options: LoaderOptions,
    progress: Progress = SILENT,
    weights: Weights | None = None,
    open_store: OpenStore | None = None,
) -> SelectedRows:
    """Map the shards of a split, and begin to read them into the page cache and to check them.

    Args:
        source: Local folder of the shards, or a source with a cache.
        manifest: Manifest of the shards.
        members: Names of the fields to read.
        options: Options of the loader.
        progress: Receives progress while shards are downloaded, checked and read ahead (default: no
            reports).
        weights: Weights of the positions (default: none).
        open_store: Opens the store of the games (default None: there is none).

    Raises:
        StoreError: A shard is missing or has another size, or every shard was skipped.
        BudgetError: The process cannot map all shards, or the cache is too small for them.
        ConfigError: The condition ``where`` is invalid, or no position is selected.
    """
    shards = MappedShards(
        source,
        manifest,
        options.split,
        on_error=options.on_error,
        check=options.check,
        progress=progress,
    )
    if shards.faults and not shards.positions:
        raise StoreError(
            f"no shard of {options.split} can be used",
            path=source.address(""),
            found=shards.faults[0][1].detail(),
            hint=REPAIR_HINT,
        )
    _warn_if_too_large(shards.read_ahead(progress), options.split)
    faults = [(entry.name, entry.positions, fault) for entry, fault in shards.faults]
    row_weights = None if weights is None else align_weights(shards, weights)
    return SelectedRows(shards, members, options, faults, row_weights, open_store)


def _warn_if_too_large(ahead: ReadAhead, split: str) -> None:
    if ahead.too_little_memory is None:
        return
    shards, memory = format_bytes(ahead.bytes), format_bytes(ahead.too_little_memory)
    warnings.warn(
        f"exact mode will be slow, because the shards of {split} do not fit into the available memory: "
        f"found {shards} of shards and {memory} of memory. Positions are read from the disk at random. "
        "Use mode='games' over a store, or mode='stream', which reads shards sequentially.",
        stacklevel=2,
    )
