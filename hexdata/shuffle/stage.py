"""One run of the shuffle on a locked store: selection, sort, manifest.

The selection determines the rows and the bucket of each. The sort writes the missing buckets, in passes. The
ledger lists the finished buckets, so that an interrupted run resumes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from hexdata.engine import Engine
from hexdata.engine.protocol import Machines
from hexdata.errors import StoreError
from hexdata.order import ORDER_VERSION
from hexdata.progress import Progress
from hexdata.retry import RetryPolicy, repeats_on_disk
from hexdata.selection import BalanceRow, Duplicates, Selection, select
from hexdata.shuffle.options import BASE_MEMORY, ShuffleOptions
from hexdata.shuffle.plan import FOLDERS, RowSize, ShufflePlan, bucket_counts, count_passes, free_space
from hexdata.shuffle.sort import Bucket, Sort, SortedBucket, write_part
from hexdata.storage import AnyPath, client_memory, is_disk_full, storage_of
from hexdata.store import Store
from hexdata.store.arrow_memory import arrow_system_memory
from hexdata.store.files import FileFacts
from hexdata.store.integrity import find_damage, require_intact
from hexdata.store.ledger import Ledger
from hexdata.store.session import duckdb_session, path_list_sql
from hexdata.store.stage_log import StageLog
from hexdata.system import peak_resident_bytes
from hexdata.units import format_bytes

__all__ = [
    "LEDGER_NAME",
    "Prepared",
    "ShuffleResult",
    "ShuffleRun",
    "is_same_shuffle",
    "open_ledger",
    "prepare",
    "with_seed",
]

LEDGER_NAME: Final = "progress.json"

_DERIVED_STAGES: Final = ("export", "pickles-shuffled")
"""Stages that are made from the shuffled positions."""
_INPUTS: Final = ("positions", "games", "sources")
"""Folders of the tables that a shuffle reads."""
_THREAD_MEMORY: Final = 125_000_000
"""Bytes of DuckDB's memory for each of its threads, as its documentation advises."""


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
        row: Mean size of a row.
    """

    selection: Selection
    buckets: list[Bucket]
    sort: Sort
    lineage: dict[str, Any]
    row: RowSize

    def plan(self, store: Store, options: ShuffleOptions, done: int, *, already_done: bool) -> ShufflePlan:
        """Return the plan of a shuffle.

        Args:
            store: The store.
            options: Options of the shuffle.
            done: Number of buckets that are already written.
            already_done: Whether the store already contains this shuffle.
        """
        missing = 0 if already_done else len(self.buckets) - done
        rows = sum(self.selection.rows.values()) * missing // len(self.buckets)
        bucket_bytes, spill = rows * self.row.stored, rows * self.row.sorted
        replaces = "shuffle" in store.manifest.stages and not is_same_shuffle(store, options)
        folders = FOLDERS if options.replace and replaces else ()
        freed = sum(size for name in folders for size in storage_of(store.path / name).files().values())
        free = free_space(store)
        passes = count_passes(spill, free + freed - bucket_bytes, self.sort.memory, missing)
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
            threads=self.sort.threads,
            bucket_bytes=bucket_bytes,
            spill_bytes=0 if spill <= self.sort.memory // 2 else -(-spill // passes),
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
    machines: Machines,
    target: AnyPath | None = None,
) -> Prepared:
    """Select the rows and assign each to a bucket.

    Args:
        store: Store to shuffle.
        options: Options of the shuffle, with a seed.
        folder: Folder for small tables that the query of the sort reads; they are not removed.
        spill: Folder for DuckDB's temporary files; None for the system's temporary folder.
        machines: Machines that will do the work.
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
    memory = options.memory - BASE_MEMORY - client_memory(store.path)
    threads = max(min(options.threads or machines.cores, memory // _THREAD_MEMORY), 1)
    with duckdb_session(memory=memory, threads=threads, spill=spill, store=store.path) as con:
        selection = select(store, options, options.seed, con, folder)
        buckets = bucket_counts(options, selection.rows)
        query = selection.assign_buckets(buckets, con, folder)
        varying = con.sql(f"""
            SELECT coalesce(sum(total_uncompressed_size), 0)::BIGINT
            FROM parquet_metadata({path_list_sql(positions)})
            WHERE path_in_schema = 'metadata' OR starts_with(path_in_schema, 'policy')
        """).fetchall()[0][0]
    lineage = {
        **_requested_lineage(store, options),
        "positions": sum(selection.rows.values()),
        "rejected": 0,
        "left_out": selection.left_out,
        "targets": list(selection.targets),
        "splits": selection.rows,
        "buckets": buckets,
    }
    sort = Sort(
        store=store.path,
        target=target or store.path,
        query=query,
        board_size=n,
        targets=selection.targets,
        memory=memory,
        threads=threads,
        spill=spill,
    )
    files = [Bucket(split, index) for split in buckets for index in range(buckets[split])]
    row = RowSize.of(n, len(selection.targets), varying // store.manifest.counts["positions"])
    return Prepared(selection, files, sort, lineage, row)


def open_ledger(path: AnyPath, lineage: dict[str, Any], *, read_only: bool = False) -> Ledger:
    """Open the ledger of a shuffle, with an entry for each finished bucket."""
    return Ledger(path, "shuffle", lineage, SortedBucket, read_only=read_only)


# --- the run ------------------------------------------------------------------------------------------


class ShuffleRun:
    """One run of the shuffle. The caller must hold the store's lock."""

    def __init__(
        self,
        store: Store,
        options: ShuffleOptions,
        progress: Progress,
        retry: RetryPolicy,
        engine: Engine,
        restore: bool = True,
    ) -> None:
        self.store = store
        self.options = options
        self.progress = progress
        self.retry = retry
        self.engine = engine
        self.restore = restore
        self.work = store.work / "shuffle"
        self.spill = storage_of(self.work / "spill").local
        self.target = store.path
        """Folder in which the buckets are written, with their names in the store."""
        for name in ("selection", "spill"):
            storage_of(self.work / name).remove_tree()

    def shuffle(self) -> ShuffleResult:
        """Do all work that is not finished, and publish the result.

        Raises:
            StoreError: An input is damaged, or the buckets do not contain every position.
            ConfigError: An option cannot be used with this store.
            BudgetError: The memory or the disk is too small.
        """
        damage = self._damage()
        if damage is not None and not damage:
            self._list_restored()
            storage_of(self.work).remove_tree()  # a run may have been killed after publishing its manifest
            return replace(self._result(resumed=0), already_done=True)
        if damage is None:
            self.target = self.store.target_of("shuffle", replace=self.options.replace)
        require_intact(self.store, _INPUTS, engine=self.engine, progress=self.progress)
        plan: ShufflePlan | None = None
        self.progress.begin("select", None, "positions")
        try:
            prepared = prepare(
                self.store,
                self.options,
                self.work / "selection",
                self.spill,
                self.engine.machines,
                self.target,
            )
            ledger = open_ledger(self.work / LEDGER_NAME, prepared.lineage)
            done = self._done(prepared, ledger, damage)
            resumed = len(done) if damage is None else 0
            plan = prepared.plan(self.store, self.options, len(done), already_done=False)
            plan.require_disk()
            if damage is None and not done:
                self._begin_new()
            log = StageLog(self.store.path, "shuffle")
            log.line(f"plan: {json.dumps(asdict(plan))}")
            with arrow_system_memory():
                self.retry.call(partial(self._write, prepared, ledger, done, plan.passes, log), log=log.line)
            self._publish(
                {bucket.name: SortedBucket(**ledger[bucket.name]) for bucket in prepared.buckets},
                prepared.lineage,
            )
            log.line(f"done: {resumed:,} buckets were finished by an earlier run")
            log.publish()
        except OSError as error:
            if plan is None or not is_disk_full(error):
                raise  # without a plan, the store reports a full disk
            path = error.filename or self.store.path
            raise plan.disk_full("the disk is full", path, free_space(self.store), error) from error
        made = prepared.selection
        result = self._result(resumed)
        return replace(result, duplicates=made.duplicates, balance=made.balance, notes=made.notes)

    def _damage(self) -> dict[str, StoreError] | None:
        """Return the damaged buckets of the requested shuffle; None if the store does not contain it.

        Buckets that were removed are included if they are to be restored.
        """
        if not is_same_shuffle(self.store, self.options):
            return None
        if self.store.manifest.removed_buckets and not self.restore:
            return {}
        self.progress.begin("check files", None, "bytes")
        return find_damage(self.store, self.store.manifest.buckets(), engine=self.engine)

    def _list_restored(self) -> None:
        """List removed buckets in the manifest again if all of them exist, because none was removed yet."""
        manifest = self.store.manifest
        if self.restore and manifest.removed_buckets:
            manifest.files |= manifest.removed_buckets
            lineage = manifest.stages["shuffle"]
            manifest.stages["shuffle"] = {name: lineage[name] for name in lineage if name != "removed"}
            manifest.save(self.store.path)

    def _done(self, prepared: Prepared, ledger: Ledger, damage: dict[str, StoreError] | None) -> set[str]:
        """Return the names of the complete buckets: those of an interrupted run, or the intact ones."""
        if len(ledger):
            self.progress.begin("check files", None, "bytes")
            names = [bucket.name for bucket in prepared.buckets if bucket.name in ledger]
            written = {name: _file_facts(SortedBucket(**ledger[name])) for name in names}
            damaged = find_damage(self.store, written, engine=self.engine, root=self.target)
            return written.keys() - damaged.keys()
        if damage is None:
            return set()
        published = self.store.manifest.buckets()
        intact = {name: facts for name, facts in published.items() if name not in damage}
        if self.store.manifest.removed_buckets:
            self.progress.note(
                f"writing {len(damage):,} of {len(published):,} buckets again, which `hexdata export "
                "--free-buckets` removed; existing shards are kept"
            )
        else:
            self.progress.note(f"writing {len(damage):,} damaged of {len(published):,} buckets again")
        ledger.finish_all({name: asdict(facts) for name, facts in intact.items()})
        return set(intact)

    def _begin_new(self) -> None:
        """Remove unfinished buckets, or with ``replace`` an old shuffle and the files made from it.

        The old shuffle is removed first from the manifest, then from the disk.
        """
        manifest = self.store.manifest
        if "shuffle" in manifest.stages:
            seed, freed = manifest.stages["shuffle"]["seed"], self.options.replace
            exports = "and its exports" if freed else "once the new one is complete"
            self.progress.note(f"replacing the shuffle with seed {seed} {exports}")
        if self.target != self.store.path:
            storage_of(self.target).remove_tree()
            return
        manifest.stages = {
            name: s for name, s in manifest.stages.items() if name not in ("shuffle", *_DERIVED_STAGES)
        }
        self.store.unpublish(*FOLDERS)

    def _write(self, prepared: Prepared, ledger: Ledger, done: set[str], passes: int, log: StageLog) -> None:
        """Write the missing buckets, and add each to the ledger and to ``done``."""
        missing = [bucket for bucket in prepared.buckets if bucket.name not in done]
        if self.target == self.store.path:  # an object of another process must not be overwritten
            self.store.keep_only("shuffled", done)
        rows = sum(prepared.selection.rows.values())
        self.progress.begin("sort", rows, "positions")
        self.progress.advance(rows * (len(prepared.buckets) - len(missing)) // len(prepared.buckets))
        if not missing:
            return
        if self.engine.machines.separate:
            passes = max(passes, self.engine.machines.count)
        bounds = [len(missing) * number // passes for number in range(passes + 1)]
        parts = [missing[start:stop] for start, stop in pairwise(bounds) if stop > start]
        try:
            for name, facts, seconds in self._sorted(prepared, parts):
                ledger.finish_buffered(name, asdict(facts))
                done.add(name)
                self.progress.advance(facts.rows)
                log.line(
                    f"{name}: {facts.rows:,} rows in {seconds:.2f} s, "
                    f"{facts.rows / max(seconds, 1e-9):,.0f} rows/s, "
                    f"{format_bytes(peak_resident_bytes())} peak resident memory"
                )
        finally:
            ledger.save()

    def _sorted(
        self, prepared: Prepared, parts: list[list[Bucket]]
    ) -> Iterator[tuple[str, SortedBucket, float]]:
        """Sort parts of the buckets, each in a pass; yield each bucket when its file is complete."""
        if not self.engine.machines.separate:
            for part in parts:
                yield from prepared.sort.write(part)
            return
        threads = prepared.sort.threads
        cores = self.engine.machines.cores_per_task(threads, self.options.memory // threads)
        memory = self.options.memory * cores // threads
        sort = replace(prepared.sort, threads=cores, memory=memory - BASE_MEMORY)
        tasks = ((sort, part) for part in parts)
        for _, written in self.engine.run(
            write_part, tasks, workers=threads // cores, memory=memory, cores=cores
        ):
            yield from written

    def _publish(self, buckets: dict[str, SortedBucket], lineage: dict[str, Any]) -> None:
        expected: dict[str, int] = lineage["splits"]
        found = dict.fromkeys(expected, 0)
        policies: Counter[str] = Counter()
        for name, bucket in buckets.items():
            split = name.split("/")[1]
            found[split] += bucket.rows
            policies[split] += bucket.policies or 0
        if found != expected:
            storage_of(self.work).remove_tree()  # the ledger is unreliable
            raise StoreError(
                "the buckets do not contain every position",
                path=self.store.path,
                found=", ".join(f"{rows:,} in {split}" for split, rows in found.items()),
                expected=", ".join(f"{rows:,} in {split}" for split, rows in expected.items()),
                hint="Run the shuffle again; it starts from the beginning. If the error repeats, run "
                "`hexdata verify`.",
            )
        manifest = self.store.manifest
        if any(bucket.policies is None for bucket in buckets.values()):  # some were kept and not counted
            counted = manifest.stages["shuffle"].get("policies")
        else:
            counted = dict(policies)
        before = manifest.digest("shuffled")
        kept = {name: f for name, f in manifest.files.items() if not name.startswith("shuffled/")}
        manifest.files = kept | {name: _file_facts(bucket) for name, bucket in buckets.items()}
        manifest.stages["shuffle"] = lineage | ({} if counted is None else {"policies": counted})
        self.store.publish(self.target)
        if "export" in manifest.stages and manifest.digest("shuffled") != before:
            again = self.store.next_command("export")
            self.progress.note(f"the shards are of another shuffle; run `{again}` to replace them")
        storage_of(self.work).remove_tree()

    def _result(self, resumed: int) -> ShuffleResult:
        files = self.store.manifest.files_in("shuffled")
        lineage = self.store.manifest.stages["shuffle"]
        return ShuffleResult(
            seed=lineage["seed"],
            positions=lineage["positions"],
            splits=lineage["splits"],
            buckets=lineage["buckets"],
            left_out=lineage["left_out"],
            bytes=sum(f.bytes for f in files.values()),
            resumed=resumed,
        )


def _file_facts(bucket: SortedBucket) -> FileFacts:
    return FileFacts(bucket.rows, bucket.bytes, bucket.sha256)
