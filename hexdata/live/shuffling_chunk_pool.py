"""The stage that keeps the newest games and draws them repeatedly in seeded random order.

It does not use the content of a game.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from hexdata.checks import check_fields, check_positive, check_seed
from hexdata.errors import ConfigError, InputError
from hexdata.live.chunk import Chunk, ChunkSource, GameBatch, Number
from hexdata.live.stage import InputEnded, Stage, Worker
from hexdata.order import derive_key, uniform_draw
from hexdata.text import printable

_LOG = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]
_PROGRESS: Final = ("lower", "draws", "passes", "undrawn")
"""Attributes of a ``StreamShuffler`` that a state contains."""


@dataclass(kw_only=True, eq=False)
class ShufflingChunkPool(Stage):
    """Keeps a window of the newest games and draws from it: :class:`ChunkSource` in, game batches out.

    Chunks are numbered upward without end in the order of their arrival. The newest ``pool_size`` chunks are
    the window, and only these are drawn, by a :class:`StreamShuffler`. Drawing starts after the first scan;
    of the files that exist at the start, those whose names sort last are therefore the newest. One thread
    receives and one draws, so that neither waits for the other's queue.

    With ``reuse``, the number of draws never exceeds ``reuse`` times the number of games that have entered;
    the pool then waits for new games.

    After the end of the input, the pool ends when ``passes`` passes over the window are complete, counted
    from the start of the run, or when ``reuse`` allows no further draw. Without a game it ends at once.

    When a pass is complete, the shuffler is reset to the window of that time. The first reset is logged as a
    warning, because from then on games are repeated; ``passes`` counts all.

    A state contains the file and the hash of each game of the window and the progress of the draws. When it
    is loaded, the stage of the pipeline with a method ``read``, such as ``ChunkSourceLoader``, reads these
    files again. Files that are missing or no longer contain the games are left out, with the numbers of their
    games; the others are drawn as they would have been.

    The metrics are ``chunks`` and ``sources`` (in the window), ``entered`` and ``evicted`` (games in total,
    so the numbers of the window are from ``evicted`` to below ``entered``), ``draws``, ``passes``, ``uses``
    (draws per game that entered), ``allowed_draws`` (draws that ``reuse`` allows before the next game
    enters), and ``missing`` (files of a state).

    Args:
        seed: Seed of the draws.
        pool_size: Number of games in the window. Default 100,000.
        game_batch_size: Maximum number of games drawn together, always from one pass. Default 256.
        min_chunks: Number of games needed before drawing starts, unless the input has ended. Default 1.
        passes: Number of passes after which the pool ends, once the input has ended. None (default) for no
            end.
        reuse: Maximum number of draws per game that has entered, a number above 0. None (default) for no
            maximum.

    Raises:
        ConfigError: An option cannot be used.
    """

    seed: int
    pool_size: int = 100_000
    game_batch_size: int = 256
    min_chunks: int = 1
    passes: int | None = None
    reuse: float | None = None

    consumes = "sources"
    produces = "games"
    kept: ClassVar = {
        "lower": Number,
        "draws": Number,
        "passes": Number,
        "undrawn": npt.NDArray[np.bool_],
        "scanned": bool,
        "games": list[tuple[str, Number, bytes] | None],
    }

    def __post_init__(self) -> None:
        super().__init__(threads=2)
        check_fields(self, {"game_batch_size": 1, "min_chunks": 1, "passes": 1})
        if self.min_chunks > self.pool_size:
            raise ConfigError(f"min_chunks {self.min_chunks} exceeds pool_size {self.pool_size}")
        if self.reuse is not None:
            check_positive("reuse", self.reuse)
        # The lock of the stage is held while these are changed or read, but never during a wait.
        self._shuffler = StreamShuffler(self.seed)
        self._chunks: list[Chunk | None] = []
        """The games of the window, by their numbers. None for a game whose file was missing on resuming."""
        self._is_scanned = False
        self._has_input_ended = False

    def work(self, worker: Worker) -> None:
        """Draw game batches in the first thread; receive sources in the second."""
        if worker.number == 0:
            while self.wait_for(worker, self._can_draw):
                games = self._draw()
                self.put(worker, [games] if games else [])
            return
        while not self._has_input_ended:
            try:
                self._add_source(self.take(worker))
            except InputEnded:
                self._has_input_ended = True
            self.coordinator.wake()  # the drawing thread

    def _can_draw(self) -> bool | None:
        """Return whether to draw more games; None if the thread has to wait.

        The window may contain numbers but no game, if all files of a state are missing.
        """
        # Without further input, waiting is of no use: the stage draws or ends.
        if self._has_input_ended:
            is_complete = self.passes is not None and self._shuffler.passes >= self.passes
            return any(self._chunks) and not is_complete and self._allowed_draws() > 0
        enough = self._is_scanned and len(self._chunks) >= self.min_chunks
        return True if enough and any(self._chunks) and self._allowed_draws() > 0 else None

    def _allowed_draws(self) -> float:
        """Return the number of draws that ``reuse`` allows before the next game enters; inf if all."""
        if self.reuse is None:
            return math.inf
        return max(0, math.floor(self.reuse * self._shuffler.upper) - self._shuffler.draws)

    def _draw(self) -> GameBatch:
        """Draw a game batch; it is empty if all games drawn are missing."""
        with self._lock:
            before = self._shuffler.passes
            numbers = self._shuffler.draw(int(min(self.game_batch_size, self._allowed_draws())))
            # The draw may end a pass, but does not move the window.
            drawn = [self._chunks[index] for index in (numbers - self._shuffler.lower).tolist()]
        # Once, at the end of the first pass, and not while other threads wait for the lock.
        if before == 0 < self._shuffler.passes:
            _LOG.warning("every game of the pool has been drawn; all of them are drawn again from now on")
        return tuple(chunk for chunk in drawn if chunk is not None)

    def _add_source(self, source: ChunkSource | str) -> None:
        """Number the chunks of a source and add them to the window; evict old ones."""
        if isinstance(source, str):  # SCANNED
            self._is_scanned = True
            return
        with self._lock:
            numbered = enumerate(source.chunks, self._shuffler.upper)
            self._chunks += [replace(chunk, number=number) for number, chunk in numbered]
            self._shuffler.extend(len(source.chunks))
            self._cut(max(self._shuffler.lower, self._shuffler.upper - self.pool_size))

    def _cut(self, lower: int) -> None:
        """Move the start of the window up to a number."""
        del self._chunks[: lower - self._shuffler.lower]
        self._shuffler.cut(lower)

    def state(self) -> dict[str, Any]:
        """Return the progress of the draws, and what identifies the games in the window."""
        # Not the games themselves, which would make the state as large as the pool.
        games = [chunk and (chunk.source, chunk.index, chunk.game_hash) for chunk in self._chunks]
        progress = {name: getattr(self._shuffler, name) for name in _PROGRESS}
        return {**progress, "scanned": self._is_scanned, "games": games}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state and read the files of its window again.

        Raises:
            ConfigError: The state names files, but no stage can read them.
            ValueError: It has no game to draw, or another number of games than draws.
        """
        undrawn, games = state["undrawn"], state["games"]
        if undrawn.shape != (len(games),) or not (undrawn.any() or not games):
            raise ValueError(f"{undrawn.shape} draws of {len(games)} games")
        self._shuffler = StreamShuffler(self.seed, **{name: state[name] for name in _PROGRESS})
        self._is_scanned = state["scanned"]
        self._chunks = [None] * len(games)
        games_of: dict[str, list[tuple[int, int, bytes]]] = {}
        for offset, game in enumerate(games):
            if game is not None:
                games_of.setdefault(game[0], []).append((offset, game[1], game[2]))
        reader: Any = next((stage for stage in self.stages if hasattr(stage, "read")), None)
        if games_of and reader is None:
            raise ConfigError("reading the files of a state needs a ChunkSourceLoader")
        for name, known in games_of.items():
            try:
                chunks = {chunk.index: chunk for chunk in reader.read(name).chunks}
                if any(index not in chunks or chunks[index].game_hash != of for _, index, of in known):
                    raise InputError(f"it no longer has the same {len(known):,} games")
            except (InputError, OSError) as error:
                self.count("missing")
                self.name_file("missing", name, str(error))
                continue
            for offset, index, _ in known:
                self._chunks[offset] = replace(chunks[index], number=self._shuffler.lower + offset)
        if not any(self._chunks):  # skip the numbers of missing games, so that new ones are drawn at once
            self._cut(self._shuffler.upper)

    def metrics(self) -> dict[str, float]:
        """Return the metrics that the class describes."""
        with self._lock:
            chunks, shuffler = self._chunks[:], self._shuffler
            counts = {"entered": shuffler.upper, "evicted": shuffler.lower}
            counts |= {"draws": shuffler.draws, "passes": shuffler.passes}
            allowed = {} if self.reuse is None else {"allowed_draws": self._allowed_draws()}
        # Outside the lock, since a large pool takes milliseconds.
        sources = [chunk.source for chunk in chunks if chunk is not None]
        found = {"chunks": len(sources), "sources": len({*sources}), **counts}
        return {**super().metrics(), **found, "uses": found["draws"] / max(found["entered"], 1), **allowed}

    def notes(self) -> dict[str, Any]:
        """Return the file of the ``newest`` game, and the last ``missing`` files: (name, reason)."""
        with self._lock:
            newest = next((chunk.source for chunk in reversed(self._chunks) if chunk is not None), "")
        return {"newest": printable(newest), **super().notes()}

    def wait_reason(self) -> str | None:
        """Return that too few games were received, or that all were drawn as often as ``reuse`` allows."""
        found = self.metrics()
        if 0 < found["chunks"] < self.min_chunks and not found["draws"]:
            return f"the pool has {found['chunks']:,} games and waits for min_chunks = {self.min_chunks:,}"
        if found["chunks"] and found.get("allowed_draws") == 0:
            reason = f"each game was drawn {found['uses']:.2f} times (reuse = {self.reuse:g})"
            return f"{reason}; new ones are needed"
        return None


