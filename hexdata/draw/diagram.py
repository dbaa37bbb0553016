"""What is to be drawn on a board: stones, marks, numbers and shades. Never how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hexdata.board import BLUE, RED, check_board_size
from hexdata.errors import ConfigError

__all__ = ["Diagram", "Shades", "fact_lines"]

Scale = Literal["linear", "sqrt"]
_SCALES: Final = ("linear", "sqrt")


@dataclass(frozen=True, eq=False)
class Shades:
    """A number a cell, drawn as a shade: the larger, the stronger.

    Attributes:
        values: (n·n,) or (n, n), not negative; NaN where there is none, and no shade then.
        label: what the numbers are, beside the legend.
        texts: what stands in each cell, (n·n,); None for nothing, an empty text leaves a cell bare.
        share: the numbers are shares of one, and written as percentages.
        scale: how a number becomes a shade. ``sqrt`` shows small ones beside very large ones.
        top: the number of the strongest shade; None takes the largest.

    Raises:
        ConfigError: the numbers are negative, or not one a cell.
    """

    values: npt.NDArray[Any]
    label: str = ""
    texts: Sequence[str] | None = None
    share: bool = False
    scale: Scale = "linear"
    top: float | None = None

    def __post_init__(self) -> None:
        values = np.asarray(self.values, dtype=np.float64).ravel()
        object.__setattr__(self, "values", values)
        known = values[~np.isnan(values)]
        if (known < 0).any() or np.isinf(known).any():
            wrong = known[(known < 0) | np.isinf(known)][0]
            raise ConfigError("shades are of numbers from 0 up", found=wrong)
        if self.texts is not None and len(self.texts) != len(values):
            raise ConfigError("shades need one text a cell", found=len(self.texts), expected=len(values))
        if self.scale not in _SCALES:
            raise ConfigError("no such scale", found=self.scale, expected=" or ".join(_SCALES))
        if self.top is not None and not self.top > 0:
            raise ConfigError("the strongest shade is of a number above 0", found=self.top)

    @property
    def most(self) -> float:
        """The number of the strongest shade; 0 where there is none to shade."""
        if self.top is not None:
            return self.top
        known = self.values[~np.isnan(self.values)]
        return float(known.max()) if len(known) else 0.0

    @property
    def strengths(self) -> npt.NDArray[np.float64]:
        """Return the shade of each cell, 0 to 1, (n·n,); NaN where there is none."""
        most = self.most
        shares = np.minimum(self.values / most, 1.0) if most else self.values * 0.0
        return np.sqrt(shares) if self.scale == "sqrt" else shares

    def value_at(self, strength: float) -> float:
        """Return the number that has this shade: what the legend writes beside it."""
        return self.most * (strength**2 if self.scale == "sqrt" else strength)

    def format(self, value: float) -> str:
        """Write a number as the legend has it."""
        if self.share:
            return f"{100 * value:.3g} %"
        return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


@dataclass(frozen=True, eq=False)
class Diagram:
    """One board to draw, of size n.

    Attributes:
        size: n, from 3 to 26.
        planes: (2, n, n), the blue stones and the red ones, as a position has them; None for none.
        last_move: cell of the move that led here; it is marked.
        next_move: cell of the move made here; it is marked.
        player: who makes the next move: gives its mark a colour.
        numbers: what is written on the stone of a cell, such as the ply it was played at.
        shades: numbers drawn on the cells themselves.
        title: what the drawing shows, for those who cannot see it.
        caption: facts, each whole on one line below the board.

    Raises:
        FormatError: no boards of that size.
        ConfigError: a part is not of that size.
    """

    size: int
    planes: npt.NDArray[Any] | None = None
    last_move: int | None = None
    next_move: int | None = None
    player: int | None = None
    numbers: Mapping[int, int] = field(default_factory=dict)
    shades: Shades | None = None
    title: str = "Hex board"
    caption: Sequence[str] = ()

    def __post_init__(self) -> None:
        n = check_board_size(self.size)
        planes = np.zeros((2, n, n), dtype=bool) if self.planes is None else np.asarray(self.planes) != 0
        object.__setattr__(self, "planes", planes)
        if planes.shape != (2, n, n):
            raise ConfigError("not the planes of such a board", found=planes.shape, expected=(2, n, n))
        if self.shades is not None and len(self.shades.values) != n * n:
            raise ConfigError("shades need one number a cell", found=len(self.shades.values), expected=n * n)
        cells = {"last move": self.last_move, "next move": self.next_move}
        for name, cell in [*cells.items(), *(("number", cell) for cell in self.numbers)]:
            if cell is not None and not 0 <= cell < n * n:
                raise ConfigError(f"no such cell for the {name}", found=cell, expected=f"0 to {n * n - 1}")
        if self.player not in (None, BLUE, RED):
            raise ConfigError("no such player", found=self.player, expected=f"{BLUE} or {RED}")

    def stones(self, player: int) -> list[int]:
        """Return the cells where a player has a stone, ascending."""
        assert self.planes is not None  # __post_init__ makes them
        cells: list[int] = np.flatnonzero(self.planes[player]).tolist()
        return cells


def fact_lines(facts: Sequence[str], letters: int, between: str = " · ") -> list[str]:
    """Write facts one after the other, in lines of at most so many letters; a fact is never cut."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(between) + len(fact) <= letters:
            lines[-1] += between + fact
        else:
            lines.append(fact)
    return lines
