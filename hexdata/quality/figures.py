"""Figures that describe the quality of a shuffle, with their expected values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hexdata.quality.theory import DEVIATIONS, Moments


@dataclass(frozen=True)
class Figure:
    """One figure of a shuffle.

    Attributes:
        name: Stable name, such as "batch-256".
        title: Description for people.
        unit: "share" (0 to 1), "count" or "value".
        before: Value in the input order; None if undefined there.
        after: Value in the shuffled order; None if there is nothing to count.
        expected: Mean in a uniform random order; None if unknown.
        deviation: Standard deviation in a uniform random order; None if unknown.
        z: (after - expected) / deviation; None if unknown.
        bound: Largest accepted ``z``; None if the figure is judged differently or not at all.
        judged: Whether the figure is judged.
        ok: False if the figure is judged and failed.
        note: Remark for people.
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

    def row(self) -> dict[str, str]:
        """Return the texts of the figure in a table, by column."""

        def text(value: float | None) -> str:
            if value is None:
                return "-"
            if self.unit == "share":
                return f"{100 * value:.4g}%"
            return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"

        return {
            "figure": self.title,
            "status": ("ok" if self.ok else "FAILED") if self.judged else "-",
            "before": text(self.before),
            "after": text(self.after),
            "expected": text(self.expected),
            "s.d.": text(self.deviation),
            "deviation, s.d.": "-" if self.z is None else f"{self.z:+.1f}",
            "limit": "-" if self.bound is None else f"{self.bound:.4g}",
            "note": self.note,
        }


def judge(figure: Figure, found: float, chance: Moments, scale: float = 1.0, *, both: bool = False) -> Figure:
    """Return ``figure`` completed with a measured statistic, its expected value and the verdict.

    Args:
        figure: Figure with name, title, unit, ``before`` and note.
        found: The measured statistic.
        chance: Moments of the statistic in a uniform random order.
        scale: Factor from the statistic to the figure. Default 1.
        both: Whether the lower limit is as wide as the upper one. Default False: counts are skewed to the
            right, so only their upper limit is widened.
    """
    deviation, bound, note = chance.deviation, chance.bound, ""
    z = (found - chance.mean) / deviation if deviation else None
    ok = z is None or bound is None or -(bound if both else DEVIATIONS) <= z <= bound
    if z is None:
        note = "does not depend on the order"
    elif bound is None:
        note = "too few pairs or rows to judge"
    return replace(
        figure,
        after=found * scale,
        expected=chance.mean * scale,
        deviation=deviation * scale,
        z=z,
        bound=bound,
        judged=z is not None and bound is not None,
        ok=ok,
        note=figure.note or note,
    )


@dataclass(frozen=True)
class Quality:
    """Quality of the shuffle of one split.

    Attributes:
        split: Always "train", the only split used for training.
        positions: Number of positions of the split.
        sampled: Number of positions of the shuffled order on which pairs, neighbours and correlations were
            counted: all, or a sample.
        sampled_before: The same for the input order.
        buckets: Number of buckets of the split.
        reference: The random order compared with: "the split in uniform order" or "each bucket in uniform
            order", where an option determines the contents of buckets.
        figures: Figures in the order in which they are shown.
        lags: Neighbours and autocorrelation at every measured lag; ``figures`` contains the first and the
            worst.
        by_bucket: Contents of each bucket that has rows: its index ("bucket"), "rows", "games" (each row
            without a game counts as one), "largest_share" (of one game, 0 to 1), and "value_mean" with
            "value_deviation", its standard deviation in a uniform random order, and "z", its deviation from
            the mean of the split in units of it. The last three are None if they are unknown, or if they do
            not depend on the order.
    """

    split: str
    positions: int
    sampled: int
    sampled_before: int
    buckets: int
    reference: str
    figures: list[Figure]
    lags: list[Figure]
    by_bucket: list[dict[str, Any]]

    @property
    def ok(self) -> bool:
        """True if no judged figure failed."""
        return all(figure.ok for figure in self.figures)

    @property
    def conclusive(self) -> list[Figure]:
        """The ``figures`` that were compared with a random order; empty if there are too few rows."""
        return [figure for figure in self.figures if figure.z is not None and figure.bound is not None]

    def __getitem__(self, name: str) -> Figure:
        """Return the figure called ``name``.

        Raises:
            KeyError: There is no such figure.
        """
        return {figure.name: figure for figure in (*self.lags, *self.figures)}[name]
