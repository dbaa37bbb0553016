"""Every layout of legacy files, with the content of the store that is converted from it."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
import pytest

from hexdata.board import BLUE, RED, Symmetry, game_hash, replay, transform_moves
from hexdata.demo.games import DemoGame
from hexdata.formats.trmph import write_trmph
from hexdata.games import find as games_module


def flat(games):
    return list(chain.from_iterable(games))


def shuffled(items, seed=0):
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def expected_content(games, n):
    """Return the expected ``Converted.content``, from the replay of the moves."""
    content = {}
    for moves, winner in games:
        boards = replay(moves, n).reshape(len(moves) + 1, -1)
        content[game_hash(moves, n)] = [
            (
                ply,
                np.packbits(board).tobytes(),
                int(moves[ply]) if ply < len(moves) else None,
                float(winner),
                ply % 2,
                len(moves) + 1,
            )
            for ply, board in enumerate(boards)
        ]
    return content


VARIANTS = ("v1", "v2", "v2 without ids", "v2 mixed within games", "v2 without ids, mixed", "player", "enums")


def examples_of(variant, make, games):
    """Return the examples of games in a variant, and the expected provenance of the games."""
    dicts = make.dicts(games, original_source="raw.trmph")
    if "without ids" in variant:
        for example in flat(dicts):
            example["metadata"]["game_id"] = None
    if "mixed" in variant:
        dicts = [shuffled(game) for game in dicts]
    if variant in ("player", "enums"):
        for example in flat(dicts):
            metadata = example["metadata"]
            player = metadata["position_in_game"] % 2
            example["player_to_move"] = make.Player(player) if variant == "enums" else player
            metadata["winner"] = make.Winner[metadata["winner"]] if variant == "enums" else metadata["winner"]
    if variant == "v1":
        return make.tuples(flat(dicts)), "recovered"
    return flat(dicts), "recovered" if "without ids" in variant else "metadata"


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_converted_to_the_original_games(variant, make, convert, hex_ai):
    games = make.games(12)
    examples, provenance = examples_of(variant, make, games)
    store = convert(make.write("games_processed.pkl.gz", examples))
    assert store.content() == expected_content(games, make.n)
    assert [game["winner"] for game in store.games()] == [("BLUE", "RED")[game.winner] for game in games]
    assert [game["moves"] for game in store.games()] == [game.moves.tolist() for game in games]
    assert {game["provenance"] for game in store.games()} == {provenance}
    assert {game["first_player"] for game in store.games()} == {BLUE}
    assert store.result.rejected == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_keep_the_order_of_the_file(variant, make, convert, hex_ai):
    examples, _ = examples_of(variant, make, make.games(4))
    store = convert(make.write("games_processed.pkl.gz", examples))
    boards = [example[0] if variant == "v1" else example["board"] for example in examples]
    assert np.array_equal(store.boards(), np.stack(boards))
    assert store.table("positions")["position_id"].to_pylist() == list(range(len(examples)))


@pytest.mark.parametrize("variant", ["v1", "v2", "v2 without ids, mixed"])
@pytest.mark.parametrize("window", [1, 7, 50])
def test_games_do_not_depend_on_the_size_of_the_windows(variant, window, make, convert, hex_ai, monkeypatch):
    examples, _ = examples_of(variant, make, make.games(12))
    monkeypatch.setattr("hexdata.formats.legacy.reader._BLOCK", 3)
    monkeypatch.setattr(games_module, "WINDOW_ROWS", window)
    narrow = convert(make.write("games_processed.pkl.gz", examples))
    monkeypatch.undo()
    wide = convert(make.folder, store="wide")
    assert narrow.games() == wide.games()
    assert narrow.rows("positions") == wide.rows("positions")


def test_all_metadata_is_kept(make, convert):
    (game,) = make.dicts(
        make.games(1), file_idx=3, original_source="raw/a.trmph", trmph_game="#5,a1", odd={"a": [1]}
    )
    store = convert(make.write("games_processed.pkl.gz", game))
    positions = store.table("positions")
    assert positions["value_sample_tier"].to_pylist() == [e["metadata"]["value_sample_tier"] for e in game]
    assert positions["winner"].to_pylist() == [e["metadata"]["winner"] for e in game]
    extra = {"odd": {"a": [1]}, "original_source": "raw/a.trmph", "trmph_game": "#5,a1"}
    assert [json.loads(text) for text in positions["metadata"].to_pylist()] == [extra] * len(game)
    (known,) = store.games()
    assert (known["file_idx"], known["line_idx"], known["origin"]) == (3, 1, "raw/a.trmph")


def test_missing_metadata_is_null(make, convert):
    (game,) = make.dicts(make.games(1))
    for example in game:
        example["metadata"] = {"winner": example["metadata"]["winner"]}
    store = convert(make.write("games_processed.pkl.gz", game))
    positions = store.table("positions")
    assert positions["value_sample_tier"].null_count == len(game)
    assert positions["metadata"].null_count == len(game)


@pytest.mark.parametrize("with_id", [True, False])
def test_a_game_without_a_named_winner_gets_it_from_the_value(make, convert, with_id):
    games = make.dicts(make.games(6))
    for example in flat(games):
        example["metadata"]["winner"] = None
        example["metadata"]["game_id"] = example["metadata"]["game_id"] if with_id else None
    store = convert(make.write("games_processed.pkl.gz", flat(games)))
    assert [game["winner"] for game in store.games()] == [("BLUE", "RED")[g.winner] for g in make.games(6)]
    assert store.table("positions")["winner"].null_count == store.result.positions
    assert store.source("games_processed.pkl.gz")["evidence"] == {
        "chains": [6, 0],
        "winners": [0, 0],
        "given": False,
        "by": "chains",
        "counted": {"chains": [6, 0], "winners": [0, 0]},
    }


def test_values_between_0_and_1_are_kept_exactly(make, convert):
    """0.3 is not exact in float32; its original value is in ``metadata``, in the source's convention."""
    games = make.dicts(make.games(4), note="kept")
    for game in games[:2]:
        for example, value in zip(game, (0.5, 0.3), strict=False):
            example["value"] = value
    dicts, tuples = flat(games), make.tuples(flat(games))
    store = convert(make.write("a.pkl.gz", dicts), make.write("b.pkl.gz", tuples))
    assert [store.source(name)["value_sense"] for name in ("a.pkl.gz", "b.pkl.gz")] == [
        "blue-is-0",
        "blue-is-1",
    ]
    positions = store.table("positions")
    values = np.array([example["value"] for example in dicts] * 2)
    assert np.array_equal(positions["value"].to_numpy(), values.astype(np.float32))
    extra = [json.loads(text or "{}") for text in positions["metadata"].to_pylist()]
    assert [e.get("hexdata:value") for e in extra[:3]] == [None, 0.3, None]
    assert [e.get("hexdata:value") for e in extra[len(dicts) :][:3]] == [None, 1.0 - 0.3, None]
    assert extra[1]["note"] == "kept"


