"""Value convention of a source: whether a value of 0.0 or of 1.0 means that blue won.

It is decided from evidence in the source; docs/decisions.md, number 17, explains the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from hexdata.json_models import Model

Convention = Literal["blue-is-0", "blue-is-1"]
CONVENTIONS: Final = get_args(Convention)

_LAYOUTS: Final[dict[object, Convention]] = {"tuple": "blue-is-1", "dict": "blue-is-0"}
"""Convention of the files of the legacy tool, by the layout of their examples."""

_WINNER_RATIO: Final = 19
"""Games in favour per game against, from which named winners decide alone: 95 %."""
_VOTE_RATIO: Final = 4
"""Games in favour per game against, from which other votes decide. Files that were joined of two parts with
opposite conventions stay undecided."""

_Count = tuple[int, int]
_By = Literal["winners", "chains", "layout", "given"]


class Votes(Model, frozen=True, gc=False):
    """Evidence for the value convention of a source, counted as (for blue-is-0, for blue-is-1).

    Values other than 0 and 1 are not counted.

    Attributes:
        chains: Final boards with a winning chain, compared with their values.
        winners: Games or positions whose metadata names the winner, compared with their values.
    """

    chains: _Count = (0, 0)
    winners: _Count = (0, 0)


@dataclass(frozen=True)
class Decision:
    """The value convention of a source.

    Attributes:
        convention: The convention.
        by: The deciding evidence: named winners, winning chains, the layout of the examples, or the option.
        contradicting: Number of voting chains that contradict the convention.
    """

    convention: Convention
    by: _By
    contradicting: int = 0


def convert_values(value: npt.NDArray[np.float64], convention: str) -> npt.NDArray[np.float64]:
    """Convert values between the store's convention (0.0 if blue won) and a source's, in either direction."""
    return value if convention == "blue-is-0" else 1.0 - value


def layout_convention(header: Mapping[str, object]) -> Convention | None:
    """Return the convention that the legacy tool used in files of this layout; None if it is unknown.

    Args:
        header: Header of a reader. Its ``dialect`` contains the layout of the examples.
    """
    dialect = header.get("dialect")
    layout = dialect.get("layout") if isinstance(dialect, Mapping) else None
    return _LAYOUTS.get(layout) if isinstance(layout, str) else None


def decide(votes: Votes, layout: Convention | None, given: Convention | None = None) -> Decision | None:
    """Return the convention that the evidence supports; None if the evidence is undecided.

    Args:
        votes: One vote per game where games are known.
        layout: Convention of the layout of the file. It counts as one vote if the votes differ, and decides
            if there are no votes.
        given: Convention given by the user. It decides if the votes do not, before the layout.
    """
    # Votes that contradict each other decide nothing, and no weaker evidence decides in their place.
    by: _By
    if convention := _majority(votes.winners, _WINNER_RATIO):
        by = "winners"
    elif any(votes.chains):
        convention, by = _majority(votes.chains, _VOTE_RATIO, layout), "chains"
    elif any(votes.winners):
        convention, by = _majority(votes.winners, _VOTE_RATIO, layout), "winners"
    else:
        convention, by = layout, "layout"
    # An option holds for all files of a run, so it must not override what a file shows.
    if given is not None and (by == "layout" or convention is None):
        convention, by = given, "given"
    if convention is None:
        return None
    return Decision(convention, by, votes.chains[1 - CONVENTIONS.index(convention)])


def _majority(games: _Count, ratio: int, layout: Convention | None = None) -> Convention | None:
    """Return the convention with at least ``ratio`` votes per game against it; the layout is a vote."""
    for index, convention in enumerate(CONVENTIONS):
        if games[index] and games[index] + (layout == convention) >= ratio * games[1 - index]:
            return convention  # type: ignore[no-any-return]
    return None


def votes_text(votes: Votes, layout: Convention | None) -> str:
    """Return the evidence as text for error messages."""
    text = (
        f"winning chains {votes.chains[0]:,} for blue-is-0 and {votes.chains[1]:,} for blue-is-1, "
        f"named winners {votes.winners[0]:,} and {votes.winners[1]:,}"
    )
    return text if layout is None else f"{text}, layout {layout}"
