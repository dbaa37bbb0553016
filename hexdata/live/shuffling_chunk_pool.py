"""The stage that keeps the newest games and draws them repeatedly in seeded random order.

It stores the games by file and removes a file when its last game has left the window. It does not use the
content of a game.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hexdata.checks import check_count
from hexdata.errors import ConfigError, InputError
from hexdata.live.chunk import (
    NAMED_FILES,
    NOTHING_READ,
    Chunk,
    ChunkSource,
    FoundFile,
    GameBatch,
    digest_games,
)
from hexdata.live.stage import Stage, Worker
from hexdata.live.stream_shuffler import StreamShuffler
from hexdata.text import printable

__all__ = ["ShufflingChunkPool"]


@runtime_checkable
class _FileReader(Protocol):
    """A stage that can read a file of a state again."""

    def read(self, file: FoundFile) -> ChunkSource: ...


@runtime_checkable
class _MoveTracker(Protocol):
    """A stage that can find the new names of a moved file."""

    def find_moved(self, name: str) -> list[str]: ...


@dataclass
class _PooledFile:
    """A file with at least one game in the window."""

    file: FoundFile
    first: int
    """Number of its first game."""
    chunks: list[Chunk]
    first_pass: int
    """Number of the pass in which its games entered; earlier passes did not contain them."""

    @property
    def stop(self) -> int:
        """Number of its last game, plus 1."""
        return self.first + len(self.chunks)

    def state(self) -> list[Any]:
        """Return the values that identify its games in the file, and their numbers."""
        previous = (self.file.previous or NOTHING_READ).games
        digest = digest_games(self.chunks)
        return [
            self.file.name,
            self.file.size,
            previous,
            len(self.chunks),
            digest,
            self.first,
            self.first_pass,
        ]


class ShufflingChunkPool(Stage):
    """Keeps a window of the newest games and draws from it: :class:`ChunkSource` in, game batches out.

    Chunks are numbered upward without end in the order of their arrival. The newest ``pool_size`` chunks are
    the window, and only these are drawn, by a :class:`StreamShuffler`. Drawing starts after the first scan;
    of the files that exist at the start, those whose names sort last are therefore the newest. One thread
    receives and one draws, so that neither waits for the other's queue.

    With ``reuse``, the number of draws never exceeds ``reuse`` times the number of games that have entered;
    the pool then waits for new games. With ``window_start``, the window grows by the formula of
    KataGo: of N games that have entered, the newest c · (1 + b · ((N / c)^a - 1) / a) are the window, at most
    ``pool_size``, with c = ``window_start``, a = ``window_exponent`` and b = ``window_slope``; all N games if
    N is at most c.

    After the end of the input, the pool ends when ``passes`` passes over the window are complete, counted
    from the start of the run, or when ``reuse`` allows no further draw. Without a game it ends at once.

    A state contains the names of the files of the window and the progress of the draws. When it is
    loaded, the stage of the pipeline with a method ``read``, such as ``ChunkSourceLoader``, reads these files
    again. Files that are missing or have changed are left out, with the numbers of their
    games; the others are drawn as they would have been. A text file that has only grown counts as unchanged.

    The metrics are ``chunks`` and ``sources`` (in the window), ``lower`` and ``upper`` (numbers of the
    window), ``entered`` and ``evicted`` (games in total), ``draws``, ``passes``, ``uses`` (draws per game
    that entered), ``window_uses`` (draws per game in the window), ``allowed_draws`` (draws that ``reuse``
    allows before the next game enters), and ``missing`` (files of a state).

    Args:
        seed: Seed of the draws.
        pool_size: Number of games in the window. Default 100,000.
        game_batch_size: Maximum number of games drawn together, always from one pass. Default 256.
        min_chunks: Number of games needed before drawing starts, unless the input has ended. Default 1.
        passes: Number of passes after which the pool ends, once the input has ended. None (default) for no
            end.
        reuse: Maximum number of draws per game that has entered, a number above 0. None (default) for no
            maximum.
        window_start: Number of games up to which the window contains all games. None (default) for
            ``pool_size``.
        window_exponent: Exponent a, above 0 and at most 1. Default 0.75.
        window_slope: Factor b, above 0 and at most 1: just above ``window_start``, the window grows by this
            share of the new games. Default 0.4.
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
        game_batch_size: int = 256,
        min_chunks: int = 1,
        passes: int | None = None,
        reuse: float | None = None,
        window_start: int | None = None,
        window_exponent: float = 0.75,
        window_slope: float = 0.4,
        directory: str | Path | None = None,
    ) -> None:
        super().__init__(threads=2)
        self.pool_size = check_count("pool_size", pool_size, 1)
        self.game_batch_size = check_count("game_batch_size", game_batch_size, 1)
        self.min_chunks = check_count("min_chunks", min_chunks, 1)
        if self.min_chunks > self.pool_size:
            raise ConfigError(
                "min_chunks exceeds pool_size", found=min_chunks, expected=f"at most {pool_size}"
            )
        self.passes = None if passes is None else check_count("passes", passes, 1)
        self.reuse = None if reuse is None else _check_number("reuse", reuse, math.inf)
        self.window_start = (
            self.pool_size if window_start is None else check_count("window_start", window_start, 1)
        )
        if self.window_start > self.pool_size:
            raise ConfigError(
                "window_start exceeds pool_size", found=window_start, expected=f"at most {pool_size}"
            )
        self.window_exponent = _check_number("window_exponent", window_exponent, 1)
        self.window_slope = _check_number("window_slope", window_slope, 1)
        self.directory = None if directory is None else Path(directory)
        self._read_file: Callable[[FoundFile], ChunkSource] | None = None
        self._move_tracker: _MoveTracker | None = None
        self._window_lock = threading.Lock()
        """Held while the attributes below are changed or read, but never during a wait."""
        self._shuffler = StreamShuffler(seed)
        self._files: list[_PooledFile] = []
        self._first_numbers: list[int] = []
        """``first`` of each file, for a binary search."""
        self._newest_file = ""
        self._scanned = False
        self._input_ended = False
        self._missing: deque[tuple[str, str]] = deque(maxlen=NAMED_FILES)

    def link_stages(self, stages: Sequence[Stage]) -> None:
        """Find the stages that can read a file again and find a moved file."""
        self._move_tracker = next((stage for stage in stages if isinstance(stage, _MoveTracker)), None)
        self._read_file = next((stage.read for stage in stages if isinstance(stage, _FileReader)), None)

    @property
    def window(self) -> tuple[int, int]:
        """Range of the numbers that can be drawn: (first, last plus 1)."""
        with self._window_lock:
            return self._shuffler.lower, self._shuffler.upper

    def work(self, worker: Worker) -> None:
        """Draw game batches in the first thread; receive sources in the second."""
        if worker.number == 0:
            self._draw_games(worker)
        else:
            self._receive_sources(worker)

    def _draw_games(self, worker: Worker) -> None:
        while self.wait_for(worker, self._can_draw):
            games = self._draw()
            self.put(worker, [games] if games else [])

    def _can_draw(self) -> bool | None:
        """Return whether to draw more games; None if the thread has to wait.

        The window may contain numbers but no game, if all files of a state are missing.
        """
        if self._input_ended:
            is_complete = self.passes is not None and self._shuffler.passes >= self.passes
            return bool(self._files) and not is_complete and self._allowed_draws() > 0
        enough = self._scanned and len(self._shuffler) >= self.min_chunks
        return True if enough and self._files and self._allowed_draws() > 0 else None

    def _allowed_draws(self) -> float:
        """Return the number of draws that ``reuse`` allows before the next game enters; inf if all."""
        if self.reuse is None:
            return math.inf
        return max(0, math.floor(self.reuse * self._shuffler.upper) - self._shuffler.draws)

    def _window_size(self, entered: int) -> int:
        """Return the number of games in the window after ``entered`` games have entered."""
        first = self.window_start
        if entered <= first:
            return first
        growth = ((entered / first) ** self.window_exponent - 1) / self.window_exponent
        return min(self.pool_size, int(first * (1 + self.window_slope * growth)))

    def _draw(self) -> GameBatch:
        """Draw a game batch; it is empty if all games drawn are missing."""
        with self._window_lock:
            count = int(min(self.game_batch_size, self._allowed_draws()))
            numbers = self._shuffler.draw(count).tolist()
            found = (self._find(number) for number in numbers)
            return tuple(chunk for chunk in found if chunk is not None)

    def _find(self, number: int) -> Chunk | None:
        """Return the chunk with a number in the window; None if its file was missing at a restart."""
        index = bisect_right(self._first_numbers, number) - 1
        if index < 0:
            return None
        file = self._files[index]
        offset = number - file.first
        return file.chunks[offset] if offset < len(file.chunks) else None

    def _receive_sources(self, worker: Worker) -> None:
        try:
            while True:
                source = self.take(worker)
                if source.file.path is None:
                    self._scanned = True
                else:
                    self._add_source(source)
                self.coordinator.change(lambda: None)  # wake the drawing thread
        finally:
            self._input_ended = True
            self.coordinator.change(lambda: None)

    def _add_source(self, source: ChunkSource) -> None:
        """Number the chunks of a source and add them to the window; evict old ones."""
        first = self._shuffler.upper  # only this thread changes it
        chunks = _numbered(source, first)
        with self._window_lock:
            self._newest_file = source.file.name
            if chunks:
                self._append(_PooledFile(source.file, first, chunks, self._shuffler.passes))
                upper = first + len(chunks)
                self._shuffler.extend(upper)
                self._shuffler.cut(max(self._shuffler.lower, upper - self._window_size(upper)))
                self._evict()

    def _append(self, file: _PooledFile) -> None:
        self._files.append(file)
        self._first_numbers.append(file.first)

    def _evict(self) -> None:
        """Remove the files without a game in the window."""
        count = 0
        while count < len(self._files) and self._files[count].stop <= self._shuffler.lower:
            count += 1
        del self._files[:count]
        del self._first_numbers[:count]

    def state(self) -> dict[str, Any]:
        """Return the names of the files in the window and the progress of the draws."""
        return {
            "shuffler": self._shuffler.state(),
            "scanned": self._scanned,
            "newest": self._newest_file,
            "sources": [file.state() for file in self._files],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state and read the files of its window again.

        Raises:
            ConfigError: The state names files, but no stage can read them or no directory is given.
        """
        self._shuffler.load_state(state["shuffler"])
        self._scanned = state["scanned"]
        self._newest_file = state["newest"]
        for *description, first, first_pass in state["sources"]:
            source = self._reread(*description)
            if source is not None:
                self._append(_PooledFile(source.file, first, _numbered(source, first), first_pass))
        if not self._files:  # skip the numbers of missing games, so that new ones are drawn at once
            self._shuffler.cut(self._shuffler.upper)

    def _reread(self, name: str, size: int, previous: int, count: int, digest: bytes) -> ChunkSource | None:
        """Return the chunks that a state had of a file; None, noting the file as missing, if it has changed.

        Args:
            name: Name of the file.
            size: Size of the file in the state, in bytes.
            previous: Number of games in earlier readings of the file.
            count: Number of games of the split in this reading.
            digest: Digest of these games.
        """
        source = self._read_named(name, size, previous, count, digest)
        if isinstance(source, str) and self._move_tracker is not None:
            for later in self._move_tracker.find_moved(name):
                moved = self._read_named(later, size, previous, count, digest)
                source = source if isinstance(moved, str) else moved
        if not isinstance(source, str):
            return source
        self.count("missing")
        self._missing.append((printable(name), printable(source)))
        return None

    def _read_named(
        self, name: str, size: int, previous: int, count: int, digest: bytes
    ) -> ChunkSource | str:
        """Return the chunks that a state had of the file with this name; or the reason why they are not
        available.
        """
        if self._read_file is None or self.directory is None:
            raise ConfigError(
                "the files of a state cannot be read again",
                found=name,
                expected="a directory, and a stage with a method read, such as ChunkSourceLoader",
            )
        path = self.directory / name
        progress = replace(NOTHING_READ, games=previous) if previous else None
        try:
            current_size = path.stat().st_size
            source = self._read_file(FoundFile(path, name, current_size, progress))
        except (InputError, OSError) as error:
            return str(error)
        has_grown = current_size > size and source.progress is not None
        chunks = source.chunks[:count] if has_grown else source.chunks
        same = len(chunks) == count and digest_games(chunks) == digest
        if same and (has_grown or current_size == size):
            return ChunkSource(FoundFile(path, name, size, progress), chunks)
        games = f"{count:,} other games" if len(chunks) == count else f"{count:,}"
        return f"{current_size:,} bytes and {len(source.chunks):,} games now, not {size:,} and {games}"

    def metrics(self) -> dict[str, float]:
        """Return the metrics that the class describes."""
        with self._window_lock:
            shuffler = self._shuffler
            inside = [min(file.stop - shuffler.lower, len(file.chunks)) for file in self._files]
            passes = [shuffler.passes - file.first_pass for file in self._files]
            chunks = sum(inside)
            drawn = sum(count * times for count, times in zip(inside, passes, strict=True))
            drawn += len(shuffler) - shuffler.left
            metrics = {
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
            if self.reuse is not None:
                metrics["allowed_draws"] = self._allowed_draws()
        return {**super().metrics(), **metrics}

    def notes(self) -> dict[str, Any]:
        """Return the ``newest`` file received, and the last ``missing`` files: (name, reason)."""
        missing = {"missing": list(self._missing)} if self._missing else {}
        return {"newest": printable(self._newest_file), **missing}


def _check_number(name: str, value: object, highest: float) -> float:
    """Return a number above 0 and at most ``highest``.

    Raises:
        ConfigError: It is not.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 < value <= highest and math.isfinite(value)):  # type: ignore[operator, arg-type]
        upper = "" if highest == math.inf else f" and at most {highest:g}"
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected=f"a number above 0{upper}")
    return float(value)  # type: ignore[arg-type]


def _numbered(source: ChunkSource, first: int) -> list[Chunk]:
    return [replace(chunk, number=number) for number, chunk in enumerate(source.chunks, first)]
