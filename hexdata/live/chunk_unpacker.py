"""The stage that turns games into positions and selects the positions of each game.

NumPy processes all games of a batch at once. The stage stores no game.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from hexdata.checks import check_count
from hexdata.fill import fill_to_packed, games_to_fill
from hexdata.live.chunk import PLY_STRIDE, Chunk, GameBatch
from hexdata.live.stage import Transform
from hexdata.order import derive_key, sort_key
from hexdata.schema import NO_MOVE, NO_TIER
from hexdata.shards.blocks import Block, join_blocks, take_rows

Bools = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

_NOT_ELIGIBLE: Final = np.uint64(1 << 63)
_USED: Final = np.uint64(1 << 62)
_RANDOM_BITS: Final = np.uint64((1 << 62) - PLY_STRIDE)
"""The random bits of a position's key: those between the bit for use and the ply."""


@dataclass(kw_only=True, eq=False)
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
        final_positions: False leaves out positions without a policy. Default True.
        threads: Number of threads of the stage. Default 1.

    Raises:
        ConfigError: A count is below 1.
    """

    seed: int
    pool_size: int
    positions_per_game: int | Literal["all"] | None = 8
    final_positions: bool = True
    threads: int = 1

    consumes = "games"
    produces = "blocks"
    kept: ClassVar = {
        "_owner": npt.NDArray[np.int64],
        "_draw_counts": npt.NDArray[np.uint64],
        "_used": npt.NDArray[np.uint8],
    }

    def __post_init__(self) -> None:
        super().__init__(threads=self.threads)
        self._per_game: int | None = None
        if self.positions_per_game not in (None, "all"):
            self._per_game = check_count("positions_per_game", self.positions_per_game, 1)
        names = ("game", "use", "ply")
        self._keys = {name: derive_key(self.seed, "live", "unpack", name) for name in names}
        # The lock of the stage is held while these are used. Each row belongs to one game: its number modulo
        # ``pool_size``, until a later game with the same remainder replaces it.
        # 0 marks a free row, and numbers are stored plus 1, so that untouched pages of zeros take no memory.
        self._owner = np.zeros(self.pool_size, np.int64)
        self._draw_counts = np.zeros(self.pool_size, np.uint64)
        self._used = np.zeros((self.pool_size, 0), np.uint8)
        """Used positions, one bit each."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state of a pool of this size.

        Raises:
            ValueError: The arrays have other shapes.
        """
        shapes = [state[name].shape for name in self.kept]
        if [(len(shape), *shape[:1]) for shape in shapes] != [(axes, self.pool_size) for axes in (1, 1, 2)]:
            raise ValueError(f"arrays of shapes {shapes}")
        super().load_state(state)

    def process(self, item: GameBatch) -> Iterable[Block]:
        """Return the selected positions of a game batch as one block; nothing if none is selected."""
        selected = self._eligible(item)
        if self._per_game is not None:
            numbers = np.array([chunk.number for chunk in item], np.int64)
            with self._lock:
                selected = self._draw(numbers, selected, self._per_game)
        amount = int(np.count_nonzero(selected))
        self.count("games", len(item))
        self.count("positions", amount)
        return [unpack_chunks(item, selected)] if amount else []

    def _draw(self, numbers: Int64Array, eligible: Bools, most: int) -> Bools:
        """Select positions of games and mark them as used.

        The positions with the lowest keys are selected. The parts of a key, from the highest bit: not
        eligible; used; 52 random bits for (game, time, ply); ply. No two keys of a game are equal.

        Args:
            numbers: Numbers of the games, int64 (g,), no two with the same row.
            eligible: Positions that may be selected, bool (g, p).
            most: Number of positions selected of each game, or all if it has fewer.

        Returns:
            Selected positions, bool (g, p): drawn uniformly without replacement from those not yet used.
        """
        rows = numbers % self.pool_size
        length = eligible.shape[1]
        missing = (length + 7) // 8 - self._used.shape[1]
        if missing > 0:
            self._used = np.pad(self._used, ((0, 0), (0, missing)))
        new = rows[self._owner[rows] != numbers + 1]
        self._draw_counts[new] = 0
        self._used[new] = 0
        self._owner[rows] = numbers + 1
        used = np.unpackbits(self._used[rows], axis=1, count=length).view(np.bool_)
        # Two rounds, since number + count would be the same for game 1 in draw 2 and game 2 in draw 1.
        game_keys = sort_key(numbers, self._keys["game"])
        draw_keys = sort_key(game_keys + self._draw_counts[rows], self._keys["use"])
        count = np.minimum(eligible.sum(axis=1), most)
        plies = np.arange(length, dtype=np.uint64)
        # The ply in the lowest bits makes keys distinct, so that exactly ``count`` of them are selected.
        keys = sort_key(draw_keys[:, np.newaxis] + plies, self._keys["ply"]) & _RANDOM_BITS | plies
        keys[used] |= _USED
        keys[~eligible] |= _NOT_ELIGIBLE
        ordered = np.sort(keys, axis=1)
        last = ordered[np.arange(len(rows)), np.maximum(count - 1, 0)]
        drawn: Bools = np.less_equal(keys, last[:, np.newaxis]) & np.greater(count, 0)[:, np.newaxis]

        unused = eligible & ~used & ~drawn
        # Once all positions are used, a new round starts: only the used ones selected now count for it.
        used = np.where(unused.any(axis=1, keepdims=True), used | drawn, used & drawn)
        self._used[rows] = 0
        packed = np.packbits(used, axis=1)
        self._used[rows, : packed.shape[1]] = packed
        self._draw_counts[rows] += np.uint64(1)
        return drawn

    def _eligible(self, chunks: Sequence[Chunk]) -> Bools:
        """Return which positions may be selected: bool (games, positions of the longest game)."""
        lengths = np.array([chunk.positions for chunk in chunks])
        eligible = np.arange(lengths.max())[np.newaxis] < lengths[:, np.newaxis]
        if self.final_positions:
            return eligible
        for row, chunk in enumerate(chunks):
            if chunk.block is None:
                eligible[row, chunk.positions - 1] = False
                continue
            final = chunk.block["move"] == NO_MOVE
            # A search may give a policy for a position that has no move.
            final[chunk.block.get("policy_row", [])] = False
            eligible[row, : len(final)] &= ~final
        return eligible


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
    whole = [row for row, chunk in enumerate(chunks) if chunk.moves is not None and selected[row].any()]
    blocks = [_unpack_moves([chunks[row] for row in whole], selected[whole])] if whole else []
    for row, chunk in enumerate(chunks):
        if chunk.block is not None and selected[row].any():
            plies = np.flatnonzero(selected[row])
            ids = {"game_id": np.full(len(plies), chunk.number, np.int64)}
            ids["position_id"] = chunk.number * PLY_STRIDE + plies
            blocks.append(take_rows(chunk.block, plies) | ids)
    return join_blocks(blocks)


def _unpack_moves(chunks: Sequence[Chunk], selected: Bools) -> Block:
    """Return the selected positions of games stored as moves."""
    games = [chunk.moves for chunk in chunks if chunk.moves is not None]
    moves = np.concatenate(games)
    lengths = np.array([len(game) for game in games])
    move_at = np.full(selected.shape, NO_MOVE, np.uint16)
    # A mask selects row after row, which is the order of the concatenated moves.
    move_at[np.arange(selected.shape[1]) < lengths[:, np.newaxis]] = moves
    tiers = np.full(selected.shape, NO_TIER, np.uint8)
    for row, chunk in enumerate(chunks):
        if chunk.tiers is not None:
            tiers[row, : chunk.positions] = chunk.tiers
    # In the order in which ``selected`` selects moves and tiers below.
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
