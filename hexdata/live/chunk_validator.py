"""The stage that leaves out games with impossible boards or contradictory labels. It repairs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hexdata.checks import as_tuple, check_choice, check_fields
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

    The counts are ``passed``, ``left_out``, and for each reason ``left_out.FLAG``, ``left_out.short`` and
    ``left_out.long``. A game with several reasons counts once for each, and once in ``left_out``.

    Args:
        flags: Codes of ``games.findings.Flag``; a game with one of them is left out. Default
            ``INVALID_FLAGS``.
        min_positions: Minimum number of positions of a game. Default 1.
        max_positions: Maximum number of positions of a game. None (default) for no limit.
        threads: Number of threads of the stage. Default 1.

    Raises:
        ConfigError: A flag is unknown, or the limits exclude every game.
    """

    flags: Sequence[str] = INVALID_FLAGS
    min_positions: int = 1
    max_positions: int | None = None
    threads: int = 1

    consumes = produces = "games"

    def __post_init__(self) -> None:
        super().__init__(threads=self.threads)
        if not isinstance(as_tuple(self.flags), tuple):
            raise ConfigError(f"flags must be a list of flags, not {self.flags!r}")
        for flag in self.flags:
            check_choice("flag", flag, [each.code for each in Flag])
        check_fields(self, {"min_positions": 1})
        check_fields(self, {"max_positions": self.min_positions})

    def process(self, item: GameBatch) -> Iterable[GameBatch]:
        """Return the batch without the games that are left out."""
        kept = []
        most = math.inf if self.max_positions is None else self.max_positions
        for chunk in item:
            reasons = [flag for flag in chunk.flags if flag in self.flags]
            reasons += ["short"] * (chunk.positions < self.min_positions)
            reasons += ["long"] * (chunk.positions > most)
            for reason in reasons:
                self.count(f"left_out.{reason}")
            if not reasons:
                kept.append(chunk)
        self.count("left_out", len(item) - len(kept))
        self.count("passed", len(kept))
        return (tuple(kept),) if kept else ()

    def wait_reason(self) -> str | None:
        """Return that no game has passed, and for which reasons."""
        if self.counts.get("passed") or not self.counts.get("left_out"):
            return None
        reasons = sorted(name.partition(".")[2] for name in list(self.counts) if "." in name)
        return f"{self.name} leaves out every game that is drawn, because of {', '.join(reasons)}"
