"""Measures the shuffled training split with the ``.sql`` files in ``queries/``. Only reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from typing import Any, Final

from hexdata.order import Permutation, derive_key
from hexdata.store import Store
from hexdata.store.session import DuckDBPyConnection, quote, read_parquet_sql

__all__ = [
    "AUTOCORRELATION_LAGS",
    "BATCHES",
    "LAGS",
    "SPLIT",
    "Arrangement",
    "BucketFacts",
    "Measured",
    "Sampling",
    "measure_split",
]

SPLIT: Final = "train"
BATCHES: Final = (256, 1024, 4096)
LAGS: Final = 100
AUTOCORRELATION_LAGS: Final = (1, 2, 5, 10, 20, 50, 100)
PIECE_ROWS: Final = 1 << 21
"""Rows whose games are counted at a time, bucket by bucket, so that memory does not grow with the store."""
SAMPLED_PIECES: Final = 8
"""Pieces of the input order of a large store: whose games may be anywhere, so that each takes memory."""

_NOISE: Final = 1e-12
"""A variance below this part of the squares is rounding."""

Run = tuple[int, int]
"""Places [start, stop)."""


@dataclass(frozen=True)
class Sampling:
    """How much of an order is looked at, where that takes time for each pair of rows.

    Attributes:
        stretch: places of a sampled stretch; a multiple of every batch.
        after: rows of the shuffled order up to which every one is counted. Of more, so many are, in whole
            stretches at seeded places.
        before: the same of the input order, whose many pairs take longer.
    """

    stretch: int = 1 << 16
    after: int = 1 << 22
    before: int = 1 << 19


@dataclass(frozen=True)
class BucketFacts:
    """What a bucket holds, or several, or all of the split.

    Attributes:
        rows: N.
        games: that have a row in it; a row of no known game is a game of its own.
        largest: rows of the game that has most.
        pairs: the sum of n (n - 1) over its games.
        triples: the sum of n (n - 1) (n - 2).
        mean: of the values.
        second, third, fourth: sums of powers of the values less their mean.
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
class Arrangement:
    """What was counted of an order, on all of its places or on some stretches of them.

    Attributes:
        runs: segment and bounds of each stretch of places; pairs are counted within.
        lag_pairs: pairs of one game at each lag from 1 to ``LAGS``.
        batch_pairs: by size of the batches.
        products: sums of products of values less their mean, by lag; empty if all values are equal.
    """

    runs: list[tuple[int, Run]]
    lag_pairs: list[int]
    batch_pairs: dict[int, int]
    products: dict[int, float]

    @property
    def rows(self) -> int:
        """Rows that it was counted on."""
        return sum(stop - start for _, (start, stop) in self.runs)

    def segments(self) -> dict[int, list[Run]]:
        """Return the runs of each segment."""
        found: dict[int, list[Run]] = {}
        for segment, run in self.runs:
            found.setdefault(segment, []).append(run)
        return found


@dataclass(frozen=True)
class Measured:
    """All that was measured.

    Attributes:
        whole: the facts of the split.
        sizes: known games and rows of no known game, by their rows.
        buckets: the facts of each, in order.
        by_bucket: whether each bucket is a segment of its own, rather than the split one.
        pieces: rows, games, rows of the largest game and mean value of each piece of the input order.
        before, after: the two orders.
        ranks: of each segment, rows, covariance and variances of place and rank in the input order.
        constant: whether all values are equal, or some are no numbers.
    """

    whole: BucketFacts
    sizes: dict[int, int]
    buckets: list[BucketFacts]
    by_bucket: bool
    pieces: list[tuple[int, int, int, float]]
    before: Arrangement
    after: Arrangement
    ranks: list[tuple[int, int, float, float, float]]
    constant: bool


def measure_split(
    store: Store, con: DuckDBPyConnection, *, by_bucket: bool, sampling: Sampling | None = None
) -> Measured:
    """Measure the training split of a shuffled store, which must have one.

    Args:
        store: shuffled.
        con: an open session, without tables.
        by_bucket: whether to count pairs only within buckets.
        sampling: how much to look at; None for the default.
    """
    return _Measure(store, con, by_bucket, sampling or Sampling()).measure()


