"""Numbers of the report, from named queries, shuffle quality, manifest and journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from hexdata import __version__
from hexdata.progress import Progress
from hexdata.quality import Quality, measure_quality
from hexdata.report.spread import Spread, spread_of
from hexdata.retry import repeats_on_disk
from hexdata.sql import SqlLimits, named_query, open_catalog
from hexdata.storage import AnyPath
from hexdata.store import STAGES, Store
from hexdata.store.files import FileFacts, digest_file
from hexdata.store.integrity import require_intact
from hexdata.store.journal import JournalEntry, read_journal
from hexdata.store.manifest import MANIFEST_NAME
from hexdata.store.session import DuckDBPyConnection

__all__ = ["QUERIES", "SPLIT", "ReportFacts", "StageSummary", "gather_facts"]

SPLIT: Final = "train"
"""The split whose shuffle is measured."""

QUERIES: Final = ("splits", "lengths", "tiers", "sources", "rejects", "flags", "first_moves", "opening_cells")
"""Named queries whose rows the report shows."""

Row = dict[str, Any]


@dataclass(frozen=True)
class StageSummary:
    """ReportFacts about one stage.

    Attributes:
        stage: Name of the stage in the manifest.
        fresh: Whether the output was made from the current contents of the store.
        positions: Number of positions in its output; for ``convert``, in the store.
        files: Number of files it wrote.
        bytes: Their total size.
        missing: Names of files that do not exist or have the wrong size.
        lineage: The stage's entry in the manifest, with the number of removed buckets as ``removed``.
        digest: SHA-256 over the names and digests of its files.
        last: The last run recorded in the journal; None if there is none.
        runs: Number of runs recorded in the journal.
    """

    stage: str
    fresh: bool
    positions: int
    files: int
    bytes: int
    missing: list[str]
    lineage: dict[str, Any]
    digest: str
    last: JournalEntry | None
    runs: int


@dataclass(frozen=True)
class ReportFacts:
    """All numbers of a report.

    Attributes:
        name: Name of the store's folder, or the last part of its address.
        location: Absolute path of the store, or its address.
        version: Version of hexdata.
        board_size: Number of rows of the board; None if the store has no positions.
        counts: Number of rows by table.
        without_game: Number of positions that belong to no known game.
        stages: The stages that have run, in order.
        tables: Rows of each query in ``QUERIES``.
        spread: Number of buckets reached by the games of the training split; None if it is not shuffled.
        quality: Quality of the shuffle of the training split; None if it is not shuffled or the buckets were
            removed.
        values_before: Mean value of each piece of the input order, one piece per bucket.
        manifest_sha256: SHA-256 of the manifest file.
        commands: Command line that begins, finishes or repeats each stage.
    """

    name: str
    location: str
    version: str
    board_size: int | None
    counts: dict[str, int]
    without_game: int
    stages: list[StageSummary]
    tables: dict[str, list[Row]]
    spread: Spread | None
    quality: Quality | None
    values_before: list[Row]
    manifest_sha256: str
    commands: dict[str, str]

    def stage(self, name: str) -> StageSummary | None:
        """Return the facts of a stage; None if it has not run."""
        return next((stage for stage in self.stages if stage.stage == name), None)

    def split(self, name: str) -> Row | None:
        """Return the row of the query ``splits`` for a split; None if the split has no games."""
        return next((row for row in self.tables["splits"] if row["split"] == name and row["games"]), None)


@repeats_on_disk
def gather_facts(store: str | AnyPath, limits: SqlLimits, progress: Progress) -> ReportFacts:
    """Compute all numbers of the report. The store is only read.

    Raises:
        StoreError: The store does not exist, or one of its files cannot be read.
        BudgetError: The memory is too small.
    """
    opened = Store.open(store)
    stages = _stages(opened)
    shuffled = next((s for s in stages if s.stage == "shuffle"), None)
    split = shuffled.lineage["splits"].get(SPLIT, 0) if shuffled and shuffled.fresh else 0
    removed = bool(opened.manifest.removed_buckets)
    checked = (*STAGES["convert"], *(() if removed else ("shuffled",)))
    require_intact(opened, checked, progress=progress)
    progress.begin("query", len(QUERIES) + 2 * bool(split), "queries")
    with open_catalog(opened, memory=limits.memory, threads=limits.threads) as con:
        tables = {name: _rows(con, name, progress) for name in QUERIES if name != "splits"}
        tables["splits"] = _splits(con, opened, progress)
        spread, values = None, list[Row]()
        if shuffled and split and not removed:
            buckets = shuffled.lineage["buckets"][SPLIT]
            spread = spread_of(_rows(con, "spread", progress), buckets=buckets, positions=split)
            values = _rows(con, "values_before", progress)
    location = str(opened.path.absolute())
    quality = None
    if split and not removed:
        progress.begin("measure", None, "positions")
        quality = measure_quality(store, **limits.session(opened.path)._asdict())
    return ReportFacts(
        name=opened.path.resolve().name or str(opened.path),
        location=location,
        version=__version__,
        board_size=opened.manifest.board_size,
        counts={name: opened.manifest.counts.get(name, 0) for name in STAGES["convert"]},
        without_game=opened.count_without_game(),
        stages=stages,
        tables=tables,
        spread=spread,
        quality=quality,
        values_before=values,
        manifest_sha256=digest_file(opened.path / MANIFEST_NAME)[1],
        commands={stage: Store(location, opened.manifest).next_command(stage) for stage in STAGES},
    )


def _splits(con: DuckDBPyConnection, store: Store, progress: Progress) -> list[Row]:
    """Return the rows of the query ``splits``; without buckets, their counts are from the manifest."""
    if not store.manifest.removed_buckets:
        return _rows(con, "splits", progress)
    empty = "shuffled AS (SELECT NULL::VARCHAR AS split, NULL::INTEGER AS bucket WHERE false)"
    lineage = store.manifest.stages["shuffle"]
    rows = _rows(con, "splits", progress, lambda query: query.replace("WITH", f"WITH {empty},", 1))
    counts = ({"shuffled": lineage["splits"].get(row["split"]), "buckets": 0} for row in rows)
    return [row | count for row, count in zip(rows, counts, strict=True)]


def _rows(
    con: DuckDBPyConnection, name: str, progress: Progress, change: Callable[[str], str] = str
) -> list[Row]:
    """Return the rows of a named query, after a change of its text, as dictionaries."""
    relation = con.sql(change(named_query(name)))
    rows = [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
    progress.advance(1)
    return rows


def _stages(store: Store) -> list[StageSummary]:
    journal = read_journal(store.path)
    return [_stage(store, name, journal) for name in STAGES if name in store.manifest.stages]


def _stage(store: Store, name: str, journal: Iterable[JournalEntry]) -> StageSummary:
    manifest = store.manifest
    lineage = manifest.stages[name]
    if "removed" in lineage:
        lineage = lineage | {"removed": len(lineage["removed"])}
    files: dict[str, FileFacts] = {}
    for folder in STAGES[name]:
        files |= manifest.files_in(folder)
    runs = [entry for entry in journal if entry.stage == name]
    return StageSummary(
        stage=name,
        fresh="of" not in lineage or lineage["of"] == store.input_digest(name),
        positions=lineage["positions"],
        files=len(files),
        bytes=sum(facts.bytes for facts in files.values()),
        missing=[missing for folder in STAGES[name] for missing in store.missing(folder)],
        lineage=lineage,
        digest=manifest.digest(*STAGES[name]),
        last=runs[-1] if runs else None,
        runs=len(runs),
    )
