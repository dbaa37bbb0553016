"""The board: notation, packing, replay, winning chains, symmetries, and the hash that decides splits."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.board import (
    BLUE,
    MAX_SIZE,
    MIN_SIZE,
    RED,
    SYMMETRIES,
    Symmetry,
    TrmphLine,
    cell_index,
    cell_name,
    format_moves,
    game_hash,
    game_hashes,
    pack_boards,
    parse_moves,
    player_to_move,
    replay,
    replay_packed,
    split_trmph,
    swaps_colours,
    symmetry_table,
    transform_moves,
    transform_planes,
    unpack_boards,
    winner_of,
)
from hexdata.errors import FormatError

Moves = tuple[int, np.ndarray]


@st.composite
def games(draw: st.DrawFn) -> Moves:
    """Draw a board size and moves without repeats; the game may continue after a win."""
    n, rng = draw(st.integers(MIN_SIZE, MAX_SIZE)), np.random.default_rng(draw(st.integers(0, 2**32)))
    return n, rng.permutation(n * n)[: draw(st.integers(0, n * n))].astype(np.uint16)


@st.composite
def positions(draw: st.DrawFn) -> np.ndarray:
    """Draw boards (20, 2, n, n) with at most one stone per cell; some are full."""
    n, rng = draw(st.integers(MIN_SIZE, 14)), np.random.default_rng(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from([(0, 0.5, 0.5), (0.2, 0.4, 0.4), (0.8, 0.1, 0.1)]))
    stones = rng.choice(3, size=(20, n, n), p=share)
    return np.stack([stones == 1, stones == 2], axis=1).astype(np.uint8)


def read_game(text: str) -> np.ndarray:
    parts = split_trmph(text)
    return parse_moves(parts.moves, parts.board_size)


# Notation

CELLS = {
    13: {"a1": 0, "m1": 12, "a2": 13, "h7": 85, "m13": 168},
    3: {"c3": 8},
    26: {"z26": 675},
    27: {"z1": 25, "aa1": 26, "aa27": 728},
    32: {"ab12": 379, "af32": 1023},
}


def test_a_cell_is_a_column_letter_and_a_row_number() -> None:
    for n, cells in CELLS.items():
        assert {name: cell_index(name, n) for name in cells} == cells
        assert [cell_name(index, n) for index in cells.values()] == [*cells]
    assert parse_moves("a1b12c3", 13).tolist() == [0, 144, 28]
    assert (format_moves([0, 144, 28], 13), parse_moves("", 13).tolist()) == ("a1b12c3", [])


@given(games())
def test_formatted_moves_parse_back(game: Moves) -> None:
    again = parse_moves(format_moves(game[1], game[0]), game[0])
    np.testing.assert_array_equal(again, game[1], strict=True)


CELL_NAMES = ("", "n1", "a14", "a0", "a01", "A1", "1a", "a", "aa1", "a1b1")
LINES = (
    "",
    "a1b2c3",
    "# a comment",
    "13,a1",
    "#13 a1",
    "#,a1",
    "#13,a1 x",
    "#13,a1 b r",
    "#13,a1b",
    "#13,a1 3",
)
LINES += ("#13,A1 b", "see #13,a1 b", "#13,a1 b#no space", "#13,1a1", "#13,a1 b2", "#13,a1swap")
REFUSED: list[tuple[str, Callable[[str], object], tuple[str, ...]]] = [
    ("trmph-cell", lambda name: cell_index(name, 13), CELL_NAMES),
    ("trmph-cell", lambda moves: parse_moves(moves, 13), ("a1n1", "a1b14", "a1b0")),
    ("trmph-syntax", read_game, LINES),
    ("board-size", lambda size: split_trmph(f"#{size},a1 b"), ("2", "33", "0", "999")),
    ("board-size", lambda size: cell_index("a1", int(size)), ("-1", "0", "2", "33")),
    ("board-size", lambda size: cell_name(0, int(size)), ("-1", "0", "2", "33")),
    ("board-size", lambda size: symmetry_table(int(size)), ("-1", "0", "2", "33")),
    ("repeated-move", lambda moves: replay(parse_moves(moves, 13), 13), ("a1b1c1b1a1",)),
]


@pytest.mark.parametrize(("code", "use", "texts"), REFUSED)
def test_invalid_texts_are_refused(code: str, use: Callable[[str], object], texts: tuple[str, ...]) -> None:
    for text in texts:
        with pytest.raises(FormatError) as error:
            use(text)
        assert pickle.loads(pickle.dumps(error.value)).code == code
    if code == "repeated-move":
        assert "ply 3 was already played at ply 1; found b1" in str(error.value)


URL = "http://www.trmph.com/hex/board"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("#13,a1b2c3 b", TrmphLine(13, "a1b2c3", BLUE)),
        ("#13,a1b2c3 r\r\n", TrmphLine(13, "a1b2c3", RED)),
        ("#13,a1b2c3 R", TrmphLine(13, "a1b2c3", RED)),
        (f"{URL}#13,a1b2c3 1", TrmphLine(13, "a1b2c3", BLUE)),
        (f"  {URL}#9,a1\t2  ", TrmphLine(9, "a1", RED)),
        ("#13,a1b2c3 # b would be wrong", TrmphLine(13, "a1b2c3")),
        ("#13,a1b2c3 b # seen in a café #2", TrmphLine(13, "a1b2c3", BLUE)),
        ("#13,", TrmphLine(13, "")),
    ],
)
def test_a_line_is_split_into_its_parts(text: str, parts: TrmphLine) -> None:
    assert split_trmph(text) == parts


# Boards


@given(positions(), st.sampled_from([bool, np.uint8, np.int64, np.float16, np.float32, np.float64]))
def test_packed_boards_unpack_to_the_same_planes(planes: np.ndarray, dtype: type) -> None:
    packed = pack_boards(planes.astype(dtype))
    np.testing.assert_array_equal(packed, np.packbits(planes.reshape(len(planes), -1), axis=1), strict=True)
    again = unpack_boards(packed, planes.shape[-1], dtype)
    assert again.flags.c_contiguous and again.flags.writeable  # noqa: PT018
    np.testing.assert_array_equal(again, planes.astype(dtype), strict=True)


def test_the_layout_of_a_packed_board_is_pinned() -> None:
    # Stores on disk hold these bytes: blue a1, then red c3, the 18th bit of 24.
    assert pack_boards(replay([0, 8], 3)).tolist() == [[0, 0, 0], [0x80, 0, 0], [0x80, 0, 0x40]]


@given(games(), st.sampled_from([BLUE, RED]))
def test_replay_adds_one_stone_per_move(game: Moves, first: int) -> None:
    n, moves = game
    planes = replay(moves, n, first).reshape(-1, 2, n * n)
    assert (planes.dtype, len(planes), planes[0].any()) == (np.uint8, len(moves) + 1, np.False_)
    added = np.argwhere(planes[1:] != planes[:-1])
    assert added.tolist() == [[ply, (first + ply) % 2, move] for ply, move in enumerate(moves.tolist())]


def test_several_games_replay_like_single_games() -> None:
    rng = np.random.default_rng(1)
    for count, first in ((0, BLUE), (1, RED), (6, BLUE), (6, RED)):
        lengths = rng.integers(0, 50, count)
        moves = [rng.permutation(49)[:length].astype(np.uint16) for length in lengths]
        packed = replay_packed(np.concatenate([np.empty(0, np.uint16), *moves]), lengths, 7, first)
        each = [pack_boards(replay(m, 7, first)) for m in moves]
        np.testing.assert_array_equal(packed, np.concatenate([np.empty((0, 13), np.uint8), *each]))


def test_the_player_to_move_follows_from_the_counts() -> None:
    blue, red = [0, 1, 1, 2, 0, 3], [0, 0, 1, 1, 1, 1]  # the last two are impossible
    assert player_to_move(blue, red).tolist() == [BLUE, RED, BLUE, RED, BLUE, RED]


# Winners


def connects(plane: np.ndarray, colour: int) -> bool:
    """Return whether the stones of one plane connect their edges, by a search from the first edge."""
    plane = plane if colour == BLUE else plane.T  # the neighbours are the same
    n, reached = len(plane), {(0, int(column)) for column in np.flatnonzero(plane[0])}
    waiting = [*reached]
    while waiting:
        r, c = waiting.pop()
        for cell in ((r, c + 1), (r + 1, c), (r + 1, c - 1), (r, c - 1), (r - 1, c), (r - 1, c + 1)):
            if cell not in reached and min(cell) >= 0 and max(cell) < n and plane[cell]:
                reached.add(cell)
                waiting.append(cell)
    return any(r == n - 1 for r, _ in reached)


@given(positions(), st.sampled_from(SYMMETRIES))
def test_the_winner_is_that_of_a_search_and_transforms_with_the_board(
    planes: np.ndarray, s: Symmetry
) -> None:
    winners = winner_of(planes)
    plain = [next((c for c in (BLUE, RED) if connects(board[c], c)), -1) for board in planes]
    assert winners.tolist() == plain
    image = transform_planes(planes, s)
    assert winner_of(image).tolist() == [w if w < 0 else w ^ swaps_colours(s) for w in plain]
    np.testing.assert_array_equal(transform_planes(image, s), planes)


def test_neighbours_are_those_of_the_short_diagonal_and_a_winding_chain_wins() -> None:
    # b1 a2 touch along the short diagonal, a1 b2 do not.
    chains = {"b1a2a3": BLUE, "a1b2c3": -1, "c1b2a3": BLUE, "a1a2a3": BLUE, "a1b1c1": -1}
    planes = np.zeros((len(chains), 2, 3, 3), np.uint8)
    for board, text in zip(planes, chains, strict=True):
        board[BLUE].flat[parse_moves(text, 3)] = 1
    assert winner_of(planes).tolist() == [*chains.values()]
    # A snake along every second row, joined at alternate ends: the longest way there is.
    planes = np.zeros((2, 2, MAX_SIZE, MAX_SIZE), np.uint8)
    planes[:, BLUE, ::2] = planes[:, BLUE, 1::4, -1] = planes[:, BLUE, 3::4, 0] = 1
    planes[1, BLUE, 1, -1] = 0
    assert (winner_of(planes).tolist(), winner_of(planes[:0]).tolist()) == ([BLUE, -1], [])


# Symmetries and hashes


def test_the_symmetry_table_of_a_small_board_is_pinned() -> None:
    assert symmetry_table(3).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [8, 7, 6, 5, 4, 3, 2, 1, 0],
        [0, 3, 6, 1, 4, 7, 2, 5, 8],
        [8, 5, 2, 7, 4, 1, 6, 3, 0],
    ]
    assert [swaps_colours(s) for s in SYMMETRIES] == [False, False, True, True]


@settings(max_examples=40)
@given(games())
def test_games_and_boards_transform_together_and_keep_their_hash(game: Moves) -> None:
    n, moves = game
    boards = replay(moves, n)
    smallest = min(transform_moves(moves, n, s).tolist() for s in (Symmetry.IDENTITY, Symmetry.ROTATION))
    canonical = b"hexdata game %d " % n + np.array(smallest, "<u2").tobytes()
    digest = hashlib.sha256(canonical).digest()[:16]
    for symmetry in SYMMETRIES:
        first, image = RED if swaps_colours(symmetry) else BLUE, transform_moves(moves, n, symmetry)
        np.testing.assert_array_equal(transform_planes(boards, symmetry), replay(image, n, first))
        assert game_hash(image, n, first) == digest
        for other in SYMMETRIES:
            both = transform_moves(moves, n, Symmetry(symmetry ^ other))
            np.testing.assert_array_equal(transform_moves(image, n, other), both)


def test_the_hash_is_pinned() -> None:
    # The split of every store follows from these bytes. If they change, games change sides between
    # training and test: do not, without a new schema version and a word in the changelog.
    assert game_hash(parse_moves("a1b12c3", 13), 13).hex() == "237bf84d7f4f766869e34094015c2713"
    assert game_hash([], 13).hex() == "9ff0051fbc17e54e1fb46133f419b135"


def test_unrelated_games_have_different_hashes() -> None:
    # Every game of two moves on the smallest board, either player first: 144 games, each with 3 images.
    games = [([a, b], first) for a in range(9) for b in range(9) if a != b for first in (BLUE, RED)]
    hashes = game_hashes(np.ravel([m for m, _ in games]), np.full(144, 2), 3, np.array([f for _, f in games]))
    assert (len({*hashes}), hashes) == (36, [game_hash(moves, 3, first) for moves, first in games])
    assert len({game_hash([0, 1], n) for n in range(MIN_SIZE, MAX_SIZE + 1)}) == 30
    none = np.zeros(0, np.int64)
    assert game_hashes(none, none, 5, none) == []
    assert game_hashes(none, np.zeros(2, np.int64), 5, np.array([1, 0])) == [game_hash([], 5)] * 2
