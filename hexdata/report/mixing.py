"""Sections about the shuffle: dispersion, batches, neighbours and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hexdata.quality import DEVIATIONS, Figure, Quality
from hexdata.report.charts import (
    bucket_means_chart,
    correlation_chart,
    neighbours_chart,
    pairs_chart,
    spread_chart,
)
from hexdata.report.facts import SPLIT, ReportFacts
from hexdata.report.page import PageTable, Section
from hexdata.report.spread import Spread
from hexdata.report.verdict import batch_sentence, number, unknown_games, unmeasured_reason
from hexdata.text import count_of

__all__ = ["mixing_sections"]

_SMALL: Final = 1e-5
"""Smaller shares are shown as "1 in N" instead of a percentage."""
_MOST_BUCKETS: Final = 100
"""Maximum number of rows in the table of buckets."""


def mixing_sections(facts: ReportFacts) -> list[Section]:
    """Return the sections about the shuffle of the training split, or one that explains their absence."""
    if facts.quality is None:
        return [_none(facts)]
    quality = facts.quality
    sections = [_dispersion(facts, quality), _batches(quality), _neighbours(quality)]
    values = _values(facts, quality)
    return [*sections, *([values] if values else []), _figures(quality)]


def _none(facts: ReportFacts) -> Section:
    return Section("dispersion", "Quality of the shuffle", unmeasured_reason(facts))


# --- dispersion -------------------------------------------------------------------------------------------


def _dispersion(facts: ReportFacts, quality: Quality) -> Section:
    share, games = quality["largest-share"], quality["games-in-bucket"]
    pictures = []
    finding = "The store contains no games, so their dispersion cannot be measured."
    if facts.spread:
        finding = _found_spread(facts.spread)
        measured = f"{count_of(facts.spread.games, 'game')} of the {SPLIT} split"
        pieces = "buckets" if facts.spread.by_bucket else "pieces"
        caption = f"Number of {pieces} that contain positions of a game: {measured}."
        pictures.append((spread_chart(facts.spread), caption))
    if quality.buckets > 1:
        finding += f" The largest share of one game in a bucket is {_part(share.after)}."
    reading = (
        "The chart shows the number of games (vertical) by the number of buckets that contain their "
        "positions (horizontal). Without a shuffle, a game is in one bucket. After a good shuffle the "
        "bars follow the line, which is the expected distribution for a uniform random order."
    )
    if facts.spread and not facts.spread.by_bucket:
        reading += (
            f" There are few buckets, so {facts.spread.pieces} equal pieces of the order are used instead."
        )
    if games.after is not None and games.expected is not None and quality.buckets > 1:
        finding += f" A bucket contains {number(games.after)} games; {number(games.expected)} are expected."
    finding = f"{finding} {unknown_games(facts)}".rstrip()
    return Section("dispersion", "Dispersion of games", finding, reading, pictures, [_buckets(quality)])


def _found_spread(spread: Spread) -> str:
    before, after, chance = (spread.mean(reached) for reached in (spread.before, spread.after, spread.chance))
    game = "The game" if spread.games == 1 else "On average, a game"
    if spread.pieces == 1:
        return "There is one position only, so no order can disperse it."
    pieces = f"{spread.pieces:,} {'buckets' if spread.by_bucket else 'pieces'}"
    return (
        f"{game} has positions in {after:.1f} of {pieces}; {chance:.1f} are expected of a random order, and "
        f"the input order had {before:.1f}."
    )


def _buckets(quality: Quality) -> PageTable:
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
    return PageTable(
        caption="Buckets",
        columns=[
            "bucket",
            "positions",
            "games",
            "largest game",
            "mean value",
            "expected s.d.",
            "deviation, s.d.",
        ],
        rows=rows[:_MOST_BUCKETS],
        texts=frozenset(),
        folded=True,
        more=f"{left:,} more buckets: hexdata report --json" if left > 0 else "",
    )


# --- batches ----------------------------------------------------------------------------------------------


def _batches(quality: Quality) -> Section:
    figures = [figure for figure in quality.figures if figure.name.startswith("batch-")]
    known = [figure for figure in figures if figure.after is not None]
    pictures = []
    if any(figure.expected for figure in known):
        pictures.append((pairs_chart(known), "Pairs of positions of the same game in a batch."))
    return Section(
        "batches",
        "Pairs of the same game in a batch",
        _found_pairs(quality),
        "Two positions of the same game are similar, so a batch with many such pairs contains less "
        "information. The teal dot should be on the line, which is the expected number, and far to the left "
        "of the orange dot.",
        pictures,
        [_before_after("Pairs of the same game in a batch", figures)],
    )


def _found_pairs(quality: Quality) -> str:
    figure = quality["batch-256"]
    if not figure.judged or figure.after is None or figure.before is None or figure.expected is None:
        return batch_sentence(quality)
    found, expected, before = map(number, (figure.after, figure.expected, figure.before))
    return (
        f"{batch_sentence(quality)} Of the 32,640 pairs of positions in a batch, {found} are of the same "
        f"game on average; {expected} are expected. In the input order, {before} are."
    )


def _before_after(caption: str, figures: Sequence[Figure]) -> PageTable:
    return PageTable(
        caption=caption,
        columns=["figure", "before", "after", "expected", "s.d.", "deviation, s.d."],
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
    finding = "There are too few positions to measure neighbours."
    if games:
        first = games[0]
        finding = (
            f"{_part(first.after)} of neighbouring pairs belong to the same game; {_part(first.expected)} is "
            f"expected, and the input order had {_part(first.before)}."
        )
    if any(figure.expected for figure in games):
        pictures.append(
            (neighbours_chart(games), "Pairs of positions of the same game, by their distance (lag).")
        )
    if values:
        same = "as unrelated as in a random shuffle" if values[0].judged and values[0].ok else "correlated"
        finding += f" The values of neighbours are {same} (correlation {number(values[0].after or 0.0)})."
        pictures.append((correlation_chart(values), "Autocorrelation of the value, by distance (lag)."))
    return Section(
        "neighbours",
        "Neighbouring positions",
        finding,
        "If consecutive positions belong to the same game, training swings from game to game. The orange "
        "line (before the shuffle) is high up to the length of the games. All teal dots (after the "
        "shuffle) should be in the grey band.",
        pictures,
        [_before_after("All lags", [*games, *values])] if games or values else [],
    )


# --- values -----------------------------------------------------------------------------------------------


def _values(facts: ReportFacts, quality: Quality) -> Section | None:
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
            "Value by bucket",
            f"All positions are in one bucket. Their mean value is {mean:.4f}.",
            "A value of 0 means that blue wins, 1 that red wins.",
        )
    off = max(abs(bucket.z or 0.0) for bucket in banded)
    return Section(
        "values",
        "Value by bucket",
        f"The mean value is {mean:.4f}. The largest deviation of a bucket is {off:.1f} standard deviations.",
        "A value of 0 means that blue wins, 1 that red wins. The grey band is the expected range of the "
        f"mean of a bucket in a random order ({DEVIATIONS:.0f} standard deviations to either side). A "
        "bucket outside of it would bias training towards one side.",
        [
            (
                bucket_means_chart(known, mean, before),
                "Mean value before (equal pieces of the input) and after.",
            ),
            (bucket_means_chart(known, mean, None), "Mean value after, enlarged."),
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
    failed, judged = sum(not figure.ok for figure in quality.figures), sum(f.judged for f in quality.figures)
    finding = "There are too few positions to judge a figure."
    if quality.conclusive:
        finding = "All judged figures are within the expected range."
    if failed:
        verb = "is" if failed == 1 else "are"
        finding = f"{failed} of {judged} judged figures {verb} outside the expected range."
    for when, sampled in (("After", quality.sampled), ("Before", quality.sampled_before)):
        if sampled < quality.positions:
            measured = f"{sampled:,} of {quality.positions:,} positions"
            finding += f" {when} the shuffle, pairs, neighbours and correlations were measured on {measured}."
    columns = ["figure", "status", "before", "after", "expected", "s.d.", "deviation, s.d.", "limit", "note"]
    return Section(
        "figures",
        "All figures",
        finding,
        f"Expected values are those of a random order ({quality.reference}). A figure fails if its "
        "deviation, in standard deviations, exceeds the limit. The limit is larger where counts are "
        "small.",
        tables=[PageTable("Figures of the shuffle", columns, rows, texts=frozenset({0, 1, 8}), folded=True)],
        documents=("quality",),
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
    """Format a share for a sentence: as a percentage, or as "1 in N" if it is very small."""
    return f"1 in {1 / share:,.0f}" if share and share < _SMALL else _percent(share)
