"""The stage that leaves out games with impossible boards or contradictory labels. It repairs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from hexdata.checks import as_tuple, check_count
from hexdata.errors import ConfigError
from hexdata.games.findings import Flag
from hexdata.live.chunk import Chunk, GameBatch
from hexdata.live.stage import Transform

__all__ = ["INVALID_FLAGS", "ChunkValidator"]

INVALID_FLAGS: Final = tuple(
    flag.code
    for flag in (
        Flag.IMPOSSIBLE_STONES,
        Flag.LABEL_CONTRADICTS_CHAIN,
        Flag.PLAYER_CONTRADICTS_STONES,
        Flag.POLICY_ON_OCCUPIED,
        Flag.REPEATED_MOVE,
        Flag.WINNER_CONTRADICTS_VALUE,
    )
)
"""Flags of games with wrong boards or labels.

They are: impossible boards (``impossible-stones``, ``repeated-move``), values that contradict the chain on
the board or the named winner, a policy on an occupied cell, and a wrong player to move.

The positions of games with other flags are usable: the game is incomplete, mirrored (``colours-swapped``) or
a duplicate, has unusual tiers, has no winning chain (``no-chain``), or has values that differ between its
positions (``value-not-constant``), as improved values do."""


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

    def __init__(
        self,
        *,
        flags: Sequence[str] = INVALID_FLAGS,
        min_positions: int = 1,
        max_positions: int | None = None,
        threads: int = 1,
    ) -> None:
        super().__init__(threads=threads)
        self.flags = _check_flags(flags)
        self.min_positions = check_count("min_positions", min_positions, 1)
        self.max_positions = None
        if max_positions is not None:
            self.max_positions = check_count("max_positions", max_positions, self.min_positions)

    def process(self, item: GameBatch) -> Iterable[GameBatch]:
        """Return the batch without the games that are left out."""
        kept = []
        for chunk in item:
            reasons = self._reasons(chunk)
            if not reasons:
                kept.append(chunk)
                continue
            self.count("left_out")
            for reason in reasons:
                self.count(f"left_out.{reason}")
        self.count("passed", len(kept))
        return (tuple(kept),) if kept else ()

    def _reasons(self, chunk: Chunk) -> list[str]:
        reasons = [flag for flag in chunk.flags if flag in self.flags]
        if chunk.positions < self.min_positions:
            reasons.append("short")
        if self.max_positions is not None and chunk.positions > self.max_positions:
            reasons.append("long")
        return reasons


def _check_flags(flags: Sequence[str]) -> frozenset[str]:
    known = [flag.code for flag in Flag]
    codes = as_tuple(flags)
    if not isinstance(codes, tuple):
        raise ConfigError("flags cannot be used", found=repr(flags), expected="a list of flag codes")
    unknown = [code for code in codes if code not in known]
    if unknown:
        raise ConfigError("unknown flags", found=unknown, expected=f"some of {', '.join(known)}")
    return frozenset(codes)
