"""Generated games: legal, won by their last move, reproducible from a seed, and varied."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hexdata.board import BLUE, MAX_SIZE, MIN_SIZE, RED, format_moves, replay, winner_of
from hexdata.demo.games import DemoGame, make_game, make_games
from hexdata.errors import FormatError


@pytest.fixture(scope="module")
def games() -> list[DemoGame]:
    return list(make_games(400, seed=1))


def check_legal(game: DemoGame, n: int) -> None:
    assert game.moves.dtype == np.uint16
    planes = replay(game.moves, n)  # refuses a repeated move
    assert winner_of(planes[-2:]).tolist() == [-1, game.winner]
    assert game.winner == (len(game.moves) - 1) % 2


def test_every_game_is_legal_and_ends_with_the_winning_move(games: list[DemoGame]) -> None:
    for game in games:
        check_legal(game, 13)


@pytest.mark.parametrize("n", [MIN_SIZE, 4, 8, 11, 19, MAX_SIZE])
def test_games_are_legal_on_every_size_of_board(n: int) -> None:
    for game in make_games(40 if n < 12 else 3, seed=5, board_size=n):
        check_legal(game, n)


@pytest.mark.parametrize("n", [MIN_SIZE - 1, MAX_SIZE + 1])
def test_unsupported_sizes_are_refused(n: int) -> None:
    with pytest.raises(FormatError, match="3 to 32"):
        make_game(0, seed=1, board_size=n)


def test_a_game_depends_on_its_seed_and_number_alone(games: list[DemoGame]) -> None:
    again = [*make_games(3, seed=1, start=20), make_game(7, seed=1)]
    for game, number in zip(again, (20, 21, 22, 7), strict=True):
        np.testing.assert_array_equal(game.moves, games[number].moves)
    others = make_games(20, seed=2)
    assert all(
        game.moves.tolist() != other.moves.tolist() for game, other in zip(games, others, strict=False)
    )


def test_a_game_is_pinned() -> None:
    # The demo's figures in the documents follow from the games; a change here changes them all.
    assert format_moves(make_game(0, seed=42, board_size=5).moves, 5) == "b4e2c4b5c5e3b3a1d2c3d3b2c2e1d5d1c1"
    assert format_moves(make_game(1, seed=42).moves[:12], 13) == "i8i7k4l2l4f5m4l5a1l6j5e8"


def test_lengths_spread_and_both_colours_win(games: list[DemoGame]) -> None:
    lengths = np.array([len(game.moves) for game in games])
    assert 60 < lengths.mean() < 80
    assert lengths.std() > 12
    assert lengths.min() >= 25
    assert lengths.max() > 100
    winners = Counter(game.winner for game in games)
    assert winners[BLUE] > 150
    assert winners[RED] > 150


def test_openings_repeat_and_games_do_not(games: list[DemoGame]) -> None:
    openings = Counter(tuple(game.moves[:2].tolist()) for game in games)
    assert openings.most_common(1)[0][1] > 40
    assert len(openings) > 100
    assert len({game.moves.tobytes() for game in games}) == len(games)


def test_most_intrusions_into_bridges_are_answered(games: list[DemoGame]) -> None:
    saved = intruded = 0
    for game in games[:100]:
        moves = game.moves.tolist()
        own: tuple[set[int], set[int]] = (set(), set())
        for ply, move in enumerate(moves[:-1]):
            saves = _saves(move, own[1 - ply % 2], own[0] | own[1])
            if saves and ply >= 6:  # beyond any opening
                intruded += 1
                saved += moves[ply + 1] in saves
            own[ply % 2].add(move)
    assert intruded > 200
    assert saved / intruded > 0.8


def _saves(move: int, stones: set[int], taken: set[int], n: int = 13) -> set[int]:
    """Return the cells that save bridges of ``stones`` from a stone at ``move``."""

    def ring(cell: int) -> set[int]:
        r, c = divmod(cell, n)
        near = ((r, c + 1), (r, c - 1), (r + 1, c), (r - 1, c), (r - 1, c + 1), (r + 1, c - 1))
        return {row * n + column for row, column in near if 0 <= row < n and 0 <= column < n}

    return {other for other in ring(move) - taken if len(ring(move) & ring(other) & stones) == 2}
