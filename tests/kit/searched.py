"""Games with the results of a search, in the two kinds of files of the legacy project since March 2026.

Both kinds describe the same games. The policies and weights that a store must have come from here.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests.legacy_pickles import Player, Winner, one_hot

__all__ = ["N", "SearchedGame", "examples_of", "some_games", "to_sidecar", "to_trmph"]

N: Final = 5


@dataclass(frozen=True)
class SearchedGame:
    """A game of m moves."""

    moves: tuple[int, ...]
    winner: int
    codes: str
    """A letter for each move. The policy of a C is not to be trained."""
    targets: np.ndarray
    """float16 (m, N * N): the policy of each move; zeros for some of the letter C."""

    def weight(self, ply: int) -> float:
        """Return the weight of the policy of a position."""
        return 0.0 if ply < len(self.moves) and self.codes[ply] == "C" else 1.0

    def board(self, ply: int) -> np.ndarray:
        """Return the planes of a position, float32 (2, N, N)."""
        board = np.zeros((2, N * N), "f4")
        for number, move in enumerate(self.moves[:ply]):
            board[number % 2, move] = 1
        return board.reshape(2, N, N)

    def policy(self, ply: int, searched: bool = True) -> np.ndarray:
        """Return the policy of a position in batches, float32 (N * N,)."""
        if ply == len(self.moves) or self.weight(ply) == 0:
            return np.zeros(N * N, "f4")
        return self.targets[ply].astype("f4") if searched else one_hot(self.moves[ply], N)


def some_games(count: int, seed: int = 0) -> list[SearchedGame]:
    """Return at most 25 games that have no position but the first in common.

    The search often prefers another move than the one that was played.
    """
    random, games = np.random.default_rng(seed), []
    for number in range(count):
        moves = random.permutation(N * N)
        moves = np.append(number, moves[moves != number])[: 4 + (number * 7) % 20]
        codes = "".join(random.choice(list("VVGTC"), len(moves)))
        targets = np.zeros((len(moves), N * N), "f2")
        for ply, code in enumerate(codes):
            free = np.setdiff1d(np.arange(N * N), moves[:ply])
            if code == "T":
                targets[ply, moves[ply]] = 1
            elif code != "C" or random.random() < 0.5:
                chosen = random.permutation(free)[: 1 + random.integers(len(free))]
                targets[ply, chosen] = random.dirichlet(np.ones(len(chosen)))
                targets[ply, chosen[0]] += 1 / 16  # never zero in float16
        games.append(SearchedGame(tuple(moves.tolist()), number % 2, codes, targets))
    return games


def examples_of(
    games: Sequence[SearchedGame], *, masked: bool = True, searched: bool = True, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the examples of the games, shuffled within each game.

    Args:
        games: The games.
        masked: Whether positions that are not to be trained are kept; the legacy project leaves them out.
        searched: Whether the examples have the policies of the search.
        seed: Seed of the order.
    """
    random, examples = np.random.default_rng(seed), []
    for line, game in enumerate(games, start=1):
        total = len(game.moves) + 1
        for ply in random.permutation(total).tolist():
            if not masked and game.weight(ply) == 0:
                continue
            final = ply == total - 1
            metadata = {
                "game_id": (0, line),
                "position_in_game": ply,
                "total_positions": total,
                "value_sample_tier": ply % 4,
                "winner": Winner(game.winner),
            }
            if not final:
                metadata |= {
                    "policy_move_code": game.codes[ply],
                    "policy_target_trainable": game.codes[ply] != "C",
                    "policy_target_source_code": game.codes[ply],
                    "policy_target_version": 2,
                }
            examples.append(
                {
                    "board": game.board(ply),
                    "policy": None if final else one_hot(game.moves[ply], N),
                    "policy_search_target": None if final or not searched else game.targets[ply].astype("f4"),
                    "value": float(game.winner),
                    "player_to_move": Player(ply % 2),
                    "metadata": metadata | {"source_file": "data/a.trmph"},
                }
            )
    return examples


def to_trmph(games: Sequence[SearchedGame]) -> str:
    """Return the text of the games."""
    lines = []
    for game in games:
        moves = "".join(f"{'abcde'[move % N]}{move // N + 1}" for move in game.moves)
        lines.append(f"#{N},{moves} {'br'[game.winner]}\n")
    return "".join(["# Self-play games - 2026-03-05T12:00:00\n", *lines])


def to_sidecar(games: Sequence[SearchedGame], version: int = 2, **changes: Any) -> str:
    """Return the text of the sidecar of a file of games.

    Args:
        games: The games.
        version: Version 1 has masks, version 2 policies too.
        changes: Values of every record to set instead; ``...`` leaves one out.
    """
    lines = []
    for index, game in enumerate(games):
        record: dict[str, Any] = {
            "schema_version": version,
            "game_index": index,
            "move_count": len(game.moves),
            "move_codes": game.codes,
            "policy_train_mask": "".join("0" if code == "C" else "1" for code in game.codes),
        }
        if version > 1:
            record |= {
                "policy_target_encoding": "dense_fp16_zlib_base64",
                "policy_targets_blob": base64.b64encode(zlib.compress(game.targets.tobytes())).decode(),
                "policy_target_size": N * N,
                "policy_target_source_codes": game.codes,
                "policy_target_version": 1,
            }
        record = {key: value for key, value in (record | changes).items() if value is not ...}
        lines.append(json.dumps(record, sort_keys=True, separators=(",", ":")) + "\n")
    return "".join(lines)
