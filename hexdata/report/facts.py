"""Facts of a report: those of the store, rows of named queries, and the quality of the shuffle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata import __version__
from hexdata.info import StoreInfo, describe
from hexdata.progress import Progress
from hexdata.quality import Quality, measure_quality
from hexdata.retry import repeats_on_disk
from hexdata.sql import SqlLimits, named_query, open_catalog
from hexdata.storage import AnyPath
from hexdata.store import STAGES, Store
from hexdata.store.files import digest_file
from hexdata.store.integrity import require_intact
from hexdata.store.manifest import MANIFEST_NAME

SPLIT: Final = "train"
"""The split whose shuffle is measured."""
QUERIES: Final = ("splits", "lengths", "tiers", "sources", "rejects", "flags", "first_moves", "opening_cells")
"""Named queries whose rows the report shows."""
# Hides the view of this name, which fails if its files were removed.
_NO_BUCKETS: Final = (
    "CREATE TEMP VIEW shuffled AS SELECT NULL::VARCHAR AS split, NULL::INTEGER AS bucket WHERE false"
)

Row = dict[str, Any]


_LONGEST_GAME: Final = 4096
"""Games with more positions are ignored; only damaged data contains them."""


@dataclass(frozen=True)
class Spread:
    """Distribution of the number of pieces of an order that contain positions of a game.

    Attributes:
        pieces: Number of pieces: the buckets, or equal parts of the order.
        by_bucket: Whether the pieces are the buckets.
        games: Number of games measured.
        positions: Number of positions of these games.
        before: Number of games by the number of pieces they reach, in the input order (pieces + 1,).
        after: The same in the shuffled order.
        chance: The same, expected of a uniform random order.
    """

    pieces: int
    by_bucket: bool
    games: int
    positions: int
    before: list[int]
    after: list[int]
    chance: list[float]

    @property
    def name(self) -> str:
        """What the pieces are called."""
        return "buckets" if self.by_bucket else "pieces"

    def mean(self, reached: Sequence[float]) -> float:
        """Return the mean number of pieces of one of the distributions."""
        return sum(number * games for number, games in enumerate(reached)) / sum(reached)


@dataclass(frozen=True, kw_only=True)
class ReportFacts(StoreInfo):
    """All facts of a report: those of ``hexdata.info``, with an absolute path, and these.

    Attributes:
        name: Name of the store's folder, or the last part of its address.
        version: Version of hexdata.
        tables: Rows of each query in ``QUERIES``.
        spread: Number of buckets reached by the games of the training split; None if it is not shuffled.
        quality: Quality of the shuffle of the training split; None if it is not shuffled or the buckets were
            removed.
        values_before: Mean value of each piece of the input order, one piece per bucket.
        manifest_sha256: SHA-256 of the manifest file.
        commands: Command line that begins, finishes or repeats each stage.
    """

    name: str
    version: str
    tables: dict[str, list[Row]]
    spread: Spread | None
    quality: Quality | None
    values_before: list[Row]
    manifest_sha256: str
    commands: dict[str, str]

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
    manifest, removed = opened.manifest, opened.manifest.removed_buckets
    folders = (*STAGES["convert"], *(() if removed else ("shuffled",)))
    require_intact(opened, folders, progress=progress)
    located = Store(opened.path.absolute(), manifest)  # so that the commands work in any folder
    # `describe` does not compare these files with their digests again.
    located.intact |= {name for folder in folders for name in manifest.files_in(folder)}
    info = describe(located)
    shuffle = info.stage("shuffle")
    is_current = shuffle is not None and shuffle.state != "outdated"
    split = manifest.stages["shuffle"]["splits"].get(SPLIT, 0) if is_current else 0
    spread, values, quality = None, list[Row](), None
    progress.begin("query", len(QUERIES) + 2 * bool(split), "queries")
    with open_catalog(opened, memory=limits.memory, threads=limits.threads) as con:

        def rows(name: str) -> list[Row]:
            relation = con.sql(named_query(name))
            found = [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]
            progress.advance(1)
            return found

        if removed:
            con.execute(_NO_BUCKETS)
        tables = {name: rows(name) for name in QUERIES}
        if removed:  # the manifest has their counts
            for row in tables["splits"]:
                row |= {"shuffled": manifest.stages["shuffle"]["splits"].get(row["split"]), "buckets": 0}
        elif split:
            spread = _spread_of(rows("spread"), len(manifest.buckets(SPLIT)), split)
            values = rows("values_before")
    # After the session of the queries has ended, since each session may use all of the memory.
    if split and not removed:
        progress.begin("measure", None, "positions")
        quality = measure_quality(store, **limits.session(opened.reader_memory()))
    return ReportFacts(
        **vars(info),
        name=opened.path.resolve().name or str(opened.path),
        version=__version__,
        tables=tables,
        spread=spread,
        quality=quality,
        values_before=values,
        manifest_sha256=digest_file(opened.path / MANIFEST_NAME)[1],
        commands={stage: located.next_command(stage) for stage in STAGES},
    )


def _spread_of(rows: Iterable[Row], buckets: int, positions: int) -> Spread | None:
    """Return the spread of the rows of the named query ``spread``; None if there are no games.

    Args:
        rows: Rows with pieces, positions, before, after and games.
        buckets: Number of buckets of the split.
        positions: Number of positions of the split.
    """
    # reached_by_chance takes a step per position of the longest game.
    found = [row for row in rows if row["positions"] <= _LONGEST_GAME]
    if not found:
        return None
    pieces = int(found[0]["pieces"])
    before, after, sizes = [0] * (pieces + 1), [0] * (pieces + 1), Counter[int]()
    for row in found:
        before[row["before"]] += row["games"]
        after[row["after"]] += row["games"]
        sizes[row["positions"]] += row["games"]
    chance = reached_by_chance(sizes, pieces=pieces, positions=positions).tolist()
    counted = sum(size * games for size, games in sizes.items())
    return Spread(pieces, pieces == buckets, sizes.total(), counted, before, after, chance)


def reached_by_chance(sizes: Mapping[int, int], *, pieces: int, positions: int) -> npt.NDArray[np.float64]:
    """Return the expected number of games that reach 0, 1, … pieces in a uniform random order (pieces + 1,).

    The positions of a game are drawn without replacement. If i of them are in k pieces of m positions each,
    the next one is in a new piece with probability (pieces - k) m / (positions - i).

    Args:
        sizes: Number of games by their number of positions.
        pieces: Number of pieces, of equal size.
        positions: Number of positions in all pieces together.
    """
    reached = np.arange(pieces + 1)
    chance, total = np.zeros(pieces + 1), np.zeros(pieces + 1)
    chance[0] = 1.0
    for drawn in range(max(sizes, default=0)):
        new = np.clip((pieces - reached) * (positions / pieces) / (positions - drawn), 0.0, 1.0)
        moved = chance * new
        chance -= moved
        chance[1:] += moved[:-1]
        total += sizes.get(drawn + 1, 0) * chance
    return total
