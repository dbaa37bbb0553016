"""The colours of drawings: each with a variable that a page may set, for light pages and for dark ones."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["CONTRAST_STRENGTH", "PALETTE", "STYLE", "Shade", "paint"]


class Shade(NamedTuple):
    """One colour as hexadecimal text, on a light page and on a dark one."""

    light: str
    dark: str


PALETTE: Final = {
    "cell": Shade("#f1ece1", "#2a2d33"),
    "line": Shade("#bdb4a1", "#565b64"),
    "blue": Shade("#1f62c4", "#5a92ee"),
    "red": Shade("#c52f33", "#ee6660"),
    "rim": Shade("#2b2a28", "#0e1013"),
    "on-stone": Shade("#ffffff", "#0e1013"),
    "heat": Shade("#053c36", "#2cb29e"),
    "on-cell": Shade("#000000", "#ffffff"),
    "on-heat": Shade("#ffffff", "#000000"),
    "ink": Shade("#747881", "#747881"),
}
"""``ink`` is what stands beside the board, on the page itself, whose scheme may not be the system's: both
shades can be read on white and on black."""

CONTRAST_STRENGTH: Final = 0.64
"""Texts on a cell take the colour ``on-heat`` where its shade is at least as strong, else ``on-cell``."""


def _rules(scheme: int) -> str:
    rules = []
    for name, shade in PALETTE.items():
        value = f"var(--hexdata-{name},{shade[scheme]})"
        stroke = f";stroke:var(--hexdata-line,{PALETTE['line'][scheme]})" if name == "cell" else ""
        rules.append(f".hexdata-fill-{name}{{fill:{value}{stroke}}}")
        if name in {"blue", "red", "ink", "rim", "on-stone"}:
            rules.append(f".hexdata-stroke-{name}{{stroke:{value}}}")
    return "".join(rules)


STYLE: Final = f"{_rules(0)}@media screen and (prefers-color-scheme:dark){{{_rules(1)}}}"
"""CSS of every drawing: the same in all, so that several may stand on one page.

Each rule names one class of our own, and no element around it: browsers do not look there for what
``<use>`` repeats.
"""


def paint(fill: str | None = None, stroke: str | None = None) -> str:
    """Return the attributes that paint an element in colours of the palette.

    The plain attributes are for viewers that know no CSS variables, and hold for light pages.
    """
    classes = [f"hexdata-{kind}-{name}" for kind, name in (("fill", fill), ("stroke", stroke)) if name]
    attributes = [f'class="{" ".join(classes)}"', f'fill="{PALETTE[fill].light if fill else "none"}"']
    if fill == "cell":
        attributes.append(f'stroke="{PALETTE["line"].light}"')
    elif stroke:
        attributes.append(f'stroke="{PALETTE[stroke].light}"')
    return " ".join(attributes)