class _Measure:
    def __init__(self, store: Store, con: DuckDBPyConnection, by_bucket: bool, sampling: Sampling) -> None:
        self.con = con
        self.by_bucket = by_bucket
        self.sampling = sampling
        self.positions = store.manifest.counts["positions"]
        self.seed = store.manifest.stages["shuffle"]["seed"]
        self.files = store.files(f"shuffled/{SPLIT}")
        self.counts = [facts.rows for facts in store.manifest.files_in(f"shuffled/{SPLIT}").values()]
        self.rows = sum(self.counts)

    def measure(self) -> Measured:
        self._list_buckets()
        least, greatest, finite = self._one("value_range")
        constant = not finite or least == greatest
        sizes = dict(self._all("game_sizes"))
        unknown = self.rows - sum(n * games for n, games in sizes.items())
        if unknown:
            sizes[1] = sizes.get(1, 0) + unknown
        buckets, whole = self._facts(sizes, 0.0 if constant else least, constant)
        pieces = self._pieces_of_input(least, constant)
        before = self._before(whole.mean, constant)
        after = self._after(whole, buckets, constant)
        ranks = [tuple(row) for row in self._all("rank")]
        return Measured(whole, sizes, buckets, self.by_bucket, pieces, before, after, ranks, constant)

    # --- what the buckets hold

    def _list_buckets(self) -> None:
        starts = [0, *accumulate(self.counts)][:-1]
        self.con.execute("CREATE TABLE buckets (filename VARCHAR, bucket BIGINT, start BIGINT)")
        values = ", ".join(
            f"({quote(str(path))}, {number}, {start})"
            for number, (path, start) in enumerate(zip(self.files, starts, strict=True))
        )
        self.con.execute(f"INSERT INTO buckets VALUES {values}")
        self._show(range(len(self.files)))

    def _show(self, buckets: Sequence[int]) -> None:
        """Let the queries see these buckets as ``shuffled``."""
        files = read_parquet_sql([self.files[number] for number in buckets], places=True)
        self.con.execute(f"CREATE OR REPLACE VIEW shuffled AS {_text('rows').format(files=files)}")

    def _facts(
        self, sizes: dict[int, int], least: float, constant: bool
    ) -> tuple[list[BucketFacts], BucketFacts]:
        """Return the facts of each bucket, and of all."""
        games = {number: row for piece in self._pieces() for number, *row in self._games(piece)}
        zero = (0.0,) * 4
        sums = {} if constant else {n: tuple(row) for n, _, *row in self._all("value_sums", least=least)}
        buckets = []
        for number, rows in enumerate(self.counts):
            _, seen, largest, pairs, triples = games.get(number, (0, 0, 0, 0, 0))
            powers = sums.get(number, zero)
            buckets.append(
                BucketFacts(
                    rows, seen, int(largest), int(pairs), int(triples), *_central(rows, powers, least)
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
        """Share the buckets out so that each piece has about ``PIECE_ROWS`` rows, or is one bucket."""
        pieces: list[list[int]] = [[]]
        held = 0
        for number, rows in enumerate(self.counts):
            if held + rows > PIECE_ROWS and pieces[-1]:
                pieces.append([])
                held = 0
            pieces[-1].append(number)
            held += rows
        return pieces

    def _games(self, piece: list[int]) -> list[tuple[Any, ...]]:
        self._show(piece)
        found = self._all("bucket_games")
        self._show(range(len(self.files)))
        return found

    # --- the two orders

    def _pieces_of_input(self, least: float, constant: bool) -> list[tuple[int, int, int, float]]:
        """Return the facts of pieces of the input order: of all, or of a seeded few of a large store."""
        count = len(self.files)
        looked_at = list(range(count))
        if self.rows > self.sampling.after:
            drawn = Permutation(count, derive_key(self.seed, "quality", "pieces"))
            looked_at = drawn.slice(0, min(count, SAMPLED_PIECES)).tolist()
        origin = 0.0 if constant else least
        found = self._all(
            "input_pieces", buckets=count, positions=self.positions, least=origin, pieces=looked_at
        )
        return [
            (rows, games, int(largest), origin + (0.0 if constant else value / rows))
            for rows, games, largest, value in found
        ]

    def _before(self, mean: float, constant: bool) -> Arrangement:
        whole = self._sample("input", self.rows, self.positions, self.sampling.before)
        self._run("sample_before", whole=whole, stretch=self.sampling.stretch, mean=mean)
        return self._count(constant)

    def _after(self, whole: BucketFacts, buckets: list[BucketFacts], constant: bool) -> Arrangement:
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

    def _sample(self, order: str, rows: int, places: int, limit: int) -> bool:
        """List the stretches of an order to be looked at; return whether that is not needed.

        Which ones is a matter of the shuffle's seed, as every draw is.
        """
        self.con.execute("CREATE OR REPLACE TABLE stretches (stretch BIGINT)")
        if rows <= limit:
            return True
        stretches = places // self.sampling.stretch
        permutation = Permutation(stretches, derive_key(self.seed, "quality", order))
        drawn = permutation.slice(0, min(limit // self.sampling.stretch, stretches))
        self.con.execute(f"INSERT INTO stretches VALUES {', '.join(f'({int(s)})' for s in drawn)}")
        return False

    def _count(self, constant: bool) -> Arrangement:
        """Count what there is to count of the rows in ``arranged``."""
        runs = [(segment, (start, stop)) for segment, start, stop in self._all("runs")]
        lags = dict(self._all("lag_pairs", lags=LAGS))
        small, middle, large = BATCHES
        batches = self._one("batch_pairs", small=small, middle=middle, large=large)
        products = {} if constant else dict(zip(AUTOCORRELATION_LAGS, self._products(), strict=True))
        return Arrangement(
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


def _text(name: str) -> str:
    """Return a named query."""
    return (resources.files("hexdata.quality") / "queries" / f"{name}.sql").read_text(encoding="utf-8")


def _central(rows: int, powers: Sequence[float], least: float) -> tuple[float, float, float, float]:
    """Return the mean, and the sums of powers less the mean, from sums of powers less ``least``."""
    if not rows:
        return 0.0, 0.0, 0.0, 0.0
    p1, p2, p3, p4 = powers
    m = p1 / rows
    second = p2 - m * p1
    third = p3 - 3 * m * p2 + 2 * m * m * p1
    fourth = p4 - 4 * m * p3 + 6 * m * m * p2 - 3 * m**3 * p1
    if second < _NOISE * p2:  # equal values, but for rounding
        return least + m, 0.0, 0.0, 0.0
    return least + m, second, third, max(fourth, second * second / rows)
