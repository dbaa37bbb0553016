"""The stage that turns games into positions and selects the positions of each game.

NumPy processes all games of a batch at once. The stage stores no game.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hexdata.checks import as_int, check_count
from hexdata.errors import ConfigError, StoreError
from hexdata.fill import fill_to_packed, games_to_fill
from hexdata.live.chunk import PLY_STRIDE, Chunk, GameBatch
from hexdata.live.stage import Transform
from hexdata.order import derive_key, sort_key, uniform_draw
from hexdata.schema import NO_MOVE, NO_TIER
from hexdata.shards.blocks import Block, join_blocks, take_rows

__all__ = ["ChunkUnpacker", "PlyUsage", "unpack_chunks"]

Bools = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

_NOT_ELIGIBLE: Final = np.uint64(1 << 63)
_USED: Final = np.uint64(1 << 62)
_RANDOM_BITS: Final = np.uint64((1 << 62) - PLY_STRIDE)
"""The random bits of a position's key: those between the bit for use and the ply."""


class ChunkUnpacker(Transform):
    """Turns game batches into blocks of positions, with all fields of a shard's block.

    ``game_id`` is the number of the chunk. ``position_id`` is that number times ``PLY_STRIDE`` plus the index
    of the position in its chunk. Both stay the same each time the game is drawn. A block contains its games
    in the order of the batch and their positions by ply, except that games stored as blocks follow those
    stored as moves. The sampler mixes the positions later.

    Each time a game is drawn, positions of it are selected that have not been used, until all have been used;
    then all are available again. If fewer unused positions are left than needed, all of them are selected,
    and used ones are added. A position is selected at most once for each draw of its game.

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
        self.usage = PlyUsage(seed, check_count("pool_size", pool_size, 1))
        self._draw_lock = threading.Lock()

    def process(self, item: GameBatch) -> Iterable[Block]:
        """Return the selected positions of a game batch: usually one block."""
        return [block for chunks in self.usage.split_repeats(item) for block in self._unpack(chunks)]

    def state(self) -> dict[str, Any]:
        """Return which positions of each game have been used."""
        return self.usage.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state` returned."""
        self.usage.load_state(state)

    def _unpack(self, chunks: Sequence[Chunk]) -> Iterator[Block]:
        """Yield the selected positions of distinct games as one block; nothing if none is selected."""
        self._check_chunks(chunks)
        eligible = self._eligible(chunks)
        if self.per_game is None and self.rate == 1.0:
            selected = eligible
        else:
            numbers = np.array([chunk.number for chunk in chunks], np.int64)
            with self._draw_lock:
                selected = self.usage.draw(numbers, eligible, self._count_selected)
        amount = int(np.count_nonzero(selected))
        self.count("games", len(chunks))
        self.count("positions", amount)
        if amount:
            yield unpack_chunks(chunks, selected)

    def _count_selected(self, available: Int64Array, draws: npt.NDArray[np.float64]) -> Int64Array:
        """Return the number of positions to select per game, int64 (g,), for draws in [0, 1)."""
        if self.per_game is not None:
            return np.minimum(available, self.per_game)
        return np.floor(available * self.rate + draws).astype(np.int64)

    def _eligible(self, chunks: Sequence[Chunk]) -> Bools:
        """Return which positions may be selected: bool (games, positions of the longest game)."""
        lengths = np.array([chunk.positions for chunk in chunks])
        eligible = np.arange(lengths.max())[np.newaxis] < lengths[:, np.newaxis]
        if self.final_positions:
            return eligible
        for row, chunk in enumerate(chunks):
            if chunk.moves is not None:
                eligible[row, len(chunk.moves)] = False
                continue
            assert chunk.block is not None
            final = chunk.block["move"] == NO_MOVE
            if "policy_row" in chunk.block:
                final[chunk.block["policy_row"]] = False
            eligible[row, : len(final)] &= ~final
        return eligible

    def _check_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Check that games can be unpacked.

        Raises:
            StoreError: A game has no number or an invalid number of positions, or board sizes differ.
        """
        for chunk in chunks:
            if chunk.board_size != chunks[0].board_size:
                found, expected = (
                    f"board size {chunk.board_size}",
                    f"{chunks[0].board_size}, as in other games",
                )
            elif chunk.number < 0:
                found, expected = "no number", "the number that ShufflingChunkPool assigns"
            elif not 1 <= chunk.positions <= PLY_STRIDE:
                found, expected = f"{chunk.positions} positions", f"1 to {PLY_STRIDE}"
            else:
                continue
            record = f"game {chunk.index}"
            raise StoreError(
                "the game cannot be unpacked",
                path=chunk.source,
                record=record,
                found=found,
                expected=expected,
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


def unpack_chunks(chunks: Sequence[Chunk], selected: Bools) -> Block:
    """Return the selected positions of games, with all fields of a shard's block.

    Args:
        chunks: Numbered games on boards of the same size.
        selected: Selected positions, at least one: bool (games, positions of the longest game). False beyond
            the end of a game.

    Returns:
        A block: first the positions of games stored as moves, game after game, by ply; then those of the
            others.
    """
    whole = np.array([chunk.moves is not None for chunk in chunks])
    blocks = []
    if selected[whole].any():
        blocks.append(_unpack_moves([chunk for chunk in chunks if chunk.moves is not None], selected[whole]))
    others = np.flatnonzero(~whole & selected.any(axis=1)).tolist()
    blocks += [_unpack_block(chunks[row], np.flatnonzero(selected[row])) for row in others]
    return join_blocks(blocks)


def _unpack_moves(chunks: Sequence[Chunk], selected: Bools) -> Block:
    """Return the selected positions of games stored as moves."""
    games = [chunk.moves for chunk in chunks if chunk.moves is not None]
    moves = np.concatenate(games)
    lengths = np.array([len(game) for game in games])
    move_at = np.full(selected.shape, NO_MOVE, np.uint16)
    move_at[np.arange(selected.shape[1]) < lengths[:, np.newaxis]] = moves
    tiers = np.full(selected.shape, NO_TIER, np.uint8)
    for row, chunk in enumerate(chunks):
        if chunk.tiers is not None:
            tiers[row, : chunk.positions] = chunk.tiers
    game, ply = np.nonzero(selected)
    number = np.array([chunk.number for chunk in chunks], np.int64)[game]
    fill = games_to_fill(moves, lengths, np.zeros_like(lengths), chunks[0].board_size)
    return {
        "board": fill_to_packed(fill, game, ply),
        "game_id": number,
        "move": move_at[selected],
        "player_to_move": (ply & 1).astype(np.uint8),
        "position_id": number * PLY_STRIDE + ply,
        "position_in_game": ply.astype(np.uint16),
        "total_positions": (lengths + 1).astype(np.uint16)[game],
        "value": np.array([chunk.value for chunk in chunks], np.float32)[game],
        "value_sample_tier": tiers[selected],
    }


def _unpack_block(chunk: Chunk, plies: npt.NDArray[np.intp]) -> Block:
    """Return positions of a game stored as a block."""
    assert chunk.block is not None
    taken = take_rows(chunk.block, plies)
    taken["game_id"] = np.full(len(plies), chunk.number, np.int64)
    taken["position_id"] = chunk.number * PLY_STRIDE + plies
    return taken


class PlyUsage:
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
        self._draw_counts = np.zeros(pool_size, np.uint64)
        self._bits = np.zeros((pool_size, 0), np.uint8)
        self._game_key = derive_key(seed, "live", "unpack", "game")
        self._use_key = derive_key(seed, "live", "unpack", "use")
        self._count_key = derive_key(seed, "live", "unpack", "count")
        self._ply_key = derive_key(seed, "live", "unpack", "ply")

    def split_repeats(self, chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
        """Split games into runs without a repeated row, so that each draw sees the result of the last one."""
        rows: set[int] = set()
        start = 0
        for index, chunk in enumerate(chunks):
            row = chunk.number % self._size
            if row in rows:
                yield chunks[start:index]
                rows, start = set(), index
            rows.add(row)
        if start < len(chunks):
            yield chunks[start:]

    def draw(self, numbers: Int64Array, eligible: Bools, count_selected: Any) -> Bools:
        """Select positions of games and mark them as used.

        The positions with the lowest keys are selected. The parts of a key, from the highest bit: not
        eligible; used; 52 random bits for (game, time, ply); ply. No two keys of a game are equal.

        Args:
            numbers: Numbers of the games, int64 (g,), no two with the same row.
            eligible: Positions that may be selected, bool (g, p).
            count_selected: Function of the number of eligible positions and a draw in [0, 1) per game. It
                returns the number of positions to select, int64 (g,), at most the eligible ones.

        Returns:
            Selected positions, bool (g, p): drawn uniformly without replacement from those not yet used.
        """
        rows = numbers % self._size
        length = eligible.shape[1]
        self._ensure_length(length)
        self._assign_rows(rows, numbers)
        used = np.unpackbits(self._bits[rows], axis=1, count=length).view(np.bool_)
        draw_keys = sort_key(sort_key(numbers, self._game_key) + self._draw_counts[rows], self._use_key)
        count = count_selected(eligible.sum(axis=1), uniform_draw(draw_keys, self._count_key))

        plies = np.arange(length, dtype=np.uint64)
        keys = sort_key(draw_keys[:, np.newaxis] + plies, self._ply_key) & _RANDOM_BITS | plies
        keys[used] |= _USED
        keys[~eligible] |= _NOT_ELIGIBLE
        ordered = np.sort(keys, axis=1)
        last = ordered[np.arange(len(rows)), np.maximum(count - 1, 0)]
        drawn: Bools = np.less_equal(keys, last[:, np.newaxis]) & np.greater(count, 0)[:, np.newaxis]

        unused = eligible & ~used & ~drawn
        # Once all positions are used, a new round starts: only the used ones selected now count for it.
        used = np.where(unused.any(axis=1, keepdims=True), used | drawn, used & drawn)
        self._bits[rows] = 0
        packed = np.packbits(used, axis=1)
        self._bits[rows, : packed.shape[1]] = packed
        self._draw_counts[rows] += np.uint64(1)
        return drawn

    def state(self) -> dict[str, Any]:
        """Return the rows in use."""
        rows = np.flatnonzero(self._owner)
        return {"owner": self._owner[rows], "times": self._draw_counts[rows], "bits": self._bits[rows]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the rows of a state."""
        rows = (state["owner"] - 1) % self._size
        self._ensure_length(8 * state["bits"].shape[1])
        self._owner[rows] = state["owner"]
        self._draw_counts[rows] = state["times"]
        self._bits[rows, : state["bits"].shape[1]] = state["bits"]

    def _ensure_length(self, length: int) -> None:
        """Enlarge the rows to at least ``length`` bits."""
        missing = (length + 7) // 8 - self._bits.shape[1]
        if missing > 0:
            self._bits = np.pad(self._bits, ((0, 0), (0, missing)))

    def _assign_rows(self, rows: Int64Array, numbers: Int64Array) -> None:
        """Clear the rows that belong to other games, and assign them to these."""
        new = rows[self._owner[rows] != numbers + 1]
        self._draw_counts[new] = 0
        self._bits[new] = 0
        self._owner[rows] = numbers + 1
