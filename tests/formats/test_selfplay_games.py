"""Reader of pickles of self-play games."""

from __future__ import annotations

import gzip
import math
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hexdata.board import format_moves, pack_boards, parse_moves, replay, split_trmph
from hexdata.demo.games import make_games
from hexdata.errors import FormatError, UnsafePickleError
from hexdata.formats import open_source
from hexdata.formats.legacy import LegacyLimits, LegacyReader, SelfPlayGamesReader
from hexdata.policy import SparsePolicies
from hexdata.schema import POLICY_TYPE
from tests.legacy_pickles import Winner, install_enums

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "foreign" / "selfplay_games.pkl.gz"

N = 5
METADATA = {"model_path": "m/epoch1.pt.gz", "temperature": 1, "generation_time": 1753777800.5}


def game(number=0, n=N, logits=True, **changes):
    """Return a game as the legacy tool wrote it, in which every cell has another logit."""
    ((moves, winner),) = make_games(1, 1, n, number)
    random = np.random.default_rng(number)
    policies = random.normal(0, 4, (len(moves), n * n)).astype(np.float32)
    if not logits:
        policies = (random.integers(0, 9, (len(moves), n * n)) / 64).astype(np.float32)
    return {
        "moves": [f"#{n},{format_moves(moves[:ply], n)}" for ply in range(len(moves))],
        "policies": [*policies],
        "values": [float(value) for value in random.normal(0, 3, len(moves))],
        "winner": ("blue", "red")[winner],
        "final_trmph": f"#{n},{format_moves(moves, n)}",
        "num_moves": len(moves),
        "avg_move_time": np.float64(0.25),
    } | changes


def save(path, games, protocol=4, **top):
    path.write_bytes(gzip.compress(pickle.dumps({"games": games, **top}, protocol)))
    return path


def read(path, **options):
    """Return the reader, and its rows and rejections."""
    with SelfPlayGamesReader(path, **options) as reader:
        batches = list(reader.batches())
    rows = [row for batch in batches for row in batch.positions.to_pylist()]
    return reader, rows, [r for batch in batches for r in batch.rejected]


def softmax(logits, empty):
    """Return the softmax over the empty cells in plain Python."""
    top = max(x for x, free in zip(logits, empty, strict=True) if free)
    powers = [math.exp(x - top) if free else 0.0 for x, free in zip(logits, empty, strict=True)]
    return [power / sum(powers) for power in powers]


def check_rows(rows, content, n):
    """Check all positions of one game of logits."""
    moves = [row["move"] for row in rows[:-1]]
    assert f"#{n},{format_moves(moves, n)}" == content["final_trmph"]
    boards = replay(moves, n)
    assert [row["board"] for row in rows] == [board.tobytes() for board in pack_boards(boards)]
    winner = ["blue", "red"].index(content["winner"])
    assert {(row["value"], row["winner"]) for row in rows} == {(float(winner), winner)}
    assert [row["player_to_move"] for row in rows] == [ply % 2 for ply in range(len(rows))]
    assert [row["position_in_game"] for row in rows] == list(range(len(rows)))
    assert {row["total_positions"] for row in rows} == {len(rows)}
    for ply, row in enumerate(rows[:-1]):
        empty = ~boards[ply].astype(bool).any(axis=0).reshape(-1)
        expected = softmax(content["policies"][ply].tolist(), empty)
        policy = np.zeros(n * n)
        policy[[cell["cell"] for cell in row["policy"]]] = [cell["probability"] for cell in row["policy"]]
        np.testing.assert_allclose(policy, expected, rtol=1e-6, atol=1e-40)
        assert (policy[~empty] == 0).all()
        assert row["root_value"] == pytest.approx(1 / (1 + math.exp(-content["values"][ply])), rel=1e-12)
    assert (rows[-1]["move"], rows[-1]["policy"], rows[-1]["root_value"]) == (None, None, None)


@pytest.mark.parametrize("protocol", range(6))
def test_every_position_of_every_game_is_read(tmp_path, protocol):
    games = [game(number) for number in range(3)]
    path = save(tmp_path / "a.pkl.gz", games, protocol, metadata=METADATA)
    with open_source(path) as reader:
        assert isinstance(reader, SelfPlayGamesReader)
        assert (reader.format, reader.targets, reader.board_size) == (
            "selfplay-games",
            ("root_value",),
            None,
        )
    reader, rows, rejected = read(path)
    assert (rejected, reader.board_size) == ([], N)
    assert [row["record"] for row in rows] == list(range(len(rows)))
    for number, content in enumerate(games, start=1):
        own = [row for row in rows if row["line_idx"] == number]
        check_rows(own, content, N)
        assert own[0]["metadata"] == (
            f'{{"avg_move_time":{{"__numpy__":["<f8",0.25]}},"num_moves":{content["num_moves"]}}}'
        )
        assert {row["metadata"] for row in own[1:]} == {None}
    assert reader.header["run"] == {"model": "m/epoch1.pt.gz", "temperature": 1.0, "date": "2025-07-29"}
    assert reader.header["counts"] == {"logits": 3, "probabilities": 0, "winners_from_chain": 0}
    assert reader.header["metadata"] == METADATA


