"""The stage that keeps the newest games and draws them repeatedly in seeded random order.

It stores the games by file and removes a file when its last game has left the window. It does not read the
content of a game.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from hexdata.checks import check_count
from hexdata.errors import ConfigError, InputError
from hexdata.live.chunk import NOTHING_READ, Chunk, ChunkSource, FoundFile, digest_games
from hexdata.live.stage import Stage, Worker
from hexdata.live.stream_shuffler import StreamShuffler
from hexdata.text import printable

__all__ = ["Hand", "ShufflingChunkPool"]

Hand = tuple[Chunk, ...]
"""Games drawn together. No game repeats."""

NAMED: Final = 20
"""Number of missing files of a state whose names are kept: the latest ones."""


@runtime_checkable
class _Reader(Protocol):
    """A stage that can read a file of a state again."""

    def read(self, file: FoundFile) -> ChunkSource: ...


@runtime_checkable
class _Mover(Protocol):
    """A stage that can find the new names of a moved file."""

    def find_moved(self, name: str) -> list[str]: ...


@dataclass
class _Source:
    """A file with at least one game in the window."""

    file: FoundFile
    first: int
    """Number of its first game."""
    chunks: list[Chunk]
    joined: int
    """Number of the pass in which its games entered; earlier passes did not contain them."""

    @property
    def stop(self) -> int:
        """Number of its last game, plus 1."""
        return self.first + len(self.chunks)

    def state(self) -> list[Any]:
        """Return the facts that find its games in the file again, and their numbers."""
        before = (self.file.after or NOTHING_READ).games
        which = digest_games(self.chunks)
        return [self.file.name, self.file.size, before, len(self.chunks), which, self.first, self.joined]


class ShufflingChunkPool(Stage):
    """Keeps a window of the newest games and draws from it: :class:`ChunkSource` in, hands of chunks out.

    Chunks are numbered upward without end in the order of their arrival. The newest ``pool_size`` chunks are
    the window, and only these are drawn, by a :class:`StreamShuffler`. Drawing starts after the first scan;
    of the files that exist at the start, those whose names sort last are therefore the newest. One thread
    receives and one draws, so that neither waits for the other's queue.

    After the end of the input, the pool ends when ``passes`` passes over the window are complete, including
    earlier passes. Without a game it ends at once.

    A state contains the names of the files of the window and the progress of the draws. To load it, these
    files are read again, by the stage of the pipeline that has a method ``read`` like that of
    ``ChunkSourceLoader``. Files that are missing or have changed are left out, with the numbers of their
    games; the others are drawn as they would have been. A text file that has only grown counts as unchanged.

    The metrics are ``chunks`` and ``sources`` (in the window), ``lower`` and ``upper`` (numbers of the
    window), ``entered`` and ``evicted`` (games in total), ``draws``, ``passes``, ``uses`` (draws per game
    that entered), ``window_uses`` (draws per game in the window), and ``missing`` (files of a state).

    Args:
        seed: Seed of the draws.
        pool_size: Number of games in the window. Default 100,000.
        hand: Maximum number of games drawn together, always from one pass. Default 256.
        min_chunks: Number of games needed before drawing starts, unless the input has ended. Default 1.
        passes: Number of passes after which the pool ends, once the input has ended. None (default) for no
            end.
        directory: Directory of the files of a state. With None (default), a state that names files cannot be
            loaded.

    Raises:
        ConfigError: An option cannot be used.
    """

    def __init__(
        self,
        *,
        seed: int,
        pool_size: int = 100_000,
        hand: int = 256,
        min_chunks: int = 1,
        passes: int | None = None,
        directory: str | Path | None = None,
    ) -> None:
        super().__init__(threads=2)
        self.pool_size = check_count("pool_size", pool_size, 1)
        self.hand = check_count("hand", hand, 1)
        self.min_chunks = check_count("min_chunks", min_chunks, 1)
        if self.min_chunks > self.pool_size:
            raise ConfigError("min_chunks is more than the pool holds", found=min_chunks, expected=pool_size)
        self.passes = None if passes is None else check_count("passes", passes, 1)
        self.directory = None if directory is None else Path(directory)
        self._reread: Callable[[FoundFile], ChunkSource] | None = None
        self._mover: _Mover | None = None
        self._window = threading.Lock()
        """Held while the attributes below are changed or read, but never while a thread waits for something
        else."""
        self._shuffler = StreamShuffler(seed)
        self._sources: list[_Source] = []
        self._firsts: list[int] = []
        """``first`` of each source."""
        self._newest = ""
        self._scanned = False
        self._ended = False
        self._missing: deque[tuple[str, str]] = deque(maxlen=NAMED)

    def meet(self, stages: Sequence[Stage]) -> None:
        """Find the stages that can read a file again and find a moved file."""
        self._mover = next((stage for stage in stages if isinstance(stage, _Mover)), None)
        self._reread = next((stage.read for stage in stages if isinstance(stage, _Reader)), None)

    @property
    def window(self) -> tuple[int, int]:
        """Range of the numbers that can be drawn: (first, last plus 1)."""
        with self._window:
            return self._shuffler.lower, self._shuffler.upper

    def work(self, worker: Worker) -> None:
        """Draw hands in the first thread; receive sources in the second."""
        if worker.number == 0:
            self._hand_out(worker)
        else:
            self._take_in(worker)

    def _hand_out(self, worker: Worker) -> None:
        while self.wait_for(worker, self._goes_on):
            hand = self._draw()
            self.put(worker, [hand] if hand else [])

    def _goes_on(self) -> bool | None:
        """Return whether to draw another hand; None if the thread has to wait.

        The window may contain numbers but no game, if all files of a state are missing.
        """
        if self._ended:
            over = self.passes is not None and self._shuffler.passes >= self.passes
            return bool(self._sources) and not over
        enough = self._scanned and len(self._shuffler) >= self.min_chunks
        return True if enough and self._sources else None

    def _draw(self) -> Hand:
        """Draw a hand; it is empty if all games drawn are missing."""
        with self._window:
            numbers = self._shuffler.draw(self.hand).tolist()
            found = (self._find(number) for number in numbers)
            return tuple(chunk for chunk in found if chunk is not None)

    def _find(self, number: int) -> Chunk | None:
        """Return the chunk with a number in the window; None if its file was missing at a restart."""
        place = bisect_right(self._firsts, number) - 1
        if place < 0:
            return None
        source = self._sources[place]
        place = number - source.first
        return source.chunks[place] if place < len(source.chunks) else None

    def _take_in(self, worker: Worker) -> None:
        try:
            while True:
                source = self.take(worker)
                if source.file.path is None:
                    self._scanned = True
                else:
                    self._enter(source)
                self.hub.change(lambda: None)  # wake the drawing thread
        finally:
            self._ended = True
            self.hub.change(lambda: None)

    def _enter(self, source: ChunkSource) -> None:
        """Number the chunks of a source and add them to the window; evict old ones."""
        first = self._shuffler.upper  # only this thread changes it
        chunks = _numbered(source, first)
        with self._window:
            self._newest = source.file.name
            if chunks:
                self._add(_Source(source.file, first, chunks, self._shuffler.passes))
                upper = first + len(chunks)
                self._shuffler.extend(upper)
                self._shuffler.cut(max(self._shuffler.lower, upper - self.pool_size))
                self._evict()

    def _add(self, source: _Source) -> None:
        self._sources.append(source)
        self._firsts.append(source.first)

    def _evict(self) -> None:
        """Remove the sources without a game in the window."""
        gone = 0
        while gone < len(self._sources) and self._sources[gone].stop <= self._shuffler.lower:
            gone += 1
        del self._sources[:gone]
        del self._firsts[:gone]

    def state(self) -> dict[str, Any]:
        """Return the names of the files in the window and the progress of the draws."""
        return {
            "shuffler": self._shuffler.state(),
            "scanned": self._scanned,
            "newest": self._newest,
            "sources": [source.state() for source in self._sources],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state and read the files of its window again.

        Raises:
            ConfigError: The state names files, but no stage can read them or no directory is given.
        """
        self._shuffler.load_state(state["shuffler"])
        self._scanned = state["scanned"]
        self._newest = state["newest"]
        for *facts, first, joined in state["sources"]:
            source = self._read_again(*facts)
            if source is not None:
                self._add(_Source(source.file, first, _numbered(source, first), joined))
        if not self._sources:  # skip the numbers of missing games, so that new ones are drawn at once
            self._shuffler.cut(self._shuffler.upper)

    def _read_again(self, name: str, size: int, before: int, count: int, which: bytes) -> ChunkSource | None:
        """Return the chunks that a state had of a file; None, noting the file as missing, if it has changed.

        Args:
            name: Name of the file.
            size: Size of the file in the state, in bytes.
            before: Number of games in earlier readings of the file.
            count: Number of games of the split in this reading.
            which: Digest of these games.
        """
        found = self._read_named(name, size, before, count, which)
        if isinstance(found, str) and self._mover is not None:
            for later in self._mover.find_moved(name):
                moved = self._read_named(later, size, before, count, which)
                found = found if isinstance(moved, str) else moved
        if not isinstance(found, str):
            return found
        self.count("missing")
        self._missing.append((printable(name), printable(found)))
        return None

    def _read_named(self, name: str, size: int, before: int, count: int, which: bytes) -> ChunkSource | str:
        """Return the chunks that a state had of the file with this name; or the reason why they are not
        available.
        """
        if self._reread is None or self.directory is None:
            raise ConfigError(
                "the pool cannot read the files of its state again",
                found=name,
                expected="a directory, and a stage that has a method read",
            )
        path = self.directory / name
        after = replace(NOTHING_READ, games=before) if before else None
        try:
            found = path.stat().st_size
            source = self._reread(FoundFile(path, name, found, after))
        except (InputError, OSError) as error:
            return str(error)
        longer = found > size and source.reading is not None
        kept = source.chunks[:count] if longer else source.chunks
        same = len(kept) == count and digest_games(kept) == which
        if same and (longer or found == size):
            return ChunkSource(FoundFile(path, name, size, after), kept)
        games = f"{count:,} other games" if len(kept) == count else f"{count:,}"
        return f"{found:,} bytes and {len(source.chunks):,} games now, not {size:,} and {games}"

    def metrics(self) -> dict[str, float]:
        """Return the metrics that the class describes."""
        with self._window:
            shuffler = self._shuffler
            inside = [min(source.stop - shuffler.lower, len(source.chunks)) for source in self._sources]
            passes = [shuffler.passes - source.joined for source in self._sources]
            chunks = sum(inside)
            drawn = sum(count * times for count, times in zip(inside, passes, strict=True))
            drawn += len(shuffler) - shuffler.left
            own = {
                "chunks": chunks,
                "sources": len(inside),
                "lower": shuffler.lower,
                "upper": shuffler.upper,
                "entered": shuffler.upper,
                "evicted": shuffler.lower,
                "draws": shuffler.draws,
                "passes": shuffler.passes,
                "uses": shuffler.draws / max(shuffler.upper, 1),
                "window_uses": drawn / max(chunks, 1),
            }
        return {**super().metrics(), **own}

    def notes(self) -> dict[str, Any]:
        """Return the ``newest`` file received, and the last ``missing`` files: (name, reason)."""
        missing = {"missing": list(self._missing)} if self._missing else {}
        return {"newest": printable(self._newest), **missing}


def _numbered(source: ChunkSource, first: int) -> list[Chunk]:
    return [replace(chunk, number=number) for number, chunk in enumerate(source.chunks, first)]
