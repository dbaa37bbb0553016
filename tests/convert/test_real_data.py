"""Real files of every variant, written by the legacy pipeline; skipped if they are absent."""

from __future__ import annotations

import json
from datetime import date
from functools import cache

import pytest

from hexdata.verify import check_round_trip

V2_VARIANTS = (
    "v2-enums-2025-09-08",
    "v2-game-id-2025-07-23",
    "v2-no-game-id-2025-07-20",
    "v2-player-int-2025-07-25",
)
VARIANTS = ("v1-tuples-2025-07-18", *V2_VARIANTS)


@pytest.fixture(scope="module")
def content(real_store):
    """Return ``content(of_source)``: ``real_store.content``, computed once for each source."""
    return cache(real_store.content)


def test_every_file_is_converted_with_its_stated_counts(real_store):
    sources = real_store.rows("sources")
    assert real_store.result.rejected == 0
    assert len(sources) == 17
    stated = 0
    for source in sources:
        stats = json.loads(source["header"]).get("processing_stats")
        if stats is not None:
            stated += 1
            assert (source["positions"], source["games"]) == (
                stats["examples_generated"],
                stats["valid_games"],
            )
            assert source["notes"] is None
    assert stated == 12


def test_v1_and_v2_have_the_same_games_and_labels(real_store, content):
    """Value 1.0 means blue in v1 and red in v2; without conversion, half of the labels are wrong."""
    older, newer = (
        real_store.source("neurohex_v1_00_processed.pkl.gz"),
        real_store.source("v2/neurohex_00_processed.pkl.gz"),
    )
    assert (older["value_sense"], older["evidence"]["chains"]) == ("blue-is-1", [0, 994])
    assert (newer["value_sense"], newer["evidence"]["chains"]) == ("blue-is-0", [994, 0])
    v1 = content("v1/neurohex_v1_00")
    assert len(v1) > 900
    assert v1 == content("v2/neurohex_00")


def test_v1_and_v2_have_the_same_winners_and_moves(real_store):
    games = {}
    for game in real_store.games():
        games.setdefault(game["game_hash"], []).append((game["winner"], game["moves"], game["first_player"]))
    assert sum(len(same) > 1 for same in games.values()) > 1_900
    assert all(entry == same[0] for same in games.values() for entry in same)
    assert all(winner is not None and moves for same in games.values() for winner, moves, _ in same)


def test_the_dated_variants_and_the_shuffled_set_hold_the_same_games(content):
    contents = [content(variant) for variant in VARIANTS]
    assert len(contents[0]) == 20
    assert all(content == contents[0] for content in contents)
    shuffled = content("shuffled-2025-09-08")
    assert {game: shuffled[game] for game in contents[0]} == contents[0]
    assert len(shuffled) == 26  # six more of another raw file


def test_every_repeated_game_is_a_duplicate_of_the_first(real_store):
    names = {source["source_id"]: source["name"] for source in real_store.rows("sources")}
    first = {}
    duplicates = 0
    for game in real_store.games():
        expected = first.setdefault(game["game_hash"], game["game_id"])
        assert game["duplicate_of"] == (None if expected == game["game_id"] else expected)
        duplicates += game["duplicate_of"] is not None
        assert (game["duplicate_of"] is not None) or "variants/v" not in names[game["source_id"]]
    assert duplicates == real_store.result.duplicate_games == 994 + 1001 + 5 * 20


def test_a_shuffled_file_without_ids_keeps_its_positions(real_store):
    found = real_store.source("found/small_shuffled_test.pkl.gz")
    assert (found["format"], found["positions"], found["games"]) == ("legacy-shuffled", 5, 0)
    assert real_store.table("positions").slice(0, 5)["game_id"].null_count == 5


def test_a_pickle_of_self_play_games_is_converted(real_data, convert):
    store = convert(real_data / "foreign")
    (source,) = store.rows("sources")
    assert (source["format"], source["positions"], source["games"]) == ("selfplay-games", 356, 5)
    assert source["model"].endswith("/epoch2_mini16.pt.gz")
    assert (source["temperature"], source["date"]) == (1.0, date(2025, 7, 29))
    assert "5 games are outputs of the network without search" in source["notes"]
    games = store.games()
    assert [len(game["moves"]) for game in games] == [62, 63, 60, 76, 90]
    assert [game["flags"] for game in games] == [[]] * 5
    assert {game["end_reason"] for game in games} == {"chain"}
    with_policy = [row["policy"] is not None for row in store.rows("positions")]
    assert (len(with_policy), sum(with_policy)) == (356, 351)
    (found,) = check_round_trip(store.path, real_data / "foreign")
    assert found.ok, found


def test_trmph_gives_the_games_of_the_pickles_made_from_it(real_data, content, convert):
    trmph = real_data / "trmph"
    raw = convert(trmph / "neurohex_00.trmph", trmph / "realmix_A.trmph")
    assert raw.result.rejected == 0
    assert raw.content("neurohex_00") == content("v2/neurohex_00")
    assert raw.content("realmix_A") == content(VARIANTS[0])
    assert {row["value_sense"] for row in raw.rows("sources")} == {"blue-is-0"}


@pytest.mark.parametrize(
    ("name", "size", "games"), [("wolve_10x10", 10, 500), ("fusekipedia_19x19", 19, 1931)]
)
def test_other_board_sizes_are_supported(real_data, convert, name, size, games):
    store = convert(real_data / "trmph" / f"{name}.trmph", max_reject_rate=0.05)
    assert store.result.positions > 40 * games * 0.9
    assert store.boards().shape[1:] == (2, size, size)
    assert store.result.games + store.result.rejected == games
    deepest = max(store.games(), key=lambda game: len(game["moves"]))
    assert max(deepest["moves"]) < size * size