def test_the_real_file_is_read():
    if not REAL.exists():
        pytest.skip("needs ../shared")
    with gzip.open(REAL) as file:
        games = pickle.load(file)["games"]
    reader, rows, rejected = read(REAL)
    assert (len(rows), rejected, reader.board_size) == (356, [], 13)
    for number, content in enumerate(games, start=1):
        check_rows([row for row in rows if row["line_idx"] == number], content, 13)
    last = [row for row in rows if row["position_in_game"] == row["total_positions"] - 2]
    assert [row["root_value"] > 0.5 for row in last] == [row["winner"] == 1 for row in last]


def test_policies_without_negative_numbers_are_kept(tmp_path):
    content = game(logits=False)
    first = int(parse_moves(split_trmph(content["final_trmph"]).moves, N)[0])
    one_hot = np.zeros(N * N, np.float32)
    one_hot[first] = 1
    content["policies"][0] = one_hot
    content["policies"][1] = np.zeros(N * N, np.float64)
    reader, rows, _ = read(save(tmp_path / "a.pkl.gz", [content]))
    assert reader.header["counts"]["probabilities"] == 1
    assert (rows[0]["policy"], rows[0]["move"]) == (None, first)
    assert rows[1]["policy"] == []
    column = pa.array([row["policy"] for row in rows[2:-1]], POLICY_TYPE)
    _, policies = SparsePolicies.from_arrow(column, N * N)
    np.testing.assert_array_equal(policies.to_dense(N * N), np.stack(content["policies"][2:]))
    assert {row["root_value"] for row in rows} == {None}
    assert [row["metadata"] for row in rows[1:-1]] == [
        f'{{"values":{value!r}}}' for value in content["values"][1:]
    ]


BAD_GAMES = {
    "not a dict": (lambda: [1, 2], "game-layout"),
    "a missing key": (lambda: {k: v for k, v in game().items() if k != "values"}, "game-layout"),
    "moves that are no texts": (lambda: game(moves=[1] * len(game()["moves"])), "game-layout"),
    "policies that are no list": (lambda: game(policies=None), "game-layout"),
    "too few values": (lambda: game(values=game()["values"][1:]), "game-mismatch"),
    "other positions": (lambda: game(moves=[*game()["moves"][:-1], "#5,a1"]), "game-mismatch"),
    "another size in a position": (lambda: game(moves=["#6,", *game()["moves"][1:]]), "game-mismatch"),
    "no moves": (lambda: game(final_trmph="#5,", moves=[], policies=[], values=[]), "no-moves"),
    "no TRMPH": (lambda: game(final_trmph="a1b2"), "trmph-syntax"),
    "a cell outside": (lambda: game(final_trmph="#5,a9"), "trmph-cell"),
    "a repeated move": (lambda: game(final_trmph="#5,a1a1"), "repeated-move"),
    "an unknown winner": (lambda: game(winner="green"), "winner-value"),
    "no winner": (
        lambda: game(winner=None, final_trmph="#5,a1", moves=["#5,"], values=[0.0], policies=[LOGITS]),
        "no-winner",
    ),
    "policies of a list": (lambda: game(policies=[[0.0] * 25] * len(game()["moves"])), "policy-type"),
    "policies of another size": (lambda: with_policy(np.zeros(24, "f4")), "policy-shape"),
    "NaN": (lambda: with_policy(np.full(25, np.nan, "f4")), "policy-values"),
    "numbers that are no float32": (
        lambda: game(logits=False) | {"policies": [np.full(25, 0.1)] * len(game()["moves"])},
        "policy-dtype",
    ),
    "a text as value": (lambda: with_value("0.5"), "value-type"),
    "an infinite value": (lambda: with_value(math.inf), "value-range"),
    "large metadata": (lambda: game(note="x" * 70_000), "metadata-size"),
}
LOGITS = -np.ones(25, "f4")


def with_policy(policy):
    return game(policies=[*game()["policies"][:-1], policy])


def with_value(value):
    return game(values=[*game()["values"][:-1], value])


@pytest.mark.parametrize("case", BAD_GAMES)
def test_an_invalid_game_is_one_rejected_record(tmp_path, case):
    make, reason = BAD_GAMES[case]
    _, rows, rejected = read(save(tmp_path / "a.pkl.gz", [game(0), make(), game(1)]))
    ends = len(game(0)["moves"]) + 1
    assert [(r.record, r.reason) for r in rejected] == [(ends, reason)]
    assert rejected[0].detail.startswith("game 2: ")
    assert len(rejected[0].detail) < 400
    assert {row["line_idx"] for row in rows} == {1, 3}
    assert rows[ends]["record"] == ends + 1


