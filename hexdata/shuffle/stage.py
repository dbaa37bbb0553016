"""One run of the shuffle on a locked store: selection, sort, manifest.

The selection determines the rows and the bucket of each. The sort writes the missing buckets, in passes. The
ledger lists the finished buckets, so that an interrupted run resumes.
"""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from hexdata.engine import Engine
from hexdata.errors import StoreError
from hexdata.options import ShuffleOptions
from hexdata.order import ORDER_VERSION
from hexdata.progress import Progress
from hexdata.retry import repeats_on_disk
from hexdata.selection import BalanceRow, Duplicates, Selection, select
from hexdata.shuffle.plan import ShufflePlan, SortLimits, bucket_counts, row_bytes
from hexdata.shuffle.sort import Bucket, Sort, SortedBucket, divide, write_part
from hexdata.storage import AnyPath, storage_of
from hexdata.storage.errors import free_space
from hexdata.store import STAGES, Store
from hexdata.store.integrity import require_intact
from hexdata.store.session import duckdb_session, path_list_sql
from hexdata.store.stage_files import StageFiles
from hexdata.units import format_bytes

_DERIVED_STAGES: Final = ("export", "pickles-shuffled")
"""Stages that are made from the shuffled positions."""
_INPUTS: Final = ("positions", "games", "sources")
"""Folders of the tables that a shuffle reads."""


@dataclass(frozen=True)
class ShuffleResult:
    """Result of ``shuffle_store``.

    Attributes:
        seed: Seed that determines the order.
        positions: Number of shuffled positions.
        splits: Number of positions by split.
        buckets: Number of buckets by split.
        left_out: Number of excluded positions by the option that excludes them.
        bytes: Size of all buckets.
        resumed: Number of buckets that an earlier run of the same command had finished.
        already_done: Whether the store already contained this shuffle.
        duplicates: Games that occur more than once in the store; None if there was nothing to do, because
            they are then not counted.
        balance: Effect of ``balance_by`` on each group.
        notes: Remarks on the selection options for the user.
    """

    seed: int
    positions: int
    splits: dict[str, int]
    buckets: dict[str, int]
    left_out: dict[str, int]
    bytes: int
    resumed: int
    already_done: bool = False
    duplicates: Duplicates | None = None
    balance: tuple[BalanceRow, ...] = ()
    notes: tuple[str, ...] = ()


# --- preparation --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A shuffle that is ready to be sorted.

    Attributes:
        selection: The selected rows.
        buckets: All buckets, in ascending order.
        sort: The sort that writes them.
        lineage: Entry of the stage for the manifest.
        stored_bytes: Bytes of a mean row in a bucket.
    """

    selection: Selection
    buckets: list[Bucket]
    sort: Sort
    lineage: dict[str, Any]
    stored_bytes: int

    def parts(self, free: int) -> list[list[Bucket]]:
        """Return all buckets divided into the passes that a sort needs.

        Args:
            free: Free bytes of the disk of its temporary files.
        """
        rows = sum(self.selection.rows.values())
        passes = self.sort.limits.count_passes(rows, free, len(self.buckets))
        return divide(self.buckets, passes)

    def plan(self, store: Store, options: ShuffleOptions, done: int, *, already_done: bool) -> ShufflePlan:
        """Return the plan of a shuffle.

        Args:
            store: The store.
            options: Options of the shuffle.
            done: Number of buckets that are already written.
            already_done: Whether the store already contains this shuffle.
        """
        # Buckets have nearly equal numbers of rows, so the missing ones have their share of rows and bytes.
        missing = 0 if already_done else len(self.buckets) - done
        rows = sum(self.selection.rows.values()) * missing // len(self.buckets)
        bucket_bytes, limits = rows * self.stored_bytes, self.sort.limits
        replaces = "shuffle" in store.manifest.stages and not is_same_shuffle(store, options)
        stages = ("shuffle", *_DERIVED_STAGES) if options.replace and replaces else ()
        folders = [folder for stage in stages for folder in STAGES[stage]]
        freed = sum(size for name in folders for size in storage_of(store.path / name).files().values())
        free = free_space(store.work)
        free = sys.maxsize if free is None else free  # of an object store with shared work
        # The missing buckets take a part of the free disk beside the temporary files.
        passes = limits.count_passes(rows, free + freed - bucket_bytes, missing)
        return ShufflePlan(
            store=str(store.path),
            seed=self.lineage["seed"],
            choices=options.non_default(),
            positions=store.manifest.counts["positions"],
            rows=self.selection.rows,
            left_out=self.selection.left_out,
            buckets=self.lineage["buckets"],
            buckets_done=done,
            passes=passes,
            memory=options.memory,
            threads=limits.threads,
            bucket_bytes=bucket_bytes,
            spill_bytes=limits.temporary_bytes(-(-rows // passes)),
            disk_free=free,
            disk_freed=freed,
            already_done=already_done,
            replaces=_describe(store, options) if replaces else None,
            duplicates=self.selection.duplicates,
            balance=self.selection.balance,
            notes=self.selection.notes,
        )


def with_seed(store: Store, options: ShuffleOptions) -> ShuffleOptions:
    """Return the options with a seed: if they have none, that of the store's shuffle, or 0 without one."""
    if options.seed is not None:
        return options
    return replace(options, seed=store.manifest.stages.get("shuffle", {"seed": 0})["seed"])


