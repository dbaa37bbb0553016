"""Figures of a shuffle, compared with those expected of a uniform random order.

DuckDB counts games and values, of each bucket and of the whole split. NumPy counts pairs of rows in the
order of the rows, or in a sample of stretches of a large store, before and after the shuffle. If an option
determines the contents of buckets, each bucket is a segment that is compared with a random order of itself;
otherwise, the whole split is the only segment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from itertools import accumulate, pairwise
from string import Template
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.order import Permutation, derive_key
from hexdata.quality import theory
from hexdata.quality.figures import Figure, Quality, judge
from hexdata.quality.theory import Moments, Slots, possible_share
from hexdata.retry import on_disk
from hexdata.schema import SPLITS
from hexdata.storage import AnyPath, translate_errors
from hexdata.store import Store
from hexdata.store.integrity import require_buckets
from hexdata.store.session import DuckDBPyConnection, duckdb_session, read_parquet_sql
from hexdata.system import default_workers
from hexdata.text import count_of

SPLIT: Final = "train"
MAX_GAME_SHARE: Final = 0.02
"""Accepted share of one game in a bucket, unless the sizes of games and buckets require more."""
_BATCHES: Final = (256, 1024, 4096)
_LAGS: Final = 100
_VALUE_LAGS: Final = (1, 2, 5, 10, 20, 50, 100)
_QUERY_ROWS: Final = 1 << 21
"""Rows whose games are counted per query, so that memory does not grow with the store."""
_MEMORY: Final = 500 << 20
"""Bytes for DuckDB unless given."""
_SAMPLED = 1 << 22
"""Maximum number of rows of the shuffled order in which pairs are counted. Of a larger order, stretches at
seeded random offsets are counted."""
_SAMPLED_INPUT = 1 << 19
"""The same for the input order."""
_STRETCH = 1 << 16
"""Number of consecutive rows sampled together; a multiple of every batch size."""

_Array = npt.NDArray[Any]


class _Counts(NamedTuple):
    """Counts over a group of rows, those of values as ``values.sql`` describes them."""

    sizes: dict[int, int]
    """Number of games by their number of rows in the group. Each row without a game counts as one game."""
    rows: int
    mean: float
    second: float
    third: float
    fourth: float

    def tuples(self, length: int) -> int:
        """Return the number of ordered tuples of different rows of the same game."""
        return sum(games * math.perm(size, length) for size, games in self.sizes.items())


class _Split(NamedTuple):
    """Counts of a split."""

    whole: _Counts
    buckets: dict[int, _Counts]
    """Those of each bucket that has rows."""


class _Order(NamedTuple):
    """Pairs of rows in an order, within runs of consecutive rows of a segment."""

    runs: dict[int, list[int]]
    """Numbers of rows of the runs of each segment."""
    found: dict[str, float]
    """By the name of the figure: the number of same-game pairs at a lag ("neighbours-1") or within batches
    ("batch-256"), or the sum of (value - mean) (later value - mean) at a lag ("value-1")."""
    rank: Figure
    """Rank correlation with the input order."""

    @property
    def rows(self) -> int:
        """Number of rows of all runs."""
        return sum(map(sum, self.runs.values()))


def measure_quality(
    store: str | AnyPath, *, memory: int = _MEMORY, threads: int | None = None
) -> Quality | None:
    """Measure how well the training split of a shuffled store is mixed, before and after the shuffle.

    Each figure is compared with its mean and standard deviation in a uniform random order of the same rows.
    If an option determines the contents of buckets (assign="game", stratify_by), the comparison is with a
    uniform random order within each bucket. For more than four million rows a seeded sample is measured. The
    store is only read; DuckDB spills to the system's temporary folder.

    Args:
        store: Path or address of the store.
        memory: Memory limit of DuckDB in bytes. Default 500 MiB.
        threads: Number of DuckDB threads. Default None: one per core.

    Returns:
        The figures, or None if the store has no training split.

    Raises:
        StoreError: The store does not exist or is not shuffled, its buckets were removed, or the disk
            fails.
        BudgetError: The memory is too small.
    """
    target = Store.open(store)
    target.require_stage("shuffle")
    require_buckets(target)
    if not target.manifest.stages["shuffle"]["splits"].get(SPLIT):
        return None

    def measure() -> Quality:
        with duckdb_session(memory=memory, threads=threads or default_workers(), store=target.path) as con:
            return _measure(target, con)

    with translate_errors(target.path):
        return on_disk(measure)


def _measure(store: Store, con: DuckDBPyConnection) -> Quality:
    shuffle = store.manifest.stages["shuffle"]
    whole_games = shuffle["choices"].get("assign") == "game"
    by_bucket = whole_games or "stratify_by" in shuffle["choices"]
    counted = {}
    # The training split is the last one, as its rows are read below.
    for split in reversed(SPLITS):
        if shuffle["splits"].get(split):
            counted[split] = _count_split(con, store, split)
    train = counted[SPLIT]
    whole, buckets = train.whole, train.buckets
    segment, segments = ("bucket", buckets) if by_bucket else ("0", {0: whole})
    before = _read_order(con, store, "position_id", _SAMPLED_INPUT, "0", {0: whole})
    after = _read_order(con, store, "row_index", _SAMPLED, segment, segments)
    figures = [
        _largest_share(split, counted[split], is_judged=not whole_games)
        for split in SPLITS
        if split in counted
    ]
    of_batches, neighbours, products = _figures_of_pairs(
        before, after, whole, segments, whole_games=whole_games
    )
    # Of 100 lags, a page shows the first and the worst; the others are in `lags`.
    among = f"the worst of lags 1 to {_LAGS}"
    figures += [*of_batches, neighbours[0], _worst("neighbours-worst", among, neighbours)]
    if products:
        among = f"the worst of lags {', '.join(map(str, _VALUE_LAGS[:-1]))} and {_VALUE_LAGS[-1]}"
        figures += [products[0], _worst("value-worst", among, products)]
    figures.append(after.rank)
    means = [_bucket_mean(whole, bucket, is_judged=not whole_games) for bucket in buckets.values()]
    if whole.second:
        figures.append(max(means, key=_distance))
    return Quality(
        split=SPLIT,
        positions=whole.rows,
        sampled=after.rows,
        sampled_before=before.rows,
        buckets=len(store.files(f"shuffled/{SPLIT}")),
        reference="each bucket in uniform order" if by_bucket else "the split in uniform order",
        figures=figures,
        lags=neighbours + products,
        by_bucket=[
            {
                "bucket": number,
                "rows": bucket.rows,
                "games": sum(bucket.sizes.values()),
                "largest_share": max(bucket.sizes) / bucket.rows,
                "value_mean": mean.after,
                "value_deviation": mean.deviation,
                "z": mean.z,
            }
            for (number, bucket), mean in zip(buckets.items(), means, strict=True)
        ],
    )


# --- counts, and pairs of rows --------------------------------------------------------------------------


def _count_split(con: DuckDBPyConnection, store: Store, split: str) -> _Split:
    """Return the counts of a split. The view ``shuffled`` has its rows afterwards."""
    facts, files = store.manifest.files_in(f"shuffled/{split}"), store.files(f"shuffled/{split}")
    firsts = [0, *accumulate(each.rows for each in facts.values())]

    def define(some: Sequence[AnyPath]) -> None:
        # Lists start at 1 in DuckDB. A row without a game has a negative id of its own, so that it equals no
        # other.
        con.execute(f"""CREATE OR REPLACE VIEW shuffled AS SELECT
            regexp_extract(filename, 'bucket-([0-9]+)[.]parquet$', 1)::BIGINT AS bucket,
            ({firsts}::BIGINT[])[bucket + 1] + file_row_number AS row_index,
            position_id, game_id, coalesce(game_id, -1 - position_id) AS game,
            if(isfinite(value), value, 'NaN')::DOUBLE AS value
            FROM {read_parquet_sql(some, row_location=True)}""")

    buckets, step = dict[int, _Counts](), max(1, _QUERY_ROWS * len(files) // firsts[-1])
    for start in range(0, len(files), step):
        define(files[start : start + step])
        buckets |= _count(con, "bucket")
    define(files)
    # The counts of buckets do not add up to those of the split: a game is in several.
    return _Split(_count(con, "0")[0], buckets)


def _count(con: DuckDBPyConnection, group: str) -> dict[int, _Counts]:
    """Return the counts of each group of rows of the view ``shuffled``, given as an SQL expression."""
    # Only counted: DuckDB keeps several groups of a game if the rows of many games alternate, and would spill
    # sums of values of each.
    of_games = f"SELECT {group} AS number, game_id, count(*) AS n FROM shuffled GROUP BY ALL"
    size, games = "if(game_id IS NULL, 1, n) AS size", "sum(if(game_id IS NULL, n, 1))::BIGINT"
    sizes = defaultdict[int, dict[int, int]](dict)
    histogram = con.sql(f"SELECT number, {size}, {games} FROM ({of_games}) GROUP BY ALL ORDER BY ALL")
    for number, rows, count in histogram.fetchall():
        sizes[number][rows] = count
    text = Template((resources.files("hexdata.quality") / "values.sql").read_text(encoding="utf-8"))
    values = con.sql(text.substitute(group=group)).fetchall()
    return {number: _Counts(sizes[number], *of_values) for number, *of_values in values}


def _read_order(
    con: DuckDBPyConnection, store: Store, column: str, limit: int, segment: str, segments: dict[int, _Counts]
) -> _Order:
    """Return the pairs of rows of the view ``shuffled`` in the order of a column.

    An order of more than ``limit`` rows is sampled in seeded stretches. Rows are compared within a stretch,
    or within the part of a stretch in one segment.

    Args:
        con: The session.
        store: The store.
        column: "row_index", or "position_id" for the order of the input.
        limit: Maximum number of rows.
        segment: "bucket", or "0" if the split is the only segment.
        segments: Counts of each segment.
    """
    is_input, positions = column == "position_id", store.manifest.counts["positions"]
    # Only rows of the split are compared, but their ids are numbered over all splits.
    rows = positions if is_input else sum(counts.rows for counts in segments.values())
    stretch, condition = "0", ""
    if rows > limit:
        seed = store.manifest.stages["shuffle"]["seed"]
        key = derive_key(seed, "quality", "input" if is_input else "shuffled")
        drawn = Permutation(rows // _STRETCH, key).slice(0, limit // _STRETCH).tolist()
        stretch = f"{column} // {_STRETCH}"
        condition = f"WHERE {stretch} IN ({', '.join(map(str, drawn))})"
    # Narrow types, because up to four million rows are held in memory.
    kind = "INTEGER" if positions < 1 << 31 else "BIGINT"
    names = {"segment": segment, "stretch": stretch, "game": "game", "index": column, "id": "position_id"}
    numbers = ", ".join(f"({each})::{kind} AS {name}" for name, each in names.items())
    query = f"SELECT {numbers}, value FROM shuffled {condition} ORDER BY index"
    number, part, game, index, ids, value = map(np.asarray, con.execute(query).fetchnumpy().values())
    runs, found = defaultdict[int, list[int]](list), defaultdict[str, float](float)
    starts = np.flatnonzero(np.diff(part, prepend=-1) | np.diff(number, prepend=-1))
    for start, stop in pairwise([*starts.tolist(), len(index)]):
        own = int(number[start])
        runs[own].append(stop - start)
        for name, amount in _pairs(game[start:stop], value[start:stop] - segments[own].mean):
            found[name] += amount
    return _Order(runs, found, _rank(number, index, ids))


def _pairs(game: _Array, value: _Array) -> Iterator[tuple[str, float]]:
    """Yield the name and the number of pairs of each kind in a run, given the value minus the mean."""
    for lag in range(1, _LAGS + 1):
        yield f"neighbours-{lag}", int(np.count_nonzero(game[lag:] == game[:-lag]))
    for lag in _VALUE_LAGS:
        yield f"value-{lag}", float((value[lag:] * value[:-lag]).sum())
    # Sorted by game, the rows of a game in one batch are neighbours: a stable sort keeps the batches in
    # order.
    order = np.argsort(game, kind="stable")
    game = game[order]
    for size in _BATCHES:
        batch = order // size
        ends = np.flatnonzero((game[1:] != game[:-1]) | (batch[1:] != batch[:-1])) + 1
        counts = np.diff(ends, prepend=0, append=len(game))
        yield f"batch-{size}", int((counts * (counts - 1)).sum()) // 2


def _rank(segment: _Array, index: _Array, ids: _Array) -> Figure:
    """Return the correlation of indices with the ranks of ids, over pairs of the same segment."""
    figure = Figure("rank", "rank correlation with the input order", "value", before=1.0)
    sums, variance = np.zeros((2, 2)), 0.0
    starts = np.flatnonzero(np.diff(segment, prepend=-1))
    for start, stop in pairwise([*starts.tolist(), len(index)]):
        rank = np.argsort(np.argsort(ids[start:stop]))
        of_segment = np.cov(index[start:stop], rank, bias=True) * (stop - start)
        sums += of_segment
        # The correlation has variance 1 / (N - 1) in each segment, and segments are independent.
        variance += float(of_segment[0, 0] * of_segment[1, 1]) / max(stop - start - 1, 1)
    scale = math.sqrt(sums[0, 0] * sums[1, 1])
    return judge(figure, float(sums[0, 1]), Moments(0.0, variance, 0.0), 1 / scale) if scale else figure


# --- figures --------------------------------------------------------------------------------------------


def _largest_share(split: str, counted: _Split, *, is_judged: bool) -> Figure:
    """Return the figure for the largest share of one game in a bucket of a split."""
    buckets = counted.buckets.values()
    share, games = max((max(each.sizes) / each.rows, sum(each.sizes.values())) for each in buckets)
    possible = max(MAX_GAME_SHARE, share)
    # The share in a single bucket does not depend on the order.
    if len(buckets) > 1:
        # The smallest bucket has the largest shares by chance.
        smallest, whole = min(bucket.rows for bucket in buckets), counted.whole
        possible = possible_share(whole.sizes, whole.rows, smallest, len(buckets), MAX_GAME_SHARE)
    note = f"limit {MAX_GAME_SHARE:.0%}"
    if not is_judged:
        note = "not judged: each game is in one bucket"
    elif possible > MAX_GAME_SHARE:
        note = f"limit {possible:.3%}: games and buckets of this size cannot keep to {MAX_GAME_SHARE:.0%}"
    name, of = ("largest-share", "") if split == SPLIT else (f"largest-share-{split}", f" of {split}")
    title = f"largest share of one game in a bucket{of} ({count_of(games, 'game')})"
    ok = share <= possible or not is_judged
    return Figure(name, title, "share", after=share, judged=is_judged, ok=ok, note=note)


def _bucket_mean(whole: _Counts, part: _Counts, *, is_judged: bool) -> Figure:
    """Return the figure for the mean value of a bucket, whose rows are drawn without replacement."""
    figure = Figure("bucket-mean", "value mean of a bucket, the furthest out", "value")
    n, rows = whole.rows, part.rows
    if not whole.second:  # values are not compared
        return figure
    if rows >= n:
        return replace(figure, after=part.mean, expected=whole.mean, note="does not depend on the order")
    variance = whole.second / (n - 1) / rows * (1 - rows / n)
    skewness = abs(whole.third / n) / (whole.second / n) ** 1.5 / math.sqrt(rows)
    found = judge(figure, part.mean, Moments(whole.mean, variance, skewness * variance**1.5), both=True)
    if not is_judged:
        # With whole games, the values of a bucket are not a draw of independent positions.
        note = f"whole games per bucket: {abs(found.z or 0.0):.3g} s.d. of independent positions"
        return replace(found, bound=None, judged=False, ok=True, note=note)
    return found


def _figures_of_pairs(
    before: _Order, after: _Order, whole: _Counts, segments: Mapping[int, _Counts], *, whole_games: bool
) -> tuple[list[Figure], list[Figure], list[Figure]]:
    """Return the figures of batches, of neighbours and of products of values at each lag, if these differ."""
    games = {n: theory.same_game_kernel(c.rows, c.tuples(2), c.tuples(3)) for n, c in segments.items()}
    values = {n: theory.product_kernel(c.rows, c.second, c.third, c.fourth) for n, c in segments.items()}

    def compare(figure: Figure, slots_of: Callable[[Sequence[int]], Slots], scale: float = 1.0) -> Figure:
        """Compare a sum over pairs of rows with a random order of each segment.

        The figure is ``scale`` times the mean of the pairs: of same-game pairs, or of products of values in
        units of their variance.
        """
        kernels = values if figure.unit == "value" else games

        def weight(slots: Slots, counts: _Counts) -> float:
            return slots.pairs * (counts.second / counts.rows if kernels is values else 1.0)

        if pairs := sum(weight(slots_of(runs), whole) for runs in before.runs.values()):
            figure = replace(figure, before=before.found[figure.name] / pairs * scale)
        parts = [(slots_of(runs), number) for number, runs in after.runs.items()]
        if not (pairs := sum(weight(slots, segments[number]) for slots, number in parts)):
            return figure
        chance = theory.moments((slots, kernels[number]) for slots, number in parts)
        return judge(figure, after.found[figure.name], chance, scale / pairs)

    batches = []
    for size in _BATCHES:
        pairs = math.comb(min(size, whole.rows), 2)
        figure = Figure(f"batch-{size}", f"same-game pairs in a batch of {size}", "count")
        figure = compare(figure, partial(theory.batch_slots, size=size), pairs)
        if whole_games and figure.after and (same := whole.tuples(2)):
            times = figure.after / pairs * whole.rows * (whole.rows - 1) / same
            note = f"whole games per bucket: {times:.3g} times the pairs of a uniform order"
            figure = replace(figure, note=note)
        batches.append(figure)
    neighbours, products = list[Figure](), list[Figure]()
    for lag in range(1, _LAGS + 1):
        figure = Figure(f"neighbours-{lag}", f"neighbours of the same game, lag {lag}", "share")
        neighbours.append(compare(figure, partial(theory.lag_slots, lag=lag)))
    for lag in _VALUE_LAGS if whole.second else ():
        figure = Figure(f"value-{lag}", f"autocorrelation of the value, lag {lag}", "value")
        products.append(compare(figure, partial(theory.lag_slots, lag=lag)))
    return batches, neighbours, products


def _worst(name: str, among: str, figures: list[Figure]) -> Figure:
    """Return the figure with the largest deviation, failed ones first, under the name ``name``."""
    worst = max(figures, key=_distance)
    return replace(worst, name=name, note=f"{among}: {worst.note}" if worst.note else among)


def _distance(figure: Figure) -> tuple[bool, float]:
    return not figure.ok, abs(figure.z or 0.0)
