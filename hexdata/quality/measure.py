"""Figures of a shuffle, compared with those expected of a uniform random order.

DuckDB counts games and values per bucket, in ``queries/``. NumPy counts pairs of rows in the order of the
rows, or in a sample of stretches of a large store, before and after the shuffle. If an option determines the
contents of buckets, each bucket is a segment that is compared with a random order of itself; otherwise, the
whole split is the only segment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.order import Permutation, derive_key
from hexdata.quality.figures import BucketFigures, Figure, Quality, judge
from hexdata.quality.theory import (
    Kernel,
    Moments,
    Slots,
    batch_slots,
    expected_games,
    lag_slots,
    moments,
    possible_share,
    product_kernel,
    same_game_kernel,
    total,
)
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
_PIECE_ROWS: Final = 1 << 21
"""Rows whose games are counted per query, so that memory does not grow with the store."""
_SAMPLED_PIECES: Final = 8
"""Pieces of the input order that are measured in a large store. Each needs memory for all of its games."""
_NOISE: Final = 1e-12
"""A variance below this share of the sum of squares is a rounding error."""

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
_RowRange = tuple[int, int]
"""Row indices [start, stop) in an order."""
_SlotsOf = Callable[[Iterable[_RowRange]], Slots]
_KernelOf = Callable[["_Counts"], Kernel]


class _Counts(NamedTuple):
    """Counts over the rows of a segment: a row without a game counts as one game."""

    rows: int
    games: int
    largest: int
    """Number of rows of the largest game."""
    pairs: int
    """Sum of n (n - 1) over games of n rows."""
    triples: int
    """Sum of n (n - 1) (n - 2) over games of n rows."""
    mean: float
    """Mean value."""
    second: float
    """Sum of (value - mean)²; ``third`` and ``fourth`` are those of the higher powers."""
    third: float
    fourth: float

    @classmethod
    def of(cls, games: Sequence[int], powers: Sequence[float], least: float) -> _Counts:
        """Return the counts, given the first five and the power sums of the values about ``least``."""
        rows, distinct, largest, pairs, triples = map(int, games)
        p1, p2, p3, p4 = powers
        m = p1 / rows
        second = p2 - m * p1
        third = p3 - 3 * m * p2 + 2 * m * m * p1
        fourth = p4 - 4 * m * p3 + 6 * m * m * p2 - 3 * m**3 * p1
        # The power sums are large numbers of which small differences remain, so equal values rarely give 0.
        if second < _NOISE * p2:  # equal values; the rest is rounding
            second = third = fourth = 0.0
        # The fourth moment is at least S2² / N (Cauchy-Schwarz); rounding may give less.
        fourth = max(fourth, second * second / rows)
        return cls(rows, distinct, largest, pairs, triples, least + m, second, third, fourth)


class _Pairs:
    """Statistics of pairs of rows in an order, within runs of consecutive rows.

    Attributes:
        runs: Ranges of row indices by segment.
        found: By the name of the figure: the number of same-game pairs at a lag ("neighbours-1") or within
            batches ("batch-256"), or the sum of (value - mean) (later value - mean) at a lag ("value-1").
    """

    def __init__(self) -> None:
        self.runs = defaultdict[int, list[_RowRange]](list)
        self.found = defaultdict[str, float](float)

    def add(self, segment: int, first: int, game: _Array, value: _Array) -> None:
        """Count a run of consecutive rows.

        Args:
            segment: Its segment.
            first: Index of its first row.
            game: Game of each row.
            value: Value of each row, minus the mean.
        """
        self.runs[segment].append((first, first + len(game)))
        for lag in range(1, min(_LAGS, len(game) - 1) + 1):
            self.found[f"neighbours-{lag}"] += int(np.count_nonzero(game[lag:] == game[:-lag]))
        for lag in _VALUE_LAGS:
            self.found[f"value-{lag}"] += float((value[lag:] * value[:-lag]).sum())
        # Sorted by game, the rows of a game in one batch are neighbours: a stable sort keeps the batches in
        # order.
        order = np.argsort(game, kind="stable")
        game = game[order]
        for size in _BATCHES:
            batch = (first + order) // size
            ends = np.flatnonzero((game[1:] != game[:-1]) | (batch[1:] != batch[:-1])) + 1
            counts = np.diff(ends, prepend=0, append=len(game))
            self.found[f"batch-{size}"] += int((counts * (counts - 1)).sum()) // 2


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
            return _Measurement(target, con).quality()

    with translate_errors(target.path):
        return on_disk(measure)


class _Measurement:
    """Counts of a shuffle, and the figures made of them."""

    def __init__(self, store: Store, con: DuckDBPyConnection) -> None:
        self.store, self.con = store, con
        lineage = store.manifest.stages["shuffle"]
        self.seed: int = lineage["seed"]
        self.whole_games = lineage["choices"].get("assign") == "game"
        self.by_bucket = self.whole_games or "stratify_by" in lineage["choices"]
        self.files, self.rows = store.files(f"shuffled/{SPLIT}"), len(store.rows(f"shuffled/{SPLIT}"))
        self._view(SPLIT)
        # Powers relative to the least value are exact if all values are equal.
        least, greatest, finite = self._all("value_range")[0]
        self.constant = not finite or least == greatest
        self.least: float = 0.0 if self.constant else least
        self.sizes, self.counted = self._games(SPLIT)
        powers = [[0.0] * 4 if self.constant else row[5:] for row in self.counted.values()]
        self.buckets = {
            number: _Counts.of(row[:5], sums, self.least)
            for (number, row), sums in zip(self.counted.items(), powers, strict=True)
        }
        # Counted over the whole split, because the counts of buckets do not add up: a game is in several.
        games = (
            self.rows,
            sum(self.sizes.values()),
            max(self.sizes),
            sum(games * n * (n - 1) for n, games in self.sizes.items()),
            sum(games * n * (n - 1) * (n - 2) for n, games in self.sizes.items()),
        )
        self.whole = _Counts.of(games, [math.fsum(p) for p in zip(*powers, strict=True)], self.least)
        self.segments = self.buckets if self.by_bucket else {0: self.whole}
        self.pieces = self._pieces_of_input()
        # Only rows of the split are compared, but their ids are numbered over all splits.
        self.before, _ = self._pairs("position_id", store.manifest.counts["positions"], _SAMPLED_INPUT)
        self.after, self.rank = self._pairs("row_index", self.rows, _SAMPLED)

    # --- queries

    def _all(self, name: str, **named: object) -> list[tuple[Any, ...]]:
        """Return the rows of ``queries/NAME.sql``."""
        text = (resources.files("hexdata.quality") / "queries" / f"{name}.sql").read_text(encoding="utf-8")
        return self.con.execute(text, named or None).fetchall()

    def _view(self, split: str, buckets: slice = slice(None)) -> list[int]:
        """Define the view ``shuffled`` over some buckets of a split; return the rows of all of them."""
        lengths = [facts.rows for facts in self.store.manifest.files_in(f"shuffled/{split}").values()]
        files = read_parquet_sql(self.store.files(f"shuffled/{split}")[buckets], row_location=True)
        # Lists start at 1 in DuckDB. A row without a game has a negative id of its own, so that it equals no
        # other.
        self.con.execute(f"""CREATE OR REPLACE VIEW shuffled AS SELECT
            regexp_extract(filename, 'bucket-([0-9]+)[.]parquet$', 1)::BIGINT AS bucket,
            ({[0, *accumulate(lengths)]}::BIGINT[])[bucket + 1] + file_row_number AS row_index,
            position_id, game_id, coalesce(game_id, -1 - position_id) AS game, value::DOUBLE AS value
            FROM {files}""")
        return lengths

    def _games(self, split: str) -> tuple[dict[int, int], dict[int, list[Any]]]:
        """Return the number of games by their number of rows, and the counts of each bucket that has rows."""
        lengths, found, start = self._view(split), dict[int, list[Any]](), 0
        sizes = dict(self._all("game_sizes"))
        unknown = sum(lengths) - sum(n * games for n, games in sizes.items())
        if unknown:
            sizes[1] = sizes.get(1, 0) + unknown
        while start < len(lengths):  # a few buckets at a time, so that memory does not grow with the store
            stop = start + 1
            while stop < len(lengths) and sum(lengths[start : stop + 1]) <= _PIECE_ROWS:
                stop += 1
            self._view(split, slice(start, stop))
            found |= {number: row for number, *row in self._all("buckets", least=self.least)}
            start = stop
        # The other queries read the whole split.
        self._view(split)
        return sizes, found

    def _pieces_of_input(self) -> list[tuple[int, int, int, float]]:
        """Return rows, games, rows of the largest game and mean value of the pieces of the input order.

        There are as many pieces as buckets. Of a large store, a seeded sample of them is counted.
        """
        count = len(self.files)
        sampled = list(range(count))
        if self.rows > _SAMPLED:
            drawn = Permutation(count, derive_key(self.seed, "quality", "pieces"))
            sampled = drawn.slice(0, min(count, _SAMPLED_PIECES)).tolist()
        positions = self.store.manifest.counts["positions"]
        found = self._all(
            "input_pieces", buckets=count, positions=positions, least=self.least, pieces=sampled
        )
        return [
            (rows, games, int(largest), self.least + (0.0 if self.constant else value / rows))
            for rows, games, largest, value in found
        ]

    def _pairs(self, column: str, rows: int, limit: int) -> tuple[_Pairs, Figure]:
        """Return the pairs in the order of a column, and its rank correlation with the input order.

        An order of more than ``limit`` rows is sampled in seeded stretches. Rows are compared within a
        stretch, or within the part of a stretch in one segment.
        """
        is_after, condition = column == "row_index", ""
        if rows > limit:
            key = derive_key(self.seed, "quality", "shuffled" if is_after else "input")
            drawn = Permutation(rows // _STRETCH, key).slice(0, min(limit, rows) // _STRETCH)
            condition = f"WHERE {column} // {_STRETCH} IN ({', '.join(map(str, drawn.tolist()))})"
        # Narrow types, because up to four million rows are held in memory.
        kind = "INTEGER" if self.store.manifest.counts["positions"] < 1 << 31 else "BIGINT"
        selected = (
            f"bucket::{kind}, {column}::{kind} AS index, position_id::{kind}, game::{kind}, value::FLOAT"
        )
        columns = self.con.execute(f"SELECT {selected} FROM shuffled {condition} ORDER BY index").fetchnumpy()
        bucket, index, ids, game, value = (np.asarray(each) for each in columns.values())
        # Options determine the buckets of the shuffled order only, so the input order is always one segment.
        segment = bucket if is_after and self.by_bucket else np.zeros_like(bucket)
        run = index // _STRETCH if condition else np.zeros_like(index)
        starts = np.flatnonzero(np.diff(run, prepend=-1) | np.diff(segment, prepend=-1))
        pairs = _Pairs()
        for start, stop in zip(starts, [*starts[1:], len(index)], strict=True):
            number = int(segment[start])
            mean = self.segments[number].mean if is_after else self.whole.mean
            # Ids of other splits are missing in the input order, so its batches are counted from the start of
            # a run.
            first = int(index[start]) if is_after else 0
            pairs.add(number, first, game[start:stop], value[start:stop].astype(np.float64) - mean)
        return pairs, self._rank(segment, index, ids)

    def _rank(self, segment: _Array, index: _Array, ids: _Array) -> Figure:
        """Return the correlation of indices with the ranks of ids, over pairs of the same segment."""
        figure = Figure("rank", "rank correlation with the input order", "value", before=1.0)
        covariance = index_variance = rank_variance = variance = 0.0
        starts = np.flatnonzero(np.diff(segment, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(index)], strict=True):
            place = index[start:stop] - index[start:stop].mean()
            rank = np.argsort(np.argsort(ids[start:stop])) - (stop - start - 1) / 2
            one, other = float((place * place).sum()), float((rank * rank).sum())
            covariance += float((place * rank).sum())
            index_variance += one
            rank_variance += other
            # The correlation has variance 1 / (N - 1) in each segment, and segments are independent.
            variance += one * other / max(stop - start - 1, 1)
        if not index_variance * rank_variance:
            return figure
        return judge(
            figure, covariance, Moments(0.0, variance, 0.0), 1 / math.sqrt(index_variance * rank_variance)
        )

    # --- figures

    def quality(self) -> Quality:
        """Return all figures."""
        figures = [self._largest_share(SPLIT, self.sizes, self.counted)]
        splits = self.store.manifest.stages["shuffle"]["splits"]
        others = [split for split in SPLITS if split != SPLIT and splits.get(split)]
        figures += [self._largest_share(split, *self._games(split)) for split in others]
        games = [counts.games for counts in self.buckets.values()]
        games_before = sum(games for _, games, _, _ in self.pieces) / len(self.pieces)
        expected = expected_games(self.sizes, self.rows, [c.rows for c in self.buckets.values()])
        note = f"from {min(games):,} to {max(games):,}"
        figure = Figure("games-in-bucket", "games in a bucket, mean", "count", games_before, note=note)
        figures.append(replace(figure, after=sum(games) / len(games), expected=expected))
        for size in _BATCHES:
            whole = min(size, self.rows)
            figure = Figure(f"batch-{size}", f"same-game pairs in a batch of {size}", "count")
            slots_of = partial(batch_slots, size=size)
            figures.append(self._of_pairs(figure, slots_of, _same_game, whole * (whole - 1) / 2))
        lags = []
        for lag in range(1, _LAGS + 1):
            figure = Figure(f"neighbours-{lag}", f"neighbours of the same game, lag {lag}", "share")
            lags.append(self._of_pairs(figure, partial(lag_slots, lag=lag), _same_game))
        # Of 100 lags, a page shows the first and the worst; the others are in `lags`.
        figures += [lags[0], _worst("neighbours-worst", f"the worst of lags 1 to {_LAGS}", lags)]
        products = []
        for lag in () if self.constant else _VALUE_LAGS:
            figure = Figure(f"value-{lag}", f"autocorrelation of the value, lag {lag}", "value")
            products.append(self._of_pairs(figure, partial(lag_slots, lag=lag), _product))
        if products:
            listed = ", ".join(map(str, _VALUE_LAGS[:-1])) + f" and {_VALUE_LAGS[-1]}"
            figures += [products[0], _worst("value-worst", f"the worst of lags {listed}", products)]
        figures.append(self.rank)
        unusual, by_bucket = self._bucket_means()
        figures += unusual
        sampled, sampled_before = (
            sum(stop - start for runs in order.runs.values() for start, stop in runs)
            for order in (self.after, self.before)
        )
        return Quality(
            split=SPLIT,
            positions=self.rows,
            sampled=sampled,
            sampled_before=sampled_before,
            buckets=len(self.files),
            reference="each bucket in uniform order" if self.by_bucket else "the split in uniform order",
            figures=figures,
            lags=lags + products,
            by_bucket=by_bucket,
        )

    def _bucket_means(self) -> tuple[list[Figure], list[BucketFigures]]:
        """Return the figure of the most unusual mean value, if values differ; and those of each bucket."""
        means = {number: self._mean(counts.mean, counts.rows) for number, counts in self.buckets.items()}
        figures = []
        if self.constant:
            means = dict.fromkeys(means, Figure("bucket-mean", "", "value"))
        else:
            before = [self._mean(mean, rows) for rows, _, _, mean in self.pieces]
            unusual = max(before, key=lambda figure: abs(figure.z or 0.0)).after
            figures = [replace(max(means.values(), key=_distance), before=unusual)]
        by_bucket = [
            BucketFigures(n, c.rows, c.games, c.largest / c.rows, mean.after, mean.deviation, mean.z)
            for (n, c), mean in zip(self.buckets.items(), means.values(), strict=True)
        ]
        return figures, by_bucket

    def _largest_share(self, split: str, sizes: dict[int, int], buckets: dict[int, list[Any]]) -> Figure:
        """Return the figure for the largest share of one game in a bucket of a split."""
        share, games = max((largest / rows, games) for rows, games, largest, *_ in buckets.values())
        rows = [counts[0] for counts in buckets.values()]
        possible = max(MAX_GAME_SHARE, share)
        # The share in a single bucket does not depend on the order.
        if len(rows) > 1:
            # The smallest bucket has the largest shares by chance.
            possible = possible_share(sizes, sum(rows), min(rows), len(rows), MAX_GAME_SHARE)
        note = f"limit {MAX_GAME_SHARE:.0%}"
        if self.whole_games:
            note = "not judged: each game is in one bucket"
        elif possible > MAX_GAME_SHARE:
            note = f"limit {possible:.3%}: games and buckets of this size cannot keep to {MAX_GAME_SHARE:.0%}"
        name, title, before = f"largest-share-{split}", f" of {split}", None
        if split == SPLIT:
            before = max(largest / rows for rows, _, largest, _ in self.pieces)
            name, title = "largest-share", ""
        title = f"largest share of one game in a bucket{title} ({count_of(games, 'game')})"
        figure = Figure(name, title, "share", before, share, judged=not self.whole_games, note=note)
        return replace(figure, ok=self.whole_games or share <= possible)

    def _mean(self, mean: float, rows: int) -> Figure:
        """Return the figure for the mean value of ``rows`` rows, drawn without replacement."""
        whole, n = self.whole, self.rows
        figure = Figure("bucket-mean", "value mean of a bucket, the furthest out", "value")
        if rows >= n or not whole.second:
            return replace(figure, after=mean, expected=whole.mean, note="does not depend on the order")
        variance = whole.second / (n - 1) / rows * (1 - rows / n)
        skewness = abs(whole.third / n) / (whole.second / n) ** 1.5 / math.sqrt(rows)
        found = judge(figure, mean, Moments(whole.mean, variance, skewness * variance**1.5), both=True)
        if self.whole_games:
            # With whole games, the values of a bucket are not a draw of independent positions.
            note = f"whole games per bucket: {abs(found.z or 0.0):.3g} s.d. of independent positions"
            return replace(found, bound=None, judged=False, ok=True, note=note)
        return found

    def _of_pairs(self, figure: Figure, slots_of: _SlotsOf, kernel: _KernelOf, scale: float = 1.0) -> Figure:
        """Compare a sum over pairs of rows with a random order of each segment.

        The figure is ``scale`` times the mean of the pairs: of same-game pairs, or of products of values in
        units of their variance.
        """
        is_product = kernel is _product

        def weight(slots: Slots, counts: _Counts) -> float:
            return slots.pairs * (counts.second / counts.rows if is_product else 1.0)

        before, after = (order.found[figure.name] for order in (self.before, self.after))
        if pairs := sum(weight(slots_of(runs), self.whole) for runs in self.before.runs.values()):
            figure = replace(figure, before=before / pairs * scale)
        parts = [(slots_of(self.after.runs.get(n, [])), counts) for n, counts in self.segments.items()]
        pairs = sum(weight(slots, counts) for slots, counts in parts)
        if not pairs:
            return figure
        if not is_product:
            uniform = self.whole.pairs / (self.rows * (self.rows - 1))
            if not uniform:
                figure = replace(figure, note="no game has two positions")
            elif self.whole_games:
                times = f"{after / pairs / uniform:.3g} times the pairs of a uniform order"
                figure = replace(figure, note=f"whole games per bucket: {times}")
        chance = total([moments(slots, kernel(counts)) for slots, counts in parts])
        return judge(figure, after, chance, scale / pairs)


def _same_game(counts: _Counts) -> Kernel:
    return same_game_kernel(counts.rows, counts.pairs, counts.triples)


def _product(counts: _Counts) -> Kernel:
    return product_kernel(counts.rows, counts.second, counts.third, counts.fourth)


def _worst(name: str, among: str, figures: list[Figure]) -> Figure:
    """Return the figure with the largest deviation, failed ones first, under the name ``name``."""
    worst = max(figures, key=_distance)
    return replace(worst, name=name, note=f"{among}: {worst.note}" if worst.note else among)


def _distance(figure: Figure) -> tuple[bool, float]:
    return not figure.ok, abs(figure.z or 0.0)
