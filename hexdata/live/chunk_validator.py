"""The stage that leaves out games with impossible boards or contradictory labels. It repairs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hexdata.checks import as_tuple, check_choice
from hexdata.errors import ConfigError
from hexdata.games.findings import Flag
from hexdata.live.chunk import GameBatch
from hexdata.live.stage import Transform

INVALID_FLAGS: Final = (
    *(Flag.IMPOSSIBLE_STONES.code, Flag.LABEL_CONTRADICTS_CHAIN.code, Flag.PLAYER_CONTRADICTS_STONES.code),
    *(Flag.POLICY_ON_OCCUPIED.code, Flag.REPEATED_MOVE.code, Flag.WINNER_CONTRADICTS_VALUE.code),
)
"""Flags of games with wrong boards or labels.

They are: impossible boards (``impossible-stones``, ``repeated-move``), values that contradict the chain on
the board or the named winner, a policy on an occupied cell, and a wrong player to move.

The positions of games with other flags are usable: the game is incomplete, mirrored (``colours-swapped``) or
a duplicate, has unusual tiers, has no winning chain (``no-chain``), or has values that differ between its
positions (``value-not-constant``), as improved values do."""


@dataclass(kw_only=True, eq=False)
class ChunkValidator(Transform):
    """Leaves out games with invalid boards or labels: game batches in, game batches out.

    A batch without a remaining game is dropped.

    The counts are ``passed``, ``left_out``, and for each flag ``left_out.FLAG``. A game with several flags
    counts once for each, and once in ``left_out``.

    Args:
        flags: Codes of ``games.findings.Flag``; a game with one of them is left out. Default
            ``INVALID_FLAGS``.

    Raises:
        ConfigError: A flag is unknown.
    """

    flags: Sequence[str] = INVALID_FLAGS

    consumes = produces = "games"

    def __post_init__(self) -> None:
        super().__init__()
        if not isinstance(as_tuple(self.flags), tuple):
            raise ConfigError(f"flags must be a list of flags, not {self.flags!r}")
        for flag in self.flags:
            check_choice("flag", flag, [each.code for each in Flag])

    def process(self, item: GameBatch) -> Iterable[GameBatch]:
        """Return the batch without the games that are left out."""
        kept = [chunk for chunk in item if not {*chunk.flags} & {*self.flags}]
        for flag in (flag for chunk in item for flag in chunk.flags if flag in self.flags):
            self.count(f"left_out.{flag}")
        self.count("left_out", len(item) - len(kept))
        self.count("passed", len(kept))
        return (tuple(kept),) if kept else ()
