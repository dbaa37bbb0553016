"""Measures of the shuffled training split, computed by the ``.sql`` files in ``queries/``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any, Final

from hexdata.order import Permutation, derive_key
from hexdata.schema import SPLITS
from hexdata.store import Store
from hexdata.store.session import DuckDBPyConnection, quote, read_parquet_sql

__all__ = [
    "AUTOCORRELATION_LAGS",
    "BATCHES",
    "LAGS",
    "SPLIT",
    "BucketFacts",
    "Dispersion",
    "OrderCounts",
    "Sampling",
    "SplitMeasures",
    "measure_split",
]

SPLIT: Final = "train"
BATCHES: Final = (256, 1024, 4096)
LAGS: Final = 100
AUTOCORRELATION_LAGS: Final = (1, 2, 5, 10, 20, 50, 100)
PIECE_ROWS: Final = 1 << 21
"""Rows whose games are counted per query, so that memory does not grow with the store."""
SAMPLED_PIECES: Final = 8
"""Pieces of the input order that are measured in a large store. Each needs memory for all of its games."""

_NOISE: Final = 1e-12
"""A variance below this share of the sum of squares is a rounding error."""

RowRange = tuple[int, int]
"""Row indices [start, stop) in an order."""


@dataclass(frozen=True)
class Sampling:
    """Sample sizes for counting pairs of rows.

    Attributes:
        stretch: Number of consecutive rows sampled together; a multiple of every batch size.
        after: Maximum number of rows of the shuffled order to measure. A larger order is sampled in stretches
            at seeded random offsets.
        before: The same for the input order, which has more pairs and takes longer.
    """

    stretch: int = 1 << 16
    after: int = 1 << 22
    before: int = 1 << 19


@dataclass(frozen=True)
class BucketFacts:
    """Counts over the rows of a bucket or of the whole split.

    Attributes:
        rows: Number of rows, N.
        games: Number of games; each row without a game counts as one game.
        largest: Number of rows of the largest game.
        pairs: Sum of n (n - 1) over games of n rows.
        triples: Sum of n (n - 1) (n - 2) over games of n rows.
        mean: Mean value.
        second: Sum of (value - mean)².
        third: Sum of (value - mean)³.
        fourth: Sum of (value - mean)⁴.
    """

    rows: int
    games: int
    largest: int
    pairs: int
    triples: int
    mean: float
    second: float
    third: float
    fourth: float


@dataclass(frozen=True)
class OrderCounts:
    """Counts over an order, or over a sample of its stretches.

    Attributes:
        runs: Segment and row range of each stretch; pairs are counted within stretches only.
        lag_pairs: Number of same-game pairs at each lag from 1 to ``LAGS``.
        batch_pairs: Number of same-game pairs within batches, by batch size.
        products: Sums of (value - mean) (later value - mean) by lag; empty if all values are equal.
    """

    runs: list[tuple[int, RowRange]]
    lag_pairs: list[int]
    batch_pairs: dict[int, int]
    products: dict[int, float]

    @property
    def rows(self) -> int:
        """Number of rows measured."""
        return sum(stop - start for _, (start, stop) in self.runs)

    def segments(self) -> dict[int, list[RowRange]]:
        """Return the row ranges of each segment."""
        found: dict[int, list[RowRange]] = {}
        for segment, run in self.runs:
            found.setdefault(segment, []).append(run)
        return found


@dataclass(frozen=True)
class Dispersion:
    """How the games of a split are spread over its buckets.

    Attributes:
        split: Name of the split.
        sizes: Number of games by their number of rows; each row without a game counts as a game of one row.
        buckets: Rows, games and rows of the largest game of each bucket that has rows.
    """

    split: str
    sizes: dict[int, int]
    buckets: list[tuple[int, int, int]]


@dataclass(frozen=True)
class SplitMeasures:
    """All measures of a split.

    Attributes:
        whole: Counts over the split.
        dispersions: The games in the buckets of this split, and of each other split.
        buckets: Counts over each bucket, in order.
        by_bucket: Whether each bucket is a segment; otherwise the split is the only segment.
        pieces: Rows, games, rows of the largest game and mean value of each piece of the input order.
        before: Counts over the input order.
        after: Counts over the shuffled order.
        ranks: For each segment: its index, rows, covariance of index and input rank, and their variances.
        constant: Whether all values are equal or some are not finite.
    """

    whole: BucketFacts
    dispersions: list[Dispersion]
    buckets: list[BucketFacts]
    by_bucket: bool
    pieces: list[tuple[int, int, int, float]]
    before: OrderCounts
    after: OrderCounts
    ranks: list[tuple[int, int, float, float, float]]
    constant: bool


def measure_split(
    store: Store, con: DuckDBPyConnection, *, by_bucket: bool, sampling: Sampling | None = None
) -> SplitMeasures:
    """Measure the training split of a shuffled store.

    Args:
        store: Shuffled store with a training split.
        con: Open DuckDB session without tables.
        by_bucket: Whether to count pairs within buckets only.
        sampling: Sample sizes. Default None: those of :class:`Sampling`.
    """
    sampling = sampling or Sampling()
    others = [
        _SplitMeasurement(store, con, by_bucket, sampling, split).dispersion()
        for split in SPLITS
        if split != SPLIT and store.manifest.stages["shuffle"]["splits"].get(split)
    ]
    return _SplitMeasurement(store, con, by_bucket, sampling, SPLIT).measure(others)


class _SplitMeasurement:
    def __init__(
        self, store: Store, con: DuckDBPyConnection, by_bucket: bool, sampling: Sampling, split: str
    ) -> None:
        self.con = con
        self.split = split
        self.by_bucket = by_bucket
        self.sampling = sampling
        self.positions = store.manifest.counts["positions"]
        self.seed = store.manifest.stages["shuffle"]["seed"]
        self.files = store.files(f"shuffled/{split}")
        self.counts = [facts.rows for facts in store.manifest.files_in(f"shuffled/{split}").values()]
        self.rows = sum(self.counts)

    def dispersion(self) -> Dispersion:
        """Return the games in the buckets of the split."""
        self._list_buckets()
        return self._dispersion(self._games_by_bucket())

    def _dispersion(self, games: dict[int, list[Any]]) -> Dispersion:
        sizes = dict(self._all("game_sizes"))
        unknown = self.rows - sum(n * count for n, count in sizes.items())
        if unknown:
            sizes[1] = sizes.get(1, 0) + unknown
        buckets = [(int(rows), int(count), int(largest)) for rows, count, largest, *_ in games.values()]
        return Dispersion(self.split, sizes, buckets)

    def measure(self, others: list[Dispersion]) -> SplitMeasures:
        """Return all measures of the split, with the dispersion of the other splits."""
        self._list_buckets()
        least, greatest, finite = self._one("value_range")
        constant = not finite or least == greatest
        games = self._games_by_bucket()
        own = self._dispersion(games)
        buckets, whole = self._facts(own.sizes, games, 0.0 if constant else least, constant)
        pieces = self._pieces_of_input(least, constant)
        before = self._before(whole.mean, constant)
        after = self._after(whole, buckets, constant)
        ranks = [tuple(row) for row in self._all("rank")]
        return SplitMeasures(
            whole, [own, *others], buckets, self.by_bucket, pieces, before, after, ranks, constant
        )

    # --- contents of the buckets

    def _list_buckets(self) -> None:
        starts = [0, *accumulate(self.counts)][:-1]
        self.con.execute("CREATE OR REPLACE TABLE buckets (filename VARCHAR, bucket BIGINT, start BIGINT)")
        values = ", ".join(
            f"({quote(str(path))}, {number}, {start})"
            for number, (path, start) in enumerate(zip(self.files, starts, strict=True))
        )
        self.con.execute(f"INSERT INTO buckets VALUES {values}")
        self._define_view(range(len(self.files)))

    def _define_view(self, buckets: Sequence[int]) -> None:
        """Define the view ``shuffled``, which the queries read, over these buckets."""
        files = read_parquet_sql([self.files[number] for number in buckets], row_location=True)
        self.con.execute(f"CREATE OR REPLACE VIEW shuffled AS {_text('rows').format(files=files)}")

    def _facts(
        self, sizes: dict[int, int], games: dict[int, list[Any]], least: float, constant: bool
    ) -> tuple[list[BucketFacts], BucketFacts]:
        """Return the counts of each bucket and of the split."""
        zero = (0.0,) * 4
        sums = {} if constant else {n: tuple(row) for n, _, *row in self._all("value_sums", least=least)}
        buckets = []
        for number, rows in enumerate(self.counts):
            _, games_found, largest, pairs, triples = games.get(number, (0, 0, 0, 0, 0))
            powers = sums.get(number, zero)
            buckets.append(
                BucketFacts(
                    rows, games_found, int(largest), int(pairs), int(triples), *_central(rows, powers, least)
                )
            )
        powers = tuple(math.fsum(column) for column in zip(*sums.values(), strict=True)) if sums else zero
        return buckets, BucketFacts(
            self.rows,
            sum(sizes.values()),
            max(sizes),
            sum(games * n * (n - 1) for n, games in sizes.items()),
            sum(games * n * (n - 1) * (n - 2) for n, games in sizes.items()),
            *_central(self.rows, powers, least),
        )

    def _pieces(self) -> list[list[int]]:
        """Group consecutive buckets into pieces of at most ``PIECE_ROWS`` rows, or of one bucket."""
        pieces: list[list[int]] = [[]]
        piece_rows = 0
        for number, rows in enumerate(self.counts):
            if piece_rows + rows > PIECE_ROWS and pieces[-1]:
                pieces.append([])
                piece_rows = 0
            pieces[-1].append(number)
            piece_rows += rows
        return pieces

    def _games_by_bucket(self) -> dict[int, list[Any]]:
        """Return the counts of games of each bucket that has rows."""
        found: dict[int, list[Any]] = {}
        for piece in self._pieces():
            self._define_view(piece)
            found |= {number: row for number, *row in self._all("bucket_games")}
        self._define_view(range(len(self.files)))
        return found

    # --- the two orders

    def _pieces_of_input(self, least: float, constant: bool) -> list[tuple[int, int, int, float]]:
        """Return the counts of the pieces of the input order, or of a seeded sample in a large store."""
        count = len(self.files)
        sampled = list(range(count))
        if self.rows > self.sampling.after:
            drawn = Permutation(count, derive_key(self.seed, "quality", "pieces"))
            sampled = drawn.slice(0, min(count, SAMPLED_PIECES)).tolist()
        origin = 0.0 if constant else least
        found = self._all(
            "input_pieces", buckets=count, positions=self.positions, least=origin, pieces=sampled
        )
        return [
            (rows, games, int(largest), origin + (0.0 if constant else value / rows))
            for rows, games, largest, value in found
        ]

    def _before(self, mean: float, constant: bool) -> OrderCounts:
        whole = self._sample("input", self.rows, self.positions, self.sampling.before)
        self._run("sample_before", whole=whole, stretch=self.sampling.stretch, mean=mean)
        return self._count(constant)

    def _after(self, whole: BucketFacts, buckets: list[BucketFacts], constant: bool) -> OrderCounts:
        self.con.execute("CREATE TABLE centres (bucket BIGINT, mean DOUBLE)")
        means = [facts.mean if self.by_bucket else whole.mean for facts in buckets]
        values = ", ".join(f"({number}, {mean!r})" for number, mean in enumerate(means))
        self.con.execute(f"INSERT INTO centres VALUES {values}")
        exact = self._sample("shuffled", self.rows, self.rows, self.sampling.after)
        self._run(
            "sample_after",
            whole=exact,
            stretch=self.sampling.stretch,
            buckets=len(self.files),
            by_bucket=self.by_bucket,
        )
        return self._count(constant)

    def _sample(self, order: str, rows: int, positions: int, limit: int) -> bool:
        """Fill the table of sampled stretches; return True if the order is short enough to measure whole.

        The sample depends on the seed of the shuffle only.
        """
        self.con.execute("CREATE OR REPLACE TABLE stretches (stretch BIGINT)")
        if rows <= limit:
            return True
        stretches = positions // self.sampling.stretch
        permutation = Permutation(stretches, derive_key(self.seed, "quality", order))
        drawn = permutation.slice(0, min(limit // self.sampling.stretch, stretches))
        self.con.execute(f"INSERT INTO stretches VALUES {', '.join(f'({int(s)})' for s in drawn)}")
        return False

    def _count(self, constant: bool) -> OrderCounts:
        """Return the counts over the rows of the table ``arranged``."""
        runs = [(segment, (start, stop)) for segment, start, stop in self._all("runs")]
        lags = dict(self._all("lag_pairs", lags=LAGS))
        small, middle, large = BATCHES
        batches = self._one("batch_pairs", small=small, middle=middle, large=large)
        products = {} if constant else dict(zip(AUTOCORRELATION_LAGS, self._products(), strict=True))
        return OrderCounts(
            runs,
            [lags.get(lag, 0) for lag in range(1, LAGS + 1)],
            dict(zip(BATCHES, map(int, batches), strict=True)),
            products,
        )

    def _products(self) -> list[float]:
        text = _text("value_products").format(
            products=", ".join(f"coalesce(sum(value * later_{lag}), 0)" for lag in AUTOCORRELATION_LAGS),
            later=", ".join(
                f"lead(value, {lag}) OVER in_order AS later_{lag}" for lag in AUTOCORRELATION_LAGS
            ),
        )
        return list(self.con.sql(text).fetchall()[0])

    # --- queries

    def _run(self, name: str, **named: object) -> None:
        self.con.execute(_text(name), named or None)

    def _all(self, name: str, **named: object) -> list[tuple[Any, ...]]:
        return self.con.execute(_text(name), named or None).fetchall()

    def _one(self, name: str, **named: object) -> tuple[Any, ...]:
        return self._all(name, **named)[0]


@cache
def _text(name: str) -> str:
    """Return the text of ``queries/NAME.sql``."""
    return (resources.files("hexdata.quality") / "queries" / f"{name}.sql").read_text(encoding="utf-8")


def _central(rows: int, powers: Sequence[float], least: float) -> tuple[float, float, float, float]:
    """Return the mean and the central power sums, given power sums about ``least``."""
    if not rows:
        return 0.0, 0.0, 0.0, 0.0
    p1, p2, p3, p4 = powers
    m = p1 / rows
    second = p2 - m * p1
    third = p3 - 3 * m * p2 + 2 * m * m * p1
    fourth = p4 - 4 * m * p3 + 6 * m * m * p2 - 3 * m**3 * p1
    if second < _NOISE * p2:  # equal values; the rest is rounding
        return least + m, 0.0, 0.0, 0.0
    return least + m, second, third, max(fourth, second * second / rows)
