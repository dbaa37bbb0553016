"""Games of PlayHex in JSON."""

from __future__ import annotations

import json

import pytest

from hexdata.errors import FormatError

GAME = {"boardsize": 11, "moves": "a10 swap-pieces d4 f7", "winner": "red", "outcome": "resign"}
LINK = "https://hexworld.org/board/#11,a1b2"
CHAIN = {"boardsize": 3, "moves": "a1 c1 a2 c2 a3", "winner": "red", "outcome": "path"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_json_lines_are_a_list(read_text, end):
    _, rows, rejected = read_text(end.join(map(json.dumps, (GAME, GAME, CHAIN))) + "\n\n", "playhex.json")
    assert ([row["line_idx"] for row in rows], len(rejected)) == ([1] * 4 + [2] * 4, 1)


@pytest.mark.parametrize(
    "content",
    [
        [GAME | {"moves": ["A10", "swap-pieces", "D4", "F7"], "note": "#11,a1b2"}],
        {"players": [{}]} | GAME | {"link": LINK},
        {"of": {"user": "games"}, "games": [GAME], "next": None},
    ],
)
@pytest.mark.parametrize(("encoding", "indent"), [("utf-8", None), ("utf-8-sig", 1), ("utf-16", 1)])
def test_a_game_of_playhex_has_its_swap_and_winner(read_text, content, encoding, indent):
    _, rows, rejected = read_text(json.dumps(content, indent=indent).encode(encoding), "playhex.json")
    assert not rejected
    # The stone a10 of red becomes one of blue at j1, and red, who is blue in hexdata, moves next.
    assert [row["move"] for row in rows] == [9, 3 * 11 + 3, 6 * 11 + 5, None]
    assert [row["player_to_move"] for row in rows] == [1, 0, 1, 0]
    ends = {(row["winner"], row["value"], row["end_reason"], row["swap"]) for row in rows}
    assert ends == {(0, 0.0, "resigned", "pieces")}


def test_names_of_another_encoding_cost_no_game(read_text):
    text = json.dumps([GAME | {"playerRed": "N"}]).encode().replace(b'"N"', b'"\xc0\xee"')
    reader, rows, rejected = read_text(text, "playhex.json")
    assert (len(rows), rejected, reader.header["counts"]["other_encodings"]) == (4, [], 1)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"winner": winner} for winner in ("nobody", 1, ["red"], {"color": "red"})),
        CHAIN | {"moves": "a1 a3 b1 b3 c1"},  # a chain between the other edges
    ],
)
def test_an_unknown_or_contradicted_winner_costs_only_its_game(read_text, wrong):
    games = [GAME | wrong, CHAIN] if "boardsize" in wrong else [GAME | wrong, GAME]
    _, rows, rejected = read_text(json.dumps(games), "a.json")
    assert (len(rows), [each.reason for each in rejected]) == (len(rows) or 1, ["winner-value"])


@pytest.mark.parametrize(
    "text", ['["#5,a1",\n"#5,b2"\n]', '{"game": "#5c1,a1b2:rb"}', json.dumps([GAME])[:-1]]
)
def test_other_json_is_refused(read_text, text):
    with pytest.raises(FormatError):
        read_text(text, "a.json")
