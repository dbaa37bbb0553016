"""Nodes of positions: equal for equal class and board, and linked by moves."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from hexdata.board import pack_boards, replay
from hexdata.convert.nodes import EVIDENCE, FINAL, NOWHERE, NodeMaker
from hexdata.demo.games import make_game
from hexdata.games.evidence import findings_schema
from hexdata.schema import board_bytes

MOVES = [4, 0, 8, 2]
TOTAL = len(MOVES) + 1


def evidence(moves=MOVES, n=3, first_player=0, **changed) -> pa.RecordBatch:
    """Return the positions of one game in ascending ply, with other columns where given."""
    packed = pack_boards(replay(moves, n, first_player))
    count = len(packed)
    columns = {
        "board": [board.tobytes() for board in packed],
        "move": [*map(int, moves), None],
        "value": [1.0] * count,
        "winner": [1] * count,
        "position_in_game": list(range(count)),
        "total_positions": [count] * count,
        **changed,
    }
    schema = pa.schema([findings_schema(n).field(name) for name in EVIDENCE])
    arrays = [pa.array(columns.get(f.name, [None] * count), f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def nodes_of(batch: pa.RecordBatch, maker: NodeMaker | None = None, n: int = 3) -> pa.Table:
    return pa.table((maker or NodeMaker(n)).nodes(batch, 100))


@pytest.mark.parametrize("n", [3, 8, 13, 26, 32])
@pytest.mark.parametrize("first_player", [0, 1])
def test_each_move_leads_to_the_node_of_the_next_position(n, first_player):
    moves = make_game(1, 2, n).moves
    players = [(first_player + ply) % 2 for ply in range(len(moves) + 1)]
    nodes = nodes_of(evidence(moves, n, first_player, player_to_move=players), n=n)
    assert nodes["next"].to_pylist()[:-1] == nodes["node"].to_pylist()[1:]
    assert nodes["next"][-1].as_py() == FINAL
    assert len(set(nodes["node"].to_pylist())) == len(moves) + 1
    assert nodes["row"].to_pylist() == list(range(100, 101 + len(moves)))
    assert nodes["ply"].to_pylist() == list(range(len(moves) + 1))
    assert nodes["move"].to_pylist() == [*moves, 65535]


def test_any_other_board_has_another_node():
    bits = np.eye(2 * 13 * 13, dtype=np.uint8).reshape(-1, 2, 13, 13)
    one, two = pack_boards(bits), pack_boards(bits | np.roll(bits, 1, axis=0))
    hashes = NodeMaker(13)._hashes(np.concatenate([one, two, np.zeros((1, board_bytes(13)), np.uint8)]))
    assert len(np.unique(hashes)) == len(hashes) == 4 * 13 * 13 + 1


@pytest.mark.parametrize(
    "changed",
    [
        {"winner": [0] * TOTAL},
        {"total_positions": [TOTAL + 1] * TOTAL},
        {"total_positions": [None] * TOTAL},
        {"origin": ["a.trmph"] * TOTAL},
        {"player_to_move": [1, 0, 1, 0, 1]},
        {"winner": [None] * TOTAL},
        {"winner": [None] * TOTAL, "value": [0.0] * TOTAL},
    ],
)
def test_another_class_has_other_nodes(changed):
    maker = NodeMaker(3)
    nodes, others = (nodes_of(batch, maker) for batch in (evidence(), evidence(**changed)))
    assert not set(nodes["node"].to_pylist()) & set(others["node"].to_pylist())
    assert len(others) == TOTAL


def test_values_that_differ_within_a_game_do_not_change_its_nodes():
    more = {"value": [0.25] * TOTAL, "position_in_game": [None] * TOTAL, "player_to_move": [0, 1, 0, 1, 0]}
    maker = NodeMaker(3)
    assert nodes_of(evidence(), maker) == nodes_of(evidence(**more), maker)


def test_a_class_encodes_origin_winner_and_first_player():
    maker = NodeMaker(3)
    batches = [
        evidence(origin=["a"] * TOTAL),
        evidence(winner=[None] * TOTAL),
        evidence(player_to_move=[1, 0, 1, 0, 1]),
    ]
    classes = np.concatenate([nodes_of(batch, maker)["class"].to_numpy()[:1] for batch in batches])
    assert maker.origins_and_winners(classes) == (["a", None, None], [1, None, 1])
    assert maker.first_players(classes).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("changed", "followed"),
    [
        ({"line_idx": [None, 1, None, 1, None]}, [0, 2, 4]),
        ({"position_in_game": [0, 1, 3, 3, 4]}, [0, 1, 3, 4]),
        ({"total_positions": [TOTAL, TOTAL, TOTAL, 3, TOTAL]}, [0, 1, 2, 4]),
        ({"winner": [None] * TOTAL, "value": [1.0, 0.5, 1.0, float("nan"), 0.0]}, [0, 2, 4]),
    ],
    ids=["ids", "stones", "beyond the end", "no winner"],
)
def test_positions_that_cannot_be_followed_are_left_out(changed, followed):
    assert nodes_of(evidence(**changed))["row"].to_pylist() == [100 + row for row in followed]


def test_positions_without_a_next_node():
    uniform = [None, [{"cell": cell, "probability": 1 / 9} for cell in range(9)], None, None, None]
    nexts = nodes_of(evidence(move=[4, None, 4, 0, None], policy=uniform))["next"].to_pylist()
    ends = [{NOWHERE: "nowhere", FINAL: "final"}.get(node) for node in nexts]
    # A dense policy; a move on a stone of the same player, and on one of the opponent.
    assert ends == [None, "nowhere", "nowhere", "nowhere", "final"]


def test_only_the_last_position_is_final_if_the_length_is_known():
    nexts = nodes_of(evidence(move=[4, 0, None, 2, 5]))["next"].to_pylist()
    assert (nexts[2], nexts[4] in (NOWHERE, FINAL)) == (NOWHERE, False)
    unknown = {"total_positions": [None] * TOTAL}
    assert nodes_of(evidence(move=[4, 0, None, 2, 5], **unknown))["next"][2].as_py() == FINAL
