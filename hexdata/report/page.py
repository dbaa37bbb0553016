"""From sections to the page: one HTML text with its pictures and styles inside. Counts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined

from hexdata.report.blocks import Section
from hexdata.report.verdict import Verdict

__all__ = ["render_page"]


def render_page(
    *,
    name: str,
    version: str,
    verdict: Verdict,
    tiles: Sequence[tuple[str, str]],
    sections: Sequence[Section],
) -> str:
    """Return the page. All texts are escaped; charts and boards are not, as those who draw them do so.

    Args:
        name: of the store.
        version: of hexdata.
        verdict: for the top.
        tiles: (number, what it counts), below it.
        sections: the rest.
    """
    environment = Environment(
        loader=PackageLoader("hexdata.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    style = (resources.files("hexdata.report") / "templates" / "report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html").render(
        name=name,
        version=version,
        verdict=verdict,
        tiles=tiles,
        sections=sections,
        style=style,
    )
