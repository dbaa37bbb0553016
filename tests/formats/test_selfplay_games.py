"""Reader of pickles of self-play games."""

from __future__ import annotations

import gzip
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hexdata import ConvertOptions, convert_sources
from hexdata.board import format_moves, pack_boards, replay
from hexdata.demo.games import make_games
from hexdata.errors import FormatError
from hexdata.policy import SparsePolicies
from hexdata.schema import POLICY_TYPE
from hexdata.verify import check_round_trip
from tests.kit.sources import read_source
from tests.legacy_pickles import Winner, example, one_hot

pytestmark = pytest.mark.usefixtures("hex_ai")

N = 5
METADATA = {"model_path": "m/epoch1.pt.gz", "temperature": 1, "generation_time": 1753777800.5}
Game = dict[str, Any]


def game(number: int = 0, n: int = N, logits: bool = True, **changes: Any) -> Game:
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


def save(path: Path, games: list[Any], protocol: int = 4, **top: Any) -> Path:
    path.write_bytes(gzip.compress(pickle.dumps({"games": games, **top}, protocol)))
    return path


def check_rows(rows: list[Game], content: Game, n: int = N) -> None:
    """Check all positions of one game of logits."""
    moves = [row["move"] for row in rows[:-1]]
    assert f"#{n},{format_moves(moves, n)}" == content["final_trmph"]
    boards = replay(moves, n)
    assert [row["board"] for row in rows] == [board.tobytes() for board in pack_boards(boards)]
    winner = ["blue", "red"].index(content["winner"])
    assert {(row["value"], row["winner"], row["total_positions"]) for row in rows} == {
        (float(winner), winner, len(rows))
    }
    assert [row["player_to_move"] for row in rows] == [ply % 2 for ply in range(len(rows))]
    assert [row["position_in_game"] for row in rows] == list(range(len(rows)))
    for ply, row in enumerate(rows[:-1]):
        empty = ~boards[ply].astype(bool).any(axis=0).reshape(-1)
        logits = content["policies"][ply].astype(np.float64)
        powers = np.where(empty, np.exp(logits - logits[empty].max()), 0)
        policy = np.zeros(n * n)
        policy[[cell["cell"] for cell in row["policy"]]] = [cell["probability"] for cell in row["policy"]]
        np.testing.assert_allclose(policy, powers / powers.sum(), rtol=1e-6, atol=1e-40)
        assert (policy[~empty] == 0).all()
        assert row["root_value"] == pytest.approx(1 / (1 + math.exp(-content["values"][ply])), rel=1e-12)
    assert (rows[-1]["move"], rows[-1]["policy"], rows[-1]["root_value"]) == (None, None, None)


def check_games(rows: list[Game], games: list[Game]) -> None:
    assert [row["record"] for row in rows] == list(range(len(rows)))
    for number, content in enumerate(games, start=1):
        check_rows([row for row in rows if row["line_idx"] == number], content)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_position_of_every_game_is_read(tmp_path: Path, protocol: int) -> None:
    games = [game(number) for number in range(3)]
    for content in games[1:]:  # the legacy tool called its network through a cache, so arrays are shared
        content["policies"][1:] = games[0]["policies"][1:2] * (len(content["moves"]) - 1)
    reader, rows, rejected = read_source(save(tmp_path / "a.pkl.gz", games, protocol, metadata=METADATA))
    assert (reader.format, reader.targets, reader.board_size) == ("selfplay-games", ("root_value",), N)
    assert rejected == []
    check_games(rows, games)
    first = [row["metadata"] for row in rows if row["position_in_game"] == 0]
    number = '{"avg_move_time":{"__numpy__":["<f8",0.25]},"num_moves":%d}'
    assert first == [number % content["num_moves"] for content in games]
    assert {row["metadata"] for row in rows if row["position_in_game"]} == {None}
    assert reader.header["run"] == {"model": "m/epoch1.pt.gz", "temperature": 1.0, "date": "2025-07-29"}
    assert reader.header["counts"] == {"logits": 3, "probabilities": 0, "winners_from_chain": 0}
    assert reader.header["metadata"] == METADATA


def test_policies_without_negative_numbers_are_kept(tmp_path: Path) -> None:
    content = game(logits=False)
    first = ord(content["final_trmph"][3]) - 97 + N * (int(content["final_trmph"][4]) - 1)
    content["policies"][:2] = [one_hot(first, N), np.zeros(N * N, np.float64)]
    reader, rows, _ = read_source(save(tmp_path / "a.pkl.gz", [content]))
    assert reader.header["counts"] == {"logits": 0, "probabilities": 1, "winners_from_chain": 0}
    assert [(row["policy"], row["move"] == first) for row in rows[:2]] == [(None, True), ([], False)]
    column = pa.array([row["policy"] for row in rows[2:-1]], POLICY_TYPE)
    _, policies = SparsePolicies.from_arrow(column, N * N)
    np.testing.assert_array_equal(policies.to_dense(N * N), np.stack(content["policies"][2:]))
    assert {row["root_value"] for row in rows} == {None}
    assert [row["metadata"] for row in rows[1:-1]] == [f'{{"values":{v!r}}}' for v in content["values"][1:]]


