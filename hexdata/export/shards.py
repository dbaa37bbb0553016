"""Export of the shuffled positions as training shards, in the order of the shuffle.

Each shard is written by one task that depends on its arguments and the buckets only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from hexdata.checks import check_choice, check_fields, check_options
from hexdata.engine import LOCAL, Engine
from hexdata.errors import ConfigError, StoreError
from hexdata.export.workers import run_workers
from hexdata.pool import WorkerOptions
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS, positions_schema
from hexdata.shards.block_check import find_bad_row
from hexdata.shards.blocks import Block, block_fields, columns_to_block
from hexdata.shards.format import ShardWriter, block_samples
from hexdata.shards.manifest import LAYOUTS, MANIFEST_NAME, FieldSpec, ShardEntry, ShardManifest
from hexdata.sql.database import write_database
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.arrow_memory import arrow_system_memory
from hexdata.store.files import FileFacts, atomic_file, remove_tree, write_bytes
from hexdata.store.integrity import find_damage, find_published_damage, require_intact
from hexdata.store.journal import journaled
from hexdata.store.ledger import Ledger
from hexdata.store.parquet import Rows, read_rows, regroup
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
class _Shard:
    """The name, the rows and the options of one shard to write."""

    name: str
    rows: Rows
    first_block: int
    block_size: int
    board_size: int
    with_policy: bool
    layout: str


def _write_shard(shard: _Shard, folder: AnyPath) -> ShardEntry:
    """Write one shard in a worker. The bytes depend on the arguments and the buckets only."""
    schema = positions_schema(shard.board_size)
    with atomic_file(folder / shard.name, replace=False) as file:
        writer = ShardWriter(file)  # type: ignore[arg-type]
        blocks = regroup(read_rows(shard.rows, schema), schema, shard.block_size)
        for key, table in enumerate(blocks, start=shard.first_block):
            block = columns_to_block(table, shard.with_policy)
            _check_values(shard, key, block)
            if shard.layout == "blocks":
                writer.write_block(key, block)
            else:
                for position_id, sample in block_samples(block):
                    writer.write_sample(position_id, sample)
        writer.close()
        return writer.entry(shard.name, file.facts(writer.positions).sha256)


def _check_values(shard: _Shard, key: int, block: Block) -> None:
    """Check a block for values that every reader of shards refuses.

    Raises:
        StoreError: the buckets contain such a value.
    """
    for name, array in block.items():
        bad = find_bad_row(name, array, shard.board_size, len(block["position_id"]))
        if bad is not None:
            raise StoreError(
                "the shuffled positions hold what no position has",
                path=shard.rows.files[0][0].parent,
                record=f"row {bad.row} of block {key} of {shard.name}",
                found=f"{name} {bad.found}",
                expected=bad.expected,
                hint="Run `hexdata verify` to see which files are wrong.",
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
    asked = check_options(options, ExportOptions)
    target = Store.open(store, shares_work=engine.machines.separate)
    with target.writing("export"), journaled(target.path, "export") as watched:
        target.require_stage("shuffle")
        engine.require([], target.path)
        with arrow_system_memory():
            result = _Run(target, asked, progress, engine).export()
        write_database(target)
        if not result.already_done:
            watched.finish(positions=result.positions, bytes=result.bytes, resumed=result.resumed > 0)
        return result


class _Run:
    """A run of the export under the store's lock."""

    def __init__(self, store: Store, options: ExportOptions, progress: Progress, engine: Engine) -> None:
        assert store.manifest.board_size is not None
        self.store = store
        self.options = options
        self.progress = progress
        self.engine = engine
        self.board_size = store.manifest.board_size
        self.folder = store.path / "shards"
        self.work = store.work / "export"
        self.intact: set[str] = set()
        """Names of published shards that this run has found undamaged."""
        self.buckets = {
            split: {(store.path / name).resolve(): f.rows for name, f in files.items()}
            for split in SPLITS
            if (files := store.manifest.files_in(f"shuffled/{split}"))
        }

    def export(self) -> ExportResult:
        asked = {
            "of": self.store.made_of("export"),
            "shard_size": self.options.shard_size,
            "block_size": self.options.block_size,
            "layout": self.options.layout,
        }
        damage = self._damage(asked)
        if damage is not None and not damage:
            # A run may have been killed after it wrote the manifest and before it removed this folder.
            remove_tree(self.work)
            return self._result(resumed=0, already_done=True)
        require_intact(self.store, ["shuffled"], engine=self.engine, progress=self.progress)
        ledger = Ledger(self.work / "progress.json", "export", asked, ShardEntry)
        if not len(ledger):
            if damage is None:
                self._clear()
            else:
                self._keep_intact(damage, ledger)
        resumed = len(ledger)
        with_policy = {split: self._has_policies(split) for split in self.buckets}
        shards = {split: self._shards(split, with_policy[split]) for split in self.buckets}
        self._write([shard for split in shards.values() for shard in split], ledger)
        entries = {
            split: [ShardEntry(**ledger[shard.name]) for shard in listed] for split, listed in shards.items()
        }
        self._publish(entries, block_fields(self.board_size, any(with_policy.values())), asked)
        return self._result(resumed)

    def _damage(self, asked: dict[str, Any]) -> dict[str, StoreError] | None:
        """Return the damaged files of the requested export, or None if the store does not have it."""
        if not asked.items() <= self.store.manifest.stages.get("export", {}).items():
            return None
        return find_published_damage(self.store, "shards", engine=self.engine, progress=self.progress)

    def _keep_intact(self, damage: dict[str, StoreError], ledger: Ledger) -> None:
        """Add the intact shards to the ledger, if the shard manifest, which has their offsets, is intact."""
        published = self.store.manifest.files_in("shards")
        if f"shards/{MANIFEST_NAME}" not in damage:
            splits = ShardManifest.load(self.folder).splits.values()
            entries = {shard.name: asdict(shard) for shards in splits for shard in shards}
            self.intact = {name for name in entries if f"shards/{name}" not in damage}
            ledger.finish_all({name: entries[name] for name in self.intact})
        again = len(published) - len(self.intact)
        self.progress.note(
            f"{len(damage):,} of {len(published):,} files are damaged: {again:,} written again"
        )

    def _shards(self, split: str, with_policy: bool) -> list[_Shard]:
        files = tuple(self.buckets[split].items())
        total = sum(self.buckets[split].values())
        size = self.options.shard_size
        return [
            _Shard(
                name=f"{split}-{index:06d}.tar",
                rows=Rows.of(files, start, min(start + size, total)),
                first_block=start // self.options.block_size,
                block_size=self.options.block_size,
                board_size=self.board_size,
                with_policy=with_policy,
                layout=self.options.layout,
            )
            for index, start in enumerate(range(0, total, size))
        ]

    def _has_policies(self, split: str) -> bool:
        """Return whether any position of a split has a policy that is not one-hot."""
        query = f"SELECT count(policy) > 0 FROM {read_parquet_sql(list(self.buckets[split]))}"
        with duckdb_session(memory=self.options.memory // 4, threads=1, place=self.store.path) as con:
            return bool(con.sql(query).fetchall()[0][0])

    def _write(self, shards: list[_Shard], ledger: Ledger) -> None:
        self.progress.begin("export", sum(s.rows.stop - s.rows.start for s in shards), "positions")
        written = self._written([shard.name for shard in shards], ledger)
        todo = [shard for shard in shards if shard.name not in written]
        missing = {shard.name for shard in todo}
        self.store.keep_only("shards", {f"shards/{s.name}" for s in shards if s.name not in missing})
        self.progress.advance(sum(s.rows.stop - s.rows.start for s in shards if s.name not in missing))
        tasks = [(shard, self.folder) for shard in todo]
        try:
            for index, entry in run_workers(self.store, self.options, self.engine, _write_shard, tasks):
                ledger.finish_soon(todo[index].name, asdict(entry))
                self.progress.advance(entry.positions)
        finally:
            ledger.save()

    def _written(self, names: list[str], ledger: Ledger) -> set[str]:
        """Return the names of the complete shards. Shards of an earlier run are hashed first."""
        done = {f"shards/{name}": ShardEntry(**ledger[name]) for name in names if name in ledger}
        unchecked = {
            path: FileFacts(entry.positions, entry.bytes, entry.sha256)
            for path, entry in done.items()
            if entry.name not in self.intact
        }
        damage = find_damage(self.store, unchecked, engine=self.engine)
        return {entry.name for path, entry in done.items() if path not in damage}

    def _clear(self) -> None:
        """Remove the shards of an earlier export, first from the manifest, then from the store."""
        manifest = self.store.manifest
        if manifest.stages.pop("export", None) is not None:
            self.progress.note("replaces the shards of an earlier export")
        manifest.files = {n: f for n, f in manifest.files.items() if not n.startswith("shards/")}
        manifest.save(self.store.path)
        self.store.remove("shards")

    def _publish(
        self, entries: dict[str, list[ShardEntry]], fields: dict[str, FieldSpec], asked: dict[str, Any]
    ) -> None:
        shuffled = self.store.manifest.stages["shuffle"]
        shard_manifest = ShardManifest(
            board_size=self.board_size,
            layout=self.options.layout,
            block_size=self.options.block_size,
            shard_size=self.options.shard_size,
            seed=shuffled["seed"],
            fields=fields,
            splits=entries,
        )
        manifest = self.store.manifest
        for shard in (shard for listed in entries.values() for shard in listed):
            manifest.files[f"shards/{shard.name}"] = FileFacts(shard.positions, shard.bytes, shard.sha256)
        manifest.files[f"shards/{MANIFEST_NAME}"] = write_bytes(
            self.folder / MANIFEST_NAME, shard_manifest.dumps(), replace=False
        )
        splits = {split: shard_manifest.positions(split) for split in entries}
        manifest.stages["export"] = {
            **asked,
            "positions": sum(splits.values()),
            "rejected": 0,
            "splits": splits,
            "shards": {split: len(listed) for split, listed in entries.items()},
            "digest": shard_manifest.digest,
        }
        manifest.save(self.store.path)
        remove_tree(self.work)

    def _result(self, resumed: int, already_done: bool = False) -> ExportResult:
        lineage = self.store.manifest.stages["export"]
        return ExportResult(
            positions=lineage["positions"],
            splits=lineage["splits"],
            shards=lineage["shards"],
            bytes=sum(f.bytes for f in self.store.manifest.files_in("shards").values()),
            digest=lineage["digest"],
            resumed=resumed,
            already_done=already_done,
        )