def is_same_shuffle(store: Store, options: ShuffleOptions) -> bool:
    """Return whether the manifest lists a shuffle with these options; its files may be damaged."""
    done = store.manifest.stages.get("shuffle")
    if done is None:
        return False
    # The number of buckets may be derived from the rows; those of the present shuffle are in the manifest.
    requested = _requested_lineage(store, options) | {"buckets": bucket_counts(options, done["splits"])}
    return bool(done | requested == done)


def _requested_lineage(store: Store, options: ShuffleOptions) -> dict[str, Any]:
    return {
        "seed": with_seed(store, options).seed,
        "order_version": ORDER_VERSION,
        "choices": options.non_default(),
        "of": store.input_digest("shuffle"),
    }


def _describe(store: Store, options: ShuffleOptions) -> str:
    done = store.manifest.stages["shuffle"]
    size = format_bytes(sum(facts.bytes for facts in store.manifest.files_in("shuffled").values()))
    text = f"the shuffle with seed {done['seed']}, {done['positions']:,} positions, {size}"
    return f"{text}, {'and its exports, first' if options.replace else 'when this one is complete'}"


@repeats_on_disk
def prepare(
    store: Store,
    options: ShuffleOptions,
    folder: AnyPath,
    spill: Path | None,
    cores: int,
    target: AnyPath | None = None,
) -> Prepared:
    """Select the rows and assign each to a bucket.

    Args:
        store: Store to shuffle.
        options: Options of the shuffle, with a seed.
        folder: Folder for small tables that the query of the sort reads; they are not removed.
        spill: Folder for DuckDB's temporary files; None for the system's temporary folder.
        cores: Cores of a machine that will do the work.
        target: Folder in which the buckets are written; None for the store (default).

    Raises:
        StoreError: The store contains no positions.
        ConfigError: An option cannot be used with this store.
        BudgetError: The memory is too small.
    """
    positions, n = store.files("positions"), store.manifest.board_size
    if not positions or n is None:
        raise StoreError(
            "the store contains no positions", path=store.path, hint="Run `hexdata convert` first."
        )
    assert options.seed is not None
    memory, most = options.memory - store.reader_memory("positions"), options.threads or cores
    narrow = SortLimits.of(memory, most)
    with duckdb_session(memory=narrow.memory, threads=narrow.threads, spill=spill, store=store.path) as con:
        selection = select(store, options, options.seed, partial(bucket_counts, options), con, folder)
        # The size of policies and metadata differs between stores. The footers state it, so no row is read.
        varying = con.sql(f"""
            WITH row_groups AS (
                SELECT sum(total_uncompressed_size) AS size, any_value(row_group_num_rows) AS rows
                FROM parquet_metadata({path_list_sql(positions)})
                WHERE path_in_schema = 'metadata' OR starts_with(path_in_schema, 'policy')
                GROUP BY file_name, row_group_id
            )
            SELECT coalesce(least(max(size / rows), sum(size) / {sum(selection.rows.values())}), 0)::BIGINT
            FROM row_groups WHERE rows > 0
        """).fetchall()[0][0]
    row, stored = row_bytes(n, len(selection.targets), varying)
    # Also the plan of the ledger: finished buckets of a run with another lineage are not kept.
    lineage = {
        **_requested_lineage(store, options),
        "positions": sum(selection.rows.values()),
        "rejected": 0,
        "left_out": selection.left_out,
        "targets": list(selection.targets),
        "splits": selection.rows,
        "buckets": selection.buckets,
    }
    sort = Sort(
        store=store.path,
        target=target or store.path,
        query=selection.sql,
        board_size=n,
        targets=selection.targets,
        limits=SortLimits.of(memory, most, row, varying),
        spill=spill,
    )
    files = [Bucket(split, index) for split, count in selection.buckets.items() for index in range(count)]
    return Prepared(selection, files, sort, lineage, stored)


