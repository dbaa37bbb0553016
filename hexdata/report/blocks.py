"""Building blocks of the page: sections and tables of formatted text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Section", "Table"]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: title of the table.
        columns: column headers.
        rows: cells of each row; the first cell is the row's header.
        texts: indices of columns with text, aligned left. The other columns contain numbers.
        codes: indices of columns in a monospaced font, for copying.
        folded: whether the table is collapsed until the reader opens it.
        more: note below the table about rows that are not shown.
        stacked: whether cells are placed below each other on narrow screens, for long texts.
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
        anchor: id of the section in the page.
        title: heading.
        finding: the result, in one sentence.
        reading: explanation of the pictures and tables, in one or two sentences.
        pictures: (``<svg>`` element, caption) of each chart or board. The elements are not escaped.
        tables: tables below the pictures.
        shape: kind of the pictures, "chart" or "board".
    """

    anchor: str
    title: str
    finding: str
    reading: str = ""
    pictures: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    shape: str = "chart"

    @property
    def beside(self) -> bool:
        """True if the text is placed beside the picture on wide screens, rather than above it."""
        return len(self.pictures) == 1
