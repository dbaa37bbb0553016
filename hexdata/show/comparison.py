"""The differences between two positions, and their drawing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from hexdata.board import BLUE, RED, SYMMETRIES, Symmetry, cell_name, transform_planes
from hexdata.draw import Diagram, board_text, film_svg
from hexdata.draw.terminal import TEXT_WIDTH
from hexdata.errors import ConfigError
from hexdata.show.position import COLOURS, Position
from hexdata.text import count_of

__all__ = ["Comparison"]

_FRAME: Final = 400.0
_LETTERS: Final = 116
"""Number of letters above the two boards of an SVG that fit into a line."""
_MOST_MOVES: Final = 3
"""Number of moves of dense policies that are listed."""
_LEAST_CHANGE: Final = 0.005
"""Smaller differences of a probability are not listed one by one."""
_IMAGES: Final = {
    Symmetry.ROTATION: "a rotation by 180°",
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
            raise ConfigError(
                "positions of different board sizes cannot be compared",
                found=f"sizes {self.first.size} and {self.second.size}",
                expected="two positions of one size",
            )

    @property
    def cells(self) -> list[int]:
        """Indices of the cells whose stones differ, ascending."""
        cells: list[int] = np.flatnonzero((self.first.planes != self.second.planes).any(axis=0)).tolist()
        return cells

    @property
    def names(self) -> tuple[str, str]:
        """How the two positions are called in the facts."""
        first, second = _name(self.first), _name(self.second)
        if first is None or second is None or first == second:
            return "the first", "the second"
        return first, second

    def facts(self) -> list[str]:
        """Return each difference as a short text; "no differences" if there is none."""
        others = [*self._of_values(), *self._of_policies()]
        if not self.cells:
            return ["all stones are equal", *others] if others else ["no differences"]
        return [*self._of_stones(), *others]

    def _of_stones(self) -> Iterator[str]:
        first, second = self.first.planes, self.second.planes
        listed = ((self.names[0], first, second), (self.names[1], second, first))
        for name, own, other in listed:
            only = own & ~other.any(axis=0)
            stones = [
                f"{COLOURS[player]} {self._list_cells(only[player])}"
                for player in (BLUE, RED)
                if only[player].any()
            ]
            if stones:
                yield f"only in {name}: {', '.join(stones)}"
        for player in (BLUE, RED):
            changed = first[1 - player] & second[player] & ~first[player]
            if changed.any():
                yield f"{COLOURS[player]} instead of {COLOURS[1 - player]}: {self._list_cells(changed)}"
        for symmetry in SYMMETRIES[1:]:
            if np.array_equal(transform_planes(first, symmetry), second):
                yield f"the stones are equal after {_IMAGES[symmetry]}"

    def _of_values(self) -> Iterator[str]:
        """Yield the other attributes that differ, as ``Position.facts`` names them."""
        for name, (before, after) in zip(
            _ATTRIBUTES, zip(_attributes(self.first), _attributes(self.second), strict=True), strict=True
        ):
            yield from _change(name, before, after)
        for name in sorted(self.first.extra.keys() | self.second.extra.keys()):
            yield from _change(name, self.first.extra.get(name), self.second.extra.get(name))
        if self.first.metadata != self.second.metadata:
            yield "the metadata differ"

    def _of_policies(self) -> Iterator[str]:
        first, second = self.first.policy, self.second.policy
        if first is None or second is None:
            if (first is None) != (second is None):
                having = self.names[0] if second is None else self.names[1]
                yield f"only {having} has a dense policy"
            return
        with np.errstate(invalid="ignore"):
            change = np.abs(second - first)
        change[np.isnan(change)] = np.inf
        change[(first == second) | (np.isnan(first) & np.isnan(second))] = 0
        cells = np.argsort(-change, kind="stable")[:_MOST_MOVES].tolist()
        listed = [
            f"{cell_name(cell, self.first.size)} {after:.0f} instead of {before:.0f} %"
            for cell, before, after in zip(cells, 100 * first[cells], 100 * second[cells], strict=True)
            if change[cell] >= _LEAST_CHANGE
        ]
        if listed:
            yield f"policy: {', '.join(listed)}"
        elif change.any():
            yield "policy: no probability differs by more than 0.5 %"

    def _list_cells(self, plane: np.ndarray[Any, Any]) -> str:
        return " ".join(cell_name(cell, self.first.size) for cell in np.flatnonzero(plane).tolist())

    def _diagrams(self) -> tuple[Diagram, Diagram]:
        first, second = (
            replace(
                position.diagram(),
                last_move=None,
                next_move=None,
                shades=None,
                differing=self.cells,
                caption=position.facts(),
            )
            for position in (self.first, self.second)
        )
        return first, second

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
        diagram = replace(self._diagrams()[1], caption=())
        drawing = board_text(diagram, color=color, unicode=unicode, width=width)
        lines = _wrap([f"{self.title}:", *self.facts()], width)
        text = "\n".join(lines) + "\n"
        return drawing + (text if unicode else text.replace("°", " degrees"))

    def svg(self) -> str:
        """Return both boards side by side as SVG, with the differing cells shaded, below the differences."""
        lines = _wrap([self.title, *self.facts()], _LETTERS)
        return film_svg(
            self._diagrams(), columns=2, title=f"Hex positions: {self.title}", caption=lines, frame=_FRAME
        )

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


_ATTRIBUTES: Final = (
    *("game", "ply", "moves of the game", "player to move", "last move", "next move", "value", "winner"),
    *("tier", "root value", "visits", "weight"),
)


def _attributes(position: Position) -> Iterator[Any]:
    """Yield the attributes of a position, in the order of ``_ATTRIBUTES``."""
    n = position.size
    total = position.total_positions
    yield position.game_id
    yield position.ply
    yield None if total is None else total - 1
    yield COLOURS[position.player]
    yield None if position.last_move is None else cell_name(position.last_move, n)
    yield None if position.move is None else cell_name(position.move, n)
    yield position.value
    yield None if position.winner is None else COLOURS[position.winner]
    yield position.value_sample_tier
    yield position.root_value
    yield position.visits
    yield position.weight


def _change(name: str, before: object, after: object) -> Iterator[str]:
    """Yield the two values of an attribute if they differ, with as many digits as show it."""
    for digits in (6, 17):
        texts = [_text(value, digits) for value in (before, after)]
        if texts[0] != texts[1]:
            yield f"{name}: {texts[1]} instead of {texts[0]}"
            return


def _text(value: object, digits: int) -> str:
    if value is None:
        return "none"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _name(position: Position) -> str | None:
    if position.position_id is not None:
        return f"position {position.position_id}"
    return None if position.ply is None else f"ply {position.ply}"


def _wrap(lines: Sequence[str], width: int) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ")]
