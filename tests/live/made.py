"""Generated games as chunks and files, their positions computed in a simple way, and stages for tests."""

from __future__ import annotations

import gzip
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hexdata.board import format_moves, pack_boards, replay
from hexdata.demo.games import DemoGame, make_game, make_games
from hexdata.live import Chunk, Stage, Transform
from hexdata.live.chunk import PLY_STRIDE
from hexdata.live.pipeline import Pipeline
from hexdata.live.stage import Worker
from hexdata.schema import NO_MOVE, NO_PLY, NO_TIER
from hexdata.shards.blocks import Block

N = 5
CELLS = N * N
TIMEOUT = 120.0
"""Seconds after which something that is waited for is taken to hang; never reached by a test that passes."""

Row = dict[str, Any]


# --- files ------------------------------------------------------------------------------------------------


def text_of(*numbers: int) -> str:
    """Return lines of a TRMPH file with generated games."""
    made = [make_game(number, 1, N) for number in numbers]
    return "".join(f"#{N},{format_moves(game.moves, N)} {'br'[game.winner]}\n" for game in made)


def examples(game: DemoGame, game_id: tuple[int, int]) -> list[Row]:
    """Return the examples of a game as the newer legacy tool stored them."""
    boards, policies = replay(game.moves, N), np.eye(CELLS, dtype=np.float32)[game.moves]
    return [
        {
            "board": board.astype(np.float32),
            "policy": policies[ply] if ply < len(game.moves) else None,
            "value": float(game.winner),
            "player_to_move": ply % 2,
            "metadata": {
                "game_id": game_id,
                "position_in_game": ply,
                "total_positions": len(boards),
                "value_sample_tier": min(ply // 5, 3),
                "winner": ("BLUE", "RED")[game.winner],
            },
        }
        for ply, board in enumerate(boards)
    ]


def write_pickle(path: Path, content: Iterable[Any], **header: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(pickle.dumps({"examples": list(content), **header}, 4), 1))
    return path


# --- chunks and blocks ------------------------------------------------------------------------------------


def move_chunks(count: int, board_size: int = N, tiers: bool = False) -> list[Chunk]:
    """Return generated games stored as moves, numbered from 0."""
    chunks = []
    for number, game in enumerate(make_games(count, 1, board_size)):
        some = (np.arange(len(game.moves) + 1) % 4).astype(np.uint8) if tiers else None
        source, name = f"made-{number % 3}.trmph", number.to_bytes(16, "big")
        whole = {"moves": game.moves, "value": float(game.winner), "tiers": some, "number": number}
        chunks.append(Chunk(board_size, source, number // 3, name, **whole))
    return chunks


def block_chunk(number: int, positions: int, dense: Iterable[int] = (), final: Iterable[int] = ()) -> Chunk:
    """Return a game of random values stored as a block: plies with a dense policy, and plies without a
    move.
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
    if rows := sorted(dense):
        policies = rng.random((len(rows), CELLS)).astype(np.float32)
        block |= {"policy": policies / policies.sum(axis=1, keepdims=True)}
        block |= {"policy_row": np.array(rows, np.uint32)}
    return Chunk(N, "found.pkl.gz", number, b"f" * 16, block=block, number=number)


def plain_rows(chunk: Chunk) -> list[Row]:
    """Return the positions of a chunk as the documentation defines them; ``policy`` is a list or None."""
    ids = [{"game_id": chunk.number, "position_id": chunk.number * PLY_STRIDE + i} for i in range(999)]
    if chunk.block is not None:
        return [row | own for row, own in zip(rows_of([chunk.block]), ids, strict=False)]
    assert chunk.moves is not None
    n, played = chunk.board_size, chunk.moves.tolist()
    rows = []
    for ply in range(len(played) + 1):
        stones = [0] * (2 * n * n + (-2 * n * n) % 8)
        for earlier, cell in enumerate(played[:ply]):
            stones[(earlier % 2) * n * n + cell] = 1
        bits = "".join(map(str, stones))
        row = {
            "board": [int(bits[start : start + 8], 2) for start in range(0, len(bits), 8)],
            "move": played[ply] if ply < len(played) else NO_MOVE,
            "player_to_move": ply % 2,
            "position_in_game": ply,
            "total_positions": len(played) + 1,
            "value": chunk.value,
            "value_sample_tier": NO_TIER if chunk.tiers is None else int(chunk.tiers[ply]),
            "policy": None,
        }
        rows.append(row | ids[ply])
    return rows


def rows_of(blocks: Iterable[Block]) -> list[Row]:
    """Return the positions of blocks as dicts of plain values."""
    rows = []
    for block in blocks:
        policies = dict(zip(block.get("policy_row", []), block.get("policy", []), strict=True))
        for row in range(len(block["position_id"])):
            own = {name: each[row].tolist() for name, each in block.items() if not name.startswith("policy")}
            rows.append(own | {"policy": policies[row].tolist() if row in policies else None})
    return rows


def ids_of(blocks: Iterable[Block]) -> list[int]:
    return [identity for block in blocks for identity in block["position_id"].tolist()]


# --- stages -----------------------------------------------------------------------------------------------


class Given(Stage):
    """First stage, which emits items in order, then ends, or waits for more; several threads divide them."""

    first = True

    def __init__(self, items: Sequence[Any], *, threads: int = 1, ends: bool = True) -> None:
        super().__init__(threads=threads)
        self.items, self.ends = items, ends
        self.next = list(range(threads))

    def work(self, worker: Worker) -> None:
        while True:
            at = self.next[worker.number]
            self.wait_for(worker, lambda at=at: self.ends or at < len(self.items) or None)  # type: ignore[misc]
            if at >= len(self.items):
                return
            self.next[worker.number] += len(self.workers)
            self.put(worker, [self.items[at]])

    kept: ClassVar = {"next": list[int]}


class SampleGames(Given):
    """Generated games, 6 at a time, in some passes; game 1 is stored as a block with policies."""

    produces = "games"

    def __init__(self, *, passes: int = 1) -> None:
        chunks = move_chunks(40, tiers=True)
        chunks[1] = replace(block_chunk(1, 9, dense=(2, 5, 8), final=(8, 7)), number=1)
        super().__init__([tuple(chunks[start : start + 6]) for start in range(0, 40, 6)] * passes)


class Pass(Transform):
    def process(self, item: Any) -> Iterable[Any]:
        return (item,)


class ChunkUnpacker(Pass):
    """A stage of a user with the name of a stage of hexdata, and other arguments."""

    def __init__(self, *, share: float) -> None:
        super().__init__()


class Interrupting(Transform):
    """Sends SIGINT once, after the trainer has started to wait."""

    def process(self, item: Any) -> Iterable[Any]:
        if not self.counts:
            self.count("interrupted")
            trainer = threading.main_thread().ident or 0
            until(lambda: sys._current_frames()[trainer].f_code.co_name == "wait")
            signal.pthread_kill(trainer, signal.SIGINT)
        return ()


class NotAStage:
    """A class that is not a stage."""


def piped(*stages: Stage, capacity: int = 2) -> Pipeline:
    return Pipeline(stages, [capacity] * len(stages))


def rest(pipeline: Pipeline) -> list[Any]:
    """Return all remaining items."""
    taken = []
    while True:
        try:
            taken.append(pipeline.take(TIMEOUT))
        except StopIteration:
            return taken
        assert taken[-1] is not None, "the pipeline hangs"


def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        time.sleep(0.001)
        assert time.monotonic() < end, "it never comes to that"
