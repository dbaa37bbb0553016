"""Export of the shuffled positions as training shards, in the order of the shuffle.

Each shard is written by one task that depends on its arguments and the buckets only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar, Final

from msgspec.structs import asdict

from hexdata.checks import check_count, check_options
from hexdata.engine import LOCAL, Engine
from hexdata.errors import ConfigError, StoreError
from hexdata.export.run import ExportFile, ExportRun, ReplacingOptions, exporting
from hexdata.json_models import MAX_JSON_BYTES
from hexdata.options import describe_options
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS, positions_schema
from hexdata.shards.block_check import find_bad_value
from hexdata.shards.blocks import block_fields, columns_to_block
from hexdata.shards.format import ShardWriter
from hexdata.shards.manifest import MANIFEST_NAME, MAX_SIZE_OF_SHARDS, ShardEntry, ShardManifest
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from hexdata.sql.database import write_database
from hexdata.storage import AnyPath, storage_of
from hexdata.storage.errors import VERIFY_HINT
from hexdata.store import Store
from hexdata.store.files import write_bytes
from hexdata.store.integrity import find_damage, require_intact
from hexdata.store.parquet import ParquetRows, read_rows, regroup

_MAX_MANIFEST: Final = MAX_JSON_BYTES - (1 << 14)
"""Maximum bytes of the shards in a manifest that is written; 16 kB are left for the rest."""


@describe_options
@dataclass(frozen=True)
class ExportOptions(ReplacingOptions):
    """Options of ``export_shards``.

    Attributes:
        shard_size: Number of positions per shard, a multiple of ``block_size``. The last shard of a split
            has the remaining positions. Default 262,144.
        block_size: Number of positions per block. Default 4,096.
        free_buckets: Whether to remove each bucket of the shuffle as soon as all shards with its rows are
            written, so that the disk never holds all buckets and all shards. Default False.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The workers, or even one worker, do not fit into the memory.
    """

    WORKER_MEMORY: ClassVar[int] = 225 << 20

    shard_size: int = 262_144
    block_size: int = 4_096
    free_buckets: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shard_size", "block_size"):
            object.__setattr__(self, name, check_count(name, getattr(self, name), 1, MAX_SIZE_OF_SHARDS))
        # Otherwise a shard would end with a short block, and rows of blocks could not be computed from sizes.
        if self.shard_size % self.block_size:
            hint = "Give both: --block-size divides --shard-size, such as 4096 and 262144."
            raise ConfigError(
                f"shard_size {self.shard_size} must be a multiple of block_size {self.block_size}", hint=hint
            )


@dataclass(frozen=True)
class ExportResult:
    """The result of ``export_shards``.

    Attributes:
        positions: Number of positions in the shards.
        splits: Split to number of positions.
        shards: Split to number of shards.
        bytes: Size of all files together, with the shard manifest.
        digest: Digest of the shard manifest.
        resumed: Number of shards that this run did not write again, because an interrupted run had written
            them, or because they were intact in a damaged export.
        already_done: The store already had this export, undamaged, and nothing was written.
        buckets_removed: Number of buckets that this run removed.
    """

    positions: int
    splits: dict[str, int]
    shards: dict[str, int]
    bytes: int
    digest: str
    resumed: int
    already_done: bool = False
    buckets_removed: int = 0


def export_shards(
    store: str | AnyPath,
    options: ExportOptions | None = None,
    progress: Progress = SILENT,
    *,
    engine: Engine = LOCAL,
) -> ExportResult:
    """Write the shuffled positions of a store as tar shards, one sequence of shards per split.

    The same store, seed and sizes give the same bytes. An export with other options replaces the
    earlier shards.

    Args:
        store: Folder of the store, or its address in an object store.
        options: Options of the export. Default None: ``ExportOptions()``.
        progress: Receives progress reports and notes. Default: ignores them.
        engine: Runs the tasks that write shards. Default: processes on this machine.

    Returns:
        Counts and sizes of the shards in the store.

    Raises:
        ConfigError: An argument has the wrong type, or the shard manifest would be too large.
        StoreError: There is no store, it has no shuffle, it is damaged, or another process writes to it.
        BudgetError: The workers do not fit into the memory, or the disk is full.
        EngineError: A machine of ``engine`` differs from this one or cannot access the store.
    """
    settings, removed = check_options(options, ExportOptions), 0
    with exporting(store, "export", settings, progress, engine) as run:
        if not run.is_done:
            removed = _write_shards(run, settings)
        elif settings.free_buckets:
            removed = _remove_buckets(run.store)
        # Also if the export was already there: a run that was killed after publishing has not written it.
        write_database(run.store)
    lineage = run.store.manifest.stages["export"]
    facts = {name: lineage[name] for name in ("positions", "splits", "shards", "digest")}
    facts |= {"bytes": run.bytes, "resumed": run.resumed}
    return ExportResult(**facts, already_done=run.is_done, buckets_removed=removed)


def _write_shards(run: ExportRun, options: ExportOptions) -> int:
    """Write and publish the shards that a store does not have, and their manifest.

    Returns:
        The number of buckets that were removed.
    """
    store, manifest = run.store, run.store.manifest
    # All buckets are hashed before a worker reads them, so that no shard is made of damaged rows.
    if not manifest.removed_buckets:  # else the buckets of missing shards are checked
        require_intact(store, ("shuffled",), run.progress)
    assert manifest.board_size is not None
    root, shuffle = store.path.resolve(), manifest.stages["shuffle"]
    buckets = {
        split: ParquetRows.of((root / name, facts.rows) for name, facts in listed.items())
        for split in SPLITS
        if (listed := manifest.buckets(split))
    }
    with_policies = any(shuffle["policies"].values())
    fields = block_fields(manifest.board_size, with_policies, manifest.targets_of("shuffled"))
    # Before the shards are written, which takes long for a large store.
    shard_count = sum(-(-len(rows) // options.shard_size) for rows in buckets.values())
    blocks = sum(-(-len(rows) // options.block_size) for rows in buckets.values())
    # More bytes than the entries of a shard and of a block take.
    if shard_count * 256 + blocks * 86 > _MAX_MANIFEST:
        reason = f"the manifest of {shard_count:,} shards with {blocks:,} blocks would be too large"
        raise ConfigError(reason, path=store.path, hint="Use larger blocks and shards.")
    files, readers = _plan_shards(store, options, buckets, with_policies)
    published: dict[str, ShardEntry] = {}
    if run.damage is not None and f"shards/{MANIFEST_NAME}" not in run.damage:
        # The blocks of the shards are known from this file only.
        listed_shards = chain(*load_manifest(make_source(store.path / "shards")).splits.values())
        published = {f"shards/{shard.name}": shard for shard in listed_shards}
    # Decides what is written, and so which of the buckets must still exist.
    missing = run.resume(files, published)
    if manifest.removed_buckets:
        # An interrupted run has begun to remove them, and a missing shard may need a removed one.
        needed = {name: manifest.removed_buckets[name] for shard in missing for name in readers[shard]}
        for bucket, error in find_damage(store, needed, progress=run.progress).items():
            shard = next(name for name in missing if bucket in readers[name])
            error.reason += f", and {shard} must be written"
            raise error
    # An interrupted run that has begun to remove the buckets is continued.
    frees, removed = options.free_buckets or bool(manifest.removed_buckets), 0

    def release(unwritten: Iterable[str]) -> None:
        nonlocal removed
        if frees:
            removed += _remove_buckets(store, {bucket for name in unwritten for bucket in readers[name]})

    # Measured: rows exist several times, in the batch that is read and in the block that is written.
    rows_of_block = min(options.block_size, max(map(len, buckets.values())))
    memory = 512 * max(0, rows_of_block - ExportOptions.block_size)  # besides a block of the default size
    if with_policies:
        policies_of_block = min(rows_of_block, max(shuffle["policies"].values()))
        memory += (64 << 20) + 36 * manifest.board_size**2 * policies_of_block
    seconds_per_position = 1e-6 + 1e-4 / options.block_size  # a block has a dozen members
    run.write(files, missing, seconds_per_position, memory, release)
    entries: list[ShardEntry] = [*run.files.entries.values()]
    shards = ShardManifest(
        board_size=manifest.board_size,
        block_size=options.block_size,
        shard_size=options.shard_size,
        seed=shuffle["seed"],
        fields=fields,
        splits={split: [e for e in entries if e.name.startswith(f"{split}-")] for split in buckets},
    )
    # After all shards, of which it has the digests, and before the
    # manifest of the store, which has its digest.
    name = f"shards/{MANIFEST_NAME}"
    written = write_bytes(run.files.target / name, shards.dumps(), replace=False)
    facts = {
        "splits": {split: shards.positions(split) for split in buckets},
        "shards": {split: len(listed) for split, listed in shards.splits.items()},
        "digest": shards.digest,
    }
    run.publish(facts, {name: written})
    # The last buckets are removed after publishing: until then they could be needed to write a shard again.
    return removed + (_remove_buckets(store) if frees else 0)


def _plan_shards(
    store: Store, options: ExportOptions, buckets: Mapping[str, ParquetRows], with_policy: bool
) -> tuple[dict[str, ExportFile], dict[str, list[str]]]:
    """Return all shards by name, and the names of the buckets that each has rows of.

    Args:
        store: The store.
        options: Options of the export.
        buckets: The rows of each split.
        with_policy: Whether the store has any policy that is not one-hot.
    """
    manifest, files, readers = store.manifest, {}, {}
    assert manifest.board_size is not None
    names = {store.path.resolve() / name: name for name in manifest.buckets()}
    for split, rows in buckets.items():
        for index, start in enumerate(range(0, len(rows), options.shard_size)):
            part = rows.part(start, min(start + options.shard_size, len(rows)))
            write = partial(
                _write_shard,
                rows=part,
                # Block keys count over the whole split, so that its shards can be read as one stream.
                first_block=start // options.block_size,
                board_size=manifest.board_size,
                with_policy=with_policy,  # since all blocks have the same members
                targets=manifest.targets_of("shuffled"),
                options=options,
            )
            name = f"shards/{split}-{index:06d}.tar"
            files[name] = ExportFile(len(part), write)
            readers[name] = [names[path] for path, _ in part.files]
    return files, readers


def _write_shard(
    path: AnyPath,
    *,
    rows: ParquetRows,
    first_block: int,
    board_size: int,
    with_policy: bool,
    targets: Sequence[str],
    options: ExportOptions,
) -> ShardEntry:
    """Write one shard.

    Args:
        path: The shard.
        rows: The rows of the buckets that the shard contains.
        first_block: Number of the first block within the split.
        board_size: Cells along an edge.
        with_policy: As for :func:`_plan_shards`.
        targets: Optional columns of the buckets.
        options: Options of the export.

    Raises:
        StoreError: The buckets contain a value that readers refuse, or policies that the store's manifest
            does not record.
    """
    fault = partial(StoreError, path=rows.files[0][0].parent, hint=VERIFY_HINT)
    # Rows are cut into blocks first, so that blocks do not depend on row groups or buckets.
    schema = positions_schema(board_size, targets)
    with storage_of(path).publish(replace=False) as file:
        writer = ShardWriter(file)
        tables = regroup(read_rows(rows, schema), schema, options.block_size)
        for key, table in enumerate(tables, start=first_block):
            # The members of blocks were chosen by the counts of the manifest,
            # and policies would be lost without notice.
            if not with_policy and table["policy"].null_count < table.num_rows:
                raise fault("the shuffled positions contain policies, but the manifest records none")
            block = columns_to_block(table, with_policy, targets)
            # Readers check the same, so that an export never gives shards which they refuse.
            if (bad := find_bad_value(block, board_size, table.num_rows)) is not None:
                record = f"{bad.field} in row {bad.row} of block {key} of {path.name}"
                reason = "the shuffled positions contain an invalid value"
                raise fault(reason, record=record, found=bad.found, expected=bad.expected)
            writer.write_block(key, block)
        writer.close()
        return writer.entry(path.name, file.sha256)


def _remove_buckets(store: Store, needed: Collection[str] = ()) -> int:
    """Remove the buckets of a store that are not needed any more, and return their number.

    The manifest records that they are being removed before the first one is.

    Args:
        store: The store.
        needed: Names of the buckets that shards which are not written yet contain rows of. Default: none.
    """
    manifest, folder = store.manifest, store.path / "shuffled"
    # The record is saved first: a run that is killed while it removes buckets must not look like damage.
    if not manifest.removed_buckets:
        removed = {name: asdict(facts) for name, facts in manifest.files_in("shuffled").items()}
        manifest.stages["shuffle"] = {**manifest.stages["shuffle"], "removed": removed}
        manifest.files = {name: facts for name, facts in manifest.files.items() if name not in removed}
        manifest.save(store.path)
    unneeded = manifest.removed_buckets.keys() - set(needed)
    present = [name for name in storage_of(folder).files() if f"shuffled/{name}" in unneeded]
    for name in present:
        # Another machine may have taken over the lock of this run, and may still need the bucket.
        store.require_lock()
        storage_of(folder / name).remove()
    if not needed:
        store.remove("shuffled")
    return len(present)