# --- the run ------------------------------------------------------------------------------------------


@dataclass
class ShuffleRun:
    """One run of the shuffle. The caller must hold the store's lock."""

    store: Store
    options: ShuffleOptions
    progress: Progress
    engine: Engine
    restore: bool = True

    def __post_init__(self) -> None:
        self.files = StageFiles(self.store, "shuffle", SortedBucket, self.progress)
        self.work = self.files.work
        self.spill = storage_of(self.work / "spill").local
        # Left by a killed run. Its temporary files would take the space that the plan counts on.
        for name in ("selection", "spill"):
            storage_of(self.work / name).remove_tree()

    def shuffle(self) -> ShuffleResult:
        """Do all work that is not finished, and publish the result.

        Raises:
            StoreError: An input is damaged, or the buckets do not contain every position.
            ConfigError: An option cannot be used with this store.
            BudgetError: The memory or the disk is too small.
        """
        # 1. Is there anything to do? Of a complete shuffle, only the damaged buckets are written again.
        manifest, damage = self.store.manifest, None
        if is_same_shuffle(self.store, self.options):
            keeps_removed = manifest.removed_buckets and not self.restore
            damage = {} if keeps_removed else self.files.find_damage(manifest.buckets())
        if damage is not None and not damage:
            if self.restore and manifest.removed_buckets:  # all exist, because none was removed yet
                manifest.files |= manifest.removed_buckets
                lineage = manifest.stages["shuffle"]
                manifest.stages["shuffle"] = {name: lineage[name] for name in lineage if name != "removed"}
                manifest.save(self.store.path)
            self.files.remove_work()  # a run may have been killed after publishing its manifest
            return replace(self._result(resumed=0), already_done=True)
        # 2. A new shuffle is written beside the present one, unless that may be removed first.
        if damage is None:
            self.files.choose_target(replace=self.options.replace)
        # 3. Altered inputs would give another result with valid digests, so they are compared first.
        require_intact(self.store, _INPUTS, self.progress)
        self.progress.begin("select", None, "positions")
        folder, cores = self.work / "selection", self.engine.cores
        prepared = prepare(self.store, self.options, folder, self.spill, cores, self.files.target)
        # 4. Keep the buckets that an interrupted run has finished, or, in a repair, the intact ones.
        names = [bucket.name for bucket in prepared.buckets]
        intact = None
        if damage is not None:
            published = manifest.buckets()
            removed = "removed" if manifest.removed_buckets else "damaged"
            self.progress.note(f"writing {len(damage):,} {removed} of {len(published):,} buckets again")
            intact = {  # whose policies were counted before
                name: SortedBucket(facts.rows, facts.bytes, facts.sha256, policies=0)
                for name, facts in published.items()
                if name not in damage
            }
        self.files.resume(prepared.lineage, names, intact)
        resumed = len(self.files.entries) if damage is None else 0
        plan = prepared.plan(self.store, self.options, len(self.files.entries), already_done=False)
        # Before anything is removed or written: a full disk would be found only after much of the work.
        plan.require_disk()
        # 5. A run that resumes has removed the old files already, and must keep its own.
        if damage is None and not resumed:
            if plan.replaces:
                self.progress.note(f"replacing {plan.replaces}")
            self.files.begin_new("shuffle", *_DERIVED_STAGES)
        # 6. Write the missing buckets, and publish all in the manifest.
        self._write(prepared, plan.passes)
        self._publish(prepared.lineage)
        made = prepared.selection
        result = self._result(resumed)
        return replace(result, duplicates=made.duplicates, balance=made.balance, notes=made.notes)

    @repeats_on_disk
    def _write(self, prepared: Prepared, passes: int) -> None:
        """Write and record the missing buckets."""
        missing = [bucket for bucket in prepared.buckets if bucket.name not in self.files.entries]
        # Files that no run has recorded: with ``replace=False`` an object of that name could not be written.
        self.files.remove_others()
        rows = sum(prepared.selection.rows.values())
        self.progress.begin("sort", rows, "positions")
        self.progress.advance(rows * (len(prepared.buckets) - len(missing)) // len(prepared.buckets))
        if not missing:
            return
        if self.engine.remote:
            # A pass is one task, so there is at least one for each machine.
            passes = max(passes, self.engine.machines)
        parts = divide(missing, passes)
        sort, memory = prepared.sort, self.options.memory
        written = (bucket for part in parts for bucket in sort.write(part))
        if self.engine.remote:
            tasks = ((sort, part) for part in parts)
            done = self.engine.run(write_part, tasks, workers=1, memory=memory, cores=sort.limits.threads)
            written = (bucket for _, part in done for bucket in part)
        try:
            with closing(written):  # also ends the session, if a bucket cannot be recorded
                for name, facts in written:
                    self.files.record(name, facts)
                    self.progress.advance(facts.rows)
        finally:
            # Also after an error, so that the next run keeps the finished buckets.
            self.files.save()

    def _publish(self, lineage: dict[str, Any]) -> None:
        expected: dict[str, int] = lineage["splits"]
        found = dict.fromkeys(expected, 0)
        policies = dict.fromkeys(lineage["buckets"], 0)
        for name, bucket in self.files.entries.items():
            split = name.split("/")[1]
            found[split] += bucket.rows
            policies[split] += bucket.policies
        # A sum over the files against the count of the selection finds lost or doubled rows.
        if found != expected:
            self.files.remove_work()  # the ledger is unreliable
            raise StoreError(
                "the buckets do not contain every position",
                path=self.store.path,
                found=found,
                expected=expected,
                hint="Run the shuffle again; it starts from the beginning. If the error repeats, run "
                "`hexdata verify`.",
            )
        manifest = self.store.manifest
        if is_same_shuffle(self.store, self.options):  # it is repaired
            # Intact buckets are not read, so their policies are not counted again.
            policies = manifest.stages["shuffle"]["policies"]
        before = manifest.digest("shuffled")
        self.files.publish({**lineage, "policies": policies})
        if "export" in manifest.stages and manifest.digest("shuffled") != before:
            again = self.store.next_command("export")
            self.progress.note(f"the shards are of another shuffle; run `{again}` to replace them")
        self.files.remove_work()

    def _result(self, resumed: int) -> ShuffleResult:
        files = self.store.manifest.files_in("shuffled")
        lineage = self.store.manifest.stages["shuffle"]
        made = {name: lineage[name] for name in ("seed", "positions", "splits", "buckets", "left_out")}
        return ShuffleResult(**made, bytes=sum(facts.bytes for facts in files.values()), resumed=resumed)
