"""The convention of a source's ``value``: 0.0 or 1.0 for a game that blue won, decided by weight of evidence.

docs/adr/0017-the-value-convention.md has the rule with its reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["CONVENTIONS", "Convention", "Decision", "Votes", "decide", "layout_convention", "votes_text"]

Convention = Literal["blue-is-0", "blue-is-1"]
CONVENTIONS: Final = get_args(Convention)

_LAYOUTS: Final[dict[object, Convention]] = {"tuple": "blue-is-1", "dict": "blue-is-0"}
"""The convention of files of the legacy tool, by the layout of their examples."""

_AGREEING: Final = 19
"""Games whose named winner agrees for each that does not: 95 %, where names decide alone."""
_OUTVOTED: Final = 4
"""Votes that outweigh one game against them."""

_Count = tuple[int, int]
_By = Literal["winners", "chains", "layout", "given"]


@dataclass(frozen=True)
class Votes:
    """Evidence of a source, counted as (for blue-is-0, for blue-is-1).

    ``chains``: final boards (no next move) that hold a winning chain, against their value.
    ``winners``: what names the winner, against its value.
    Values other than 0 and 1 say nothing.
    """

    chains: _Count = (0, 0)
    winners: _Count = (0, 0)

    def __add__(self, other: Votes) -> Votes:
        """Return the evidence of both."""
        return Votes(_sum(self.chains, other.chains), _sum(self.winners, other.winners))


def _sum(one: _Count, other: _Count) -> _Count:
    return one[0] + other[0], one[1] + other[1]


@dataclass(frozen=True)
class Decision:
    """The convention of a source.

    ``by``: what decided it: named winners, chains, the layout of the examples, or the option.
    ``contradicting``: chains against it, of those that vote.
    """

    convention: Convention
    by: _By
    contradicting: int = 0


def layout_convention(header: Mapping[str, object]) -> Convention | None:
    """Return the convention that the legacy tool used in files of a layout; None where that is not known.

    Args:
        header: what the reader found out about the file; ``dialect`` names the layout of its examples.
    """
    dialect = header.get("dialect")
    layout = dialect.get("layout") if isinstance(dialect, Mapping) else None
    return _LAYOUTS.get(layout) if isinstance(layout, str) else None


def decide(votes: Votes, layout: Convention | None, given: Convention | None = None) -> Decision | None:
    """Return the convention that the evidence shows, or None if it is near even.

    Args:
        votes: one vote per game, where games are known.
        layout: the convention of the file's layout. It is worth one game where votes differ.
        given: what the user says of files that do not show it. It decides where the votes do not, and in
            place of the layout where there is no vote.
    """
    convention, by = _shown(votes, layout)
    if convention is None and given is not None:
        convention, by = given, "given"
    elif by is None and layout is not None:
        convention, by = layout, "layout"
    if convention is None or by is None:
        return None
    return Decision(convention, by, votes.chains[1 - CONVENTIONS.index(convention)])


def _shown(votes: Votes, layout: Convention | None) -> tuple[Convention | None, _By | None]:
    """Return what the votes show, None if they are near even, and which of them decide, None without any."""
    named = _majority(votes.winners, _AGREEING, None)
    if named is not None:
        return named, "winners"
    if sum(votes.chains):
        return _majority(votes.chains, _OUTVOTED, layout), "chains"
    if sum(votes.winners):
        return _majority(votes.winners, _OUTVOTED, layout), "winners"
    return None, None


def _majority(games: _Count, ratio: int, layout: Convention | None) -> Convention | None:
    """Return the convention with ``ratio`` votes or more for each game against it; the layout is a vote."""
    for index, convention in enumerate(CONVENTIONS):
        if games[index] and games[index] + (layout == convention) >= ratio * games[1 - index]:
            return convention  # type: ignore[no-any-return]
    return None


def votes_text(votes: Votes, layout: Convention | None) -> str:
    """Return the evidence of a source for an error message."""
    text = (
        f"winning chains {votes.chains[0]:,} for blue-is-0 and {votes.chains[1]:,} for blue-is-1, "
        f"named winners {votes.winners[0]:,} and {votes.winners[1]:,}"
    )
    return text if layout is None else f"{text}, layout {layout}"
