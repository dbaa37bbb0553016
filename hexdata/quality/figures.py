"""What is said of a shuffle's quality: figures beside what chance makes of them. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hexdata.quality.theory import DEVIATIONS, Moments

__all__ = ["BucketFigures", "Figure", "Quality", "judge"]


@dataclass(frozen=True)
class Figure:
    """One figure of a shuffle.

    Attributes:
        name: stable, such as "batch-256".
        title: what it is, in words.
        unit: "share" (of 1), "count" or "value", for those who print it.
        before: in the input order; None where that has no such figure.
        after: in the shuffled order; None where there is nothing to count.
        expected, deviation: mean and standard deviation of it in a uniform shuffle, where they are known.
        z: standard deviations that ``after`` is above ``expected``.
        bound: standard deviations that chance is granted; None where another bound holds, or none.
        judged: whether it could have failed.
        ok: that it did not.
        note: what else there is to say.
    """

    name: str
    title: str
    unit: str
    before: float | None = None
    after: float | None = None
    expected: float | None = None
    deviation: float | None = None
    z: float | None = None
    bound: float | None = None
    judged: bool = False
    ok: bool = True
    note: str = ""


def judge(figure: Figure, found: float, chance: Moments, scale: float) -> Figure:
    """Return a figure with what was found of a statistic, as held against chance.

    Args:
        figure: its name, title, unit, ``before`` and note.
        found: the statistic itself.
        chance: its moments.
        scale: what a statistic is multiplied by to give the figure.
    """
    deviation = chance.deviation
    z = (found - chance.mean) / deviation if deviation else None
    bound = chance.bound
    reason = figure.note
    if not deviation:
        reason = reason or "chance has no part in it"
    elif bound is None:
        reason = reason or "too little to count for a judgement"
    return replace(
        figure,
        after=found * scale,
        expected=chance.mean * scale,
        deviation=deviation * scale,
        z=z,
        bound=bound,
        judged=z is not None and bound is not None,
        ok=z is None or bound is None or -DEVIATIONS <= z <= bound,
        note=reason,
    )


@dataclass(frozen=True)
class BucketFigures:
    """What one bucket holds.

    Attributes:
        bucket: its number, from 0; those without rows are left out.
        rows: in it.
        games: in it; a row of no known game is a game of its own.
        largest_share: of its rows, those of the game that has most.
        value_mean: of its rows; None if all values of the split are equal, or some are no numbers.
        value_deviation: standard deviation of such a mean in a uniform shuffle, the binomial band; None
            where chance has no part in it.
        z: standard deviations that ``value_mean`` is above the mean of the split.
    """

    bucket: int
    rows: int
    games: int
    largest_share: float
    value_mean: float | None
    value_deviation: float | None
    z: float | None


@dataclass(frozen=True)
class Quality:
    """How well one split of a store is shuffled.

    Attributes:
        split: always "train": the other splits are not trained on.
        positions: of the split.
        sampled: of these, those that pairs, neighbours and correlations were counted on; all if there
            are few enough.
        sampled_before: likewise of the input order.
        buckets: of the split.
        reference: what chance is taken to do: "the split in uniform order", or "each bucket in uniform
            order" where a choice decides what the buckets hold.
        figures: in the order in which they are shown.
        lags: neighbours and autocorrelation at every lag that was counted, of which ``figures`` has the
            first and the worst.
        by_bucket: what each bucket holds.
    """

    split: str
    positions: int
    sampled: int
    sampled_before: int
    buckets: int
    reference: str
    figures: list[Figure] = field(default_factory=list)
    lags: list[Figure] = field(default_factory=list)
    by_bucket: list[BucketFigures] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every figure is what chance may make of it."""
        return all(figure.ok for figure in self.figures)

    @property
    def telling(self) -> list[Figure]:
        """Those ``figures`` that chance has a part in and that could have failed: none of very few rows."""
        return [figure for figure in self.figures if figure.z is not None and figure.bound is not None]

    def __getitem__(self, name: str) -> Figure:
        """Return the figure of a name.

        Raises:
            KeyError: there is none.
        """
        for figure in (*self.figures, *self.lags):
            if figure.name == name:
                return figure
        raise KeyError(name)
