"""What chance makes of a uniform shuffle: exact means and variances, and how far is too far.

Pure arithmetic on counts; reads nothing. docs/quality.md derives the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Final

__all__ = [
    "DEVIATIONS",
    "Kernel",
    "Moments",
    "Slots",
    "batch_slots",
    "expected_games",
    "lag_slots",
    "moments",
    "possible_share",
    "product_kernel",
    "same_game_kernel",
    "tail_bound",
    "total",
]

DEVIATIONS: Final = 5.0
"""Standard deviations that chance is granted."""
TAIL: Final = math.erfc(DEVIATIONS / math.sqrt(2)) / 2
"""The part of a normal distribution beyond them, on one side: 2.9e-7."""
_LARGEST_SKEW: Final = 4.0
"""Beyond it a count has a mean below 1/16: whatever comes, it is no evidence."""


@dataclass(frozen=True)
class Slots:
    """Pairs of places in an order; a statistic is the sum of a kernel over the rows that stand there.

    Attributes:
        pairs: how many.
        touching: ordered pairs of two of them that have one place in common.
        clique: places that are all paired with each other: a batch, or 2 for neighbours.
    """

    pairs: int
    touching: int
    clique: int

    def __add__(self, other: Slots) -> Slots:
        """Join the slots of two stretches that have no place in common."""
        return Slots(self.pairs + other.pairs, self.touching + other.touching, max(self.clique, other.clique))


def lag_slots(runs: Iterable[tuple[int, int]], lag: int) -> Slots:
    """Return the pairs of places ``lag`` apart within runs of places [start, stop).

    In a run of l places, l - lag are the first of a pair, and l - 2 lag of them also the second of one.
    """
    found = Slots(0, 0, 2)
    for start, stop in runs:
        length = stop - start
        found += Slots(max(0, length - lag), 2 * max(0, length - 2 * lag), 2)
    return found


def batch_slots(runs: Iterable[tuple[int, int]], size: int) -> Slots:
    """Return the pairs of places in one batch within runs; batch i has the places [i size, (i + 1) size)."""
    found = Slots(0, 0, 0)
    for start, stop in runs:
        first, last = -(-start // size), stop // size
        if first > last:  # within one batch
            found += _clique(stop - start)
        else:
            found += _clique(first * size - start) + _clique(stop - last * size)
            if last > first:
                whole = _clique(size)
                count = last - first
                found += Slots(count * whole.pairs, count * whole.touching, size)
    return found


def _clique(size: int) -> Slots:
    return Slots(size * (size - 1) // 2, size * (size - 1) * (size - 2), size)


@dataclass(frozen=True)
class Kernel:
    """Means, over a uniform order of some rows, of a kernel h of the rows at two places a, b.

    They are integers over one denominator, so that what is made of them is exact, and quickly made.

    Attributes:
        mean: of h(a, b).
        square: of h(a, b)².
        touching: of h(a, b) h(a, c).
        disjoint: of h(a, b) h(c, d).
        denominator: of the four.
        third: of the cube of h less its parts of one row, about; for the skewness only.
        crowding: what that grows by for each place of a clique, relative to the variance.
    """

    mean: int
    square: int
    touching: int
    disjoint: int
    denominator: int
    third: float
    crowding: float


def _kernel(means: list[Fraction], third: float, crowding: float) -> Kernel:
    denominator = math.lcm(*(mean.denominator for mean in means))
    one, square, touching, disjoint = (int(mean * denominator) for mean in means)
    return Kernel(one, square, touching, disjoint, denominator, third, crowding)


def same_game_kernel(rows: int, pairs: int, triples: int) -> Kernel:
    """Return the kernel that is 1 where two rows are of one game.

    Args:
        rows: N.
        pairs: A, the sum of n (n - 1) over games of n rows.
        triples: B, the sum of n (n - 1) (n - 2).
    """
    two, three = rows * (rows - 1), rows * (rows - 1) * (rows - 2)
    mean = _ratio(pairs, two)
    touching = _ratio(triples, three)
    disjoint = _ratio(pairs * pairs - 4 * triples - 2 * pairs, three * (rows - 3))
    crowding = 2.0 * triples / (pairs * rows) if pairs else 0.0
    return _kernel([mean, mean, touching, disjoint], float(mean), crowding)


def product_kernel(rows: int, second: float, third: float, fourth: float) -> Kernel:
    """Return the kernel that is the product of two rows' values, less the mean value.

    Args:
        rows: N.
        second: sum of the squares of the values less their mean.
        third: sum of their cubes.
        fourth: sum of their fourth powers.
    """
    s2, s4 = Fraction(second), Fraction(fourth)
    two, three = rows * (rows - 1), rows * (rows - 1) * (rows - 2)
    means = [
        _ratio(-s2, two),
        _ratio(s2 * s2 - s4, two),
        _ratio(2 * s4 - s2 * s2, three),
        _ratio(3 * s2 * s2 - 6 * s4, three * (rows - 3)),
    ]
    return _kernel(means, (third / rows) ** 2, 0.0)


def _ratio(numerator: int | Fraction, denominator: int) -> Fraction:
    """Return a ratio; 0 where there are too few rows for such a thing to be."""
    return Fraction(numerator, denominator) if denominator > 0 else Fraction(0)


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a statistic, and its third central moment, about."""

    mean: float
    variance: float
    third: float

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the sum of two independent statistics."""
        return Moments(self.mean + other.mean, self.variance + other.variance, self.third + other.third)

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)

    @property
    def bound(self) -> float | None:
        """Standard deviations above the mean that chance is granted; None if it cannot be judged."""
        return tail_bound(self.third / self.deviation**3) if self.deviation else None


def moments(slots: Slots, kernel: Kernel) -> Moments:
    """Return the moments of the sum of a kernel over slots, under a uniform order of the rows, exact.

    The square of the sum is a sum over ordered pairs of slots: a slot with itself, two with a place in
    common, two without.
    """
    m, w, d = slots.pairs, slots.touching, kernel.denominator
    mean = m * kernel.mean
    square = m * kernel.square + w * kernel.touching + (m * m - m - w) * kernel.disjoint
    variance = max((square * d - mean * mean) / (d * d), 0.0)  # the sums of powers that it is of are rounded
    third = m * kernel.third + variance * kernel.crowding * slots.clique
    return Moments(mean / d, variance, third)


def total(parts: Iterable[Moments]) -> Moments:
    """Return the moments of a sum of independent statistics."""
    return reduce(Moments.__add__, parts, Moments(0.0, 0.0, 0.0))


def tail_bound(skewness: float) -> float | None:
    """Return how many standard deviations leave ``TAIL`` above them: 5 without skewness, more with it.

    The quantile of a Pearson III (shifted gamma) distribution by the cube root of Wilson & Hilferty
    (1931). None where the skewness is so large that there is next to nothing to count.
    """
    if skewness > _LARGEST_SKEW:
        return None
    if skewness < 1e-6:
        return DEVIATIONS
    return (2 / skewness) * ((1 + skewness * DEVIATIONS / 6 - skewness * skewness / 36) ** 3 - 1)


def possible_share(
    sizes: Mapping[int, int], rows: int, bucket_rows: int, buckets: int, wanted: float
) -> float:
    """Return the share of a bucket that no game passes in a uniform shuffle, but for a chance of ``TAIL``.

    ``wanted`` if that is so already of ``wanted``. A game of n rows has k of them in a bucket of m rows
    with a hypergeometric chance, whose tail is at most exp(-n KL(k/n || m/N)) (Hoeffding 1963); the
    chances of all games and buckets are added.

    Args:
        sizes: games by their rows; a row of no known game is a game of one.
        rows: N of the split.
        bucket_rows: of the smallest bucket.
        buckets: their number.
        wanted: share, in (0, 1).
    """

    def chance(share: float) -> float:
        least = math.floor(share * bucket_rows + 1e-9) + 1
        return buckets * sum(n_games * _tail(n, least, bucket_rows / rows) for n, n_games in sizes.items())

    if chance(wanted) <= TAIL:
        return wanted
    low, high = wanted, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if chance(middle) <= TAIL else (middle, high)
    return high


def _tail(n: int, least: int, part: float) -> float:
    """Bound the chance that at least ``least`` of ``n`` rows are in a bucket with this part of all rows."""
    share = least / n
    if share > 1:
        return 0.0
    if share <= part or part >= 1:
        return 1.0
    exponent = share * math.log(share / part)
    if share < 1:
        exponent += (1 - share) * math.log((1 - share) / (1 - part))
    return math.exp(-n * exponent)


def expected_games(sizes: Mapping[int, int], rows: int, bucket_rows: Iterable[int]) -> float:
    """Return how many games a bucket of a uniform shuffle is expected to hold, the mean over the buckets.

    A game of n rows is missing from a bucket of m with the chance C(N - n, m) / C(N, m).
    """
    counted = Counter(bucket_rows)
    found = 0.0
    for m, times in counted.items():
        for n, games in sizes.items():
            missing = math.exp(_log_choose(rows - n, m) - _log_choose(rows, m)) if m <= rows - n else 0.0
            found += times * games * (1 - missing)
    return found / counted.total()


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