def test_dense_policies_are_kept_unchanged(make, convert):
    (played,) = make.games(1)
    game = make.game(played)
    soft = np.full(make.n**2, 0.04, dtype=np.float32)
    game[2]["policy"] = soft
    game[3]["policy"] = np.zeros(make.n**2, dtype=np.float32)
    positions = convert(make.write("a.pkl.gz", game)).table("positions")
    assert positions["policy"][2].as_py() == [
        {"cell": cell, "probability": float(probability)} for cell, probability in enumerate(soft)
    ]
    assert positions["policy"][3].as_py() == []
    assert positions["policy"].null_count == len(game) - 2
    assert positions["move"].to_pylist() == [*map(int, played.moves), None]


# Unusual and invalid games.


def with_repeat(make):
    """Return a v1 game in which a cell is played twice, so that the cell changes colour."""
    moves = np.array([0, 1, 6, 0, 12, 2, 18, 3, 24], dtype=np.uint16)
    board = np.zeros((2, make.n, make.n), dtype=np.float32)
    examples = []
    for ply, move in enumerate([*moves.tolist(), None]):
        examples.append((board.copy(), None if move is None else make.policy(move), 0.0))
        if move is not None:
            board[ply % 2].flat[move] = 1
            board[1 - ply % 2].flat[move] = 0
    return moves, examples


def test_a_tuple_game_with_a_repeated_move_is_one_game(make, convert):
    moves, repeated = with_repeat(make)
    before, after = (make.tuples(flat(make.dicts(make.games(2, start=start)))) for start in (0, 2))
    store = convert(make.write("a.pkl.gz", before + repeated + after))
    assert len(store.games()) == 5
    game = store.games()[2]
    assert (game["moves"], game["total_positions"]) == (moves.tolist(), 10)
    assert game["game_hash"] == game_hash(moves, make.n)
    start = len(before)
    assert np.array_equal(store.boards()[start : start + 10], np.stack([example[0] for example in repeated]))
    players = store.table("positions")["player_to_move"].to_pylist()
    assert players[start : start + 10] == [ply % 2 for ply in range(10)]


