"""Real files of every variant, written by the legacy pipeline; skipped if they are absent."""

from __future__ import annotations

import json
from datetime import date

from hexdata.verify import check_round_trip


def test_every_file_is_converted_with_its_stated_counts(real_store):
    sources = real_store.rows("sources")
    assert (real_store.result.rejected, len(sources)) == (0, 17)
    stated = 0
    for source in sources:
        stats = json.loads(source["header"]).get("processing_stats")
        if stats is not None:
            stated += 1
            found = {"examples_generated": source["positions"], "valid_games": source["games"]}
            assert (stats | found, source["notes"]) == (stats, None)
    assert stated == 12


def test_v1_and_v2_have_the_same_games_and_labels(real_store):
    """Value 1.0 means blue in v1 and red in v2; without conversion, half of the labels are wrong."""
    files = {"v1/neurohex_v1_00_processed.pkl.gz": ("blue-is-1", [0, 994])}
    files["v2/neurohex_00_processed.pkl.gz"] = ("blue-is-0", [994, 0])
    for name, expected in files.items():
        source = real_store.source(name)
        assert (source["value_sense"], source["evidence"]["chains"]) == expected
    v1, v2 = map(real_store.content, ("v1/neurohex_v1_00", "v2/neurohex_00"))
    assert len(v1) > 900
    assert v1 == v2


def test_a_pickle_of_self_play_games_is_converted(real_data, convert):
    store = convert(real_data / "foreign")
    (source,) = store.rows("sources")
    assert (source["format"], source["positions"], source["games"]) == ("selfplay-games", 356, 5)
    assert source["model"].endswith("/epoch2_mini16.pt.gz")
    assert (source["temperature"], source["date"]) == (1.0, date(2025, 7, 29))
    assert ": 5" in source["notes"]
    games = store.games()
    assert [len(game["moves"]) for game in games] == [62, 63, 60, 76, 90]
    assert [(game["flags"], game["end_reason"]) for game in games] == [([], "chain")] * 5
    assert store.table("positions")["policy"].null_count == 5
    (found,) = check_round_trip(store.path, real_data / "foreign")
    assert found.ok, found
