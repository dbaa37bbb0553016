"""The stage that turns games into positions and selects the positions of each game.

NumPy processes all games of a hand at once. The stage keeps no game.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hexdata.checks import as_int, check_count
from hexdata.errors import ConfigError, StoreError
from hexdata.live.chunk import PLIES, Chunk
from hexdata.live.positions import unpack_chunks
from hexdata.live.stage import Transform
from hexdata.order import derive_key, sort_key, uniform_draw
from hexdata.schema import NO_MOVE
from hexdata.shards.blocks import Block

__all__ = ["ChunkUnpacker", "Uses"]

Bools = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

_NOT_ELIGIBLE: Final = np.uint64(1 << 63)
_USED: Final = np.uint64(1 << 62)
_DRAWN_BITS: Final = np.uint64((1 << 62) - PLIES)
"""The random bits of a position's key: those between the mark of use and the ply."""


class ChunkUnpacker(Transform):
    """Turns hands of games into blocks of positions, with all fields of a shard's block.

    ``game_id`` is the number of the chunk. ``position_id`` is that number times ``PLIES`` plus the index of
    the position in its chunk. Both stay the same each time the game is drawn. A block contains its games in
    the order of the hand and their positions by ply, except that games stored as blocks follow those stored
    as moves. The sampler mixes the positions later.

    Each time a game is drawn, positions of it are selected that have not been used, until all have been used;
    then all are available again. If fewer unused positions are left than wanted, all of them are selected,
    and used ones fill up the rest. A position is selected at most once for each draw of its game.

    The counts are ``games`` and ``positions``.

    Args:
        seed: Seed of the draws, which also depend on the number of the chunk and on how often it was drawn.
        pool_size: Number of games in the pool. The unpacker discards its record of a game when a game arrives
            whose number is higher by ``pool_size``: the pool has evicted the old game by then.
        positions_per_game: Number of positions selected each time a game is drawn, or all if the game has
            fewer. "all" or None for all positions of every game. Default 8.
        position_sampling_rate: Share of a game's positions selected each time, above 0 and at most 1;
            replaces ``positions_per_game``. The number is rounded up or down at random, so that the mean
            equals the rate; a short game may give no position. Default None.
        final_positions: False leaves out positions without a policy. Default True.
        threads: Number of threads of the stage. Default 1.

    Raises:
        ConfigError: The rate is not above 0 and at most 1, or a count is below 1.
    """

    def __init__(
        self,
        *,
        seed: int,
        pool_size: int,
        positions_per_game: int | Literal["all"] | None = 8,
        position_sampling_rate: float | None = None,
        final_positions: bool = True,
        threads: int = 1,
    ) -> None:
        super().__init__(threads=threads)
        self.per_game = _check_per_game(positions_per_game)
        self.rate = 1.0
        if position_sampling_rate is not None:
            self.per_game, self.rate = None, _check_rate(position_sampling_rate)
        self.final_positions = final_positions
        self.uses = Uses(seed, check_count("pool_size", pool_size, 1))
        self._drawing = threading.Lock()

    def process(self, item: tuple[Chunk, ...]) -> Iterable[Block]:
        """Return the selected positions of a hand: usually one block."""
        return [block for hand in self.uses.apart(item) for block in self._unpack(hand)]

    def state(self) -> dict[str, Any]:
        """Return which positions of each game have been used."""
        return self.uses.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state` returned."""
        self.uses.load_state(state)

    def _unpack(self, hand: Sequence[Chunk]) -> Iterator[Block]:
        """Yield the selected positions of distinct games as one block; nothing if none is selected."""
        self._check(hand)
        eligible = self._eligible(hand)
        if self.per_game is None and self.rate == 1.0:
            picked = eligible
        else:
            numbers = np.array([chunk.number for chunk in hand], np.int64)
            with self._drawing:
                picked = self.uses.draw(numbers, eligible, self._wanted)
        amount = int(np.count_nonzero(picked))
        self.count("games", len(hand))
        self.count("positions", amount)
        if amount:
            yield unpack_chunks(hand, picked)

    def _wanted(self, available: Int64Array, draws: npt.NDArray[np.float64]) -> Int64Array:
        """Return the number of positions to select per game, int64 (g,), for draws in [0, 1)."""
        if self.per_game is not None:
            return np.minimum(available, self.per_game)
        return np.floor(available * self.rate + draws).astype(np.int64)

    def _eligible(self, hand: Sequence[Chunk]) -> Bools:
        """Return which positions may be selected: bool (games, positions of the longest game)."""
        lengths = np.array([chunk.positions for chunk in hand])
        eligible = np.arange(lengths.max())[np.newaxis] < lengths[:, np.newaxis]
        if self.final_positions:
            return eligible
        for row, chunk in enumerate(hand):
            if chunk.moves is not None:
                eligible[row, len(chunk.moves)] = False
                continue
            assert chunk.block is not None
            final = chunk.block["move"] == NO_MOVE
            if "policy_row" in chunk.block:
                final[chunk.block["policy_row"]] = False
            eligible[row, : len(final)] &= ~final
        return eligible

    def _check(self, hand: Sequence[Chunk]) -> None:
        """Check that a hand can be unpacked.

        Raises:
            StoreError: A game has no number or an invalid number of positions, or board sizes differ.
        """
        for chunk in hand:
            if chunk.board_size != hand[0].board_size:
                fault, expected = f"a board of size {chunk.board_size}", f"{hand[0].board_size}, as others"
            elif chunk.number < 0:
                fault, expected = "a game without a number", "one that comes out of the pool"
            elif not 1 <= chunk.positions <= PLIES:
                fault, expected = f"{chunk.positions} positions in a game", f"1 to {PLIES}"
            else:
                continue
            where = f"game {chunk.place}"
            raise StoreError(
                "a game cannot be unpacked", path=chunk.source, record=where, found=fault, expected=expected
            )


def _check_per_game(count: object) -> int | None:
    if count is None or count == "all":
        return None
    number = as_int(count)
    if number is None or number < 1:
        expected = 'an integer, at least 1, or "all"'
        raise ConfigError("positions_per_game cannot be used", found=repr(count), expected=expected)
    return number


def _check_rate(rate: object) -> float:
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
        expected = "a number above 0, at most 1"
        raise ConfigError("position_sampling_rate cannot be used", found=repr(rate), expected=expected)
    return float(rate)


class Uses:
    """Table of the positions already used, for the games in the pool; selects the next positions of a game.

    Each row belongs to one game and contains a bit for each position and the number of draws. The row of a
    game is its number modulo ``pool_size``; a later game with the same remainder replaces it.

    Args:
        seed: Seed of the draws.
        pool_size: Number of rows.
    """

    def __init__(self, seed: int, pool_size: int) -> None:
        self._size = pool_size
        # 0 marks a free row, and numbers are stored plus 1, so that untouched pages of zeros take no memory.
        self._owner = np.zeros(pool_size, np.int64)
        self._times = np.zeros(pool_size, np.uint64)
        self._bits = np.zeros((pool_size, 0), np.uint8)
        self._game_key = derive_key(seed, "live", "unpack", "game")
        self._use_key = derive_key(seed, "live", "unpack", "use")
        self._count_key = derive_key(seed, "live", "unpack", "count")
        self._ply_key = derive_key(seed, "live", "unpack", "ply")

    def apart(self, hand: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
        """Split a hand before a row repeats, so that each draw sees the result of the last one."""
        rows: set[int] = set()
        start = 0
        for place, chunk in enumerate(hand):
            row = chunk.number % self._size
            if row in rows:
                yield hand[start:place]
                rows, start = set(), place
            rows.add(row)
        if start < len(hand):
            yield hand[start:]

    def draw(self, numbers: Int64Array, eligible: Bools, wanted: Any) -> Bools:
        """Select positions of games and mark them as used.

        Args:
            numbers: Numbers of the games, int64 (g,), no two with the same row.
            eligible: Positions that may be selected, bool (g, p).
            wanted: Function of the number of eligible positions and a draw in [0, 1) per game. It returns the
                number of positions to select, int64 (g,), at most the eligible ones.

        Returns:
            Selected positions, bool (g, p): drawn uniformly without replacement from those not yet used.

        The positions with the lowest keys are selected. The parts of a key, from the highest bit: not
        eligible; used; 52 random bits for (game, time, ply); ply. No two keys of a game are equal.
        """
        rows = numbers % self._size
        places = eligible.shape[1]
        self._widen(places)
        self._take_over(rows, numbers)
        used = np.unpackbits(self._bits[rows], axis=1, count=places).view(np.bool_)
        times = sort_key(sort_key(numbers, self._game_key) + self._times[rows], self._use_key)
        count = wanted(eligible.sum(axis=1), uniform_draw(times, self._count_key))

        plies = np.arange(places, dtype=np.uint64)
        keys = sort_key(times[:, np.newaxis] + plies, self._ply_key) & _DRAWN_BITS | plies
        keys[used] |= _USED
        keys[~eligible] |= _NOT_ELIGIBLE
        ordered = np.sort(keys, axis=1)
        last = ordered[np.arange(len(rows)), np.maximum(count - 1, 0)]
        drawn: Bools = np.less_equal(keys, last[:, np.newaxis]) & np.greater(count, 0)[:, np.newaxis]

        left = eligible & ~used & ~drawn
        # Once all positions are used, a new round starts: only the used ones selected now count for it.
        used = np.where(left.any(axis=1, keepdims=True), used | drawn, used & drawn)
        self._bits[rows] = 0
        packed = np.packbits(used, axis=1)
        self._bits[rows, : packed.shape[1]] = packed
        self._times[rows] += np.uint64(1)
        return drawn

    def state(self) -> dict[str, Any]:
        """Return the rows in use."""
        rows = np.flatnonzero(self._owner)
        return {"owner": self._owner[rows], "times": self._times[rows], "bits": self._bits[rows]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the rows of a state."""
        rows = (state["owner"] - 1) % self._size
        self._widen(8 * state["bits"].shape[1])
        self._owner[rows] = state["owner"]
        self._times[rows] = state["times"]
        self._bits[rows, : state["bits"].shape[1]] = state["bits"]

    def _widen(self, places: int) -> None:
        """Enlarge the rows to hold ``places`` bits."""
        missing = (places + 7) // 8 - self._bits.shape[1]
        if missing > 0:
            self._bits = np.pad(self._bits, ((0, 0), (0, missing)))

    def _take_over(self, rows: Int64Array, numbers: Int64Array) -> None:
        """Clear the rows that belong to other games, and assign them to these."""
        new = rows[self._owner[rows] != numbers + 1]
        self._times[new] = 0
        self._bits[new] = 0
        self._owner[rows] = numbers + 1