def swapped(make, game, n):
    """Return a game with swapped colours, so that red begins and connects the other two edges."""
    moves = transform_moves(game.moves, n, Symmetry.LONG_DIAGONAL)
    return make.game(DemoGame(moves, 1 - game.winner), (0, 1), first_player=RED)


@pytest.mark.parametrize("variant", ["tuples", "dicts"])
def test_the_player_of_a_colour_swapped_game_follows_from_its_boards(make, convert, variant):
    (game,) = make.games(1)
    examples = swapped(make, game, make.n)
    store = convert(make.write("a.pkl.gz", make.tuples(examples) if variant == "tuples" else examples))
    (found,) = store.games()
    assert found["first_player"] == RED
    assert found["winner"] == ("RED", "BLUE")[game.winner]
    assert found["game_hash"] == game_hash(game.moves, make.n)  # it is a mirror image
    players = store.table("positions")["player_to_move"].to_pylist()
    assert players == [1 - ply % 2 for ply in range(len(examples))]


def test_a_file_of_final_positions_has_games_without_moves(make, convert):
    finals = [game[-1:] for game in make.dicts(make.games(8))]
    store = convert(make.write("final.pkl.gz", flat(finals)))
    assert [game["line_idx"] for game in store.games()] == list(range(1, 9))
    assert all(game["moves"] is None and game["positions"] == 1 for game in store.games())
    assert [g["total_positions"] for g in store.games()] == [len(g.moves) + 1 for g in make.games(8)]
    assert store.source("final.pkl.gz")["evidence"]["chains"] == [8, 0]


def test_the_player_of_the_last_two_positions_of_a_game(make, convert):
    ends = [game[-2:] for game in make.dicts(make.games(8))]
    store = convert(make.write("penultimate.pkl.gz", flat(ends)))
    assert {game["first_player"] for game in store.games()} == {BLUE}
    plies = [example["metadata"]["position_in_game"] for example in flat(ends)]
    assert store.table("positions")["player_to_move"].to_pylist() == [ply % 2 for ply in plies]
    assert {ply % 2 for ply in plies[::2]} == {0, 1}


def test_final_positions_without_ids_belong_to_no_known_game(make, convert):
    finals = flat(game[-1:] for game in make.dicts(make.games(8)))
    for example in finals:
        example["metadata"]["game_id"] = None
    store = convert(make.write("final.pkl.gz", finals), make.write("old.pkl.gz", make.tuples(finals)))
    assert store.games() == []
    positions = store.table("positions")
    assert positions["game_id"].null_count == 16
    assert positions["position_in_game"].to_pylist()[:8] == [len(g.moves) for g in make.games(8)]
    assert positions["player_to_move"].to_pylist()[:8] == [len(g.moves) % 2 for g in make.games(8)]


def test_matching_plies_without_matching_boards_are_not_a_game(make, convert):
    """Dicts without ids; boards are exchanged between two games with the same length and winner."""
    lengths = {}
    for game in make.games(40):
        lengths.setdefault((len(game.moves), game.winner), []).append(game)
    twins = next(games for games in lengths.values() if len(games) > 1)
    one, other = (make.game(game, None) for game in twins[:2])
    store = convert(make.write("a.pkl.gz", one[:6] + other[6:] + other[:6] + one[6:]))
    assert store.games() == []
    assert store.table("positions")["game_id"].null_count == len(one) + len(other)


# Shuffled collections.


def shuffle_stats(number, sources):
    return {"num_buckets": 3, "bucket_id": number, "total_examples": 0, "source_files": sources}


def write_shuffled(make, folder, examples, buckets=3):
    """Distribute the examples over files; each lists the same sources in another order."""
    sources = ["x_processed.pkl.gz", "y_processed.pkl.gz"]
    for number in range(buckets):
        stats = shuffle_stats(number, sources if number % 2 else sources[::-1])
        make.write(f"{folder}/shuffled_{number:04d}.pkl.gz", examples[number::buckets], shuffling_stats=stats)


def test_the_files_of_a_shuffle_share_their_games(make, convert):
    games = make.games(20)
    dicts = make.dicts(games[:10], 0, source_file="x") + make.dicts(games[10:], 0, source_file="y")
    write_shuffled(make, "set", shuffled(flat(dicts)))
    store = convert(make.folder)
    assert store.content() == expected_content(games, make.n)
    assert {row["format"] for row in store.rows("sources")} == {"legacy-shuffled"}
    assert [row["games"] for row in store.rows("sources")] == [20, 0, 0]
    assert sorted((g["origin"], g["line_idx"]) for g in store.games()) == [
        (origin, line) for origin in "xy" for line in range(1, 11)
    ]