def test_a_game_of_another_size_is_rejected(tmp_path):
    _, rows, rejected = read(save(tmp_path / "a.pkl.gz", [game(0), game(1, n=6), game(2)]))
    assert [r.reason for r in rejected] == ["board-size"]
    assert {row["line_idx"] for row in rows} == {1, 3}


def test_spellings_of_the_winner(tmp_path, monkeypatch):
    install_enums(monkeypatch)
    winner = ["blue", "red"].index(game()["winner"])
    spellings = [("BLUE", "RED"), ("b", "r"), ("1", "2"), (1, 2), (Winner.BLUE, Winner.RED)]
    games = [game(winner=pair[winner]) for pair in spellings] + [game(winner=None)]
    reader, rows, rejected = read(save(tmp_path / "a.pkl.gz", games))
    assert rejected == []
    assert {row["winner"] for row in rows} == {winner}
    assert reader.header["counts"]["winners_from_chain"] == 1


def test_games_share_arrays(tmp_path):
    """The legacy tool called its network through a cache."""
    games = [game(number) for number in range(4)]
    for content in games:
        content["policies"][0] = games[0]["policies"][0]
        content["policies"][1:] = games[0]["policies"][1:2] * (len(content["moves"]) - 1)
    _, rows, rejected = read(save(tmp_path / "a.pkl.gz", games))
    assert rejected == []
    for number, content in enumerate(games, start=1):
        check_rows([row for row in rows if row["line_idx"] == number], content, N)


def test_memory_is_bounded_per_game(tmp_path):
    """A pickler writes up to 1,000 games in one batch; the limits hold for each game of it."""
    games = [game(number, n=13) for number in range(40)]
    path = save(tmp_path / "a.pkl.gz", games, metadata=METADATA)
    assert sum(array.nbytes for content in games for array in content["policies"]) > 2 << 19
    limits = LegacyLimits(held_bytes=1 << 19, memo_bytes=1 << 17)
    _, rows, rejected = read(path, limits=limits)
    assert (len(rows), rejected) == (sum(len(content["moves"]) + 1 for content in games), [])
    with pytest.raises(FormatError, match="too many bytes"):
        read(path, limits=LegacyLimits(held_bytes=1 << 14))
    shared = [content | {"policies": games[0]["policies"][:1] * len(content["moves"])} for content in games]
    assert read(save(path, shared), limits=limits)[2] == []  # an array that is used again is kept


def test_complete_games_are_salvaged(tmp_path):
    games = [game(number) for number in range(5)]
    whole = pickle.dumps({"games": games, "metadata": METADATA})
    path = tmp_path / "a.pkl"
    path.write_bytes(whole[: whole.index(games[3]["final_trmph"].encode()) + 5])
    with pytest.raises(FormatError, match="truncated"):
        read(path)
    reader, rows, rejected = read(path, salvage=True)
    assert reader.damage is not None
    assert rejected == []
    assert {row["line_idx"] for row in rows} == {1, 2, 3}


@pytest.mark.parametrize(
    ("top", "is_games"),
    [
        ({"metadata": {"games": 5}, "games": []}, True),
        ({"metadata": {"games": [1], "x": 1}, "examples": []}, False),
        ({"examples": [], "games": []}, False),
        ({"games": 5}, False),
        ({"x": "games"}, False),
    ],
)
def test_the_layout_is_detected_by_the_top_level_key(tmp_path, top, is_games):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(top))
    with open_source(path) as reader:
        assert isinstance(reader, SelfPlayGamesReader if is_games else LegacyReader)


@pytest.mark.parametrize("opcode", [b"t", b"l", b"\x85e"])  # TUPLE and LIST of all games, TUPLE1 of the last
def test_games_within_another_object_are_refused(tmp_path, opcode):
    raw = pickle.dumps({"games": [game(0), game(1)]}, 3)
    assert raw.endswith(b"es.")
    path = tmp_path / "a.pkl"
    path.write_bytes(raw[:-3] + (opcode if opcode.endswith(b"e") else opcode + b"a") + b"s.")
    with pytest.raises(FormatError, match="nested") as caught:
        read(path)
    assert caught.value.code == "irregular-examples"


def test_no_code_is_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)

    for content in ({"games": [game(), Attack()]}, {"games": [game(note=Attack())]}, {"games": Attack()}):
        path = tmp_path / "a.pkl"
        path.write_bytes(pickle.dumps(content))
        with open_source(path) as reader, pytest.raises(UnsafePickleError):
            list(reader.batches())
    assert not (tmp_path / "touched").exists()


def test_a_text_that_is_shared_many_times_is_refused_or_rejected(tmp_path):
    games = [game(moves=["x" * 100_000] * 300_000), game(policies=[LOGITS] * 300_000)]
    _, rows, rejected = read(save(tmp_path / "a.pkl.gz", games))
    assert rows == []
    assert [r.reason for r in rejected] == ["game-mismatch", "game-mismatch"]
