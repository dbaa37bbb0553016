"""The global shuffle: positions in the order of their sort keys, split by split, bucket by bucket.

``plan`` says what will be done, ``local`` does it on this machine with DuckDB. The stage resumes unit by
unit and publishes its manifest last.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hexdata.errors import StoreError
from hexdata.order import ORDER_VERSION
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS, positions_schema
from hexdata.shuffle.local import scatter, sort_buckets, split_sizes_sql, varying_bytes_sql
from hexdata.shuffle.plan import Bucket, ShuffleOptions, ShufflePlan, make_plan
from hexdata.store import Store
from hexdata.store.files import FileFacts, has_size
from hexdata.store.ledger import Ledger
from hexdata.store.parquet import write_parquet
from hexdata.store.session import DuckDBPyConnection, duckdb_session

__all__ = ["ShuffleOptions", "ShufflePlan", "ShuffleResult", "make_plan", "shuffle_store"]


@dataclass(frozen=True)
class ShuffleResult:
    """What ``shuffle_store`` did."""

    seed: int
    positions: int
    splits: dict[str, int]
    buckets: dict[str, int]
    bytes: int
    resumed: int
    """Units that an earlier run of the same command had finished."""
    already_done: bool = False


def shuffle_store(
    store: str | Path, options: ShuffleOptions | None = None, progress: Progress = SILENT
) -> ShuffleResult:
    """Shuffle a store's positions globally: ``ORDER BY sort_key``, out of core.

    Another seed or number of buckets replaces an earlier shuffle, and the shards made of it.

    Raises:
        StoreError: there is no store, it holds no position, or another process writes to it.
        BudgetError: the memory is too small.
    """
    options = options or ShuffleOptions()
    target = Store.open(store)
    with target.writing("shuffle"):
        return _Run(target, options, progress).shuffle()


_MADE_OF_IT: Final = ("export", "pickles-shuffled")
"""Stages whose files are the shuffled positions in another form."""
_FOLDERS: Final = ("shuffled", "shards", "pickles/shuffled")
"""Where the shuffled positions lie, in every form."""


class _Run:
    """One run under the store's lock."""

    def __init__(self, store: Store, options: ShuffleOptions, progress: Progress) -> None:
        self.store = store
        self.progress = progress
        self.work = store.work / "shuffle"
        self.spill = self.work / "spill"
        shutil.rmtree(self.spill, ignore_errors=True)
        self.positions = store.files("positions")
        self.games = store.files("games")
        if not self.positions or store.manifest.board_size is None:
            raise StoreError(
                "this store holds no positions", path=store.path, cure="Convert some sources into it first."
            )
        self.plan = make_plan(options, store.manifest.board_size, *self._survey(options))
        self.of = store.made_of("shuffle")

    def _survey(self, options: ShuffleOptions) -> tuple[dict[str, int], int]:
        """Count the positions of each split, and the bytes of the columns of varying length."""
        with duckdb_session(memory=options.memory // 4, threads=1, spill=self.spill) as con:
            counted = dict(con.sql(split_sizes_sql(self.positions, self.games)).fetchall())
            varying = con.sql(varying_bytes_sql(self.positions)).fetchall()[0][0]
        return {split: counted[i] for i, split in enumerate(SPLITS) if i in counted}, varying

    def shuffle(self) -> ShuffleResult:
        lineage = {**self._lineage(), "of": self.of}
        done = self.store.manifest.stages.get("shuffle")
        if done == lineage and self.store.intact("shuffled"):
            shutil.rmtree(self.work)  # a run may have been killed right after its manifest
            return self._result(resumed=0, already_done=True)
        ledger = Ledger(self.work / "shuffling_progress.json", "shuffle", [self.of, self.plan.identity()])
        if not len(ledger):
            self._clear(replaced=done)
        resumed = len(ledger)
        self._scatter(ledger)
        self._publish(self._sort(ledger), lineage)
        return self._result(resumed)

    def _session(self) -> AbstractContextManager[DuckDBPyConnection]:
        return duckdb_session(memory=self.plan.duckdb_memory, threads=self.plan.threads, spill=self.spill)

    def _scatter(self, ledger: Ledger) -> None:
        """Phase 1: write the runs that are not there yet."""
        self.progress.begin("scatter", sum(self.plan.rows.values()), "positions")
        with self._session() as con:
            for part in self.plan.slices:
                if part.name not in ledger or not (self.work / part.name).is_file():
                    rows = scatter(con, self.positions, self.games, self.plan, part, self.work / part.name)
                    ledger.finish(part.name, {"rows": rows})
                self.progress.advance(part.stop - part.start)

    def _sort(self, ledger: Ledger) -> dict[str, FileFacts]:
        """Phase 2: write the buckets that are not there yet; return the facts of all of them."""
        self.progress.begin("sort", sum(self.plan.rows.values()), "positions")
        runs = [(self.work / part.name).resolve() for part in self.plan.slices]
        schema = positions_schema(self.plan.board_size)
        with self._session() as con:
            for split in self.plan.rows:
                own = [bucket for bucket in self.plan.buckets if bucket.split == split]
                todo = [bucket for bucket in own if not self._is_written(bucket, ledger)]
                self.progress.advance(sum(ledger[b.name]["rows"] for b in own if b not in todo))
                for bucket, rows in sort_buckets(con, runs, self.plan, todo) if todo else ():
                    written = write_parquet(self.store.path / bucket.name, schema, rows)
                    ledger.finish(bucket.name, written.to_json())
                    self.progress.advance(written.rows)
        return {bucket.name: FileFacts(**ledger[bucket.name]) for bucket in self.plan.buckets}

    def _is_written(self, bucket: Bucket, ledger: Ledger) -> bool:
        return bucket.name in ledger and has_size(self.store.path / bucket.name, ledger[bucket.name]["bytes"])

    def _lineage(self) -> dict[str, Any]:
        counts = {split: sum(b.split == split for b in self.plan.buckets) for split in self.plan.rows}
        return {
            "seed": self.plan.seed,
            "order_version": ORDER_VERSION,
            "positions": sum(self.plan.rows.values()),
            "rejected": 0,
            "splits": self.plan.rows,
            "buckets": counts,
        }

    def _clear(self, replaced: dict[str, Any] | None) -> None:
        """Begin anew: first the manifest forgets the old shuffle and its shards, then they go."""
        if replaced is not None:
            self.progress.note(f"replaces the shuffle of seed {replaced['seed']} and what was made of it")
        manifest = self.store.manifest
        manifest.stages = {
            name: s for name, s in manifest.stages.items() if name not in ("shuffle", *_MADE_OF_IT)
        }
        manifest.files = {
            name: facts
            for name, facts in manifest.files.items()
            if not name.startswith(tuple(f"{folder}/" for folder in _FOLDERS))
        }
        manifest.save(self.store.path)
        for folder in (*(self.store.path / name for name in _FOLDERS), self.work):
            shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, facts: dict[str, FileFacts], lineage: dict[str, Any]) -> None:
        found = sum(f.rows for f in facts.values())
        if found != lineage["positions"]:
            raise StoreError(
                "the buckets do not hold every position",
                path=self.store.path,
                found=f"{found:,}",
                expected=f"{lineage['positions']:,}",
                cure="Run the shuffle again; if this repeats, run `hexdata verify`.",
            )
        manifest = self.store.manifest
        manifest.files |= facts
        manifest.stages["shuffle"] = lineage
        manifest.save(self.store.path)
        shutil.rmtree(self.work)

    def _result(self, resumed: int, already_done: bool = False) -> ShuffleResult:
        files = self.store.manifest.files_in("shuffled")
        lineage = self.store.manifest.stages["shuffle"]
        return ShuffleResult(
            seed=lineage["seed"],
            positions=lineage["positions"],
            splits=lineage["splits"],
            buckets=lineage["buckets"],
            bytes=sum(f.bytes for f in files.values()),
            resumed=resumed,
            already_done=already_done,
        )
