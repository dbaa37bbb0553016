"""The sections about the shuffle: dispersion, batches, neighbours, values. Says what numbers say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hexdata.quality import DEVIATIONS, Figure, Quality
from hexdata.report.blocks import Section, Table
from hexdata.report.charts import (
    bucket_means_chart,
    correlation_chart,
    neighbours_chart,
    pairs_chart,
    spread_chart,
)
from hexdata.report.facts import SPLIT, Facts
from hexdata.report.spread import Spread
from hexdata.report.verdict import number

__all__ = ["mixing_sections"]

_SMALL: Final = 1e-5
"""Shares below this one have too many zeros as percentages."""
_MOST_BUCKETS: Final = 100
"""Rows of the table of buckets."""


def mixing_sections(facts: Facts) -> list[Section]:
    """Return the sections about how well the training split is mixed; one that says why not otherwise."""
    if facts.quality is None:
        return [_none(facts)]
    quality = facts.quality
    sections = [_dispersion(facts, quality), _batches(quality), _neighbours(quality)]
    values = _values(facts, quality)
    return [*sections, *([values] if values else []), _figures(quality)]


def _none(facts: Facts) -> Section:
    shuffle = facts.stage("shuffle")
    if shuffle is None:
        finding = "This store is not shuffled yet, so there is nothing to measure."
    elif not shuffle.fresh:
        finding = "The shuffle is older than the positions. Shuffle again, and it will be measured here."
    else:
        finding = f"The shuffle has no {SPLIT} split, which is the one that is measured."
    return Section("dispersion", "How well it is shuffled", finding, "")


# --- dispersion -------------------------------------------------------------------------------------------


def _dispersion(facts: Facts, quality: Quality) -> Section:
    share, games = quality["largest-share"], quality["games-in-bucket"]
    pictures = []
    finding = "No game is known, so none can be followed through the shuffle."
    if facts.spread:
        finding = _found_spread(facts.spread)
        looked_at = f"{facts.spread.games:,} games of the {SPLIT} split"
        pictures.append((spread_chart(facts.spread), f"How far a game is scattered: {looked_at}."))
    if quality.buckets > 1:
        finding += f" No bucket has more than {_part(share.after)} of its positions from one game."
    reading = (
        "Each game's positions are followed: the further right, the more buckets they reach. Without a "
        "shuffle a game stays in one place. After a good one the bars lie under the line, which is what "
        "dealing the positions out at random would give."
    )
    if facts.spread and not facts.spread.by_bucket:
        reading += f" With so few buckets, {facts.spread.pieces} equal pieces of the order stand for them."
    if games.after is not None and games.expected is not None and quality.buckets > 1:
        finding += (
            f" A bucket has positions of {number(games.after)} games; chance gives {number(games.expected)}."
        )
    return Section(
        "dispersion", "Where the positions of a game go", finding, reading, pictures, [_buckets(quality)]
    )


def _found_spread(spread: Spread) -> str:
    before, after, chance = (spread.mean(reached) for reached in (spread.before, spread.after, spread.chance))
    return (
        f"A game reaches {after:.1f} of {spread.pieces:,} {'buckets' if spread.by_bucket else 'pieces'}; "
        f"chance would give {chance:.1f}, the input order gave {before:.1f}."
    )


def _buckets(quality: Quality) -> Table:
    rows = [
        [
            f"{bucket.bucket:,}",
            f"{bucket.rows:,}",
            f"{bucket.games:,}",
            _percent(bucket.largest_share),
            "-" if bucket.value_mean is None else f"{bucket.value_mean:.4f}",
            "-" if bucket.value_deviation is None else f"{bucket.value_deviation:.2g}",
            "-" if bucket.z is None else f"{bucket.z:+.1f}",
        ]
        for bucket in quality.by_bucket
    ]
    left = len(rows) - _MOST_BUCKETS
    return Table(
        caption="Each bucket",
        columns=[
            "bucket",
            "positions",
            "games",
            "largest game",
            "mean value",
            "s.d. by chance",
            "off by, s.d.",
        ],
        rows=rows[:_MOST_BUCKETS],
        texts=frozenset(),
        folded=True,
        more=f"{left:,} more buckets are in the --json output." if left > 0 else "",
    )


# --- batches ----------------------------------------------------------------------------------------------


def _batches(quality: Quality) -> Section:
    figures = [figure for figure in quality.figures if figure.name.startswith("batch-")]
    known = [figure for figure in figures if figure.after is not None]
    pictures = []
    if any(figure.expected for figure in known):
        pictures.append((pairs_chart(known), "Pairs of positions of one game in a batch."))
    return Section(
        "batches",
        "What a batch holds",
        _found_pairs(figures[0]),
        "Two positions of one game in a batch say nearly the same thing twice, and their values agree. The "
        "teal dot should lie on the line of chance, far to the left of the orange one.",
        pictures,
        [_before_after("Pairs of one game in a batch", figures)],
    )


def _found_pairs(figure: Figure) -> str:
    if not figure.expected or figure.after is None or figure.before is None:
        return "No game has two positions, so no batch can hold a pair of one game."
    if not figure.after:
        return "A batch of 256 holds no pair of one game."
    times = figure.before / figure.after
    found, expected = number(figure.after), number(figure.expected)
    text = f"A batch of 256 holds {found} pairs of one game; chance gives {expected}."
    return text + (f" The input order held {number(times)} times as many." if times > 1.5 else "")


def _before_after(caption: str, figures: Sequence[Figure]) -> Table:
    return Table(
        caption=caption,
        columns=["", "before", "after", "by chance", "s.d.", "off by, s.d."],
        rows=[
            [
                figure.title,
                *(
                    _figure(figure, it)
                    for it in (figure.before, figure.after, figure.expected, figure.deviation)
                ),
                "-" if figure.z is None else f"{figure.z:+.1f}",
            ]
            for figure in figures
        ],
        folded=True,
    )


# --- neighbours -------------------------------------------------------------------------------------------


def _neighbours(quality: Quality) -> Section:
    games = [f for f in quality.lags if f.name.startswith("neighbours-") and f.after is not None]
    values = [f for f in quality.lags if f.name.startswith("value-") and f.after is not None]
    pictures = []
    finding = "There are too few positions for neighbours."
    if games:
        first = games[0]
        finding = (
            f"Of pairs of neighbours, {_part(first.after)} are of one game; chance gives "
            f"{_part(first.expected)}, the input order gave {_part(first.before)}."
        )
    if any(figure.expected for figure in games):
        pictures.append(
            (neighbours_chart(games), "Pairs of positions of one game, by how far apart they stand.")
        )
    if values:
        finding += f" Their values correlate by {number(values[0].after or 0.0)}."
        pictures.append(
            (correlation_chart(values), "Autocorrelation of the value, by how far apart they stand.")
        )
    return Section(
        "neighbours",
        "What stands next to what",
        finding,
        "Positions of one game in a row make training swing from game to game. Before the shuffle the "
        "orange line is high and falls slowly, as long as the games are; after it, every teal dot should "
        "lie in the grey band.",
        pictures,
        [_before_after("Every lag", [*games, *values])] if games or values else [],
    )


# --- values -----------------------------------------------------------------------------------------------


def _values(facts: Facts, quality: Quality) -> Section | None:
    known = [bucket for bucket in quality.by_bucket if bucket.value_mean is not None]
    if not known:
        return None
    rows = sum(bucket.rows for bucket in known)
    mean = sum(bucket.rows * (bucket.value_mean or 0.0) for bucket in known) / rows
    before = [row["value_mean"] for row in facts.values_before]
    banded = [bucket for bucket in known if bucket.z is not None]
    if len(known) == 1 or not banded:
        return Section(
            "values",
            "The value, bucket by bucket",
            f"One bucket holds every position, so its mean is the mean of all: {mean:.4f}.",
            "A value of 0 means that blue wins, 1 that red wins.",
        )
    off = max(abs(bucket.z or 0.0) for bucket in banded)
    return Section(
        "values",
        "The value, bucket by bucket",
        f"The mean value is {mean:.4f}, and no bucket is further from it than {off:.1f} standard deviations.",
        "A value of 0 means that blue wins, 1 that red wins. The grey band is where chance puts a "
        f"bucket's mean ({DEVIATIONS:.0f} standard deviations to either side): a bucket outside it would "
        "teach that one side wins more often.",
        [
            (bucket_means_chart(known, mean, before), "Before, as equal pieces of the input, and after."),
            (bucket_means_chart(known, mean, None), "After, from close by."),
        ],
    )


# --- all figures ------------------------------------------------------------------------------------------


def _figures(quality: Quality) -> Section:
    rows = [
        [
            figure.title,
            ("ok" if figure.ok else "FAILED") if figure.judged else "-",
            *(_figure(figure, it) for it in (figure.before, figure.after, figure.expected, figure.deviation)),
            "-" if figure.z is None else f"{figure.z:+.1f}",
            "-" if figure.bound is None else f"{figure.bound:.1f}",
            figure.note,
        ]
        for figure in quality.figures
    ]
    failed = sum(not figure.ok for figure in quality.figures)
    finding = (
        f"{failed} of the figures failed."
        if failed
        else "No figure is further from chance than chance allows."
    )
    for when, sampled in (("After", quality.sampled), ("Before", quality.sampled_before)):
        if sampled < quality.positions:
            looked_at = f"{sampled:,} of {quality.positions:,} positions"
            finding += f" {when} the shuffle, pairs, neighbours and correlations were counted on {looked_at}."
    columns = ["figure", "", "before", "after", "by chance", "s.d.", "off by, s.d.", "allowed", "note"]
    return Section(
        "figures",
        "Every figure, held against chance",
        finding,
        f"Chance is {quality.reference}. A figure is judged by how many standard deviations it is off; "
        "what is allowed grows where there is little to count. The formulas are in the documentation, "
        "under quality.",
        tables=[Table("Figures of the shuffle", columns, rows, texts=frozenset({0, 1, 8}), folded=True)],
    )


def _figure(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.unit == "share":
        return _percent(value)
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g}%"


def _part(share: float | None) -> str:
    """Write a share as a sentence has it: a very small one as one of so many."""
    return f"1 in {1 / share:,.0f}" if share and share < _SMALL else _percent(share)
