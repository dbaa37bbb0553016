"""Charts of the report: axes and series in pixels, which the template of the page draws as SVG.

A chart has 340 x 220 pixels; its texts are 10 pixels high. Colours are names of CSS variables of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, log10
from typing import Any, Final, NamedTuple

import numpy as np

from hexdata.quality import DEVIATIONS, Figure
from hexdata.report.facts import Spread
from hexdata.report.verdict import number

Chart = dict[str, Any]
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 326, 24, 178
"""Edges of the area of the data. The legend is above, the numbers and names of the axes are beside it."""
_MOST_BARS: Final = 48
"""Maximum number of bars in a chart."""


class _Scale(NamedTuple):
    """An axis from ``low`` to ``high``, which are at the pixels ``start`` and ``end``."""

    low: float
    high: float
    start: int = _LEFT
    end: int = _RIGHT
    is_log: bool = False
    is_share: bool = False

    def at(self, values: Any) -> Any:
        """Return the pixels of numbers; those outside are drawn at the edge."""
        # Clipped before the logarithm, which 0 does not have.
        found, low, high = np.clip(values, self.low, self.high), self.low, self.high
        if self.is_log:
            found, low, high = np.log10(found), log10(low), log10(high)
        return self.start + (self.end - self.start) * (found - low) / (high - low or 1)

    def ticks(self, at: Iterable[float] = (), names: Iterable[str] = ()) -> list[tuple[float, str]]:
        """Return the pixel and the name of each tick: at these numbers, or at about five round ones."""
        if not at and self.is_log:
            first, last = ceil(log10(self.low)), floor(log10(self.high))
            at = [10.0**power for power in range(first, last + 1, 1 + (last - first) // 5)]
        elif not at:
            raw = (self.high - self.low) / 5 or 1.0
            unit = 10.0 ** floor(log10(raw))
            step = next(unit * round_ for round_ in (1, 2, 5, 10) if unit * round_ >= raw)
            at = [step * k for k in range(ceil(self.low / step), floor(self.high / step) + 1)]
        texts = names or [f"{100 * v:.3g}%" if self.is_share else f"{v:,.6g}" for v in at]
        return [(round(float(self.at(v)), 1), text) for v, text in zip(at, texts, strict=True)]


def _points(x: Any, y: Any) -> list[tuple[float, float]]:
    # A number that differs from itself is NaN, which stands for an unknown figure and has no point.
    return [(round(float(a), 1), round(float(b), 1)) for a, b in zip(x, y, strict=True) if a == a and b == b]


def _bars(x: _Scale, y: _Scale, at: Any, heights: Any, width: float, label: str, colour: str = "") -> Chart:
    corners = zip(_points(x.at(at - width / 2), y.at(heights)), x.at(at + width / 2), strict=True)
    boxes = [(a, b, round(float(right) - a, 1), round(_BOTTOM - b, 1)) for (a, b), right in corners]
    return {"shape": "bars", "label": label, "colour": colour or label, "boxes": boxes}


def _line(x: _Scale, y: _Scale, at: Any, values: Any, label: str = "expected", width: float = 1.5) -> Chart:
    return {"shape": "line", "label": label, "points": _points(x.at(at), y.at(values)), "width": width}


def _dots(x: _Scale, y: _Scale, at: Any, values: Any, label: str, radius: float) -> Chart:
    return {"shape": "dots", "label": label, "points": _points(x.at(at), y.at(values)), "radius": radius}


def _band(x: _Scale, y: _Scale, at: Any, mean: Any, deviation: Any) -> list[Chart]:
    """Return the range and the mean of a random order."""
    low, high = (y.at(mean + sign * DEVIATIONS * deviation) for sign in (-1, 1))
    outline = _points(np.append(x.at(at), x.at(at)[::-1]), np.append(low, high[::-1]))
    return [{"shape": "band", "label": "", "points": outline}, _line(x, y, at, mean)]


def spread_chart(spread: Spread) -> Chart:
    """Draw the number of pieces that games reach: before, after and expected."""
    width = -(-spread.pieces // _MOST_BARS)
    starts = np.arange(1, spread.pieces + 1, width)
    at = starts + (width - 1) / 2
    before, after, chance = (
        np.add.reduceat(np.asarray(reached[1:], dtype=np.float64), starts - 1) / spread.games
        for reached in (spread.before, spread.after, spread.chance)
    )
    # The bars before the shuffle would make the other ones invisible, and are cut.
    top = 1.3 * float(max(after.max(), chance.max()))
    x, y = _Scale(0.4, spread.pieces + 0.6 + width), _Scale(0, top, _BOTTOM, _TOP, is_share=True)
    series = [_bars(x, y, at, before, 0.86 * width, "before"), _bars(x, y, at, after, 0.86 * width, "after")]
    series.append(_line(x, y, at, chance))
    if len(cut := np.flatnonzero(before > top)):
        text = f"↑ {', '.join(f'{share:.0%}' for share in before[cut])}"
        series.append(_texts([(x.at(at[cut[-1]] + width / 2) + 3, _TOP + 9)], [text], "start"))
    means = [spread.mean(it) for it in (spread.before, spread.after, spread.chance)]
    title = "A game is in {:.1f} pieces of the order before, {:.1f} after, {:.1f} expected".format(*means)
    x_label = f"{spread.name} that a game reaches, of {spread.pieces:,}"
    return _chart("spread", title, (x_label, "share of the games"), x.ticks(), y.ticks(), series)


def pairs_chart(figures: Sequence[Figure]) -> Chart:
    """Draw the same-game pairs of each batch size on one scale: before, after and expected."""
    known = [n for f in figures for n in (f.before, f.after, f.expected) if n] or [1.0]
    least = 10.0 ** floor(log10(min(known)))
    x = _Scale(least / 1.8, max(known) * 2.2, is_log=True)
    y = _Scale(-0.55, len(figures) - 0.45, _TOP, _BOTTOM)
    rows, names = np.arange(len(figures)), [figure.name.removeprefix("batch-") for figure in figures]
    # On a logarithmic axis, 0 is drawn at the edge.
    ends = [[max(figure.after or 0.0, least), max(figure.before or 0.0, least)] for figure in figures]
    series = [{**_line(x, y, ends[row], [row, row], "", 2.4), "colour": "line"} for row in range(len(rows))]
    for label in ("before", "after"):
        values = [getattr(figure, label) for figure in figures]
        dots = _dots(x, y, [np.nan if v is None else max(v, least) for v in values], rows, label, 4)
        shown = [number(value) for value in values if value is not None]
        beside = -8 if label == "before" else 17  # above and below the line, since the dots may be close
        series += [dots, _texts([(a, b + beside) for a, b in dots["points"]], shown, "middle")]
    marks = _points(x.at([f.expected or np.nan for f in figures]), y.at(rows))
    series.append({"shape": "marks", "label": "expected", "points": marks})
    means = [f"{n}: {_change(figure)}" for n, figure in zip(names, figures, strict=True)]
    title = f"Pairs of the same game in a batch of {'; '.join(means)}"
    labels = ("pairs of the same game in a batch, mean", "positions in a batch")
    return _chart("pairs", title, labels, x.ticks(), y.ticks(rows.tolist(), names), series)


def lag_chart(lags: Sequence[Figure], name: str, label: str, *, shares: bool = False) -> Chart:
    """Draw a figure by lag: before, after and the band of a random order.

    Args:
        lags: Measured figures, with the lag at the end of their names.
        name: Prefix of ids.
        label: Label of the vertical axis.
        shares: Draw percentages on a logarithmic scale, instead of values by lags on one. Default False.
    """
    at = np.array([int(figure.name.rpartition("-")[2]) for figure in lags])
    before, after, mean, deviation = (
        np.array([getattr(figure, part) for figure in lags], np.float64)
        for part in ("before", "after", "expected", "deviation")
    )
    known = [n for n in np.concatenate([before, after, mean]).tolist() if n == n and (n > 0 or not shares)]
    least = min(known, default=0.0)
    x = _Scale(int(at[0]), int(at[-1]), is_log=not shares)
    y = _Scale(least / 2 or 1e-6, 1.4, _BOTTOM, _TOP, is_log=True, is_share=True)
    if not shares:
        y = _Scale(min(-0.2, 1.1 * least), max(0.2, 1.1 * max(known, default=0.0)), _BOTTOM, _TOP)
    series = [
        _line(x, y, at, before, "before", 2),
        *_band(x, y, at, mean, np.nan_to_num(deviation)),
        _dots(x, y, at, after, "after", 1 if shares else 2.5),
    ]
    title, ticks = f"At lag 1, {label}: {_change(lags[0])}", x.ticks(() if shares else at.tolist())
    return _chart(name, title, ("lag, in positions", label), ticks, y.ticks(), series)


def bucket_means_chart(buckets: Sequence[Mapping[str, Any]], mean: float, before: Sequence[float]) -> Chart:
    """Draw the mean value of each bucket, and of each piece of the input order (``before``)."""
    at = np.array([bucket["bucket"] for bucket in buckets])
    after = np.array([bucket["value_mean"] or 0.0 for bucket in buckets])
    # Two corners per bucket, so that the band has a step where the number of rows differs.
    deviation = np.repeat([bucket["value_deviation"] or 0.0 for bucket in buckets], 2)
    wide = DEVIATIONS * float(deviation.max())
    low, high = min(*after, *before, mean - wide), max(*after, *before, mean + wide)
    x, y = _Scale(-1, max(at[-1], len(before)) + 1), _Scale(low, high, _BOTTOM, _TOP)
    radius = 2.5 if len(at) <= 30 else 1.5 if len(at) <= 200 else 0.75
    series = [
        *_band(x, y, (at[:, None] + [-0.5, 0.5]).ravel(), np.full(2 * len(at), mean), deviation),
        _dots(x, y, range(len(before)), before, "before", radius),
        _dots(x, y, at, after, "after", radius),
    ]
    title = f"The mean value of each of {len(at):,} buckets, about {mean:.4f}"
    return _chart("means", title, ("bucket", "mean value"), x.ticks(), y.ticks(), series)


def lengths_chart(lengths: Sequence[tuple[int, int]]) -> Chart:
    """Draw the distribution of game lengths, given as (positions, games) in ascending order."""
    first, last = lengths[0][0], lengths[-1][0]
    width = -(-(last - first + 1) // _MOST_BARS)
    known, counts = np.array(lengths).T
    games = np.bincount((known - first) // width, counts)
    at = first + width * np.arange(len(games)) + (width - 1) / 2
    x, y = _Scale(first - width, last + width), _Scale(0, 1.05 * float(games.max()), _BOTTOM, _TOP)
    x_label = f"positions of a game{'' if width == 1 else f', in steps of {width}'}"
    title = f"Games by their length, from {first} to {last} positions"
    series = [_bars(x, y, at, games, 0.88 * width, "", "after")]
    return _chart("lengths", title, (x_label, "games"), x.ticks(), y.ticks(), series)


def _texts(points: Sequence[tuple[float, float]], texts: Sequence[str], anchor: str) -> Chart:
    placed = [(round(float(x), 1), y, text) for (x, y), text in zip(points, texts, strict=True)]
    return {"shape": "texts", "label": "", "texts": placed, "anchor": anchor}


def _change(figure: Figure) -> str:
    before, after = ("unknown" if v is None else number(v) for v in (figure.before, figure.after))
    return f"{before} before, {after} after"


def _chart(
    name: str, title: str, labels: tuple[str, str], x: list[Any], y: list[Any], series: list[Chart]
) -> Chart:
    return {"name": name, "title": title, "labels": labels, "x": x, "y": y, "series": series}
