"""Items that pass between the stages of a live pipeline: chunks (games), by file and drawn together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hexdata.errors import InputError
from hexdata.shards.blocks import Block

NAMED_FILES = 20
"""Number of bad or missing files whose names a stage keeps: the latest ones."""

PLY_STRIDE = 1 << 10
"""Factor between a chunk's number and the ``position_id`` of its positions: ``number * PLY_STRIDE + ply``.
It exceeds the number of positions of a game on the largest board (677)."""


SCANNED = ""
"""Marker between the names of files, and between the sources made of them: the end of the first scan. A stage
passes it on, and no queue drops it."""


def name_of(path: str) -> str:
    r"""Return the name of a file in a pipeline, whose state needs names that UTF-8 can encode.

    It is the path relative to the directory, except that ``\udcff`` stands for a byte 0xFF that is not UTF-8,
    and ``\u005cu`` for ``\u``.
    """
    return path.replace("\\u", r"\u005cu").encode("utf-8", "backslashreplace").decode()


def path_of(name: str) -> Path:
    """Return the path that has a name, relative to the directory.

    Raises:
        InputError: The file is outside the directory; the name is of a state that hexdata did not write.
    """
    path = Path(re.sub(r"\\u(005c|d[89a-f]..)", lambda code: chr(int(code[1], 16)), name))
    if path.anchor or ".." in path.parts:
        raise InputError("the file is outside the directory", path=path)
    return path


@dataclass(frozen=True, slots=True)
class Chunk:
    """One game: all the positions that its source has, with values in the store's convention.

    A complete game that follows the rules is stored as its moves, which take less memory than its fill row;
    ``hexdata.fill`` makes its boards on demand. Any other game is stored as a ``block``, with the boards of
    its source.
    """

    board_size: int
    source: str
    """Name of the file that contains the game."""
    index: int
    """Index of the chunk in its file, from 0."""
    game_hash: bytes
    """16 bytes, as in ``games.game_hash``. The split depends on it."""
    moves: npt.NDArray[np.uint16] | None = None
    """uint16 (m,): the game has m + 1 positions. The policy of a position is its move; the last position has
    none. None for a game stored as a ``block``."""
    value: float = 0.0
    """Value of every position, in the store's convention: 0.0 if blue won, 1.0 if red won. Used with
    ``moves`` only."""
    tiers: npt.NDArray[np.uint8] | None = None
    """uint8 (m + 1,): value sample tiers by ply, 255 where unknown. None for no tiers. Used with ``moves``
    only."""
    block: Block | None = None
    """The fields of a shard's block, by ply. ``position_id`` and ``game_id`` are ignored. None for a game
    stored as ``moves``."""
    flags: tuple[str, ...] = ()
    """Codes of ``games.findings.Flag`` that apply to the game, sorted. docs/format.md defines them."""
    number: int = -1
    """Number of the chunk in the pool, counted upward without end; -1 before it enters the pool."""

    @property
    def positions(self) -> int:
        """Number of positions of the game."""
        if self.moves is not None:
            return len(self.moves) + 1
        assert self.block is not None
        return len(self.block["value"])


GameBatch = tuple[Chunk, ...]
"""Games that pass through the pipeline together. A batch that the pool draws contains no game twice."""


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """The new chunks of one file."""

    name: str
    """Path of the file relative to the directory, with forward slashes."""
    chunks: list[Chunk]


@dataclass(slots=True)
class KnownFile:
    """What the listings of the directory have found of a file, and how far it was read.

    The listing sets the first attributes, the stage that reads files the others.
    """

    stat: tuple[int, int] = (0, 0)
    """Size in bytes and modification time in nanoseconds in the last listing."""
    since: float = 0.0
    """Time of ``time.monotonic`` after the first listing that found this size and time."""
    delivered: tuple[int, int] | None = None
    """Size and time when the file was last delivered; None if it has to be delivered, again or at all."""
    deliveries: int = 0
    """Number of deliveries, or -1 for a file that is never delivered."""
    games: int = 0
    """Number of games read, of all splits. They are the first games of the file."""
    records: int = 0
    """Number of records read, with rejected ones."""
    digest: bytes = b""
    """Digest of their hashes."""
    may_grow: bool = True
    """False if the file is complete, and a change of it is an error."""
