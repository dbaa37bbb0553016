"""Export of the shuffled positions as training shards, in the order of the shuffle.

Each shard is written by one task that depends on its arguments and the buckets only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from hexdata.checks import check_choice, check_fields, check_options
from hexdata.engine import LOCAL, Engine
from hexdata.errors import ConfigError, StoreError
from hexdata.export.run import ExportRun
from hexdata.pool import WorkerOptions
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS, positions_schema
from hexdata.shards.block_check import find_bad_row
from hexdata.shards.blocks import Block, block_fields, columns_to_block
from hexdata.shards.format import ShardWriter, block_samples
from hexdata.shards.manifest import LAYOUTS, MANIFEST_NAME, ShardEntry, ShardManifest
from hexdata.sql.database import write_database
from hexdata.storage import AnyPath, storage_of
from hexdata.store import Store
from hexdata.store.arrow_memory import arrow_system_memory
from hexdata.store.files import FileFacts, write_bytes
from hexdata.store.journal import journaled
from hexdata.store.parquet import ParquetRows, read_rows, regroup
from hexdata.store.session import duckdb_session, read_parquet_sql

__all__ = ["ExportOptions", "ExportResult", "export_shards"]


@dataclass(frozen=True)
class ExportOptions(WorkerOptions):
    """Options of ``export_shards``.

    Attributes:
        shard_size: number of positions per shard, a multiple of ``block_size``. The last shard of a split
            has the remaining positions. Default 262,144.
        block_size: number of positions per block. Default 4,096.
        layout: "blocks", the default, for one block per sample of the tar file, or "samples" for one
            position per sample, which is larger and slower to read.
        workers: number of processes. Default None: one per core, as far as ``memory`` allows.
        memory: memory limit in bytes for all processes together. Default 1 GB.

    Raises:
        ConfigError: a value is out of range.
        BudgetError: the workers, or even one worker, do not fit into the memory.
    """

    WORKER_MEMORY: ClassVar[int] = 225 << 20

    shard_size: int = 262_144
    block_size: int = 4_096
    layout: str = "blocks"

    def __post_init__(self) -> None:
        check_fields(self, {"workers": 1, "memory": 0})
        super().__post_init__()
        check_fields(self, {"shard_size": 1, "block_size": 1})
        if self.shard_size % self.block_size:
            raise ConfigError(
                "shard_size must be a multiple of block_size",
                found=f"{self.shard_size} and {self.block_size}",
                hint="Give both: --block-size divides --shard-size, such as 4096 and 262144.",
            )
        check_choice("layout", self.layout, LAYOUTS)


@dataclass(frozen=True)
class ExportResult:
    """The result of ``export_shards``.

    Attributes:
        positions: number of positions in the shards.
        splits: split to number of positions.
        shards: split to number of shards.
        bytes: size of all files together, with the shard manifest.
        digest: digest of the shard manifest.
        resumed: number of shards that this run did not write again, because an interrupted run had written
            them, or because they were intact in a damaged export.
        already_done: the store already had this export, undamaged, and nothing was written.
    """

    positions: int
    splits: dict[str, int]
    shards: dict[str, int]
    bytes: int
    digest: str
    resumed: int
    already_done: bool = False


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

    def write(self, path: AnyPath) -> ShardEntry:
        schema = positions_schema(self.board_size, self.targets)
        with storage_of(path).publish(replace=False) as file:
            writer = ShardWriter(file)  # type: ignore[arg-type]
            blocks = regroup(read_rows(self.rows, schema), schema, self.block_size)
            for key, table in enumerate(blocks, start=self.first_block):
                block = columns_to_block(table, self.with_policy, self.targets)
                self._check_values(block, f"block {key} of {path.name}")
                if self.layout == "blocks":
                    writer.write_block(key, block)
                else:
                    for position_id, sample in block_samples(block):
                        writer.write_sample(position_id, sample)
            writer.close()
            return writer.entry(path.name, file.sha256)

    def _check_values(self, block: Block, name: str) -> None:
        """Check a block for values that every reader of shards refuses.

        Raises:
            StoreError: the buckets contain such a value.
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
        store: folder of the store, or its address in an object store.
        options: options of the export. Default None: ``ExportOptions()``.
        progress: receives progress reports and notes. Default: ignores them.
        engine: runs the tasks that write shards. Default: processes on this machine.

    Returns:
        Counts and sizes of the shards in the store.

    Raises:
        ConfigError: an argument has the wrong type.
        StoreError: there is no store, it has no shuffle, it is damaged, or another process writes to it.
        BudgetError: the workers do not fit into the memory, or the disk is full.
        EngineError: a machine of ``engine`` differs from this one or cannot access the store.
    """
    settings = check_options(options, ExportOptions)
    target = Store.open(store, shares_work=engine.machines.separate)
    with target.writing("export"), journaled(target.path, "export") as journal:
        target.require_stage("shuffle")
        engine.require([], target.path)
        with arrow_system_memory():
            resumed, already_done = _ShardExport(target, settings, progress, engine).run()
        write_database(target)
        lineage = target.manifest.stages["export"]
        result = ExportResult(
            positions=lineage["positions"],
            splits=lineage["splits"],
            shards=lineage["shards"],
            bytes=sum(facts.bytes for facts in target.manifest.files_in("shards").values()),
            digest=lineage["digest"],
            resumed=resumed,
            already_done=already_done,
        )
        if not already_done:
            journal.finish(positions=result.positions, bytes=result.bytes, resumed=resumed > 0)
        return result


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
        self.buckets = {
            split: tuple(((store.path / name).resolve(), facts.rows) for name, facts in files.items())
            for split in SPLITS
            if (files := store.manifest.files_in(f"shuffled/{split}"))
        }

    def intact_entries(self, damage: Mapping[str, StoreError]) -> dict[str, ShardEntry]:
        if f"shards/{MANIFEST_NAME}" in damage:
            return {}  # the offsets in the shards are known from this file only
        splits = ShardManifest.load(self.store.path / "shards").splits.values()
        entries = {f"shards/{shard.name}": shard for shards in splits for shard in shards}
        return {name: shard for name, shard in entries.items() if name not in damage}

    def list_files(self) -> dict[str, _ShardFile]:
        files = {}
        for split, buckets in self.buckets.items():
            total = sum(rows for _, rows in buckets)
            for index, start in enumerate(range(0, total, self.options.shard_size)):
                files[f"shards/{split}-{index:06d}.tar"] = _ShardFile(
                    rows=ParquetRows.over(buckets, start, min(start + self.options.shard_size, total)),
                    first_block=start // self.options.block_size,
                    block_size=self.options.block_size,
                    board_size=self.board_size,
                    with_policy=self._splits_with_policy[split],
                    targets=self.targets,
                    layout=self.options.layout,
                )
        return files

    @cached_property
    def _splits_with_policy(self) -> dict[str, bool]:
        """Return, by split, whether any position has a policy that is not one-hot."""
        memory = self.options.memory // 4
        with duckdb_session(memory=memory, threads=1, store=self.store.path) as con:
            queries = {
                split: f"SELECT count(policy) > 0 FROM {read_parquet_sql([path for path, _ in buckets])}"
                for split, buckets in self.buckets.items()
            }
            return {split: bool(con.sql(query).fetchall()[0][0]) for split, query in queries.items()}

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
            fields=block_fields(self.board_size, any(self._splits_with_policy.values()), self.targets),
            splits=shards,
        )
        path = self.store.path / "shards" / MANIFEST_NAME
        written = write_bytes(path, shard_manifest.dumps(), replace=False)
        return {f"shards/{MANIFEST_NAME}": written}, {
            "splits": {split: shard_manifest.positions(split) for split in shards},
            "shards": {split: len(listed) for split, listed in shards.items()},
            "digest": shard_manifest.digest,
        }
