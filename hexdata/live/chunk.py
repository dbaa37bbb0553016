"""What flows through the stages of a live pipeline: files, chunks (games) and blocks of positions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hexdata.formats.shards import Block

__all__ = [
    "NOTHING_READ",
    "PLIES",
    "SCANNED",
    "Chunk",
    "ChunkSource",
    "FoundFile",
    "Reading",
    "begins_as",
    "digest_games",
]

PLIES = 1 << 10
"""More than a game on the largest board has positions (677): what a chunk's number is multiplied with, and
a ply added to, for the ``position_id`` of a live position."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a file was read that may still be written to: where it goes on once it has changed."""

    games: int
    """So many games of it, of all splits, are known; they are its first."""
    records: int
    """So many records of it, positions and rejected ones, are known."""
    digest: bytes
    """``digest_games`` of its games."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A complete file of the directory that is watched; or, as ``SCANNED``, the end of the first scan."""

    path: Path | None
    name: str = ""
    """Relative to the directory, with forward slashes: what messages and states call it."""
    size: int = 0
    after: Reading | None = None
    """How far it was read before, if it came before and has changed: only what follows is new."""
    is_moved: bool = False
    """Whether ``after`` is of an earlier name, going by the inode: what begins otherwise is a new file."""

    @property
    def is_mark(self) -> bool:
        """Whether it is ``SCANNED``: a mark, which no queue drops."""
        return self.path is None


SCANNED = FoundFile(None)
"""What comes once, after the files that were there at the start."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One game: all of its positions that its source has, and what its labels mean already decided.

    A game that is whole and was played by the rules is its moves: boards are made when they are needed.
    Any other is a ``block``, with the boards that were found.
    """

    board_size: int
    source: str
    """Name of the file it is from."""
    place: int
    """Of its file's chunks, from 0."""
    game_hash: bytes
    """16 bytes, as in ``games.game_hash``: decides the split."""
    moves: npt.NDArray[np.uint16] | None = None
    """(m,): the game has m + 1 positions, whose policies are the moves; the last has none."""
    value: float = 0.0
    """Of all its positions, in the store's convention: 0.0 blue wins, 1.0 red wins. With ``moves`` alone."""
    tiers: npt.NDArray[np.uint8] | None = None
    """(m + 1,) value sample tiers by ply, 255 where unknown; None for none. With ``moves`` alone."""
    block: Block | None = None
    """The fields of a shard's block (``position_id`` and ``game_id`` are not looked at), ply by ply."""
    flags: tuple[str, ...] = ()
    """Codes of ``games.findings.Flag`` that the game has, sorted: docs/format.md says what they mean."""
    number: int = -1
    """Counts the chunks that entered the pool, upward for ever; -1 before."""

    @property
    def positions(self) -> int:
        """How many positions it gives."""
        if self.moves is not None:
            return len(self.moves) + 1
        assert self.block is not None
        return len(self.block["value"])


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """The chunks of one file, or the end of the first scan (``file`` is ``SCANNED``)."""

    file: FoundFile
    chunks: list[Chunk] = field(default_factory=list)
    reading: Reading | None = None
    """How far the file was read, if it may go on; None where all of it was there."""

    @property
    def is_mark(self) -> bool:
        """Whether it is the end of the first scan: a mark, which no queue drops."""
        return self.file.is_mark


def digest_games(chunks: Iterable[Chunk]) -> bytes:
    """Return 16 bytes that say which games these are, and in which order."""
    return hashlib.blake2b(b"".join(chunk.game_hash for chunk in chunks), digest_size=16).digest()


def begins_as(chunks: Sequence[Chunk], reading: Reading) -> bool:
    """Say whether the games of a file begin with those of an earlier reading of it."""
    first = chunks[: reading.games]
    return len(first) == reading.games and digest_games(first) == reading.digest


NOTHING_READ = Reading(0, 0, digest_games([]))
"""How far a file was read that could not be used."""
