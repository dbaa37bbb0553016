"""The interface of a fuzz target, and what all targets share."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from hexdata.errors import FormatError
from hexdata.formats.source import RawBatch, Rejection

__all__ = [
    "BOTH",
    "NEITHER",
    "STRICTER",
    "DifferentError",
    "Target",
    "check_boards",
    "edited",
    "files_in_memory",
    "read_all",
    "require",
]

BOTH, NEITHER, STRICTER = "accepted", "refused", "refused by hexdata only"
"""Results of a check. An input that hexdata accepts and the other reader refuses is a failure. Where the
other reader does not read refused inputs, ``STRICTER`` is a part of ``NEITHER``."""


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
        stack: Closes what the target opens.
    """

    name: ClassVar[str]
    max_len: ClassVar[int] = 2048
    words: ClassVar[tuple[bytes, ...]] = ()
    """Byte strings that random changes would hardly produce."""

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        self.scratch = scratch
        self.stack = stack

    def seeds(self) -> list[bytes]:
        """Return valid inputs."""
        raise NotImplementedError

    def check(self, raw: bytes) -> str:
        """Check one input; return ``BOTH``, ``NEITHER`` or ``STRICTER``.

        Raises:
            Exception: A failure.
        """
        raise NotImplementedError

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Return a changed input. Targets with checksums override this, to keep them valid."""
        return edited(raw, rng, self.words)


_BYTES = (0, 1, 2, 9, 10, 32, 34, 40, 41, 44, 46, 48, 58, 91, 93, 127, 128, 255)
_LENGTHS = (1, 1, 2, 3, 4, 8, 16, 64, 256)


def edited(raw: bytes, rng: random.Random, words: Sequence[bytes] = ()) -> bytes:
    """Return bytes after one to four edits."""
    found = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(found) + 1)
        length = rng.choice(_LENGTHS)
        kind = rng.randrange(8)
        if kind == 0 and words:
            found[start : start + rng.choice((0, 0, length))] = rng.choice(words)
        elif kind <= 1:
            found[start : start + 1] = bytes([rng.choice(_BYTES)])
        elif kind == 2 and start < len(found):
            found[start] ^= 1 << rng.randrange(8)
        elif kind == 3:
            del found[start : start + length]
        elif kind == 4:
            found[start:start] = found[start : start + length]
        elif kind == 5:
            other = rng.randrange(len(found) + 1)
            found[start : start + length] = found[other : other + length]
        elif kind == 6 and start < len(found):
            found[start] = (found[start] + rng.choice((1, -1))) % 256
        elif start < len(found):
            found[start] = rng.randrange(256)
    return bytes(found)


class MemoryStorage:
    """Stands in for the storage of a path: one file whose content is in memory."""

    local = None

    def __init__(self) -> None:
        self.content = b""

    def open(self, block: int = 0) -> io.BufferedReader:
        """Open the file for reading."""
        return io.BufferedReader(io.BytesIO(self.content))  # type: ignore[arg-type]

    def read_tagged(self, max_bytes: int) -> tuple[bytes, None]:
        """Return the content."""
        return self.content[:max_bytes], None

    def read_range(self, start: int, stop: int) -> bytes:
        """Return a part of the content."""
        return self.content[start:stop]

    def size(self) -> int:
        """Return the size of the content."""
        return len(self.content)

    def exists(self) -> bool:
        """Return True."""
        return True

    def names(self) -> list[str]:
        """Return no names: there is only one file."""
        return []


@contextmanager
def files_in_memory(*modules: ModuleType) -> Iterator[MemoryStorage]:
    """Let these modules read every path from the returned storage."""
    storage = MemoryStorage()
    before = [module.storage_of for module in modules]
    for module in modules:
        module.storage_of = lambda path: storage  # type: ignore[attr-defined]
    try:
        yield storage
    finally:
        for module, function in zip(modules, before, strict=True):
            module.storage_of = function  # type: ignore[attr-defined]


Reading = tuple[list[dict[str, Any]], list[Rejection], str]


def read_all(opened: Any) -> Reading:
    """Return rows, rejections and the code of the error, "" for none, of a function that opens a reader.

    Raises:
        DifferentError: A record is neither a row nor a rejection, or both.
    """
    batches: list[RawBatch] = []
    code = ""
    try:
        with opened() as reader:
            batches.extend(reader.batches())
            code = reader.damage.code if reader.damage else ""
    except FormatError as error:
        code = error.code
    rows: list[dict[str, Any]] = []
    rejected: list[Rejection] = []
    for batch in batches:
        found = batch.positions.to_pylist()
        first = len(rows) + len(rejected)
        records = sorted([row["record"] for row in found] + [each.record for each in batch.rejected])
        require(records == list(range(first, first + len(records))), "a record is missing or twice")
        require(all(each.reason and each.detail for each in batch.rejected), "a rejection without a reason")
        rows += found
        rejected += batch.rejected
    return rows, rejected, code


def check_boards(rows: list[dict[str, Any]], size: int) -> None:
    """Replay the moves of each game cell by cell, and compare every board and player with the rows."""
    stones: list[set[int]] = [set(), set()]
    for row in rows:
        if row["position_in_game"] == 0:
            stones = [set(), set()]
            first = row["player_to_move"]
        player = (first + row["position_in_game"]) % 2
        bits = np.unpackbits(np.frombuffer(row["board"], np.uint8), count=2 * size * size)
        found = [set(np.flatnonzero(plane).tolist()) for plane in bits.reshape(2, -1)]
        require(found == stones, f"record {row['record']} has another board")
        require(row["player_to_move"] == player, f"record {row['record']} has another player")
        if row["move"] is not None:
            require(not any(row["move"] in plane for plane in stones), "a move on a stone")
            stones[player] = stones[player] | {row["move"]}
