"""The meaning of the flags of games, in one phrase each. docs/format.md defines them."""

from __future__ import annotations

from typing import Final

__all__ = ["FLAG_TEXTS"]

FLAG_TEXTS: Final = {
    "colours-swapped": "The game was begun by red.",
    "contradictory-duplicates": "The game is a duplicate, but its winner differs from the earlier one's.",
    "duplicate-exact": "The game has the moves of an earlier game.",
    "duplicate-fragment": "The game is incomplete and matches an earlier game.",
    "duplicate-symmetric": "The game is the mirror image or the rotation of an earlier game.",
    "impossible-stones": "A board has numbers of stones that cannot occur.",
    "label-contradicts-chain": "The value contradicts the winning chain on the final board.",
    "missing-positions": "Some positions of the game are missing.",
    "no-chain": "The game ends without a winning chain, for example by resignation.",
    "player-contradicts-stones": "The player to move contradicts the number of stones.",
    "policy-on-occupied": "A policy has weight on an occupied cell.",
    "repeated-move": "A move is on an occupied cell, and the game continues after it.",
    "tier-counts": "The value sample tiers do not have the usual numbers of positions.",
    "truncated": "The game was cut before a repeated move (--truncate-repeats).",
    "value-not-constant": "The positions of the game have different values.",
    "winner-contradicts-value": "A value contradicts the winner that is stated.",
}
"""Meaning of each flag."""
