"""The stage that keeps the newest games and hands them out, again and again, in seeded random order.

Holds the games of whole files, and lets go of a file when the last of its games has left the window. Never
looks into a game.
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
"""Games drawn together. None comes twice in it."""

NAMED: Final = 20
"""So many of the last files that a state names and that are not there any more are remembered by name."""


@runtime_checkable
class _Reader(Protocol):
    """What can read a file of a state again."""

    def read(self, file: FoundFile) -> ChunkSource: ...


@runtime_checkable
class _Mover(Protocol):
    """What knows the later names of a file that was moved."""

    def find_moved(self, name: str) -> list[str]: ...


@dataclass
class _Source:
    """A file of which at least one game is in the window."""

    file: FoundFile
    first: int
    """Number of its first game."""
    chunks: list[Chunk]
    joined: int
    """The pass that its games joined: they were not there in those before."""

    @property
    def stop(self) -> int:
        """The number after that of its last game."""
        return self.first + len(self.chunks)

    def state(self) -> list[Any]:
        """Return what finds its games again in the file, and their numbers."""
        before = (self.file.after or NOTHING_READ).games
        which = digest_games(self.chunks)
        return [self.file.name, self.file.size, before, len(self.chunks), which, self.first, self.joined]


class ShufflingChunkPool(Stage):
    """Takes in :class:`ChunkSource`, and hands out hands of chunks that a :class:`StreamShuffler` draws.

    Chunks are numbered upward for ever as they come; the newest ``pool_size`` of them are the window, and
    only these are handed out. Nothing is handed out until the first scan is done, so the newest of the files
    that are there at the start are those whose names come last. One thread takes in and one hands out, so
    that neither waits for the other's queue.

    Once the input has ended, ``passes`` over the window are completed, those before that counted too; then
    the pool ends. Without a game it ends at once.

    A state names the files of the window and what has been drawn. When it is loaded, these files are read
    again, by the stage of the pipeline that has a method ``read`` as ``ChunkSourceLoader`` has it. Those that
    are gone or have changed are left out, with the numbers of their games; the others are drawn as they would
    have been. A file that has only become longer, and may, has not changed.

    Told are ``chunks`` and ``sources`` (of the window), ``lower`` and ``upper`` (its numbers), ``entered``
    and ``evicted`` (games, ever), ``draws``, ``passes``, ``uses`` (draws for each game that ever entered),
    ``window_uses`` (for each that is in the window), and ``missing`` (files of a state).

    Args:
        seed: of the draws.
        pool_size: games in the window.
        hand: at most so many games are handed out together, always of one pass.
        min_chunks: nothing is handed out before there are so many, unless the input has ended.
        passes: after the input has ended; None for no end.
        directory: where the files of a state are; without it, a state that names any cannot be loaded.

    Raises:
        ConfigError: an option cannot be used.
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
        """Held while what follows is changed or read; never while a thread waits for something else."""
        self._shuffler = StreamShuffler(seed)
        self._sources: list[_Source] = []
        self._firsts: list[int] = []
        """The ``first`` of each source."""
        self._newest = ""
        self._scanned = False
        self._ended = False
        self._missing: deque[tuple[str, str]] = deque(maxlen=NAMED)

    def meet(self, stages: Sequence[Stage]) -> None:
        """Find who can read a file again, and who knows where it was moved."""
        self._mover = next((stage for stage in stages if isinstance(stage, _Mover)), None)
        self._reread = next((stage.read for stage in stages if isinstance(stage, _Reader)), None)

    @property
    def window(self) -> tuple[int, int]:
        """The numbers that can be drawn: from the first up to the second, it excluded."""
        with self._window:
            return self._shuffler.lower, self._shuffler.upper

    def work(self, worker: Worker) -> None:
        """Hand out, or take in."""
        if worker.number == 0:
            self._hand_out(worker)
        else:
            self._take_in(worker)

    def _hand_out(self, worker: Worker) -> None:
        while self.wait_for(worker, self._goes_on):
            hand = self._draw()
            self.put(worker, [hand] if hand else [])

    def _goes_on(self) -> bool | None:
        """Say whether to draw a hand; None as long as it is to be waited for.

        The window may have numbers and yet no game: where all files of a state are gone.
        """
        if self._ended:
            over = self.passes is not None and self._shuffler.passes >= self.passes
            return bool(self._sources) and not over
        enough = self._scanned and len(self._shuffler) >= self.min_chunks
        return True if enough and self._sources else None

    def _draw(self) -> Hand:
        """Draw a hand; empty where all that was drawn is missing."""
        with self._window:
            numbers = self._shuffler.draw(self.hand).tolist()
            found = (self._find(number) for number in numbers)
            return tuple(chunk for chunk in found if chunk is not None)

    def _find(self, number: int) -> Chunk | None:
        """Return the chunk of a number of the window; None if a state that was loaded missed its file."""
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
                self.hub.change(lambda: None)  # who hands out may be waiting for this one
        finally:
            self._ended = True
            self.hub.change(lambda: None)

    def _enter(self, source: ChunkSource) -> None:
        """Number the chunks of a source, and let go of what leaves the window."""
        first = self._shuffler.upper  # nobody else moves it
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
        """Let go of the sources that have left the window as a whole."""
        gone = 0
        while gone < len(self._sources) and self._sources[gone].stop <= self._shuffler.lower:
            gone += 1
        del self._sources[:gone]
        del self._firsts[:gone]

    def state(self) -> dict[str, Any]:
        """Return the window, by the names of its files, and what has been drawn of it."""
        return {
            "shuffler": self._shuffler.state(),
            "scanned": self._scanned,
            "newest": self._newest,
            "sources": [source.state() for source in self._sources],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state: read the files of its window again.

        Raises:
            ConfigError: it names files, and nothing is there to read them, or no directory is known.
        """
        self._shuffler.load_state(state["shuffler"])
        self._scanned = state["scanned"]
        self._newest = state["newest"]
        for *facts, first, joined in state["sources"]:
            source = self._read_again(*facts)
            if source is not None:
                self._add(_Source(source.file, first, _numbered(source, first), joined))
        if not self._sources:  # of the numbers of then none can be drawn: what comes is not to wait for them
            self._shuffler.cut(self._shuffler.upper)

    def _read_again(self, name: str, size: int, before: int, count: int, which: bytes) -> ChunkSource | None:
        """Return what a state had of a file as it was then; None, and named, if it is not that any more.

        Args:
            name: of the file.
            size: of the file then.
            before: so many games of it came earlier.
            count: so many came then, of the split;
            which: and these.
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
        """Return what a state had of a file, if it has this name now; else the reason why it is not that."""
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
        """Return what people watch: see the class."""
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
        """Return the ``newest`` file that came in, and the last ``missing`` ones: (name, reason)."""
        missing = {"missing": list(self._missing)} if self._missing else {}
        return {"newest": printable(self._newest), **missing}


def _numbered(source: ChunkSource, first: int) -> list[Chunk]:
    return [replace(chunk, number=number) for number, chunk in enumerate(source.chunks, first)]