# --- draws from a range of numbers whose ends move ---------------------------------------------------------


@dataclass(eq=False)
class StreamShuffler:
    """Draws numbers of [``lower``, ``upper``) without repetition within a pass.

    Each draw is uniform among the numbers of the range that the current pass has not drawn. Numbers that
    enter the range join the current pass; numbers that leave it are not drawn again. When no number is left
    to draw, the shuffler is reset: the next pass begins, over the range at that time.

    The result of a draw depends on the seed, on the number of earlier draws, and on the numbers left. Memory
    is one byte per number of the range. A call takes about one nanosecond per number of the range and one
    microsecond per number drawn.

    Args:
        seed: Any integer.

    Attributes:
        lower: Start of the range.
        draws: Numbers drawn so far.
        passes: Completed passes.
        undrawn: Numbers of the range that the current pass has not drawn, bool (upper - lower,).
    """

    seed: int
    lower: int = 0
    draws: int = 0
    passes: int = 0
    undrawn: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))

    def __post_init__(self) -> None:
        self._key = derive_key(check_seed(self.seed), "live", "draws")

    @property
    def upper(self) -> int:
        """End of the range, exclusive."""
        return self.lower + len(self.undrawn)

    def extend(self, count: int) -> None:
        """Move the end of the range up by ``count`` numbers, which join the current pass."""
        self.undrawn = np.append(self.undrawn, np.ones(count, np.bool_))

    def cut(self, lower: int) -> None:
        """Move the start of the range up to ``lower``; the numbers below are not drawn again."""
        # A view would keep the memory of all numbers below.
        self.undrawn = self.undrawn[lower - self.lower :].copy()
        self.lower = lower
        self._end_pass()

    def draw(self, count: int) -> Int64Array:
        """Return up to ``count`` numbers of the current pass, int64 (k,); fewer if the pass has fewer left.

        All numbers of a call are from one pass. The result is empty only if the range is, or ``count`` is 0.
        """
        left = np.flatnonzero(self.undrawn)
        count = min(count, len(left))
        # By the number of the draw, so that a state needs no generator.
        draws = uniform_draw(np.arange(self.draws, self.draws + count), self._key)
        self.draws += count
        indices = left[_distinct_indices(len(left), draws)]
        self.undrawn[indices] = False
        if count:
            self._end_pass()
        return indices + self.lower

    def _end_pass(self) -> None:
        if len(self.undrawn) and not self.undrawn.any():
            self.passes += 1
            self.undrawn[:] = True


def _distinct_indices(size: int, draws: npt.NDArray[np.float64]) -> Int64Array:
    """Return distinct indices below ``size``, one for each draw in [0, 1), in the order drawn.

    This is a partial Fisher-Yates shuffle that stores only the array entries that differ from their index.
    """
    moved: dict[int, int] = {}
    steps = np.arange(len(draws))
    chosen = (steps + (draws * (size - steps)).astype(np.int64)).tolist()
    result = []
    for step, index in enumerate(chosen):
        result.append(moved.get(index, index))
        moved[index] = moved.get(step, step)
    return np.array(result, dtype=np.int64)
