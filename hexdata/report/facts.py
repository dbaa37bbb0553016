"""The numbers of a report: named queries, the shuffle's quality, manifest and journal. Words come later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from hexdata import __version__
from hexdata.progress import Progress
from hexdata.quality import Quality, measure_quality
from hexdata.remote import AnyPath
from hexdata.report.spread import Spread, spread_of
from hexdata.sql import Limits, named_query, open_catalog
from hexdata.store import Store
from hexdata.store.files import FileFacts, digest_file
from hexdata.store.journal import Entry, read_journal
from hexdata.store.manifest import MANIFEST_NAME
from hexdata.store.session import DuckDBPyConnection

__all__ = ["QUERIES", "SPLIT", "STAGES", "Facts", "StageFacts", "gather_facts"]

SPLIT: Final = "train"
"""The split whose shuffle is looked at."""

QUERIES: Final = ("splits", "lengths", "tiers", "sources", "rejects", "flags", "first_moves", "opening_cells")
"""Named queries whose rows the report shows as they are."""

STAGES: Final = {
    "convert": ("positions", "games", "sources", "rejected"),
    "shuffle": ("shuffled",),
    "export": ("shards",),
    "pickles-original": ("pickles/original",),
    "pickles-shuffled": ("pickles/shuffled",),
}
"""The stages that make files, and the folders they make."""

Row = dict[str, Any]


@dataclass(frozen=True)
class StageFacts:
    """What the store says of one stage.

    Attributes:
        stage: its name in the manifest.
        fresh: whether it was run on what the store holds now.
        positions: in what it made; of ``convert``, in the store.
        files, bytes: that it made.
        missing: names of those that are not there, or have another size.
        lineage: its entry in the manifest.
        digest: SHA-256 over the names and digests of its files.
        last: its last run, as the journal has it.
        runs: in the journal.
    """

    stage: str
    fresh: bool
    positions: int
    files: int
    bytes: int
    missing: list[str]
    lineage: dict[str, Any]
    digest: str
    last: Entry | None
    runs: int


@dataclass(frozen=True)
class Facts:
    """All that a report says, as numbers.

    Attributes:
        name: of the store's folder, or of its address the last part.
        version: of hexdata.
        board_size: n; None while there is no position.
        counts: rows by table.
        stages: those that have run, in order.
        tables: the rows of each named query of ``QUERIES``.
        spread: how many buckets a game of the training split reaches; None without one.
        quality: of the shuffle of the training split; None without one.
        values_before: mean value of each piece of the input order, a piece a bucket.
        manifest_sha256: of the manifest's file.
    """

    name: str
    version: str
    board_size: int | None
    counts: dict[str, int]
    stages: list[StageFacts]
    tables: dict[str, list[Row]]
    spread: Spread | None
    quality: Quality | None
    values_before: list[Row]
    manifest_sha256: str

    def stage(self, name: str) -> StageFacts | None:
        """Return the facts of a stage; None if it has not run."""
        return next((stage for stage in self.stages if stage.stage == name), None)


def gather_facts(store: str | AnyPath, limits: Limits, progress: Progress) -> Facts:
    """Read every number of the report. Only reads.

    Raises:
        StoreError: there is no store, or a file of it cannot be read.
        BudgetError: the memory is too small.
    """
    opened = Store.open(store)
    stages = _stages(opened)
    shuffled = next((s for s in stages if s.stage == "shuffle"), None)
    split = shuffled.lineage["splits"].get(SPLIT, 0) if shuffled and shuffled.fresh else 0
    progress.begin("query", len(QUERIES) + 2 * bool(split), "queries")
    with open_catalog(opened, memory=limits.memory, threads=limits.threads) as con:
        tables = {name: _rows(con, name, progress) for name in QUERIES}
        spread, values = None, list[Row]()
        if shuffled and split:
            buckets = shuffled.lineage["buckets"][SPLIT]
            spread = spread_of(_rows(con, "spread", progress), buckets=buckets, positions=split)
            values = _rows(con, "values_before", progress)
    quality = None
    if split:
        progress.begin("measure", None, "positions")
        quality = measure_quality(store, **limits.share(opened.path)._asdict())
    return Facts(
        name=opened.path.resolve().name or str(opened.path),
        version=__version__,
        board_size=opened.manifest.board_size,
        counts={name: opened.manifest.counts.get(name, 0) for name in STAGES["convert"]},
        stages=stages,
        tables=tables,
        spread=spread,
        quality=quality,
        values_before=values,
        manifest_sha256=digest_file(opened.path / MANIFEST_NAME)[1],
    )


def _rows(con: DuckDBPyConnection, name: str, progress: Progress) -> list[Row]:
    """Return the rows of a named query, each a dictionary."""
    relation = con.sql(named_query(name))
    rows = [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
    progress.advance(1)
    return rows


def _stages(store: Store) -> list[StageFacts]:
    journal = read_journal(store.path)
    return [_stage(store, name, journal) for name in STAGES if name in store.manifest.stages]


def _stage(store: Store, name: str, journal: Iterable[Entry]) -> StageFacts:
    manifest = store.manifest
    lineage = manifest.stages[name]
    files: dict[str, FileFacts] = {}
    for folder in STAGES[name]:
        files |= manifest.files_in(folder)
    runs = [entry for entry in journal if entry.stage == name]
    return StageFacts(
        stage=name,
        fresh="of" not in lineage or lineage["of"] == store.made_of(name),
        positions=lineage["positions"],
        files=len(files),
        bytes=sum(facts.bytes for facts in files.values()),
        missing=[missing for folder in STAGES[name] for missing in store.missing(folder)],
        lineage=lineage,
        digest=manifest.digest(*STAGES[name]),
        last=runs[-1] if runs else None,
        runs=len(runs),
    )
