"""Items that pass between the stages of a live pipeline: chunks (games), by file and drawn together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.shards.blocks import Block

BoardSize = Annotated[int, Meta(ge=MIN_SIZE, le=MAX_SIZE)]
Number = Annotated[int, Meta(ge=0, le=1 << 50)]
"""A count, or the number of a chunk, from which the ids of its positions are computed in 64 bits."""

NAMED_FILES = 20
"""Number of bad or missing files whose names a stage keeps: the latest ones."""

PLY_STRIDE = 1 << 10
"""Factor between a chunk's number and the ``position_id`` of its positions: ``number * PLY_STRIDE + ply``.
It exceeds the number of positions of a game on the largest board (677)."""


SCANNED = ""
"""Marker between the names of files, and between the sources made of them: the end of the first scan. A stage
passes it on."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One game: all the positions that its source has, with values in the store's convention.

    A complete game that follows the rules is stored as its moves, which take less memory than its fill row;
    ``hexdata.fill`` makes its boards on demand. Any other game is stored as a ``block``, with the boards of
    its source.

    Attributes:
        board_size: Cells along an edge.
        source: Name of the file that contains the game.
        index: Index of the chunk in its file, from 0.
        game_hash: 16 bytes, as in ``games.game_hash``. The split depends on it.
        moves: uint16 (m,): the game has m + 1 positions. The policy of a position is its move; the last
            position has none. None for a game stored as a ``block``.
        value: Value of every position, in the store's convention: 0.0 if blue won, 1.0 if red won. Used with
            ``moves`` only.
        tiers: uint8 (m + 1,): value sample tiers by ply, 255 where unknown. None for no tiers. Used with
            ``moves`` only.
        block: The fields of a shard's block, by ply. ``position_id`` and ``game_id`` are ignored. None for a
            game stored as ``moves``.
        flags: Codes of ``games.findings.Flag`` that apply to the game, sorted. docs/format.md defines them.
        number: Number of the chunk in the pool, counted upward without end; -1 before it enters the pool.
    """

    board_size: BoardSize
    source: str
    index: Number
    game_hash: Annotated[bytes, Meta(min_length=16, max_length=16)]
    moves: npt.NDArray[np.uint16] | None = None
    value: Annotated[float, Meta(ge=0, le=1)] = 0.0
    tiers: npt.NDArray[np.uint8] | None = None
    block: Block | None = None
    flags: tuple[str, ...] = ()
    number: Annotated[int, Meta(ge=-1, le=1 << 50)] = -1

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
    deliveries: Number = 0
    """Number of deliveries."""
    games: Number = 0
    """Number of games read, of all splits. They are the first games of the file."""
    records: Number = 0
    """Number of records read, with rejected ones."""
    digest: bytes = b""
    """Digest of their hashes."""
    may_grow: bool = True
    """False if the file is complete, and a change of it is an error."""
