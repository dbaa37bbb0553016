"""Colours of drawings for light and dark pages. A page can override each with a CSS variable."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["CONTRAST_STRENGTH", "PALETTE", "STYLE", "Shade", "paint"]


class Shade(NamedTuple):
    """Hexadecimal codes of one colour on light and on dark pages."""

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
"""Colours by name. ``ink`` is used beside the board, where the background is the page's own and may differ
from the system's scheme, so both of its codes are readable on white and on black."""

CONTRAST_STRENGTH: Final = 0.64
"""Texts use the colour ``on-heat`` on cells with at least this shade, and ``on-cell`` otherwise."""


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
"""CSS of every drawing. It is the same in all drawings, so that a page can contain several.

Each selector is a single class, because browsers do not match ancestors for elements repeated by ``<use>``.
"""


def paint(fill: str | None = None, stroke: str | None = None) -> str:
    """Return SVG attributes that paint an element in colours of the palette.

    The plain attributes are a fallback for viewers without CSS variables, in the colours of light pages.
    """
    classes = [f"hexdata-{kind}-{name}" for kind, name in (("fill", fill), ("stroke", stroke)) if name]
    attributes = [f'class="{" ".join(classes)}"', f'fill="{PALETTE[fill].light if fill else "none"}"']
    if fill == "cell":
        attributes.append(f'stroke="{PALETTE["line"].light}"')
    elif stroke:
        attributes.append(f'stroke="{PALETTE[stroke].light}"')
    return " ".join(attributes)
