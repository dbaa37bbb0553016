"""Rendering of matplotlib charts as inline SVG that uses the colours and fonts of the page.

The output is deterministic: it contains no date, and ids depend only on the chart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from io import BytesIO
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["AFTER", "BEFORE", "CHANCE", "INK", "LINE", "MUTED", "PAPER", "draw_chart"]

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
        draw: function that draws on the axes with the placeholder colours.
        name: prefix of every id, unique on the page.
        title: accessible description of the chart.
        width: nominal width in CSS pixels; text is 10 pixels high at this width.
        height: nominal height in CSS pixels.
    """
    file = BytesIO()
    with mpl.rc_context():
        mpl.rcdefaults()  # the user's matplotlib style must not change the page
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        draw(figure.subplots())
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