def last(key: str, value: object) -> Callable[[], Game]:
    return lambda: game(**{key: [*game()[key][:-1], value]})


LOGITS = -np.ones(25, "f4")
BAD_GAMES: list[tuple[str, Callable[[], Any]]] = [
    ("game-layout", lambda: [1, 2]),
    ("game-layout", lambda: {k: v for k, v in game().items() if k != "values"}),
    ("game-layout", lambda: game(moves=[1] * len(game()["moves"]))),
    ("game-layout", lambda: game(policies=None)),
    ("game-mismatch", lambda: game(values=game()["values"][1:])),
    ("game-mismatch", last("moves", "#5,a1")),
    ("game-mismatch", lambda: game(moves=["#6,", *game()["moves"][1:]])),
    ("no-moves", lambda: game(final_trmph="#5,", moves=[], policies=[], values=[])),
    ("trmph-syntax", lambda: game(final_trmph="a1b2")),
    ("trmph-cell", lambda: game(final_trmph="#5,a9")),
    ("repeated-move", lambda: game(final_trmph="#5,a1a1")),
    ("winner-value", lambda: game(winner="green")),
    (
        "no-winner",
        lambda: game(winner=None, final_trmph="#5,a1", moves=["#5,"], values=[0.0], policies=[LOGITS]),
    ),
    ("policy-type", lambda: game(policies=[[0.0] * 25] * len(game()["moves"]))),
    ("policy-shape", last("policies", np.zeros(24, "f4"))),
    ("policy-values", last("policies", np.full(25, np.nan, "f4"))),
    ("policy-dtype", lambda: game(policies=[np.full(25, 0.1)] * len(game()["moves"]))),
    ("value-type", last("values", "0.5")),
    ("value-range", last("values", math.inf)),
    ("metadata-size", lambda: game(note="x" * 70_000)),
]


def test_an_invalid_game_is_one_rejected_record(tmp_path: Path) -> None:
    ends = len(game(0)["moves"]) + 1
    for reason, make in BAD_GAMES:
        _, rows, rejected = read_source(save(tmp_path / "a.pkl.gz", [game(0), make(), game(1)]))
        assert [(each.record, each.reason) for each in rejected] == [(ends, reason)]
        assert rejected[0].detail.startswith("game 2: ")
        assert len(rejected[0].detail) < 400
        assert ({row["line_idx"] for row in rows}, rows[ends]["record"]) == ({1, 3}, ends + 1)


def test_spellings_of_the_winner(tmp_path: Path) -> None:
    winner = ["blue", "red"].index(game()["winner"])
    spellings = [("BLUE", "RED"), ("b", "r"), ("1", "2"), (1, 2), (Winner.BLUE, Winner.RED)]
    games = [game(winner=pair[winner]) for pair in spellings] + [game(winner=None)]
    reader, rows, rejected = read_source(save(tmp_path / "a.pkl.gz", games))
    assert (rejected, {row["winner"] for row in rows}) == ([], {winner})
    assert reader.header["counts"] == {"logits": 6, "probabilities": 0, "winners_from_chain": 1}


def test_complete_games_are_salvaged(tmp_path: Path) -> None:
    games = [game(number) for number in range(5)]
    whole, path = pickle.dumps({"games": games, "metadata": METADATA}), tmp_path / "a.pkl"
    path.write_bytes(whole[: whole.index(games[3]["final_trmph"].encode()) + 5])
    with pytest.raises(FormatError, match="truncated"):
        read_source(path)
    reader, rows, rejected = read_source(path, salvage=True)
    assert reader.damage is not None
    assert (rejected, {row["line_idx"] for row in rows}) == ([], {1, 2, 3})


@pytest.mark.parametrize("layout", ["games", "examples"])
def test_keys_of_the_file_are_not_those_of_the_store(tmp_path: Path, layout: str) -> None:
    foreign = {"sidecar": 5, "continues": 7, "counts": 3, "convention": 4, "stated_format": 6, "run": 1}
    path = tmp_path / "a.pkl.gz"
    content: list[Any] = [game()] if layout == "games" else [example(1, ply) for ply in range(4)]
    path.write_bytes(gzip.compress(pickle.dumps({layout: content, **foreign})))
    options = ConvertOptions(workers=1, val=0, test=0)
    assert [convert_sources(path, tmp_path / "store", options).sources for _ in range(2)] == [1, 0]
    assert [result.ok for result in check_round_trip(tmp_path / "store", [path])] == [True]
