"""Export of the shuffled positions as training shards, in the order of the shuffle.

Each shard is written by one task that depends on its arguments and the buckets only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from hexdata.cards import write_cards
from hexdata.checks import check_choice, check_fields, check_options
from hexdata.engine import LOCAL, Engine
from hexdata.errors import ConfigError, StoreError
from hexdata.export.run import ExportFile, ExportRun, ReplacingOptions
from hexdata.progress import SILENT, Progress
from hexdata.retry import repeats_on_disk
from hexdata.schema import SPLITS, positions_schema
from hexdata.shards.block_check import find_bad_row
from hexdata.shards.blocks import Block, block_fields, columns_to_block
from hexdata.shards.format import ShardWriter, block_samples
from hexdata.shards.manifest import (
    LAYOUTS,
    MANIFEST_NAME,
    MAX_SIZE_OF_SHARDS,
    FieldSpec,
    ShardEntry,
    ShardManifest,
    max_offsets,
)
from hexdata.sql.database import write_database
from hexdata.storage import AnyPath, storage_of
from hexdata.store import Store
from hexdata.store.arrow_memory import arrow_system_memory
from hexdata.store.commands import RunRecord
from hexdata.store.files import FileFacts, write_bytes
from hexdata.store.integrity import find_damage, rebuild_command, removed_buckets_error
from hexdata.store.journal import journaled
from hexdata.store.parquet import ROW_GROUP_ROWS, ParquetFiles, ParquetRows, open_parquet, read_rows, regroup
from hexdata.store.session import duckdb_session, read_parquet_sql
from hexdata.strict_json import MAX_JSON_BYTES, MAX_JSON_VALUES

__all__ = ["ExportOptions", "ExportResult", "export_shards"]


_MEMBER_BYTES: Final = 2048
"""Maximum size of the headers and the padding of one member of a shard."""
_BLOCKS_OF_A_SHARD: Final = 16
"""Minimum number of blocks per shard of the sizes that an error proposes."""
_REMOVED_AT_ONCE: Final = 8
"""Buckets that are removed at the same time. In an object store, each takes a request."""


@dataclass(frozen=True)
class ExportOptions(ReplacingOptions):
    """Options of ``export_shards``.

    Attributes:
        shard_size: Number of positions per shard, a multiple of ``block_size``. The last shard of a split
            has the remaining positions. Default 262,144.
        block_size: Number of positions per block. Default 4,096.
        layout: "blocks", the default, for one block per sample of the tar file, or "samples" for one
            position per sample, which is larger and slower to read.
        workers: Number of processes. Default None: 1 for little data, else one per core, as far as ``memory``
            allows.
        memory: Memory limit in bytes for all processes together. Default 1 GB.
        free_buckets: Whether to remove each bucket of the shuffle as soon as all shards with its rows are
            written, so that the disk never holds all buckets and all shards. Default False.
        replace: Whether to remove the present shards of the store before the new ones are written, to save
            disk space. Default False: they are replaced when all new files are complete.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The workers, or even one worker, do not fit into the memory.
    """

    WORKER_MEMORY: ClassVar[int] = 225 << 20

    shard_size: int = 262_144
    block_size: int = 4_096
    layout: str = "blocks"
    free_buckets: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"shard_size": 1, "block_size": 1})
        if max(self.shard_size, self.block_size) > MAX_SIZE_OF_SHARDS:
            raise ConfigError(
                "shard_size and block_size are too large",
                found=f"{self.shard_size} and {self.block_size}",
                expected=f"at most {MAX_SIZE_OF_SHARDS}",
            )
        if self.shard_size % self.block_size:
            raise ConfigError(
                "shard_size must be a multiple of block_size",
                found=f"{self.shard_size} and {self.block_size}",
                hint="Give both: --block-size divides --shard-size, such as 4096 and 262144.",
            )
        check_choice("layout", self.layout, LAYOUTS)
        if not isinstance(self.free_buckets, bool):
            raise ConfigError(
                "free_buckets cannot be used", found=self.free_buckets, expected="True or False"
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


@dataclass(frozen=True)
class _ShardFile:
    """One shard to write."""

    rows: ParquetRows
    """The rows of the buckets that the shard contains."""
    first_block: int
    """Number of the first block within the split."""
    block_size: int
    board_size: int
    with_policy: bool
    targets: tuple[str, ...]
    layout: str

    @property
    def positions(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def paths(self) -> list[AnyPath]:
        """Paths of the buckets."""
        return [path for path, _ in self.rows.files]

    def write(self, path: AnyPath) -> ShardEntry:
        schema = positions_schema(self.board_size, self.targets)
        with storage_of(path).publish(replace=False) as file:
            writer = ShardWriter(file)  # type: ignore[arg-type]
            blocks = regroup(read_rows(self.rows, schema), schema, self.block_size)
            for key, table in enumerate(blocks, start=self.first_block):
                self._check_policies(table)
                block = columns_to_block(table, self.with_policy, self.targets)
                self._check_values(block, f"block {key} of {path.name}")
                if self.layout == "blocks":
                    writer.write_block(key, block)
                else:
                    for position_id, sample in block_samples(block):
                        writer.write_sample(position_id, sample)
            writer.close()
            entry = writer.entry(path.name, file.sha256)
            if entry.positions != self.positions:
                raise StoreError(
                    "the buckets do not contain every position of the shard",
                    path=path,
                    found=f"{entry.positions:,}",
                    expected=f"{self.positions:,}",
                    hint="Run `hexdata verify` to list the damaged files.",
                )
            return entry

    def _check_policies(self, rows: pa.Table) -> None:
        """Check that no position has a policy if the shard has no policies.

        Raises:
            StoreError: A position has one, so the number in the manifest is wrong.
        """
        if not self.with_policy and rows["policy"].null_count < rows.num_rows:
            raise StoreError(
                "the shuffled positions contain policies, but the manifest records none",
                path=self.rows.files[0][0].parent,
                hint="Run `hexdata verify` to check the store.",
            )

    def _check_values(self, block: Block, name: str) -> None:
        """Check a block for values that every reader of shards refuses.

        Raises:
            StoreError: The buckets contain such a value.
        """
        for column, array in block.items():
            bad = find_bad_row(column, array, self.board_size, len(block["position_id"]))
            if bad is not None:
                raise StoreError(
                    "the shuffled positions contain an invalid value",
                    path=self.rows.files[0][0].parent,
                    record=f"row {bad.row} of {name}",
                    found=f"{column} {bad.found}",
                    expected=bad.expected,
                    hint="Run `hexdata verify` to list the damaged files.",
                )


def export_shards(
    store: str | AnyPath,
    options: ExportOptions | None = None,
    progress: Progress = SILENT,
    *,
    engine: Engine = LOCAL,
) -> ExportResult:
    """Write the shuffled positions of a store as tar shards, one sequence of shards per split.

    The same store, seed, sizes and layout give the same bytes. An export with other options replaces the
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
    settings = check_options(options, ExportOptions)
    target = Store.open(store, shares_work=engine.machines.separate)
    with target.writing("export", RunRecord.of(settings)), journaled(target.path, "export") as journal:
        target.require_stage("shuffle")
        engine.require([], target.path)
        with arrow_system_memory():
            export = _ShardExport(target, settings, progress, engine)
            resumed, already_done = export.run()
        write_database(target)
        write_cards(target)
        lineage = target.manifest.stages["export"]
        result = ExportResult(
            positions=lineage["positions"],
            splits=lineage["splits"],
            shards=lineage["shards"],
            bytes=sum(facts.bytes for facts in target.manifest.files_in("shards").values()),
            digest=lineage["digest"],
            resumed=resumed,
            already_done=already_done,
            buckets_removed=export.buckets_removed,
        )
        if not already_done:
            journal.finish(positions=result.positions, bytes=result.bytes, resumed=resumed > 0)
        return result


