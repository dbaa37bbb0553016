"""Generated games that many tests use. Each is made once per process, because a game takes milliseconds."""

from __future__ import annotations

from functools import cache

from hexdata.demo.games import DemoGame, make_game

__all__ = ["demo_games"]


def demo_games(count: int, seed: int, board_size: int = 13, start: int = 0) -> list[DemoGame]:
    """Return what ``make_games`` yields. The arrays are read-only."""
    return [_demo_game(number, seed, board_size) for number in range(start, start + count)]


@cache
def _demo_game(number: int, seed: int, board_size: int) -> DemoGame:
    game = make_game(number, seed, board_size)
    game.moves.flags.writeable = False
    return game
