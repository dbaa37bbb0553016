"""Companions of the legacy tools: their names and counts are used, and their errors are harmless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hexdata.convert.companions import read_companions
from hexdata.convert.spool import SpoolFacts


@pytest.fixture
def beside(make):
    """Return ``beside(name, content)``, which writes a companion, as JSON unless it is bytes."""

    def write(name, content):
        return make.write_bytes(name, content if isinstance(content, bytes) else json.dumps(content).encode())

    return write


def notes(store, name="a.pkl.gz"):
    return json.loads(store.source(name)["notes"] or "[]")


LOOKUP = {"created_at": "2025-07-21T09:15:40", "total_files": 2, "format_version": "1.0"}


@pytest.mark.parametrize("layout", ["plain", "nested"])
def test_a_lookup_names_the_raw_files(make, convert, beside, layout):
    make.write(
        "a.pkl.gz", [e for i in (0, 1, 2) for g in make.dicts(make.games(2, start=2 * i), i) for e in g]
    )
    names = {"0": "data/zero.trmph", "1": "data/one.trmph"}
    beside("file_lookup_20250721.json", names if layout == "plain" else {**LOOKUP, "file_mapping": names})
    store = convert(make.folder)
    origins = [game["origin"] for game in store.games()]
    assert origins == ["data/zero.trmph"] * 2 + ["data/one.trmph"] * 2 + [None] * 2
    assert notes(store) == []


def test_names_in_the_metadata_are_kept(make, convert, beside):
    make.write("a.pkl.gz", [e for g in make.dicts(make.games(2), source_file="named") for e in g])
    beside("file_lookup_1.json", {"0": "other"})
    assert {game["origin"] for game in convert(make.folder).games()} == {"named"}


def test_conflicting_lookups_are_not_used(make, convert, beside):
    make.write("a.pkl.gz", [e for i in (0, 1) for g in make.dicts(make.games(2, start=2 * i), i) for e in g])
    beside("file_lookup_1.json", {"0": "x.trmph", "1": "data/y.trmph"})
    beside("file_lookup_2.json", {"0": "z.trmph", "1": "y.trmph"})
    store = convert(make.folder)
    assert [game["origin"] for game in store.games()] == [None, None, "data/y.trmph", "data/y.trmph"]
    assert notes(store) == [
        "companion files name 1 raw files differently; not used: file_idx 0 is x.trmph or z.trmph …"
    ]


def test_a_lookup_of_another_run_does_not_name_a_file(make, convert, beside):
    """``file_idx`` restarts in every run; the header shows that the lookup is from another run."""
    make.write("a.pkl.gz", [e for g in make.dicts(make.games(2)) for e in g], source_file="data/mine.trmph")
    beside("file_lookup_1.json", {"0": "data/theirs.trmph"})
    store = convert(make.folder)
    assert {game["origin"] for game in store.games()} == {None}
    assert "data/theirs.trmph or data/mine.trmph" in notes(store)[0]


def test_shuffled_files_get_names_from_companions(make, convert, beside):
    examples = [e for g in make.dicts(make.games(4), 7) for e in g]
    stats = {"num_buckets": 2, "source_files": ["x"]}
    make.write("a.pkl.gz", examples[::2], shuffling_stats=stats)
    make.write("b.pkl.gz", examples[1::2], shuffling_stats=stats)
    beside("file_lookup_1.json", {"7": "seven"})
    assert [game["origin"] for game in convert(make.folder).games()] == ["seven"] * 4


def stats_of(raw, records, games, file_idx=0):
    stats = {"file_path": raw, "valid_games": games, "examples_generated": records, "file_error": None}
    return {"success": True, "stats": stats, "file_path": raw, "file_idx": file_idx}


def test_processing_stats_are_compared_if_they_name_the_file(make, convert, beside):
    games = make.games(3)
    make.v2("mine_processed.pkl.gz", games)
    records = sum(len(game) for game in make.dicts(games))
    beside(
        "processing_stats.json",
        [stats_of("data/mine.trmph", records + 1, 4), stats_of("data/x.trmph", 1, 1, 9)],
    )
    store = convert(make.folder)
    assert notes(store, "mine_processed.pkl.gz") == [
        f"processing_stats.json states {records + 1} records, the file has {records}",
        "processing_stats.json states 4 games, the file has 3",
    ]
    assert {name: len(notes) for name, notes in store.result.file_notes.items()} == {
        "legacy/mine_processed.pkl.gz": 2
    }


def test_processing_state_is_matched_by_the_name_of_the_pickle(make, convert, beside):
    make.v2("odd name.pkl.gz", make.games(3))
    done = {"file": "data/x.trmph", "output": "out/odd name.pkl.gz", "stats": {"valid_games": 5}}
    other = {"file": "data/x.trmph", "output": "out/other.pkl.gz", "stats": {"valid_games": 6}}
    beside("processing_state.json", {"version": "1.1", "processed_files": [done, other], "failed_files": []})
    assert notes(convert(make.folder), "odd name.pkl.gz") == [
        "processing_state.json states 5 games, the file has 3"
    ]


CORRUPT = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b"null",
    b"3",
    b'[[1], "x", {"stats": 3}]',
    b'{"0": 1, "x": "y"}',
]


@pytest.mark.parametrize("content", CORRUPT)
@pytest.mark.parametrize("name", ["processing_stats.json", "processing_state.json", "file_lookup_1.json"])
def test_a_corrupt_companion_only_causes_a_note(make, convert, beside, name, content):
    make.v2("a.pkl.gz", make.games(2))
    make.v2("b.pkl.gz", make.games(2, start=5))
    beside(name, content)
    store = convert(make.folder)
    assert store.result.games == 4
    assert store.result.rejected == 0
    unreadable = content in CORRUPT[:4]
    found = store.result.file_notes.get("legacy/a.pkl.gz", [])
    assert sum(map(len, store.result.file_notes.values())) == len(found) <= 1
    assert not unreadable or found[0].startswith(f"the companion file {name} cannot be used")


def test_a_companion_that_is_a_folder_or_huge_is_a_note(tmp_path, monkeypatch):
    (tmp_path / "file_lookup_1.json").mkdir()
    monkeypatch.setattr("hexdata.convert.companions.MAX_BYTES", 8)
    (tmp_path / "processing_stats.json").write_text("[1, 2, 3, 4]")
    found = read_companions(tmp_path)
    assert len(found.notes) == 2
    assert found.origins({0}, SpoolFacts()) == ({}, [])


def test_a_changed_companion_does_not_change_the_store(make, convert, beside):
    make.v2("a.pkl.gz", make.games(2))
    beside("file_lookup_1.json", {"0": "first"})
    before = convert(make.folder).files()
    beside("file_lookup_1.json", {"0": "second"})
    assert convert(make.folder).files() == before
    make.v2("b.pkl.gz", make.games(2, start=5))
    later = convert(make.folder)
    assert [game["origin"] for game in later.games()] == ["first", "first", "second", "second"]
    after = later.files()
    assert all(after[file_name] == before[file_name] for file_name in before if file_name != "manifest.json")


def test_real_processing_stats_agree(real_data: Path):
    for folder, entries in (("v1", 0), ("v2", 5)):
        found = read_companions(real_data / "legacy" / folder)
        assert (len(found.entries), found.notes) == (entries, [])
    facts = SpoolFacts(records=51168, games=994)
    assert found.compare("neurohex_00_processed.pkl.gz", facts) == []
    assert found.compare("neurohex_01_processed.pkl.gz", facts) != []
    assert found.names[3] == ["data/neurohex/neurohex_03.trmph"]
