"""The stage that turns games into positions, and decides which of a game's positions come.

All games of a hand at once, in NumPy; never keeps a game.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hexdata.checks import as_int, check_count
from hexdata.errors import ConfigError, StoreError
from hexdata.formats.shards import Block
from hexdata.live.chunk import PLIES, Chunk
from hexdata.live.positions import unpack_chunks
from hexdata.live.stage import Transform
from hexdata.order import derive_key, sort_key, uniform_draw
from hexdata.schema import NO_MOVE

__all__ = ["ChunkUnpacker", "Uses"]

Bools = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

_NOT_ELIGIBLE: Final = np.uint64(1 << 63)
_USED: Final = np.uint64(1 << 62)
_DRAWN_BITS: Final = np.uint64((1 << 62) - PLIES)
"""The bits of a position's key that are drawn: those between the mark of use and the ply."""


class ChunkUnpacker(Transform):
    """Turns hands of games into blocks of positions: all fields of ``formats.shards.block_fields``.

    ``game_id`` is the number of the chunk, and ``position_id`` that number times ``PLIES`` plus the place of
    the position in its chunk, so both are the same whenever the game comes round again. A block has its
    games in the order of the hand and their positions by ply, except that games that are not their moves
    come last; the sampler mixes them.

    Each time that a game comes, other positions of it are drawn, until all have been used; then all may be
    drawn again. Where fewer than wanted have not been used, those come, and of the others as many as it
    takes. No position comes twice at once.

    Counted are ``games`` and ``positions``.

    Args:
        seed: of the draws, with the number of the chunk and how often it has come.
        pool_size: of the pool: what is known of a game is forgotten when one comes whose number is that
            much higher, as the pool has let go of it.
        positions_per_game: so many of each game come each time, or all if it has fewer; "all" or None for
            all of every game.
        position_sampling_rate: instead, where it is given: the share of a game's positions that come each
            time, as many whole positions, and one more by chance, so that the rate is met on average. A
            short game may give none.
        final_positions: False leaves out positions without a policy.
        threads: of the stage.

    Raises:
        ConfigError: the rate is not above 0 and at most 1, or a count is below 1.
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
        """Return the positions that are drawn of a hand: as a rule one block."""
        return [block for hand in self.uses.apart(item) for block in self._unpack(hand)]

    def state(self) -> dict[str, Any]:
        """Return which positions of which games have been used."""
        return self.uses.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.uses.load_state(state)

    def _unpack(self, hand: Sequence[Chunk]) -> Iterator[Block]:
        """Unpack games none of which comes twice; nothing where no position is drawn."""
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
        """Return how many positions are to come of games with so many: int64 (g,), from draws in [0, 1)."""
        if self.per_game is not None:
            return np.minimum(available, self.per_game)
        return np.floor(available * self.rate + draws).astype(np.int64)

    def _eligible(self, hand: Sequence[Chunk]) -> Bools:
        """Say which places of the table (games, most positions of one) are positions that may come."""
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
        """See that a hand can be unpacked.

        Raises:
            StoreError: a game has no number or too many positions, or boards are of different sizes.
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
    """Which positions of the games in the pool have been used, and which come next.

    One row a game: a bit for each of its positions, and how often it has come. A game has the row of its
    number modulo ``pool_size``, so a row is taken over by the first game that comes so much later.

    Args:
        seed: of the draws.
        pool_size: rows.
    """

    def __init__(self, seed: int, pool_size: int) -> None:
        self._size = pool_size
        # Zeros, and numbers from 1, so that a large table takes no memory before it is used.
        self._owner = np.zeros(pool_size, np.int64)
        self._times = np.zeros(pool_size, np.uint64)
        self._bits = np.zeros((pool_size, 0), np.uint8)
        self._game_key = derive_key(seed, "live", "unpack", "game")
        self._use_key = derive_key(seed, "live", "unpack", "use")
        self._count_key = derive_key(seed, "live", "unpack", "count")
        self._ply_key = derive_key(seed, "live", "unpack", "ply")

    def apart(self, hand: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
        """Cut a hand wherever a row would be asked for a second time, so that each draw knows the last."""
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
        """Draw positions of games, and note that they have been used.

        Args:
            numbers: of the games, (g,), no two of one row.
            eligible: which of the places of each game may be drawn: (g, places).
            wanted: gives how many to draw, int64 (g,), at most those that may be, from the number of those
                and a draw in [0, 1) for each game.

        Returns:
            bool (g, places): those drawn, of those not used yet uniformly without replacement.

        Each position has a key: whether it may not be drawn, whether it is used, 52 bits that are drawn for
        (game, time, ply), and its ply, so that no two are equal. Those with the lowest keys are drawn.
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
        # Where none is left unused, what was drawn a second time is all that has been used of the next round.
        used = np.where(left.any(axis=1, keepdims=True), used | drawn, used & drawn)
        self._bits[rows] = 0
        packed = np.packbits(used, axis=1)
        self._bits[rows, : packed.shape[1]] = packed
        self._times[rows] += np.uint64(1)
        return drawn

    def state(self) -> dict[str, Any]:
        """Return the rows that are in use."""
        rows = np.flatnonzero(self._owner)
        return {"owner": self._owner[rows], "times": self._times[rows], "bits": self._bits[rows]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up the rows of a state."""
        rows = (state["owner"] - 1) % self._size
        self._widen(8 * state["bits"].shape[1])
        self._owner[rows] = state["owner"]
        self._times[rows] = state["times"]
        self._bits[rows, : state["bits"].shape[1]] = state["bits"]

    def _widen(self, places: int) -> None:
        """Make room for the bits of games with so many positions."""
        missing = (places + 7) // 8 - self._bits.shape[1]
        if missing > 0:
            self._bits = np.pad(self._bits, ((0, 0), (0, missing)))

    def _take_over(self, rows: Int64Array, numbers: Int64Array) -> None:
        """Forget the games that had these rows before."""
        new = rows[self._owner[rows] != numbers + 1]
        self._times[new] = 0
        self._bits[new] = 0
        self._owner[rows] = numbers + 1
