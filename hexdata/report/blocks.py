"""What a page is made of: sections of text, pictures and tables. Holds no numbers, only what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Section", "Table"]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: what it shows.
        columns: their heads.
        rows: texts, one a column; the first is the head of its row.
        texts: the columns that hold words, and stand to the left; the others hold numbers.
        codes: the columns that are to be copied letter by letter.
        folded: whether it is shown only when it is asked for.
        more: what was left out of it.
        stacked: whether its cells stand below each other on a phone: for long texts.
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
        anchor: its id in the page.
        title: its heading.
        finding: what the data says, in a sentence.
        reading: how to read what is below, in a sentence or two.
        pictures: charts or boards, each an ``<svg>`` element of ours, not escaped, and its caption.
        tables: below the pictures.
        shape: of the pictures: "chart" or "board".
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
        """Whether the words stand beside the picture where there is room, rather than above."""
        return len(self.pictures) == 1
