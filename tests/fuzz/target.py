"""The interface of a fuzz target, and what all targets share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hexdata.errors import FormatError
from hexdata.formats import Rejection, SourceReader

__all__ = ["DifferentError", "Target", "check_boards", "edited", "read_all", "require"]


class DifferentError(AssertionError):
    """hexdata and another reader find different things in the same bytes."""


def require(condition: object, message: str) -> None:
    """Raise ``DifferentError`` unless the condition holds."""
    if not condition:
        raise DifferentError(message)


class Target:
    """A parser, valid inputs of it, and a check of one input.

    Args:
        scratch: Empty folder.
    """

    max_len: ClassVar[int] = 2048
    words: ClassVar[tuple[bytes, ...]] = ()
    """Byte strings that random changes would hardly produce."""

    def __init__(self, scratch: Path) -> None:
        self.path = scratch / "file"

    def seeds(self) -> list[bytes]:
        """Return valid inputs."""
        raise NotImplementedError

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Return a changed input. Targets with checksums override this, to keep them valid."""
        return edited(raw, rng, self.words)

    def check(self, raw: bytes) -> bool:
        """Check one input; return whether it is accepted.

        Raises:
            Exception: A failure.
        """
        raise NotImplementedError


_BYTES = (0, 1, 2, 9, 10, 32, 34, 40, 41, 44, 46, 48, 58, 91, 93, 127, 128, 255)


def edited(raw: bytes, rng: random.Random, words: Sequence[bytes] = ()) -> bytes:
    """Return bytes after one to four edits."""
    found = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(found) + 1)
        stop = start + rng.choice((1, 1, 2, 3, 4, 8, 16, 64, 256))
        kind = rng.randrange(7)
        if kind == 0 and words:
            found[start : rng.choice((start, start, stop))] = rng.choice(words)
        elif kind <= 1:
            found[start : start + 1] = bytes([rng.choice(_BYTES)])
        elif kind == 2 and start < len(found):
            found[start] ^= 1 << rng.randrange(8)
        elif kind == 3:
            del found[start:stop]
        elif kind == 4:
            found[start:start] = found[start:stop]
        elif kind == 5:
            other = rng.randrange(len(found) + 1)
            found[start:stop] = found[other : other + stop - start]
        elif start < len(found):
            found[start] = (found[start] + rng.choice((1, -1, rng.randrange(256)))) % 256
    return bytes(found)


Reading = tuple[list[dict[str, Any]], list[Rejection], str]


def read_all(opened: Callable[[], SourceReader]) -> Reading:
    """Return rows, rejections and the code of the error, "" for none, of a function that opens a reader.

    Raises:
        DifferentError: A record is neither a row nor a rejection, or both.
    """
    rows: list[dict[str, Any]] = []
    rejected: list[Rejection] = []
    code = ""
    try:
        with opened() as reader:
            for batch in reader.batches():
                batch.positions.validate(full=True)
                found, first = batch.positions.to_pylist(), len(rows) + len(rejected)
                records = sorted([row["record"] for row in found] + [each.record for each in batch.rejected])
                expected = list(range(first, first + len(records)))
                require(records == expected, "a record is missing or twice")
                are_named = all(each.reason and each.detail for each in batch.rejected)
                require(are_named, "a rejection without a reason")
                rows += found
                rejected += batch.rejected
            code = reader.damage.code if reader.damage else ""
    except FormatError as error:
        code = error.code
    return rows, rejected, code


def check_boards(rows: list[dict[str, Any]]) -> None:
    """Replay the moves of each game cell by cell, and compare every board and player with the rows.

    A game may begin with stones, and at a later ply: its first row is the one after a row without a move.
    """
    stones, is_first = list[set[int]](), True
    size = int((4 * len(rows[0]["board"])) ** 0.5) if rows else 0
    for row in rows:
        bits = np.unpackbits(np.frombuffer(row["board"], np.uint8), count=2 * size * size)
        found = [set(np.flatnonzero(plane).tolist()) for plane in bits.reshape(2, -1)]
        if is_first:
            stones = found if row["position_in_game"] else [set(), set()]
            first = (row["player_to_move"] + row["position_in_game"]) % 2
        player = row["player_to_move"]
        require(found == stones, f"record {row['record']} has another board")
        require(player == (first + row["position_in_game"]) % 2, f"record {row['record']} has another player")
        if not (is_first := row["move"] is None):
            require(not any(row["move"] in plane for plane in stones), "a move on a stone")
            stones[player] = stones[player] | {row["move"]}
