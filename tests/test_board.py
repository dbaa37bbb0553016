"""The board: notation, packing, replay, winning chains, symmetries, and the hash that decides splits."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.board import (
    BLUE,
    MAX_SIZE,
    MIN_SIZE,
    RED,
    SYMMETRIES,
    Symmetry,
    TrmphLine,
    canonical_moves,
    cast_cells,
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
from hexdata.schema import board_bytes

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "trmph"

sizes = st.integers(MIN_SIZE, MAX_SIZE)


@st.composite
def games(draw: st.DrawFn, size: st.SearchStrategy[int] = sizes) -> tuple[int, np.ndarray]:
    """Draw a board size and moves without repeats; the game may continue after a win."""
    n = draw(size)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return n, rng.permutation(n * n)[: draw(st.integers(0, n * n))].astype(np.uint16)


@st.composite
def positions(draw: st.DrawFn) -> np.ndarray:
    """Draw boards (N, 2, n, n) with at most one stone per cell; some are full."""
    n = draw(st.integers(MIN_SIZE, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    stones = rng.choice(
        3, size=(20, n, n), p=draw(st.sampled_from([(0, 0.5, 0.5), (0.2, 0.4, 0.4), (0.8, 0.1, 0.1)]))
    )
    return np.stack([stones == 1, stones == 2], axis=1).astype(np.uint8)


def error_code(error: pytest.ExceptionInfo[FormatError]) -> str:
    return error.value.code


# Cells and moves


@pytest.mark.parametrize(
    ("name", "n", "index"),
    [
        ("a1", 13, 0),
        ("m1", 13, 12),
        ("a2", 13, 13),
        ("h7", 13, 85),
        ("m13", 13, 168),
        ("c3", 3, 8),
        ("z26", 26, 675),
        ("z1", 27, 25),
        ("aa1", 27, 26),
        ("aa27", 27, 728),
        ("ab12", 32, 379),
        ("af32", 32, 1023),
    ],
)
def test_a_cell_is_a_column_letter_and_a_row_number(name: str, n: int, index: int) -> None:
    assert cell_index(name, n) == index
    assert cell_name(index, n) == name


@pytest.mark.parametrize("name", ["", "n1", "a14", "a0", "a01", "A1", "1a", "a", "aa1", "a1b1"])
def test_invalid_cell_names_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="a1 to m13") as error:
        cell_index(name, 13)
    assert error_code(error) == "trmph-cell"


@pytest.mark.parametrize("index", [-1, 169])
def test_an_index_off_the_board_is_refused(index: int) -> None:
    with pytest.raises(FormatError, match="0 to 168"):
        cell_name(index, 13)


@pytest.mark.parametrize("n", [-1, 0, 2, 33])
def test_a_board_size_out_of_range_is_refused(n: int) -> None:
    for use in (lambda: cell_index("a1", n), lambda: cell_name(0, n), lambda: symmetry_table(n)):
        with pytest.raises(FormatError, match="3 to 32") as error:
            use()
        assert error_code(error) == "board-size"


@given(games())
def test_formatted_moves_parse_back(game: tuple[int, np.ndarray]) -> None:
    n, moves = game
    again = parse_moves(format_moves(moves, n), n)
    assert again.dtype == np.uint16
    np.testing.assert_array_equal(again, moves)


def test_moves_are_parsed_in_order() -> None:
    assert parse_moves("a1b12c3", 13).tolist() == [0, 144, 28]
    assert format_moves([0, 144, 28], 13) == "a1b12c3"
    assert parse_moves("", 13).tolist() == []


@pytest.mark.parametrize(
    ("text", "code"),
    [("a1b", "trmph-syntax"), ("1a1", "trmph-syntax"), ("a1 b2", "trmph-syntax"), ("A1", "trmph-syntax"),
     ("a1swap", "trmph-syntax"), ("a1n1", "trmph-cell"), ("a1b14", "trmph-cell"), ("a1b0", "trmph-cell")],
)  # fmt: skip
def test_invalid_move_lists_are_refused(text: str, code: str) -> None:
    with pytest.raises(FormatError) as error:
        parse_moves(text, 13)
    assert error_code(error) == code


# TRMPH lines


URL = "http://www.trmph.com/hex/board"


@pytest.mark.parametrize(
    ("text", "parts", "winner"),
    [
        ("#13,a1b2c3 b", TrmphLine(13, "a1b2c3", "b"), BLUE),
        ("#13,a1b2c3 r\r\n", TrmphLine(13, "a1b2c3", "r"), RED),
        ("#13,a1b2c3 R", TrmphLine(13, "a1b2c3", "R"), RED),
        (f"{URL}#13,a1b2c3 1", TrmphLine(13, "a1b2c3", "1", URL), BLUE),
        (f"  {URL}#9,a1\t2  ", TrmphLine(9, "a1", "2", URL), RED),
        ("#13,a1b2c3", TrmphLine(13, "a1b2c3"), None),
        ("#13,a1b2c3 # b would be wrong", TrmphLine(13, "a1b2c3"), None),
        ("#13,a1b2c3 b # seen in a café #2", TrmphLine(13, "a1b2c3", "b"), BLUE),
        ("#13,", TrmphLine(13, ""), None),
    ],
)
def test_a_line_is_split_into_its_parts(text: str, parts: TrmphLine, winner: int | None) -> None:
    assert split_trmph(text) == parts
    assert split_trmph(text).winner == winner


@pytest.mark.parametrize(
    "text",
    ["", "a1b2c3", "# a comment", "13,a1", "#13 a1", "#,a1", "#13,a1 x", "#13,a1 b r", "#13,a1b", "#13,a1 3",
     "#13,A1 b", "see #13,a1 b", "#13,a1 b#no space"],
)  # fmt: skip
def test_invalid_lines_are_refused(text: str) -> None:
    with pytest.raises(FormatError) as error:
        read_game(text)
    assert error_code(error) == "trmph-syntax"


def read_game(text: str) -> np.ndarray:
    parts = split_trmph(text)
    return parse_moves(parts.moves, parts.board_size)


@pytest.mark.parametrize("size", ["2", "33", "0", "999"])
def test_a_line_of_an_unknown_size_is_refused(size: str) -> None:
    with pytest.raises(FormatError) as error:
        split_trmph(f"#{size},a1 b")
    assert error_code(error) == "board-size"


# Boards


@given(positions(), st.sampled_from([bool, np.uint8, np.int64, np.float16, np.float32, np.float64]))
def test_packed_boards_unpack_to_the_same_planes(planes: np.ndarray, dtype: type) -> None:
    n = planes.shape[-1]
    packed = pack_boards(planes.astype(dtype))
    assert packed.dtype == np.uint8
    assert packed.shape == (len(planes), board_bytes(n))
    np.testing.assert_array_equal(packed, np.packbits(planes.reshape(len(planes), -1), axis=1))
    again = unpack_boards(packed, n, dtype)
    assert again.dtype == dtype
    assert again.flags.c_contiguous
    assert again.flags.writeable
    np.testing.assert_array_equal(again, planes.astype(dtype))


def test_the_layout_of_a_packed_board_is_pinned() -> None:
    # Stores on disk hold these bytes: blue a1, then red c3, the 18th bit of 24.
    planes = replay([0, 8], 3)
    assert pack_boards(planes).tolist() == [[0, 0, 0], [0x80, 0, 0], [0x80, 0, 0x40]]
    assert unpack_boards(np.array([[0x80, 0, 0x40]], np.uint8), 3)[0, :, [0, 2], [0, 2]].tolist() == [
        [1, 0],
        [0, 1],
    ]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float16, np.float32, np.float64, ">f2"])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 1, 5), (2, 3, 4, 4)])
def test_cells_are_cast_to_any_dtype(dtype: str | type, shape: tuple[int, ...]) -> None:
    cells = np.random.default_rng(1).integers(0, 2, shape, np.uint8)
    before = cells.copy()
    np.testing.assert_array_equal(cast_cells(cells, dtype), cells.astype(dtype), strict=True)
    np.testing.assert_array_equal(cells, before)


def test_no_boards_pack_to_no_bytes() -> None:
    assert pack_boards(np.zeros((0, 2, 13, 13))).shape == (0, 43)
    assert unpack_boards(np.zeros((0, 43), np.uint8), 13).shape == (0, 2, 13, 13)


@given(games(), st.sampled_from([BLUE, RED]))
def test_replay_adds_one_stone_per_move(game: tuple[int, np.ndarray], first: int) -> None:
    n, moves = game
    planes = replay(moves, n, first).reshape(-1, 2, n * n)
    assert planes.dtype == np.uint8
    assert len(planes) == len(moves) + 1
    assert not planes[0].any()
    for ply, move in enumerate(moves.tolist()):
        added = np.argwhere(planes[ply + 1] != planes[ply])
        assert added.tolist() == [[(first + ply) % 2, move]]


@given(st.lists(games(st.just(7)), max_size=6), st.sampled_from([BLUE, RED]))
def test_several_games_replay_like_single_games(several: list[tuple[int, np.ndarray]], first: int) -> None:
    moves = [moves for _, moves in several]
    lengths = np.array([len(m) for m in moves], dtype=np.int64)
    packed = replay_packed(np.concatenate([np.empty(0, np.uint16), *moves]), lengths, 7, first)
    each = [pack_boards(replay(m, 7, first)) for m in moves]
    assert packed.flags.c_contiguous
    np.testing.assert_array_equal(packed, np.concatenate([np.empty((0, board_bytes(7)), np.uint8), *each]))


def test_a_cell_played_twice_is_refused_with_its_ply() -> None:
    with pytest.raises(FormatError, match="ply 3 was already played at ply 1; found b1") as error:
        replay([0, 1, 2, 1, 0], 13)
    assert error_code(error) == "repeated-move"
    assert pickle.loads(pickle.dumps(error.value)).code == "repeated-move"


def test_the_player_to_move_follows_from_the_counts() -> None:
    blue, red = [0, 1, 1, 2, 0, 3], [0, 0, 1, 1, 1, 1]  # the last two are impossible
    assert player_to_move(blue, red).tolist() == [BLUE, RED, BLUE, RED, BLUE, RED]
    assert player_to_move(blue, red).dtype == np.uint8


# Winners


def plain_winner(planes: np.ndarray) -> int:
    """Return the winner of one board (2, n, n), -1 for none, by another algorithm."""
    return next((colour for colour in (BLUE, RED) if plain_connected(planes[colour], colour)), -1)


def plain_connected(plane: np.ndarray, colour: int) -> bool:
    """Union-find over the stones of one plane (n, n) and its two edges."""
    n = len(plane)
    stones = {(int(r), int(c)) for r, c in np.argwhere(plane)}
    parent: dict[object, object] = {member: member for member in (*stones, "low", "high")}

    def root(member: object) -> object:
        while parent[member] != member:
            member = parent[member]
        return member

    for r, c in stones:
        for neighbour in {(r, c + 1), (r + 1, c), (r + 1, c - 1)} & stones:
            parent[root(neighbour)] = root((r, c))
        along = r if colour == BLUE else c
        if along == 0:
            parent[root("low")] = root((r, c))
        if along == n - 1:
            parent[root("high")] = root((r, c))
    return root("low") == root("high")


@given(positions())
def test_the_winner_matches_union_find(planes: np.ndarray) -> None:
    winners = winner_of(planes)
    assert winners.dtype == np.int8
    assert winners.tolist() == [plain_winner(board) for board in planes]


@given(positions())
def test_a_full_board_has_the_same_winner_in_every_dtype(planes: np.ndarray) -> None:
    full = planes.copy()
    full[:, BLUE] |= 1 - full[:, RED]
    assert (winner_of(full) >= 0).all()
    np.testing.assert_array_equal(winner_of(full.astype(np.float32)), winner_of(full.astype(bool)))


def test_neighbours_are_those_of_the_short_diagonal() -> None:
    # b1 a2 touch along the short diagonal, a1 b2 do not.
    chains = {"b1a2a3": BLUE, "a1b2c3": -1, "c1b2a3": BLUE, "a1a2a3": BLUE, "a1b1c1": -1}
    planes = np.zeros((len(chains), 2, 3, 3), np.uint8)
    for board, text in zip(planes, chains, strict=True):
        board[BLUE].flat[parse_moves(text, 3)] = 1
    assert winner_of(planes).tolist() == list(chains.values())
    assert winner_of(planes[:, ::-1]).tolist() == [-1, -1, RED, -1, RED]


def test_a_winding_chain_wins() -> None:
    # A snake along every second row, joined at alternate ends: the longest way there is.
    n = MAX_SIZE
    planes = np.zeros((2, 2, n, n), np.uint8)
    planes[:, BLUE, ::2] = 1
    planes[:, BLUE, 1::4, n - 1] = 1
    planes[:, BLUE, 3::4, 0] = 1
    planes[1, BLUE, 1, n - 1] = 0
    assert winner_of(planes).tolist() == [BLUE, -1]
    assert winner_of(planes[:0]).tolist() == []


@pytest.mark.skipif(not DATA.is_dir(), reason="real games are not here")
def test_every_real_engine_game_ends_with_a_winning_chain() -> None:
    texts = [path.read_text() for path in sorted(DATA.glob("neurohex_*.trmph"))]
    lines = [split_trmph(line) for text in texts for line in text.splitlines()]
    assert len(lines) == 5000
    games = [parse_moves(line.moves, 13) for line in lines]
    lengths = np.array([len(moves) for moves in games])
    boards = unpack_boards(replay_packed(np.concatenate(games), lengths, 13), 13, np.uint8)
    finals = np.cumsum(lengths + 1) - 1
    winners = winner_of(boards[finals])
    assert winners.tolist() == [line.winner for line in lines]
    assert (winner_of(boards[finals - 1]) == -1).mean() > 0.99  # and hardly any was played on


# Symmetries


def test_the_symmetry_table_of_a_small_board_is_pinned() -> None:
    assert symmetry_table(3).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [8, 7, 6, 5, 4, 3, 2, 1, 0],
        [0, 3, 6, 1, 4, 7, 2, 5, 8],
        [8, 5, 2, 7, 4, 1, 6, 3, 0],
    ]
    assert [swaps_colours(s) for s in SYMMETRIES] == [False, False, True, True]


@given(sizes)
def test_symmetries_compose_by_xor(n: int) -> None:
    cells = np.arange(n * n)
    for one in SYMMETRIES:
        for other in SYMMETRIES:
            both = transform_moves(transform_moves(cells, n, one), n, other)
            np.testing.assert_array_equal(both, transform_moves(cells, n, Symmetry(one ^ other)))


@given(games(), st.sampled_from(SYMMETRIES))
def test_moves_and_boards_transform_consistently(game: tuple[int, np.ndarray], symmetry: Symmetry) -> None:
    n, moves = game
    image = replay(transform_moves(moves, n, symmetry), n, RED if swaps_colours(symmetry) else BLUE)
    np.testing.assert_array_equal(transform_planes(replay(moves, n), symmetry), image)


@given(positions(), st.sampled_from(SYMMETRIES))
def test_the_winner_transforms_with_the_board(planes: np.ndarray, symmetry: Symmetry) -> None:
    before, after = winner_of(planes), winner_of(transform_planes(planes, symmetry))
    expected = np.where(before < 0, before, before ^ swaps_colours(symmetry))
    np.testing.assert_array_equal(after, expected)
    np.testing.assert_array_equal(transform_planes(transform_planes(planes, symmetry), symmetry), planes)


def images(moves: np.ndarray, n: int) -> list[tuple[int, np.ndarray]]:
    return [(RED if swaps_colours(s) else BLUE, transform_moves(moves, n, s)) for s in SYMMETRIES]


@given(games())
def test_all_images_of_a_game_have_one_canonical_form(game: tuple[int, np.ndarray]) -> None:
    n, moves = game
    smallest = min(transform_moves(moves, n, s).tolist() for s in (Symmetry.IDENTITY, Symmetry.ROTATION))
    for first_player, image in images(moves, n):
        first, canonical = canonical_moves(image, n, first_player)
        assert first == BLUE
        assert canonical.tolist() == smallest
        assert game_hash(image, n, first_player) == game_hash(moves, n)


def test_unrelated_games_have_different_hashes() -> None:
    # Every game of two moves on the smallest board, either player first: 144 games, each with 3 images.
    games = [([a, b], first) for a in range(9) for b in range(9) if a != b for first in (BLUE, RED)]
    orbits = {tuple(canonical_moves(moves, 3, first)[1].tolist()) for moves, first in games}
    assert len(orbits) == 36
    assert len({game_hash(moves, 3, first) for moves, first in games}) == 36
    assert len({game_hash([0, 1], n) for n in range(MIN_SIZE, MAX_SIZE + 1)}) == 30


def test_the_hash_is_pinned() -> None:
    # The split of every store follows from these bytes. If they change, games change sides between
    # training and test: do not, without a new schema version and a word in the changelog.
    assert game_hash(parse_moves("a1b12c3", 13), 13).hex() == "237bf84d7f4f766869e34094015c2713"
    assert game_hash([], 13).hex() == "9ff0051fbc17e54e1fb46133f419b135"
    assert game_hash(parse_moves("g7a1", 13), 13) == game_hash(parse_moves("g7m13", 13), 13)


def test_hashes_of_several_games_are_those_of_each() -> None:
    rng = np.random.default_rng(1)
    lengths = np.array([0, 1, 24, 0, 7, 0])
    games = [rng.permutation(25)[:length] for length in lengths]
    first = np.array([0, 1, 1, 1, 0, 0])
    expected = [game_hash(moves, 5, int(player)) for moves, player in zip(games, first, strict=True)]
    assert game_hashes(np.concatenate(games), lengths, 5, first) == expected
    assert game_hashes(np.zeros(0, np.int64), np.zeros(0, np.int64), 5, np.zeros(0, np.int64)) == []
