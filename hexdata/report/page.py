"""Rendering of the sections as one HTML page with embedded pictures and styles."""

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
    """Return the page as HTML. Texts are escaped here, charts and boards where they are drawn.

    Args:
        name: name of the store.
        version: version of hexdata.
        verdict: summary at the top of the page.
        tiles: (number, unit) pairs below the summary.
        sections: the sections of the page.
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
