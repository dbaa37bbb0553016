"""Generated games: legal, won by their last move, reproducible from a seed, and varied."""

from __future__ import annotations

import numpy as np
import pytest

from hexdata.board import MAX_SIZE, MIN_SIZE, format_moves, replay, winner_of
from hexdata.demo.games import make_game, make_games
from hexdata.errors import FormatError


@pytest.mark.parametrize("n", [MIN_SIZE, 4, 8, 11, 13, 19, MAX_SIZE])
def test_every_game_is_legal_and_ends_with_the_winning_move(n: int) -> None:
    for game in make_games(40 if n < 12 else 5, seed=5, board_size=n):
        planes = replay(game.moves, n)  # refuses a repeated move
        assert winner_of(planes[-2:]).tolist() == [-1, game.winner]
        assert (game.moves.dtype, game.winner) == (np.uint16, (len(game.moves) - 1) % 2)


@pytest.mark.parametrize("n", [MIN_SIZE - 1, MAX_SIZE + 1])
def test_unsupported_sizes_are_refused(n: int) -> None:
    with pytest.raises(FormatError, match="3 to 32"):
        make_game(0, seed=1, board_size=n)


def test_a_game_depends_on_its_seed_and_number_alone() -> None:
    texts = [[format_moves(game.moves, 5) for game in make_games(23, seed=s, board_size=5)] for s in (1, 2)]
    again = [*make_games(3, seed=1, start=20, board_size=5), make_game(7, seed=1, board_size=5)]
    assert [format_moves(game.moves, 5) for game in again] == [texts[0][number] for number in (20, 21, 22, 7)]
    assert len({*texts[0], *texts[1]}) == 46
    # The demo's figures in the documents follow from the games; a change here changes them all.
    assert format_moves(make_game(0, seed=42, board_size=5).moves, 5) == "b4e2c4b5c5e3b3a1d2c3d3b2c2e1d5d1c1"
    assert format_moves(make_game(1, seed=42).moves[:12], 13) == "i8i7k4l2l4f5m4l5a1l6j5e8"
