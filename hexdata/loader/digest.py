"""The digest of an epoch: a number that two runs share if they had the same positions at the same steps.

A sum, so the digests of ranks and workers add up to that of one process. Never keeps a batch alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from hexdata.order import derive_key, sort_key

__all__ = ["EpochDigest", "combine_digests"]

_WORD: Final = (1 << 64) - 1
_STEP_SHIFT: Final = 36
"""Below it stands the position: ids under 69 billion and steps under 268 million never meet."""
_ENOUGH: Final = 1 << 16
"""Positions that are summed at once: a call for each batch would take some per cent of the loader's time."""


class EpochDigest:
    """Sums, mod 2^64, ``sort_key(position_id + step · 2^36, key)`` over the positions delivered.

    The key is ``derive_key(0, "digest", manifest digest, epoch)``. A position that is missing, repeated,
    exchanged for another or moved to another step changes the sum; the order within a step, which ranks
    and workers share out among them, does not. Padding does not count.
    """

    def __init__(self, shards: str, epoch: int, value: int = 0) -> None:
        """Begin the digest of an epoch of the shards of that manifest digest, or go on from a sum."""
        self._key = derive_key(0, "digest", shards, epoch)
        self._value = value
        self._pending: list[npt.NDArray[np.uint64]] = []
        self._count = 0

    def add(self, step: int, position_ids: npt.NDArray[np.int64]) -> None:
        """Count the positions (B,) of one step, or of a part of it."""
        self._pending.append(position_ids.astype(np.uint64) + np.uint64(step << _STEP_SHIFT & _WORD))
        self._count += len(position_ids)
        if self._count >= _ENOUGH:
            self._sum()

    @property
    def value(self) -> int:
        """The sum so far."""
        self._sum()
        return self._value

    def __str__(self) -> str:
        """Return the sum so far as 16 hexadecimal digits."""
        return format(self.value, "016x")

    def _sum(self) -> None:
        if self._pending:
            keys = sort_key(np.concatenate(self._pending), self._key)
            self._value = (self._value + int(keys.sum(dtype=np.uint64))) & _WORD
            self._pending, self._count = [], 0


def combine_digests(digests: Iterable[str]) -> str:
    """Return the digest of a whole epoch out of those of its ranks, each once and in any order."""
    return format(sum(int(digest, 16) for digest in digests) & _WORD, "016x")
