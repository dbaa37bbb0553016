"""Charts of the report, as inline SVG that uses the colours and fonts of the page.

The output is deterministic: it contains no date, and ids depend only on the chart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from io import BytesIO
from typing import Any, Final

import numpy as np

from hexdata.extras import installed_by
from hexdata.quality import DEVIATIONS, BucketFigures, Figure
from hexdata.report.spread import Spread

with installed_by("report", "the report"):
    import matplotlib as mpl
    from matplotlib import figure as mpl_figure
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

__all__ = [
    "bucket_means_chart",
    "correlation_chart",
    "lengths_chart",
    "neighbours_chart",
    "pairs_chart",
    "spread_chart",
    "tiers_chart",
]

INK: Final = "#010101"
MUTED: Final = "#010102"
LINE: Final = "#010103"
PAPER: Final = "#010104"
BEFORE: Final = "#010105"
AFTER: Final = "#010106"
CHANCE: Final = "#010107"
"""Placeholder colours, replaced by CSS variables of the page."""

_VARIABLES: Final = {
    INK: "ink",
    MUTED: "muted",
    LINE: "line",
    PAPER: "card",
    BEFORE: "before",
    AFTER: "after",
    CHANCE: "chance",
}
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hexdata",
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10.0,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.unicode_minus": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.size": 3,
    "xtick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "legend.borderaxespad": 0.0,
    "figure.facecolor": "none",
}

_MOST_BARS: Final = 48
"""Maximum number of bars in a chart."""
_MOST_DOTS: Final = 500
_ORDER: Final = ("before", "after", "expected")
_COUNTS: Final = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 or not value else f"{value:g}")


def spread_chart(spread: Spread) -> str:
    """Draw the number of pieces that games reach: before, after and expected."""
    width = -(-spread.pieces // _MOST_BARS)
    starts = np.arange(1, spread.pieces + 1, width)

    def shares(reached: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.add.reduceat(np.asarray(reached[1:], dtype=np.float64), starts - 1) / spread.games

    def draw(axes: Axes) -> None:
        centres = starts + (width - 1) / 2
        before, after, chance = (shares(reached) for reached in (spread.before, spread.after, spread.chance))
        axes.bar(centres, before, width * 0.86, color=BEFORE, label="before", lw=0)
        axes.bar(centres, after, width * 0.86, color=AFTER, label="after", lw=0)
        axes.plot(centres, chance, color=CHANCE, lw=1.6, label="expected")
        top = 1.3 * float(max(after.max(), chance.max()))
        if before.max() > top:  # it would make the other bars invisible
            axes.set_ylim(0, top)
            for at in np.flatnonzero(before > top):
                axes.annotate(
                    f"↑ {before[at]:.0%}",
                    (centres[at] + width / 2, top),
                    xytext=(3, -2),
                    textcoords="offset points",
                    va="top",
                    color=INK,
                )
        axes.set_xlim(0.4, spread.pieces + 0.6 + width)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if top > 0.05 else 1))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.set_xlabel(
            f"{'buckets' if spread.by_bucket else 'pieces'} that a game reaches, of {spread.pieces:,}"
        )
        axes.set_ylabel("share of the games")
        _legend(axes)

    means = [spread.mean(it) for it in (spread.before, spread.after, spread.chance)]
    title = "A game is in {:.1f} pieces of the order before, {:.1f} after, {:.1f} expected".format(*means)
    return draw_chart(draw, "spread", title)


def _legend(axes: Axes) -> None:
    """Draw the legend above the axes, with entries in a fixed order."""
    handles, labels = axes.get_legend_handles_labels()
    ordered = sorted(zip(labels, handles, strict=True), key=lambda pair: _ORDER.index(pair[0]))
    axes.legend(
        [handle for _, handle in ordered],
        [label for label, _ in ordered],
        loc="upper center",
        ncols=3,
        bbox_to_anchor=(0.5, 1.14),
    )


def pairs_chart(figures: Sequence[Figure]) -> str:
    """Draw the same-game pairs of each batch size on one scale: before, after and expected."""
    known = [figure for figure in figures if figure.after is not None]
    numbers = [n for f in known for n in (f.before, f.after, f.expected) if n]
    least = 10.0 ** np.floor(np.log10(min(numbers, default=1.0)))

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        for row, figure in enumerate(reversed(known)):
            after = max(figure.after or 0.0, least)
            before = max(figure.before or 0.0, least)
            axes.plot([after, before], [row, row], color=LINE, lw=2.4, zorder=1, solid_capstyle="round")
            if figure.before is not None:
                axes.plot(before, row, "o", color=BEFORE, ms=8, label="before" if not row else None)
                _number(axes, before, row, figure.before)
            axes.plot(after, row, "o", color=AFTER, ms=8, label="after" if not row else None)
            _number(axes, after, row, figure.after or 0.0)
            if figure.expected:
                axes.plot(
                    figure.expected,
                    row,
                    "|",
                    color=CHANCE,
                    ms=17,
                    mew=1.8,
                    label="expected" if not row else None,
                )
        axes.set_yticks(range(len(known)), [f.name.removeprefix("batch-") for f in reversed(known)])
        axes.set_ylim(-0.55, len(known) - 0.45)
        axes.set_xlim(least / 1.8, max(numbers, default=1.0) * 2.2)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
        axes.xaxis.set_major_formatter(_COUNTS)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("positions in a batch")
        axes.set_xlabel("pairs of the same game in a batch, mean")
        _legend(axes)

    means = [
        f"{f.name.removeprefix('batch-')}: {_short(f.before)} before, {_short(f.after)} after" for f in known
    ]
    return draw_chart(draw, "pairs", "Pairs of the same game in a batch of " + "; ".join(means))


def _number(axes: Axes, x: float, y: float, value: float) -> None:
    axes.annotate(
        _short(value), (x, y), xytext=(0, 9), textcoords="offset points", ha="center", va="bottom", color=INK
    )


def _short(value: float | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _by_lag(lags: Sequence[Figure]) -> list[tuple[int, Figure]]:
    """Return the measured figures, each with the lag at the end of its name."""
    return [(int(figure.name.rpartition("-")[2]), figure) for figure in lags if figure.after is not None]


def neighbours_chart(lags: Sequence[Figure]) -> str:
    """Draw the share of same-game neighbours by lag."""
    known = _by_lag(lags)
    numbers = [n for _, f in known for n in (f.before, f.after, f.expected) if n]
    least = min(numbers, default=1e-6) / 2

    def draw(axes: Axes) -> None:
        axes.set_yscale("log")
        at = [lag for lag, _ in known]
        axes.plot(at, [max(f.before or least, least) for _, f in known], color=BEFORE, lw=2, label="before")
        _band(axes, [(lag, f.expected, f.deviation) for lag, f in known], least)
        axes.plot(at, [max(f.after or least, least) for _, f in known], ".", color=AFTER, ms=4, label="after")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(least, 1.4)
        axes.set_xlabel("lag, in positions")
        axes.set_ylabel("pairs of the same game")
        _legend(axes)

    first = known[0][1]
    title = (
        f"{_percent(first.before)} of neighbours are of the same game before, {_percent(first.after)} after"
    )
    return draw_chart(draw, "neighbours", title)


def _band(
    axes: Axes, points: Sequence[tuple[float, float | None, float | None]], least: float | None = None
) -> None:
    """Draw the expected value and the accepted band."""
    known = [(x, mean, deviation or 0.0) for x, mean, deviation in points if mean is not None]
    at = [x for x, _, _ in known]
    low = [mean - DEVIATIONS * deviation for _, mean, deviation in known]
    if least is not None:
        low = [max(value, least) for value in low]
    axes.fill_between(at, low, [m + DEVIATIONS * d for _, m, d in known], color=CHANCE, alpha=0.18, lw=0)
    axes.plot(at, [mean for _, mean, _ in known], color=CHANCE, lw=1.4, label="expected")


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.3g}%"


def correlation_chart(lags: Sequence[Figure]) -> str:
    """Draw the autocorrelation of the value by lag."""
    known = _by_lag(lags)

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        at = [lag for lag, _ in known]
        axes.axhline(0, color=MUTED, lw=0.8)
        before = {lag: f.before for lag, f in known if f.before is not None}
        axes.plot(list(before), list(before.values()), "o-", color=BEFORE, lw=2, ms=4, label="before")
        _band(axes, [(lag, f.expected, f.deviation) for lag, f in known])
        axes.plot(at, [f.after or 0.0 for _, f in known], "o", color=AFTER, ms=5, label="after")
        axes.set_xticks(at, [f"{lag}" for lag in at])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("lag, in positions")
        axes.set_ylabel("correlation of the values")
        _legend(axes)

    first = known[0][1]
    title = f"Correlation of neighbouring values: {_short(first.before)} before, {_short(first.after)} after"
    return draw_chart(draw, "correlation", title)


def bucket_means_chart(buckets: Sequence[BucketFigures], mean: float, before: Sequence[float] | None) -> str:
    """Draw the mean value of each bucket and, if given, of each piece of the input order (``before``)."""
    known = [bucket for bucket in buckets if bucket.value_mean is not None]

    def draw(axes: Axes) -> None:
        at = [bucket.bucket for bucket in known]
        edges = [bucket + half for bucket in at for half in (-0.5, 0.5)]
        band = np.repeat([DEVIATIONS * (bucket.value_deviation or 0.0) for bucket in known], 2)
        if before is not None:
            axes.plot(range(len(before)), before, color=BEFORE, label="before", **_marks(len(before)))
        axes.fill_between(edges, mean - band, mean + band, color=CHANCE, alpha=0.18, lw=0)
        axes.axhline(mean, color=CHANCE, lw=1.4, label="expected")
        means = [bucket.value_mean or 0.0 for bucket in known]
        axes.plot(at, means, color=AFTER, label="after", **_marks(len(at)))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("bucket")
        axes.set_ylabel("mean value")
        _legend(axes)

    name = "means" if before is None else "means-before"
    return draw_chart(draw, name, f"The mean value of each of {len(known):,} buckets, about {mean:.4f}")


def _marks(count: int) -> dict[str, Any]:
    """Return the style of ``count`` points: dots, or a thin line if there are too many."""
    if count > _MOST_DOTS:
        return {"lw": 0.6}
    return {"marker": "o", "ls": "none", "ms": 5.0 if count <= 30 else 3.0 if count <= 200 else 1.8}


def lengths_chart(lengths: Sequence[tuple[int, int]]) -> str:
    """Draw the distribution of game lengths.

    Args:
        lengths: (positions, games), ascending.
    """
    first, last = lengths[0][0], lengths[-1][0]
    width = -(-(last - first + 1) // _MOST_BARS)
    bars: dict[int, int] = {}
    for length, games in lengths:
        start = first + (length - first) // width * width
        bars[start] = bars.get(start, 0) + games

    def draw(axes: Axes) -> None:
        at = [start + (width - 1) / 2 for start in bars]
        axes.bar(at, list(bars.values()), width * 0.88, color=AFTER, lw=0)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(_COUNTS)
        axes.set_xlabel("positions of a game" if width == 1 else f"positions of a game, in steps of {width}")
        axes.set_ylabel("games")

    return draw_chart(draw, "lengths", f"Games by their length, from {first} to {last} positions")


def tiers_chart(tiers: Sequence[tuple[str, int]]) -> str:
    """Draw the share of positions in each value sample tier.

    Args:
        tiers: (name, positions).
    """
    total = sum(positions for _, positions in tiers) or 1

    def draw(axes: Axes) -> None:
        rows = range(len(tiers))[::-1]
        axes.barh(rows, [positions / total for _, positions in tiers], 0.62, color=AFTER, lw=0)
        for row, (_, positions) in zip(rows, tiers, strict=True):
            axes.annotate(
                f"{positions / total:.1%}",
                (positions / total, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=INK,
            )
        axes.set_yticks(rows, [name for name, _ in tiers])
        axes.set_xlim(0, max(positions for _, positions in tiers) / total * 1.18)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.set_xlabel("share of the positions")

    return draw_chart(draw, "tiers", "Positions by value sample tier")


# --- rendering -----------------------------------------------------------------------------------------

_PROLOGUE: Final = re.compile(r"\A.*?(?=<svg)", re.DOTALL)
_SIZE: Final = re.compile(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>')
_DROPPED: Final = re.compile(
    r" <metadata>.*?</metadata>\n| <defs>\s*<style type=\"text/css\">.*?</style>\s*</defs>\n|<!--.*?-->",
    re.DOTALL,
)
_FAMILY: Final = re.compile(r" font-family: [^;\"]*;?|(?<=px) '[^;\"]*")
_NAMED: Final = re.compile(r'\bid="([^"]*)"|xlink:href="#([^"]*)"|url\(#([^)]*)\)')


def draw_chart(
    draw: Callable[[Axes], None], name: str, title: str, *, width: float = 340, height: float = 220
) -> str:
    """Return a chart as an ``<svg>`` element.

    Args:
        draw: Function that draws on the axes with the placeholder colours.
        name: Prefix of every id, unique on the page.
        title: Accessible description of the chart.
        width: Nominal width in CSS pixels; text is 10 pixels high at this width.
        height: Nominal height in CSS pixels.
    """
    file = BytesIO()
    with mpl.rc_context():
        mpl.rcdefaults()  # the user's matplotlib style must not change the page
        mpl.rcParams.update(_STYLE)
        figure = mpl_figure.Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        draw(figure.subplots())
        ConstrainedLayoutEngine().execute(figure)  # an engine of the figure would let savefig draw it twice
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    text = _DROPPED.sub("", _PROLOGUE.sub("", file.getvalue().decode("utf-8"), count=1))
    text = _NAMED.sub(lambda found: _rename(found, name), text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    head = f'<svg class="chart" viewBox="\\1" role="img" aria-labelledby="{name}-title">'
    head += f'<title id="{name}-title">'
    text = _FAMILY.sub("", text)
    return _SIZE.sub(lambda found: found.expand(head) + f"{escape(title)}</title>", text, count=1).strip()


def _rename(found: re.Match[str], name: str) -> str:
    own, link, url = found.groups()
    if own is not None:
        return f'id="{name}-{own}"'
    return f'href="#{name}-{link}"' if link is not None else f"url(#{name}-{url})"
