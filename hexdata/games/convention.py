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
"""What the legacy tool wrote, by the layout of its examples."""

_AGREEING: Final = 19
"""Games whose named winner agrees for each that does not: 95 %, where names decide alone."""
_OUTVOTED: Final = 4
"""Votes that outweigh one game against them."""
_REFUTING: Final = 3
"""Winning chains against the named winners from which these may be wrong throughout."""

_Count = tuple[int, int]


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
    """The convention of a source, and what decided it: named winners, chains, the layout, or the option."""

    convention: Convention
    by: Literal["winners", "chains", "layout", "given"]


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
        layout: the convention of the file's layout. It is worth one game.
        given: what the user says of files that do not show it. It decides where votes and layout do not,
            and in place of the layout where there is no vote; never against named winners that agree.
    """
    named = _unanimous(votes.winners)
    if named is not None:
        if not _refuted(votes.chains, named):
            return Decision(named, "winners")
        return Decision(named, "given") if given == named else None
    for by, count in (("chains", votes.chains), ("winners", votes.winners)):
        if sum(count):
            shown = _majority(count, layout)
            if shown is None:
                return given and Decision(given, "given")
            return Decision(shown, by)  # type: ignore[arg-type]
    if given is not None:
        return Decision(given, "given")
    return layout and Decision(layout, "layout")


def votes_text(votes: Votes, layout: Convention | None) -> str:
    """Return the evidence of a source for an error message."""
    text = (
        f"winning chains {votes.chains[0]:,} for blue-is-0 and {votes.chains[1]:,} for blue-is-1, "
        f"named winners {votes.winners[0]:,} and {votes.winners[1]:,}"
    )
    return text if layout is None else f"{text}, layout {layout}"


def _unanimous(winners: _Count) -> Convention | None:
    """Return what named winners say, if they agree but for slips."""
    if sum(winners):
        for index, convention in enumerate(CONVENTIONS):
            if winners[index] >= _AGREEING * winners[1 - index]:
                return convention  # type: ignore[no-any-return]
    return None


def _refuted(chains: _Count, named: Convention) -> bool:
    """Say whether the boards contradict the named winners in more games than they agree with them."""
    agreeing, against = chains if named == CONVENTIONS[0] else chains[::-1]
    return against >= _REFUTING and against > agreeing


def _majority(games: _Count, layout: Convention | None) -> Convention | None:
    """Return the convention with more votes, the layout's among them, that outweigh the games against it."""
    votes = [games[index] + (layout == convention) for index, convention in enumerate(CONVENTIONS)]
    for index, convention in enumerate(CONVENTIONS):
        if votes[index] > votes[1 - index] and votes[index] >= _OUTVOTED * games[1 - index]:
            return convention  # type: ignore[no-any-return]
    return None
