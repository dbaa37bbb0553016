"""Which epoch an iteration runs, agreed on by workers that share some memory and exchange no word.

For a DataLoader that copies its dataset into every worker. Never knows PyTorch, and never waits.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError

__all__ = ["MOST_WORKERS", "TURNS_SIZE", "Turns", "mark_of"]

MOST_WORKERS: Final = 1024
TURNS_SIZE: Final = 2 + MOST_WORKERS
"""Words of the shared array."""

_MARK_BITS: Final = 31


def mark_of(*facts: int) -> int:
    """Return 31 bits that name an iteration: the same in all its workers, and others in the next one."""
    return zlib.crc32(repr(facts).encode("ascii")) >> 1


class Turns:
    """The epochs that workers have begun, each in its own word of an array shared by all.

    Who comes to an iteration first takes the next epoch; who finds there a turn of this iteration that is
    ahead of its own last one joins it. A worker writes its word at once and no other, so those who come
    at the same time find the same epoch.

    An iteration that was left before all of its workers had begun it is passed over, if its mark is not
    that of the next.

    Args:
        words: int64 (``TURNS_SIZE``,): the epoch to run next and its first step, as they were set last,
            then a word a worker, -1 or its latest turn: epoch · 2^31 + the mark of the iteration.
    """

    def __init__(self, words: npt.NDArray[np.int64]) -> None:
        self._words = words

    def set(self, epoch: int, step: int) -> None:
        """Let the next iteration run ``epoch`` from ``step`` on; for when none is running."""
        self._words[2:] = -1
        self._words[:2] = epoch, step

    @property
    def latest(self) -> int:
        """The latest epoch that a worker has begun since the epoch was set; -1 if none has."""
        return int(self._words[2:].max()) >> _MARK_BITS

    def take(self, worker: int, mark: int) -> tuple[int, int]:
        """Return the epoch and the first step of the iteration of this mark, for one of its workers.

        Raises:
            ConfigError: there are more workers than words.
        """
        if worker >= MOST_WORKERS:
            raise ConfigError("too many workers", found=worker + 1, expected=f"up to {MOST_WORKERS}")
        turns = self._words[2:].copy()
        epochs = turns >> _MARK_BITS
        same = (turns & ((1 << _MARK_BITS) - 1)) == mark
        ahead = epochs[same & (epochs > epochs[worker])]
        begins, step = self._words[:2].tolist()
        epoch = int(ahead.max()) if len(ahead) else max(begins, int(epochs.max()) + 1)
        self.note(worker, mark, epoch)
        return epoch, step if epoch == begins else 0

    def note(self, worker: int, mark: int, epoch: int) -> None:
        """Write down which epoch a worker runs, for one that did not ask."""
        self._words[2 + worker] = epoch << _MARK_BITS | mark
