"""Description of a drawing: stones, marks, numbers and shades on a board."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from hexdata.board import BLUE, RED, check_board_size
from hexdata.checks import check_choice
from hexdata.errors import ConfigError

Scale = Literal["linear", "sqrt"]


@dataclass(frozen=True, eq=False)
class Shades:
    """Numbers per cell, drawn as shades: larger numbers are darker.

    Attributes:
        values: Numbers of the cells (n·n,) or (n, n), not negative; NaN for cells without a shade.
        label: Description of the numbers, shown in the legend.
        texts: Texts written into the cells (n·n,); an empty text writes nothing. Default None: no texts.
        share: Whether the numbers are shares from 0 to 1, shown as percentages. Default False.
        scale: ``"linear"`` (default), or ``"sqrt"``, which makes small numbers visible beside large ones.
        top: Number of the darkest shade. Default None: the largest number.

    Raises:
        ConfigError: A number is negative or infinite, or an attribute has the wrong length or value.
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
        wrong = values[(values < 0) | np.isinf(values)]
        if len(wrong):
            raise ConfigError(f"shades need finite numbers that are not negative; found {wrong[0]}")
        if self.texts is not None and len(self.texts) != len(values):
            raise ConfigError(f"shades need a text for each of {len(values)} cells; found {len(self.texts)}")
        check_choice("scale", self.scale, get_args(Scale))
        if self.top is not None and not self.top > 0:
            raise ConfigError(f"top must be above 0; found {self.top}")

    @property
    def maximum(self) -> float:
        """Number of the darkest shade; 0 if there are no numbers."""
        if self.top is not None:
            return self.top
        # Cells without a shade are NaN, which `max` would return.
        known = self.values[~np.isnan(self.values)]
        return float(known.max()) if len(known) else 0.0

    @property
    def strengths(self) -> npt.NDArray[np.float64]:
        """Shade of each cell from 0 to 1 (n·n,); NaN for cells without a shade."""
        maximum = self.maximum
        shares = np.minimum(self.values / maximum, 1.0) if maximum else self.values * 0.0
        return np.sqrt(shares) if self.scale == "sqrt" else shares

    def value_at(self, strength: float) -> float:
        """Return the number that has this shade, for the legend."""
        return self.maximum * (strength**2 if self.scale == "sqrt" else strength)

    def format(self, value: float) -> str:
        """Format a number for the legend."""
        if self.share:
            return f"{100 * value:.3g} %"
        return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


@dataclass(frozen=True, eq=False)
class Diagram:
    """Drawing of one board of size n.

    Attributes:
        size: Board size n, from 3 to 32.
        planes: Blue and red stones (2, n, n), any dtype, 0 for empty. Default None: an empty board.
        last_move: Cell index of the last move, which is marked.
        next_move: Cell index of the next move, which is marked.
        player: Player of the next move, ``BLUE`` or ``RED``; determines the colour of the mark.
        numbers: Numbers written on stones, by cell index, such as plies.
        shades: Numbers drawn as shades of the cells.
        title: Accessible description of the drawing.
        caption: Short texts below the board; only those longer than a line are split.

    Raises:
        FormatError: The board size is not supported.
        ConfigError: An attribute does not fit the board size.
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
            raise ConfigError(f"planes must have the shape {(2, n, n)}; found {planes.shape}")
        if self.shades is not None and len(self.shades.values) != n * n:
            raise ConfigError(f"shades need {n * n} numbers, one a cell; found {len(self.shades.values)}")
        for cell in (self.last_move, self.next_move, *self.numbers):
            if cell is not None and not 0 <= cell < n * n:
                raise ConfigError(f"a cell must be from 0 to {n * n - 1}; found {cell}")
        if self.player not in (None, BLUE, RED):
            raise ConfigError(f"player must be {BLUE} or {RED}; found {self.player}")

    def stones(self, player: int) -> list[int]:
        """Return the cell indices of a player's stones, ascending."""
        assert self.planes is not None  # set by __post_init__
        cells: list[int] = np.flatnonzero(self.planes[player]).tolist()
        return cells


def fact_lines(
    facts: Sequence[str], letters: int, between: str = " · ", *, length: Callable[[str], int] = len
) -> list[str]:
    """Join texts into lines of at most ``letters`` characters. Only a text that is longer is split."""
    lines: list[str] = []
    for fact in facts:
        if lines and length(lines[-1] + between + fact) <= letters:
            lines[-1] += between + fact
        else:
            lines += (
                [fact] if length(fact) <= letters else textwrap.wrap(fact, letters, subsequent_indent="  ")
            )
    return lines
