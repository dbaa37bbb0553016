"""The differences between two positions, and their drawing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from hexdata.board import BLUE, RED, SYMMETRIES, Symmetry, cell_name, transform_planes
from hexdata.draw import Diagram, board_text, film_svg
from hexdata.draw.terminal import TEXT_WIDTH
from hexdata.errors import ConfigError
from hexdata.show.position import COLOURS, Position
from hexdata.text import count_of

_FRAME: Final = 400.0
"""Horizontal distance between the two boards in pixels: twice that of a filmstrip, which has many."""
_MOST_MOVES: Final = 3
"""Number of moves of dense policies that are listed."""
_IMAGES: Final = {
    Symmetry.ROTATION: "a rotation by half a turn",
    Symmetry.LONG_DIAGONAL: "a reflection in the long diagonal, with the colours swapped",
    Symmetry.SHORT_DIAGONAL: "a reflection in the short diagonal, with the colours swapped",
}


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The differences between two positions. Notebooks display it as SVG, ``print`` as text:

        comparison = hexdata.show.Comparison(game.at(30), game.at(40))
        print(comparison)
        comparison.cells  # the cells whose stones differ

    Attributes:
        first: A position.
        second: The position that is compared with it, of the same board size.

    Raises:
        ConfigError: The board sizes differ.
    """

    first: Position
    second: Position

    def __post_init__(self) -> None:
        if self.first.size != self.second.size:
            sizes = f"sizes {self.first.size} and {self.second.size}"
            raise ConfigError(f"positions of different board sizes cannot be compared: {sizes}")

    @property
    def cells(self) -> list[int]:
        """Indices of the cells whose stones differ, ascending."""
        cells: list[int] = np.flatnonzero((self.first.planes != self.second.planes).any(axis=0)).tolist()
        return cells

    def facts(self) -> list[str]:
        """Return each difference as a short text; "no differences" if there is none."""
        stones, others = list(self._of_stones()), [*self._of_values(), *self._of_policies()]
        if not self.cells:
            stones = ["all stones are equal"] if others else ["no differences"]
        return stones + others

    @property
    def names(self) -> tuple[str, str]:
        """How the two positions are called in the facts."""
        first, second = _name(self.first), _name(self.second)
        known = first and second and first != second
        return (first, second) if known else ("the first", "the second")  # type: ignore[return-value]

    def _of_stones(self) -> Iterator[str]:
        first, second = self.first.planes, self.second.planes

        def listed(plane: Any) -> str:
            return " ".join(cell_name(cell, self.first.size) for cell in np.flatnonzero(plane).tolist())

        for name, own, other in zip(self.names, (first, second), (second, first), strict=True):
            # Cells whose stone has the other colour are listed below.
            only = own & ~other.any(axis=0)
            if only.any():
                each = [f"{COLOURS[p]} {listed(only[p])}" for p in (BLUE, RED) if only[p].any()]
                yield f"only in {name}: {', '.join(each)}"
        for player in (BLUE, RED):
            changed = first[1 - player] & second[player] & ~first[player]
            if changed.any():
                yield f"{COLOURS[player]} instead of {COLOURS[1 - player]}: {listed(changed)}"
        for symmetry in SYMMETRIES[1:]:
            if self.cells and np.array_equal(transform_planes(first, symmetry), second):
                yield f"the stones are equal after {_IMAGES[symmetry]}"

    def _of_values(self) -> Iterator[str]:
        """Yield the other attributes that differ, with as many digits as show it."""
        before, after = (_values(position) for position in (self.first, self.second))
        for name in before | after:
            # 17 digits distinguish all numbers of 64 bits.
            for digits in (6, 17):
                old, new = (_text(values.get(name), digits) for values in (before, after))
                if old != new:
                    yield f"{name}: {new} instead of {old}"
                    break
        if self.first.metadata != self.second.metadata:
            yield "the metadata differ"

    def _of_policies(self) -> Iterator[str]:
        first, second = self.first.policy, self.second.policy
        if first is None or second is None:
            if first is not second:
                yield f"only {self.names[second is not None]} has a dense policy"
            return
        change = np.nan_to_num(np.abs(second - first))
        largest = [c for c in np.argsort(-change, kind="stable")[:_MOST_MOVES].tolist() if change[c]]
        name = functools.partial(cell_name, n=self.first.size)
        listed = [f"{name(c)} {100 * second[c]:.4g} instead of {100 * first[c]:.4g} %" for c in largest]
        if listed:
            yield f"policy: {', '.join(listed)}"

    def _diagrams(self) -> list[Diagram]:
        return [
            # Without the marks of a single position, so that only the differences stand out.
            replace(p.diagram(), last_move=None, next_move=None, shades=None, differing=self.cells)
            for p in (self.first, self.second)
        ]

    @property
    def title(self) -> str:
        """One line that names both positions."""
        first, second = _name(self.first), _name(self.second)
        return f"{second or 'the second'} compared with {first or 'the first'}"

    def text(self, *, color: bool = False, unicode: bool = True, width: int = TEXT_WIDTH) -> str:
        """Return the second position as text, with the differing cells in parentheses, and the differences.

        Args:
            color: Whether to use ANSI escape sequences. Default False.
            unicode: Whether to use characters beyond ASCII. Default True.
            width: Maximum line length of the texts below the board. Default 78.
        """
        diagram = replace(self._diagrams()[1], caption=(self.title, *self.facts()))
        return board_text(diagram, color=color, unicode=unicode, width=width)

    def svg(self) -> str:
        """Return both boards side by side as SVG, with the differing cells shaded, below the differences."""
        title, caption = f"Hex positions: {self.title}", (self.title, *self.facts())
        return film_svg(self._diagrams(), columns=2, title=title, caption=caption, frame=_FRAME)

    def to_json(self) -> dict[str, Any]:
        """Return both positions, the names of the differing cells, and the differences as texts."""
        return {
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "cells": [cell_name(cell, self.first.size) for cell in self.cells],
            "differences": self.facts(),
        }

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Comparison: {self.title}, {count_of(len(self.cells), 'differing cell')}>"

    def _repr_svg_(self) -> str:
        return self.svg()


def _values(position: Position) -> dict[str, Any]:
    """Return the values of a position by name, without those that are compared in another way."""
    content = position.to_json()
    for name in ("board_size", *COLOURS, "policy", "position_id", "metadata"):
        del content[name]
    return {name.replace("_", " "): value for name, value in (content | content.pop("extra")).items()}


def _text(value: object, digits: int) -> str:
    if value is None:
        return "none"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _name(position: Position) -> str | None:
    if position.position_id is not None:
        return f"position {position.position_id}"
    return None if position.ply is None else f"ply {position.ply}"
