"""The HTML page: its sections and tables, and their rendering with embedded pictures and styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, resources

from hexdata.extras import installed_by
from hexdata.report.verdict import Verdict

with installed_by("report", "the report"):
    from jinja2 import Environment, PackageLoader, StrictUndefined

__all__ = ["PageTable", "Section", "documentation_address", "render_page"]


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes:
        caption: Title of the table.
        columns: Column headers.
        rows: Cells of each row; the first cell is the row's header.
        texts: Indices of columns with text, aligned left. The other columns contain numbers.
        codes: Indices of columns in a monospaced font, for copying.
        folded: Whether the table is collapsed until the reader opens it.
        more: Note below the table about rows that are not shown.
        stacked: Whether cells are placed below each other on narrow screens, for long texts.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: frozenset[int] = frozenset({0})
    codes: frozenset[int] = frozenset()
    folded: bool = False
    more: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        anchor: Id of the section in the page.
        title: Heading.
        finding: The result, in one sentence.
        reading: Explanation of the pictures and tables. An empty line separates paragraphs.
        pictures: (``<svg>`` element, caption) of each chart or board. The elements are not escaped.
        tables: Tables below the pictures.
        shape: Kind of the pictures, "chart" or "board".
        documents: Pages of the documentation about this section, such as "howto/splits".
    """

    anchor: str
    title: str
    finding: str
    reading: str = ""
    pictures: Sequence[tuple[str, str]] = ()
    tables: Sequence[PageTable] = ()
    shape: str = "chart"
    documents: Sequence[str] = ()

    @property
    def beside(self) -> bool:
        """True if the text is placed beside the picture on wide screens, rather than above it."""
        return len(self.pictures) == 1


def documentation_address() -> str:
    """Return the address of the documentation in the metadata of the installed package; empty if none."""
    try:
        listed: list[str] = metadata.metadata("hexdata").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    addresses = dict(entry.split(", ", 1) for entry in listed)
    return addresses.get("Documentation", "").rstrip("/")


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
        name: Name of the store.
        version: Version of hexdata.
        verdict: Summary at the top of the page.
        tiles: (number, unit) pairs below the summary.
        sections: The sections of the page.
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
        address=documentation_address(),
    )
