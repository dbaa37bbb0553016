"""Games from TRMPH text: valid games, and errors that name the faulty move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.board import format_moves
from hexdata.demo.games import make_game
from hexdata.errors import FormatError
from hexdata.show.trmph import looks_like_game, read_trmph


def text_of(moves: list[int], n: int) -> str:
    return format_moves(moves, n)


@given(st.data())
def test_moves_are_parsed_in_order(data):
    n = data.draw(st.integers(3, 32))
    moves = data.draw(st.lists(st.integers(0, n * n - 1), unique=True, max_size=60))
    head = data.draw(
        st.sampled_from(["#", "http://www.trmph.com/hex/board#", " https://trmph.com/hex/board#"])
    )
    tail, winner = data.draw(st.sampled_from([(" b", 0), (" r", 1), (" 1", 0), (" 2 # by hand", 1)]))
    text = f"{head}{n},{text_of(moves, n)}{tail}"
    assert looks_like_game(text)
    game = read_trmph(text)
    assert (game.size, game.winner, game.moves.tolist()) == (n, winner, moves)
    last = game.last
    assert last.planes[0].ravel().nonzero()[0].tolist() == sorted(moves[::2])
    assert last.planes[1].ravel().nonzero()[0].tolist() == sorted(moves[1::2])
    assert last.total_positions == len(moves) + 1


def test_a_missing_winner_is_that_of_the_chain():
    for number in range(4):
        moves, winner = make_game(number, 1, 7)
        text = f"#7,{text_of(moves.tolist(), 7)}"
        assert read_trmph(text).winner == winner
        assert read_trmph(f"#7,{text_of(moves[:-1].tolist(), 7)}").winner is None
        assert read_trmph(f"{text} {'br'[1 - winner]}").winner == 1 - winner  # what is said is believed


@pytest.mark.parametrize(
    ("text", "message", "code"),
    [
        ("#13,a1b2n3c4", "move 3 is not on the board; found 'n3'; expected a1 to m13", "trmph-cell"),
        ("#13,a1b14", "move 2 is not on the board; found 'b14'", "trmph-cell"),
        ("#13,a1b2c3b2", "move 4 was already played as move 2; found b2", "repeated-move"),
        ("#13,a1b2?c3", "move 3 is not a cell; found '\\?c3'", "trmph-syntax"),
        ("#13,a1bb2", "move 2 is not on the board; found 'bb2'", "trmph-cell"),
        ("#13,a1bbb2", "move 2 is not a cell; found 'bbb2'", "trmph-syntax"),
        ("#13,a1b", "move 2 is not a cell; found 'b'", "trmph-syntax"),
        ("#13,A1", "move 1 is not a cell; found 'A1'", "trmph-syntax"),
        ("#2,a1", "board size; found 2", "board-size"),
        ("#33,a1", "board size; found 33", "board-size"),
        ("#13", "not a TRMPH line", "trmph-syntax"),
        ("#13,a1b2 x", "not a TRMPH line", "trmph-syntax"),
        ("https://example.org/board", "not a TRMPH line", "trmph-syntax"),
    ],
)
def test_errors_name_the_faulty_move(text, message, code):
    assert looks_like_game(text)
    with pytest.raises(FormatError, match=message) as caught:
        read_trmph(text)
    assert caught.value.code == code


@pytest.mark.parametrize("location", ["STORE", "./a.tar:3", "", "13,a1b2", "/data/#1"])
def test_paths_are_not_games(location):
    assert not looks_like_game(location)


def test_an_empty_game_has_an_empty_board():
    game = read_trmph("#5,")
    assert (len(game), game.winner, int(game.last.planes.sum())) == (1, None, 0)
    assert np.array_equal(game.last.planes, game.positions[0].planes)
