"""Generated games as chunks, their positions computed in a simple way, and stages for tests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from hexdata.board import pack_boards
from hexdata.demo.games import make_games
from hexdata.live.chunk import PLY_STRIDE, Chunk
from hexdata.live.stage import Stage, Transform, Worker
from hexdata.schema import NO_MOVE, NO_PLY, NO_TIER
from hexdata.shards.blocks import Block
from tests.live.number_stages import until

N = 5
CELLS = N * N


def move_chunks(count: int, seed: int = 1, board_size: int = N, tiers: bool = False) -> list[Chunk]:
    """Return generated games stored as moves, numbered from 0."""
    return [
        Chunk(
            board_size=board_size,
            source=f"made-{number % 3}.trmph",
            index=number // 3,
            game_hash=number.to_bytes(16, "big"),
            moves=game.moves,
            value=float(game.winner),
            tiers=(np.arange(len(game.moves) + 1) % 4).astype(np.uint8) if tiers else None,
            number=number,
        )
        for number, game in enumerate(make_games(count, seed, board_size))
    ]


def block_chunk(number: int, positions: int, dense: Iterable[int] = (), final: Iterable[int] = ()) -> Chunk:
    """Return a game stored as a block, with random values.

    Args:
        number: Number of the chunk.
        positions: Number of positions.
        dense: Plies with a dense policy. Default none.
        final: Plies without a move. Default none.
    """
    rng = np.random.default_rng([number, positions])
    cells = rng.integers(0, 3, (positions, N, N))
    move = rng.integers(0, CELLS, positions).astype(np.uint16)
    move[list(final)] = NO_MOVE
    block: Block = {
        "board": pack_boards(np.stack([cells == 1, cells == 2], axis=1).astype(np.uint8)),
        "game_id": np.full(positions, 77, np.int64),
        "move": move,
        "player_to_move": rng.integers(0, 2, positions).astype(np.uint8),
        "position_id": rng.permutation(99)[:positions],
        "position_in_game": np.full(positions, NO_PLY, np.uint16),
        "total_positions": rng.integers(0, 99, positions).astype(np.uint16),
        "value": rng.random(positions).astype(np.float32),
        "value_sample_tier": rng.integers(0, 4, positions).astype(np.uint8),
    }
    rows = np.array(sorted(dense), np.uint32)
    if len(rows):
        policies = rng.random((len(rows), CELLS)).astype(np.float32)
        block |= {"policy": policies / policies.sum(axis=1, keepdims=True), "policy_row": rows}
    return Chunk(N, "found.pkl.gz", number, b"f" * 16, block=block, number=number)


Row = dict[str, Any]


def plain_row(chunk: Chunk, ply: int) -> Row:
    """Return one position of a chunk as the documentation defines it; ``policy`` is a list or None."""
    identity = {"game_id": chunk.number, "position_id": chunk.number * PLY_STRIDE + ply}
    if chunk.block is not None:
        return block_rows(chunk.block)[ply] | identity
    assert chunk.moves is not None
    n, played = chunk.board_size, chunk.moves.tolist()
    stones = [0] * (2 * n * n + (-2 * n * n) % 8)
    for earlier, cell in enumerate(played[:ply]):
        stones[(earlier % 2) * n * n + cell] = 1
    bits = "".join(map(str, stones))
    return identity | {
        "board": [int(bits[start : start + 8], 2) for start in range(0, len(bits), 8)],
        "move": played[ply] if ply < len(played) else NO_MOVE,
        "player_to_move": ply % 2,
        "position_in_game": ply,
        "total_positions": len(played) + 1,
        "value": chunk.value,
        "value_sample_tier": NO_TIER if chunk.tiers is None else int(chunk.tiers[ply]),
        "policy": None,
    }


def block_rows(block: Block) -> list[Row]:
    """Return the positions of a block as dicts of plain values."""
    policies = dict(zip(block.get("policy_row", []), block.get("policy", []), strict=True))
    return [
        {name: array[row].tolist() for name, array in block.items() if not name.startswith("policy")}
        | {"policy": policies[row].tolist() if row in policies else None}
        for row in range(len(block["value"]))
    ]


def rows_of(blocks: Iterable[Block]) -> list[Row]:
    return [row for block in blocks for row in block_rows(block)]


def ids_of(blocks: Iterable[Block]) -> list[int]:
    return [identity for block in blocks for identity in block["position_id"].tolist()]


class SampleGames(Stage):
    """First stage that emits generated games in order, ``batch_games`` at a time, ``passes`` times."""

    first: ClassVar[bool] = True
    produces: ClassVar[str] = "games"

    def __init__(self, *, games: int = 40, batch_games: int = 6, passes: int | None = 1) -> None:
        super().__init__()
        chunks = move_chunks(games, tiers=True)
        chunks[1] = replace(block_chunk(1, 9, dense=(2, 5, 8), final=(8, 7)), number=1)
        self._game_batches = [
            tuple(chunks[start : start + batch_games]) for start in range(0, games, batch_games)
        ]
        self._passes = passes
        self._next = 0

    def work(self, worker: Worker) -> None:
        while self._passes is None or self._next < self._passes * len(self._game_batches):
            games = self._game_batches[self._next % len(self._game_batches)]
            self._next += 1
            self.put(worker, (games,))

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Silence(Stage):
    """First stage that never emits anything."""

    first: ClassVar[bool] = True
    produces: ClassVar[str] = "games"

    def work(self, worker: Worker) -> None:
        self.wait_for(worker, lambda: None)


class Faulty(Transform):
    """Passes on ``after`` items, then raises."""

    def __init__(self, *, after: int = 2) -> None:
        super().__init__()
        self.after = after

    def process(self, item: Any) -> Iterable[Any]:
        self.after -= 1
        if self.after < 0:
            raise ArithmeticError("no more items")
        return (item,)


class Interrupting(Transform):
    """Sends SIGINT once, after the trainer has started to wait."""

    def link_stages(self, stages: Sequence[Stage]) -> None:
        self.last = stages[-1]

    def process(self, item: Any) -> Iterable[Any]:
        if not self.counts:
            self.count("interrupted")
            until(lambda: self.coordinator.change(lambda: list(self.last.sink.filled._waiters)))
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
        return ()


class NotAStage:
    """A class that is not a stage."""