def test_incomplete_games_of_a_shuffle_do_not_affect_complete_ones(make, convert):
    dicts = make.dicts(make.games(10))
    write_shuffled(make, "set", shuffled(flat(dicts[:6]) + flat(game[3:] for game in dicts[6:])))
    store = convert(make.folder)
    assert store.result.games == 10
    assert [game["moves"] is None for game in store.games()] == [False] * 6 + [True] * 4
    assert [game["positions"] for game in store.games()][6:] == [len(game) - 3 for game in dicts[6:]]


def test_a_shuffle_processed_in_parts_gives_the_same_games(make, convert, monkeypatch):
    write_shuffled(make, "set", shuffled(flat(make.dicts(make.games(30)))))
    whole = convert(make.folder)
    monkeypatch.setattr("hexdata.convert.games_by_id.PART_ROWS", 100)
    parts = convert(make.folder, store="parts")
    assert parts.content() == whole.content()
    assert parts.result.games == 30


def test_two_shuffles_of_the_same_games_are_independent(make, convert):
    examples = flat(make.dicts(make.games(10)))
    write_shuffled(make, "one", shuffled(examples, 1))
    write_shuffled(make, "two", shuffled(examples, 2))
    store = convert(make.folder)
    assert store.content() == expected_content(make.games(10), make.n)
    assert (store.result.games, store.result.duplicate_games) == (20, 10)


def test_ids_that_do_not_identify_a_game_are_not_used(make, convert):
    """Two games with one id, as from different runs of the legacy tool; the ids are still stored."""
    one, other, sound = make.games(3)
    examples = make.game(one, (0, 1)) + make.game(other, (0, 1)) + make.game(sound, (0, 2))
    write_shuffled(make, "set", shuffled(examples))
    store = convert(make.folder)
    assert [game["line_idx"] for game in store.games()] == [2]
    extra = [json.loads(text or "{}") for text in store.table("positions")["metadata"].to_pylist()]
    assert sum(e.get("hexdata:game_id") == [0, 1] for e in extra) == len(one.moves) + len(other.moves) + 2


def test_a_colour_swapped_game_of_a_shuffle_keeps_its_first_player(make, convert):
    (game,) = make.games(1)
    examples = swapped(make, game, make.n)
    for example in examples:
        example["player_to_move"] = 1 - example["metadata"]["position_in_game"] % 2
    write_shuffled(make, "set", shuffled(examples))
    (found,) = convert(make.folder).games()
    assert (found["first_player"], found["game_hash"]) == (RED, game_hash(game.moves, make.n))


@pytest.mark.parametrize("key", ["chunk_info", "pass_info"])
def test_chunks_of_a_shuffled_collection_are_read_as_shuffled(make, convert, key):
    games = make.games(6)
    examples = shuffled(flat(make.dicts(games)))
    store = convert(make.write("chunk.pkl.gz", examples, format_version="2.0", **{key: {"number": 0}}))
    assert store.content() == expected_content(games, make.n)


def test_trmph_and_pickles_of_the_same_games_give_the_same_positions(make, convert):
    games = make.games(12)
    make.v1("v1_processed.pkl.gz", games)
    write_trmph(make.folder / "games.trmph", games, make.n)
    store = convert(make.folder)
    assert store.content("games.trmph") == store.content("v1_processed") == expected_content(games, make.n)
    assert store.source("games.trmph")["value_sense"] == "blue-is-0"


def test_text_that_utf8_cannot_hold_does_not_stop_the_run(make, convert):
    (game,) = make.dicts(make.games(1), odd="half a pair: \ud800")
    make.write("a.pkl.gz", game, source_file="\ud800")
    make.write_bytes("b\udcff.pkl.gz", b"no legacy file")
    store = convert(make.folder, max_reject_rate=1.0)
    assert json.loads(store.source("a.pkl.gz")["header"])["source_file"] == "\ud800"
    assert json.loads(store.table("positions")["metadata"][0].as_py()) == {"odd": "half a pair: \ud800"}
    assert store.rows("rejected")[0]["reason"] == "unknown-layout"
    assert store.rows("sources")[1]["name"] == "legacy/b\\udcff.pkl.gz"