def _policy_cells(metadata: Any) -> float:
    """Return the mean number of cells of a policy, from the metadata of a Parquet file."""
    cells = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(index) for index in range(group.num_columns)]
        cells += max(int(each.num_values) for each in columns if each.path_in_schema.startswith("policy."))
    return cells / max(int(metadata.num_rows), 1)


def _remove_file(path: AnyPath) -> bool:
    """Remove a file; return whether it existed."""
    exists = storage_of(path).exists()
    storage_of(path).remove()
    return exists


class _ShardExport(ExportRun):
    """One run of ``export_shards``."""

    ENTRY = ShardEntry
    UNIT_PREFIX = "shards/"
    PLAN = ("shard_size", "block_size", "layout")

    stage = "export"
    folder = "shards"
    inputs = ("shuffled",)
    options: ExportOptions

    def __init__(self, store: Store, options: ExportOptions, progress: Progress, engine: Engine) -> None:
        super().__init__(store, options, progress, engine)
        assert store.manifest.board_size is not None
        self.board_size = store.manifest.board_size
        self.targets = tuple(store.manifest.targets_of("shuffled"))
        root = store.path.resolve()
        self.buckets = {
            split: tuple((root / name, facts.rows) for name, facts in files.items())
            for split in SPLITS
            if (files := store.manifest.buckets(split))
        }
        self.names = {root / name: name for name in store.manifest.buckets()}
        """Name of each bucket, by path."""
        self.buckets_removed = 0
        self._frees = options.free_buckets
        self._unread: Counter[str] = Counter()
        """Number of shards that are not yet recorded, for each bucket that they contain rows of."""
        self._files: Mapping[str, ExportFile] = {}

    @property
    def seconds_per_position(self) -> float:
        members = 1 if self.options.layout == "samples" else 1 / self.options.block_size
        return 1e-6 + 1e-4 * members

    @property
    def policy_memory(self) -> int:
        """Bytes that a process needs for policies that are not one-hot.

        They exist several times, in the row groups that are read and in the block that is written.
        """
        positions = sum(self._rows.values())
        if not sum(self._policies.values()):
            return 0
        block = min(self.options.block_size, max(self._rows.values()))
        return int(6 * self._cells_per_position * (5 * min(ROW_GROUP_ROWS, positions) + 6 * block))

    @cached_property
    def _cells_per_position(self) -> float:
        """Mean number of cells with a probability per position, as in the first bucket of each split."""
        found: list[float] = []
        for (path, _), *_ in self.buckets.values():
            if storage_of(path).exists():
                with open_parquet(path) as file:
                    found.append(_policy_cells(file.metadata))
        return max(found, default=self.board_size**2)  # without buckets: as many as possible

    @property
    def _rows(self) -> dict[str, int]:
        """Number of positions of each split."""
        return {split: sum(rows for _, rows in listed) for split, listed in self.buckets.items()}

    def intact_entries(self, damage: Mapping[str, StoreError]) -> dict[str, ShardEntry]:
        if f"shards/{MANIFEST_NAME}" in damage:
            return {}  # the offsets in the shards are known from this file only
        splits = ShardManifest.load(self.store.path / "shards").splits.values()
        entries = {f"shards/{shard.name}": shard for shards in splits for shard in shards}
        return {name: shard for name, shard in entries.items() if name not in damage}

    def require_inputs(self, plan: Mapping[str, Any], damage: Mapping[str, StoreError] | None) -> None:
        """Check the buckets and the size of the shard manifest.

        Raises:
            ConfigError: The shard manifest would be too large.
            StoreError: A bucket is damaged, or was removed.
        """
        self._require_buckets(plan, damage)
        self._check_manifest_size()

    def _require_buckets(self, plan: Mapping[str, Any], damage: Mapping[str, StoreError] | None) -> None:
        """Check the buckets; if an interrupted run has begun to remove them, only those that are needed."""
        removed = self.store.manifest.removed_buckets
        if not removed:
            super().require_inputs(plan, damage)
            return
        files, ledger = self.list_files(), self.ledger(plan, read_only=True)
        if len(ledger) or damage is None:
            self.intact = self.complete_files(files, ledger)
        else:
            self.intact = set(self.intact_entries(damage))
        if not self.intact and not storage_of(self.store.path / "shuffled").exists():
            raise removed_buckets_error(self.store)
        missing = [name for name in files if name not in self.intact]
        readers = {self.names[path]: name for name in reversed(missing) for path in files[name].paths}
        needed = {bucket: removed[bucket] for bucket in readers}
        bad = find_damage(self.store, needed, engine=self.engine, progress=self.progress)
        for bucket, error in bad.items():
            raise StoreError(
                "this file must be written, but `hexdata export --free-buckets` has removed its buckets",
                path=self.store.path / readers[bucket],
                found=f"{bucket}: {error.reason}",
                hint=f"Run `{rebuild_command(self.store, bucket)}` to make the buckets again, and then this "
                "command. Undamaged shards are kept.",
            )

    def _check_manifest_size(self) -> None:
        """Check that readers will accept the shard manifest, which has an offset per field and block.

        Raises:
            ConfigError: It would be too large.
        """
        size, block_size = self.options.shard_size, self.options.block_size
        if self._can_be_listed(size, block_size):
            return
        shards, blocks = self._shards_and_blocks(size, block_size)
        offsets = f" with {blocks:,} blocks of {len(self._fields)} fields" if self._has_offsets else ""
        block_size, size = ExportOptions.block_size, ExportOptions.shard_size
        while not self._can_be_listed(size, block_size):
            block_size *= 2
            size = block_size * max(-(-size // block_size), _BLOCKS_OF_A_SHARD)
        raise ConfigError(
            "the manifest of the shards would be too large to be read",
            path=self.store.path,
            found=f"{shards:,} shards{offsets}",
            expected=f"at most {MAX_JSON_BYTES >> 20} MiB and {MAX_JSON_VALUES:,} values",
            hint=f"Use larger blocks and shards, such as --block-size {block_size} --shard-size {size}.",
        )

    def _can_be_listed(self, shard_size: int, block_size: int) -> bool:
        """Return whether the manifest of shards of these sizes can be read."""
        shards, blocks = self._shards_and_blocks(shard_size, block_size)
        fields = self._fields if self._has_offsets else {}
        row_bytes = sum(np.dtype(spec.dtype).itemsize * math.prod(spec.shape) for spec in fields.values())
        shard_bytes = shard_size * row_bytes + _MEMBER_BYTES * len(fields) * (shard_size // block_size)
        return blocks * len(fields) <= max_offsets(shards, shard_bytes, fields)

    @property
    def _has_offsets(self) -> bool:
        """Whether the manifest has the offsets of the fields in each block; samples have none."""
        return self.options.layout == "blocks"

    def _shards_and_blocks(self, shard_size: int, block_size: int) -> tuple[int, int]:
        """Return the numbers of shards and of blocks."""
        rows = self._rows.values()
        return sum(-(-each // shard_size) for each in rows), sum(-(-each // block_size) for each in rows)

    def begin(self, files: Mapping[str, ExportFile], missing: Sequence[str]) -> None:
        """Begin to remove buckets if that is asked for, or if an interrupted run has begun it."""
        if self.store.manifest.removed_buckets and not self._frees:
            self._frees = True
            self.progress.note("removing buckets, as the interrupted `hexdata export --free-buckets` did")
        if not self._frees:
            return
        self._mark_removed()
        self._files = files
        self._unread = Counter(bucket for name in missing for bucket in self._buckets_of(name))
        self._remove([bucket for bucket in self.names.values() if not self._unread[bucket]])

    def release(self, names: Sequence[str]) -> None:
        """Remove the buckets whose last shard is among these."""
        if not self._frees:
            return
        read = [bucket for name in names for bucket in self._buckets_of(name)]
        self._unread.subtract(read)
        self._remove([bucket for bucket in dict.fromkeys(read) if not self._unread[bucket]])

    def release_all(self) -> None:
        """Remove the buckets that are left, and their folders."""
        if self._frees:
            self._mark_removed()
            self._remove(self.names.values())
            self.store.remove("shuffled")

    def _buckets_of(self, name: str) -> Iterator[str]:
        file = self._files[name]
        assert isinstance(file, _ShardFile)
        return (self.names[path] for path in file.paths)

    def _mark_removed(self) -> None:
        """Record in the manifest that the buckets are being removed, before the first one is."""
        manifest = self.store.manifest
        if manifest.removed_buckets:
            return
        removed = manifest.files_in("shuffled")
        manifest.stages["shuffle"] = {
            **manifest.stages["shuffle"],
            "policies": self._policies,
            "removed": {name: facts.to_json() for name, facts in removed.items()},
        }
        manifest.files = {name: facts for name, facts in manifest.files.items() if name not in removed}
        manifest.save(self.store.path)

    def _remove(self, buckets: Iterable[str]) -> None:
        def tasks() -> Iterator[tuple[AnyPath]]:
            for bucket in buckets:
                self.store.require_lock()
                yield (self.store.path / bucket,)

        for _, removed in LOCAL.run_light(_remove_file, tasks(), workers=_REMOVED_AT_ONCE):
            self.buckets_removed += removed

    def list_files(self) -> dict[str, _ShardFile]:
        files = {}
        for split, listed in self.buckets.items():
            buckets = ParquetFiles(listed)
            for index, start in enumerate(range(0, len(buckets), self.options.shard_size)):
                files[f"shards/{split}-{index:06d}.tar"] = _ShardFile(
                    rows=buckets.rows(start, min(start + self.options.shard_size, len(buckets))),
                    first_block=start // self.options.block_size,
                    block_size=self.options.block_size,
                    board_size=self.board_size,
                    with_policy=self._policies[split] > 0,
                    targets=self.targets,
                    layout=self.options.layout,
                )
        return files

    @cached_property
    def _fields(self) -> dict[str, FieldSpec]:
        """Return the fields of all splits."""
        return block_fields(self.board_size, any(self._policies.values()), self.targets)

    @cached_property
    @repeats_on_disk
    def _policies(self) -> dict[str, int]:
        """Return the number of positions with a policy that is not one-hot, by split.

        Earlier releases did not count them in the shuffle, so the buckets are read.
        """
        counted = self.store.manifest.stages["shuffle"].get("policies")
        if counted is not None:
            return {split: counted.get(split, 0) for split in self.buckets}
        memory = self.options.memory // 4
        with duckdb_session(memory=memory, threads=1, store=self.store.path) as con:
            queries = {
                split: f"SELECT count(policy) FROM {read_parquet_sql([path for path, _ in buckets])}"
                for split, buckets in self.buckets.items()
            }
            return {split: con.sql(query).fetchall()[0][0] for split, query in queries.items()}

    def complete(self, entries: Mapping[str, ShardEntry]) -> tuple[dict[str, FileFacts], dict[str, Any]]:
        shards = {
            split: [shard for shard in entries.values() if shard.name.startswith(f"{split}-")]
            for split in self.buckets
        }
        shard_manifest = ShardManifest(
            board_size=self.board_size,
            layout=self.options.layout,
            block_size=self.options.block_size,
            shard_size=self.options.shard_size,
            seed=self.store.manifest.stages["shuffle"]["seed"],
            fields=self._fields,
            splits=shards,
        )
        path = self.target / "shards" / MANIFEST_NAME
        written = write_bytes(path, shard_manifest.dumps(), replace=False)
        return {f"shards/{MANIFEST_NAME}": written}, {
            "splits": {split: shard_manifest.positions(split) for split in shards},
            "shards": {split: len(listed) for split, listed in shards.items()},
            "digest": shard_manifest.digest,
        }
