"""Items that pass between the stages of a live pipeline: files, chunks (games) and game batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hexdata.shards.blocks import Block

__all__ = [
    "NAMED_FILES",
    "NOTHING_READ",
    "PLY_STRIDE",
    "SCANNED",
    "Chunk",
    "ChunkSource",
    "FoundFile",
    "GameBatch",
    "ReadProgress",
    "digest_games",
    "starts_with",
]

NAMED_FILES = 20
"""Number of bad or missing files whose names a stage keeps: the latest ones."""

PLY_STRIDE = 1 << 10
"""Factor between a chunk's number and the ``position_id`` of its positions: ``number * PLY_STRIDE + ply``.
It exceeds the number of positions of a game on the largest board (677)."""


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """Progress of reading a file that may grow. The next reading continues from here."""

    games: int
    """Number of games read, of all splits. They are the first games of the file."""
    records: int
    """Number of records read: positions and rejected records."""
    digest: bytes
    """``digest_games`` of the games read."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A complete file of the watched directory, or the marker ``SCANNED`` for the end of the first scan."""

    path: Path | None
    name: str = ""
    """Path relative to the directory, with forward slashes. Messages and states use it."""
    size: int = 0
    previous: ReadProgress | None = None
    """Progress of the reading before the file changed: only the games after it are new. None for a new
    file."""
    is_moved: bool = False
    """Whether ``previous`` belongs to an earlier name of the same inode. If the games differ, the file counts
    as new."""

    @property
    def is_marker(self) -> bool:
        """True for ``SCANNED``, a marker that no queue drops."""
        return self.path is None


SCANNED = FoundFile(None)
"""Marker emitted once, after the files that exist at the start."""


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
    """The chunks of one file, or the end of the first scan if ``file`` is ``SCANNED``."""

    file: FoundFile
    chunks: list[Chunk] = field(default_factory=list)
    progress: ReadProgress | None = None
    """Progress of the reading, if the file may grow; None if it is complete."""

    @property
    def is_marker(self) -> bool:
        """True for the end of the first scan, a marker that no queue drops."""
        return self.file.is_marker


def digest_games(chunks: Iterable[Chunk]) -> bytes:
    """Return a digest of 16 bytes that identifies these games and their order."""
    return hashlib.blake2b(b"".join(chunk.game_hash for chunk in chunks), digest_size=16).digest()


def starts_with(chunks: Sequence[Chunk], progress: ReadProgress) -> bool:
    """Return whether the first games of a file are those of an earlier reading of it."""
    first = chunks[: progress.games]
    return len(first) == progress.games and digest_games(first) == progress.digest


NOTHING_READ = ReadProgress(0, 0, digest_games([]))
"""Progress of a file that gave no games, such as one that could not be read."""
