"""Which sense a source's ``value`` has: decided by evidence, per source, never assumed.

Dict files say 0.0 where blue won, tuple files 1.0, and neither says which (docs/format.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from hexdata.board import unpack_boards, winner_of
from hexdata.errors import InputError

__all__ = ["SENSES", "Sense", "Votes", "decide"]

Sense = Literal["blue-is-0", "blue-is-1"]
SENSES: Final = get_args(Sense)

MAJORITY: Final = 0.99
"""So large a share of the evidence must point one way."""


@dataclass
class Votes:
    """Evidence of a source, counted as (for blue-is-0, for blue-is-1).

    ``chains``: final boards (no next move) that hold a winning chain, against their value.
    ``winners``: positions whose metadata names the winner, against their value.
    Values other than 0 and 1 say nothing.
    """

    chains: tuple[int, int] = (0, 0)
    winners: tuple[int, int] = (0, 0)

    def count(
        self,
        boards: npt.NDArray[np.uint8],
        board_size: int,
        value: npt.NDArray[np.float64],
        winner: npt.NDArray[np.int8],
        final: npt.NDArray[np.bool_],
    ) -> None:
        """Add the evidence of some positions.

        Args:
            boards: packed, uint8 (N, ceil(2·n·n / 8)).
            board_size: n.
            value: float64 (N,), in the source's own sense.
            winner: int8 (N,): 0 blue, 1 red, -1 unknown.
            final: bool (N,): the position has no next move.
        """
        decided = (value == 0.0) | (value == 1.0)
        named = decided & (winner >= 0)
        self.winners = _add(self.winners, value[named] == winner[named])
        last = np.flatnonzero(decided & final)
        chain = winner_of(unpack_boards(boards[last], board_size, np.uint8))
        won = chain >= 0
        self.chains = _add(self.chains, value[last[won]] == chain[won])


def _add(votes: tuple[int, int], agrees: npt.NDArray[np.bool_]) -> tuple[int, int]:
    blue_is_0 = int(np.count_nonzero(agrees))
    return votes[0] + blue_is_0, votes[1] + len(agrees) - blue_is_0


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
        cure="If you know it, say so with --value-sense blue-is-0 or --value-sense blue-is-1.",
    )


def _leaning(votes: tuple[int, int]) -> Sense | None:
    for count, sense in zip(votes, SENSES, strict=True):
        if count >= MAJORITY * sum(votes):
            return sense  # type: ignore[no-any-return]
    return None
