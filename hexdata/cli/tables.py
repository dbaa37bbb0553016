"""Layout of tables for terminals of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from rich.cells import cell_len, set_cell_size

__all__ = ["TableText", "lay_out"]

_GAP: Final = "  "
_MIN_TEXT: Final = 16
"""Width to which a column of texts may shrink before columns are left out, in characters."""

Row = Sequence[str]


@dataclass(frozen=True)
class TableText:
    """Lines of a table.

    Attributes:
        header: Lines of the column names; none in the vertical layout.
        body: Lines of the rows.
        rows: Number of rows in ``body``.
    """

    header: list[str]
    body: list[str]
    rows: int


def lay_out(
    names: Row,
    rows: Sequence[Row],
    width: int,
    *,
    numeric: Sequence[bool] | None = None,
    optional: Sequence[str] = (),
    shorten: bool = False,
    most_vertical: int | None = None,
) -> TableText:
    """Return a table whose lines fit a width, without cut column names and without broken words.

    Texts are wrapped at spaces. If that is not enough, the optional columns are left out, and otherwise each
    row is printed vertically, one line per column. Only a single word longer than the width exceeds it.

    Args:
        names: Names of the columns.
        rows: Texts of the rows.
        width: Width in characters.
        numeric: Whether each column contains numbers, which are aligned right and never shortened. Default
            None: columns in which every text begins like a number.
        optional: Columns that may be left out, the least important first.
        shorten: Cut long texts, marked by "…", instead of wrapping them. Default False.
        most_vertical: Maximum number of rows in the vertical layout. Default None: all.
    """
    table = _Table(names, rows, numeric or _numeric(rows, len(names)), shorten)
    shown = list(range(len(names)))
    leave_out = [names.index(name) for name in optional]
    while (widths := table.fitted(shown, width)) is None and leave_out:
        shown.remove(leave_out.pop(0))
    if widths is None:
        rows = rows[:most_vertical]
        return TableText([], list(table.vertical(rows, width)), len(rows))
    body = [text for row in rows for text in table.lines(row, shown, widths)]
    return TableText(table.lines(names, shown, widths), body, len(rows))


def _numeric(rows: Sequence[Row], columns: int) -> list[bool]:
    def is_number(text: str) -> bool:
        return text in ("", "-") or text.lstrip("+-")[:1].isdigit()

    return [bool(rows) and all(is_number(row[index]) for row in rows) for index in range(columns)]


class _Table:
    def __init__(self, names: Row, rows: Sequence[Row], numeric: Sequence[bool], shorten: bool) -> None:
        self.names = names
        self.rows = rows
        self.numeric = numeric
        self.shorten = shorten

    def fitted(self, shown: Sequence[int], width: int) -> list[int] | None:
        """Return the widths of the columns with which a line fits; None if there are none."""
        available = width - len(_GAP) * (len(shown) - 1)
        limits = [self._limits(index) for index in shown]
        if sum(low for low, _ in limits) > available:
            return None

        def limited(limit: int) -> list[int]:
            return [max(low, min(high, limit)) for low, high in limits]

        return next(w for limit in range(width, -1, -1) if sum(w := limited(limit)) <= available)

    def _limits(self, index: int) -> tuple[int, int]:
        """Return the lowest and the highest useful width of a column."""
        name, cells = self.names[index], [row[index] for row in self.rows]
        high = max(map(cell_len, [name, *cells]))
        if self.shorten:
            longest = max(map(cell_len, cells), default=0)
            return max(cell_len(name), longest if self.numeric[index] else min(longest, _MIN_TEXT)), high
        if self.numeric[index]:
            return max(map(cell_len, [*name.split(" "), *cells])), high
        words = [word for text in (name, *cells) for word in text.split(" ")]
        return max(*map(cell_len, words), min(high, _MIN_TEXT)), high

    def lines(self, row: Row, shown: Sequence[int], widths: Sequence[int]) -> list[str]:
        """Return the lines of one row."""
        cells = [self._parts(row[index], width) for index, width in zip(shown, widths, strict=True)]
        return [
            _GAP.join(
                _padded(part, width, self.numeric[index])
                for part, index, width in zip(parts, shown, widths, strict=True)
            ).rstrip()
            for parts in zip_longest(*cells, fillvalue="")
        ]

    def vertical(self, rows: Sequence[Row], width: int) -> Iterator[str]:
        """Yield one line per column and row, with an empty line between two rows."""
        names = min(max(map(cell_len, self.names)), width // 2)
        for number, row in enumerate(rows):
            if number:
                yield ""
            for name, text in zip(self.names, row, strict=True):
                parts = self._parts(text, max(width - names - len(_GAP), _MIN_TEXT))
                for label, part in zip_longest(self._parts(name, names), parts, fillvalue=""):
                    yield f"{_padded(label, names)}{_GAP}{part}".rstrip()

    def _parts(self, text: str, width: int) -> list[str]:
        """Return a text as lines of a width, cut or wrapped at spaces."""
        if cell_len(text) <= width:
            return [text]
        if self.shorten:
            return [set_cell_size(text, width - 1) + "…"]
        lines = [""]
        for word in text.split(" "):
            longer = f"{lines[-1]} {word}"
            if not lines[-1]:
                lines[-1] = word
            elif cell_len(longer) <= width:
                lines[-1] = longer
            else:
                lines.append(word)
        return lines


def _padded(text: str, width: int, right: bool = False) -> str:
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks
