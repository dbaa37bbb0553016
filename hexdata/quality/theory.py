"""Means, variances and tail bounds of statistics of a uniform random order.

docs/quality.md derives the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

DEVIATIONS: Final = 5.0
"""Accepted deviation from the mean, in standard deviations of a normal distribution."""
TAIL: Final = math.erfc(DEVIATIONS / math.sqrt(2)) / 2
"""One-sided tail probability of a normal distribution beyond ``DEVIATIONS``: 2.9e-7."""
_LARGEST_SKEW: Final = 4.0
"""Above this skewness the mean of a count is below 1/16, which is too little evidence for a verdict."""


class Slots(NamedTuple):
    """Pairs of row indices. A statistic is the sum of a kernel over the pairs of rows at these indices."""

    pairs: int
    """Number of pairs."""
    touching: int
    """Number of ordered pairs of pairs that share one index."""
    clique: int
    """Largest number of indices that are all paired with each other: the batch size, or 2 for neighbours."""


def lag_slots(runs: Iterable[int], lag: int) -> Slots:
    """Return the pairs of indices ``lag`` apart within runs, given the number of rows of each.

    In a run of n rows, n - lag indices are the first of a pair, and n - 2 lag of them also the second of one.
    """
    lengths = [*runs]
    return Slots(sum(max(0, n - lag) for n in lengths), 2 * sum(max(0, n - 2 * lag) for n in lengths), 2)


def batch_slots(runs: Iterable[int], size: int) -> Slots:
    """Return the pairs of indices within batches, the last of which is shorter in each run."""
    batches = Counter[int]()  # number of batches by their size
    for length in runs:
        batches[size] += length // size
        batches[length % size] += 1
    pairs = sum(count * n * (n - 1) // 2 for n, count in batches.items())
    touching = sum(count * n * (n - 1) * (n - 2) for n, count in batches.items())
    return Slots(pairs, touching, max(n for n, count in batches.items() if count))


class Kernel(NamedTuple):
    """Means of products of a kernel h(a, b) over a uniform random order, for distinct rows a, b, c, d.

    The means are exact, because variances are small differences of them.
    """

    mean: Fraction
    """Mean of h(a, b)."""
    square: Fraction
    """Mean of h(a, b)²."""
    touching: Fraction
    """Mean of h(a, b) h(a, c)."""
    disjoint: Fraction
    """Mean of h(a, b) h(c, d)."""
    third: float
    """Approximate third moment of h per pair; used for the skewness only."""
    crowding: float
    """Additional third moment per index of a clique, relative to the variance."""


def same_game_kernel(rows: int, pairs: int, triples: int) -> Kernel:
    """Return the kernel that is 1 if two rows belong to the same game, and 0 otherwise.

    Args:
        rows: Number of rows, N.
        pairs: Sum of n (n - 1) over games of n rows.
        triples: Sum of n (n - 1) (n - 2) over games of n rows.
    """
    two, three = rows * (rows - 1), rows * (rows - 1) * (rows - 2)
    mean = _ratio(pairs, two)
    touching = _ratio(triples, three)
    # Of all ordered pairs of same-game pairs, 4 triples share one row, and 2 pairs share both.
    disjoint = _ratio(pairs * pairs - 4 * triples - 2 * pairs, three * (rows - 3))
    # A same-game pair has triples / pairs further rows in its game, of which clique / rows are in the batch.
    # This factor times clique is 2 l in docs/quality.md.
    crowding = 2.0 * triples / (pairs * rows) if pairs else 0.0
    return Kernel(mean, mean, touching, disjoint, float(mean), crowding)


def product_kernel(rows: int, second: float, third: float, fourth: float) -> Kernel:
    """Return the kernel (value_a - mean) (value_b - mean).

    Args:
        rows: Number of rows, N.
        second: Sum of (value - mean)².
        third: Sum of (value - mean)³.
        fourth: Sum of (value - mean)⁴.
    """
    s2, s4 = Fraction(second), Fraction(fourth)
    two, three = rows * (rows - 1), rows * (rows - 1) * (rows - 2)
    return Kernel(
        mean=_ratio(-s2, two),
        square=_ratio(s2 * s2 - s4, two),
        touching=_ratio(2 * s4 - s2 * s2, three),
        disjoint=_ratio(3 * s2 * s2 - 6 * s4, three * (rows - 3)),
        # The third moment of a product of independent values is the product of their third moments.
        third=(third / rows) ** 2,
        crowding=0.0,
    )


def _ratio(numerator: int | Fraction, denominator: int) -> Fraction:
    """Return a ratio, or 0 if the denominator is not positive because there are too few rows."""
    return Fraction(numerator, denominator) if denominator > 0 else Fraction(0)


@dataclass(frozen=True)
class Moments:
    """Mean, variance and approximate third central moment of a statistic."""

    mean: float
    variance: float
    third: float

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)

    @property
    def bound(self) -> float | None:
        """Largest accepted deviation above the mean, in standard deviations; None if it cannot be judged."""
        return tail_bound(self.third / self.deviation**3) if self.deviation else None


def moments(parts: Iterable[tuple[Slots, Kernel]]) -> Moments:
    """Return the exact moments of the sum of a kernel over slots in uniform random orders.

    Each part is an order of its own, independent of the others. The square of its sum is a sum over ordered
    pairs of slots: identical ones, those that share an index, and those that do not.
    """
    total, of_variance, of_third = 0.0, 0.0, 0.0
    for slots, kernel in parts:
        m, w = slots.pairs, slots.touching
        mean = m * kernel.mean
        square = m * kernel.square + w * kernel.touching + (m * m - m - w) * kernel.disjoint
        variance = max(float(square - mean * mean), 0.0)  # negative only by rounding of the power sums
        total += float(mean)
        of_variance += variance
        of_third += m * kernel.third + variance * kernel.crowding * slots.clique
    return Moments(total, of_variance, of_third)


def tail_bound(skewness: float) -> float | None:
    """Return the number of standard deviations that is exceeded with probability ``TAIL``.

    It is 5 without skewness and more with positive skewness: the quantile of a Pearson III (shifted gamma)
    distribution by the cube root approximation of Wilson & Hilferty (1931). Returns None if the skewness is
    so large that the count is no evidence.
    """
    if skewness > _LARGEST_SKEW:
        return None
    # The formula divides by the skewness; 5 is its limit.
    if skewness < 1e-6:
        return DEVIATIONS
    return (2 / skewness) * ((1 + skewness * DEVIATIONS / 6 - skewness * skewness / 36) ** 3 - 1)


def possible_share(
    sizes: Mapping[int, int], rows: int, bucket_rows: int, buckets: int, minimum: float
) -> float:
    """Return the smallest share, at least ``minimum``, that a game exceeds with probability at most ``TAIL``.

    In a uniform random order, the number k of rows that a game of n rows has in a bucket of m rows is
    hypergeometric. Its tail is at most exp(-n KL(k/n || m/N)) (Hoeffding 1963). The probabilities of all
    games and buckets are added.

    Args:
        sizes: Number of games by their number of rows; a row without a game counts as a game of one row.
        rows: Number of rows of the split, N.
        bucket_rows: Number of rows of the smallest bucket, m.
        buckets: Number of buckets.
        minimum: Smallest share to return, in (0, 1).
    """

    def chance(share: float) -> float:
        # A product that rounding leaves just below a whole number counts as this number.
        least = math.floor(share * bucket_rows + 1e-9) + 1
        return buckets * sum(n_games * _tail(n, least, bucket_rows / rows) for n, n_games in sizes.items())

    if chance(minimum) <= TAIL:
        return minimum
    low, high = minimum, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if chance(middle) <= TAIL else (middle, high)
    return high


def _tail(n: int, least: int, part: float) -> float:
    """Bound the probability that ``least`` of ``n`` rows are in a bucket with ``part`` of all rows."""
    share = least / n
    if share > 1:
        return 0.0
    # The bound is valid above the mean only.
    if share <= part or part >= 1:
        return 1.0
    exponent = share * math.log(share / part)
    if share < 1:
        exponent += (1 - share) * math.log((1 - share) / (1 - part))
    return math.exp(-n * exponent)
