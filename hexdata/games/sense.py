"""Which sense a source's ``value`` has: decided by evidence, per source, never assumed.

Dict files say 0.0 where blue won, tuple files 1.0, and neither says which (docs/format.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from hexdata.errors import InputError

__all__ = ["SENSES", "Sense", "Votes", "decide"]

Sense = Literal["blue-is-0", "blue-is-1"]
SENSES: Final = get_args(Sense)

MAJORITY: Final = 0.99
"""So large a share of the evidence must point one way."""


@dataclass(frozen=True)
class Votes:
    """Evidence of a source, counted as (for blue-is-0, for blue-is-1).

    ``chains``: final boards (no next move) that hold a winning chain, against their value.
    ``winners``: positions whose metadata names the winner, against their value.
    Values other than 0 and 1 say nothing.
    """

    chains: tuple[int, int] = (0, 0)
    winners: tuple[int, int] = (0, 0)

    def __add__(self, other: Votes) -> Votes:
        """Return the evidence of both."""
        return Votes(_sum(self.chains, other.chains), _sum(self.winners, other.winners))


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def decide(votes: Votes, source: str) -> Sense:
    """Return the sense that the evidence shows.

    The first kind of evidence that is there decides, chains before winners, if ``MAJORITY`` of it
    points one way and the other kind, where it is there, does not point the other way.

    Raises:
        InputError: there is no evidence, or it contradicts itself.
    """
    leanings = [_leaning(kind) for kind in (votes.chains, votes.winners) if sum(kind)]
    if leanings and leanings[0] is not None and set(leanings) <= {leanings[0], None}:
        return leanings[0]
    raise InputError(
        "it is not clear which value means that blue won",
        path=source,
        found=f"final boards with a winning chain: {votes.chains[0]} for blue-is-0 and {votes.chains[1]} "
        f"for blue-is-1; positions with a named winner: {votes.winners[0]} and {votes.winners[1]}",
        expected=f"at least {MAJORITY:.0%} one way",
        hint="If you know it, say so with --value-sense blue-is-0 or --value-sense blue-is-1.",
    )


def _leaning(votes: tuple[int, int]) -> Sense | None:
    for count, sense in zip(votes, SENSES, strict=True):
        if count >= MAJORITY * sum(votes):
            return sense  # type: ignore[no-any-return]
    return None
