"""Companions of the legacy tools: their names and counts are used, and their errors are harmless."""

from __future__ import annotations

import json

from tests.convert.conftest import flat


def write(make, name, content):
    """Write a companion, as JSON unless it is bytes."""
    make.write_bytes(name, content if isinstance(content, bytes) else json.dumps(content).encode())


def test_lookups_name_the_raw_files_unless_they_contradict_each_other(make, convert):
    for name, header in (("a.pkl.gz", {}), ("b.pkl.gz", {"source_file": "data/two.trmph"})):
        games = [make.dicts(make.games(2, start=2 * i + 9 * (name > "b")), i) for i in (0, 1, 2)]
        make.write(name, flat(flat(games)), **header)
    nested = {"0": "data/zero.trmph", "1": "one.trmph"}
    write(make, "file_lookup_2.json", {"total_files": 2, "format_version": "1.0", "file_mapping": nested})
    write(make, "file_lookup_1.json", {"0": "zero.trmph", "1": "another.trmph"})
    store = convert(make.folder)
    assert [game["origin"] for game in store.games()] == ["data/zero.trmph"] * 2 + [None] * 10
    notes = [note for name in ("a.pkl.gz", "b.pkl.gz") for note in store.notes(name)]
    assert ["file_idx 1" in note or "file_idx 0" in note for note in notes] == [True, True]


def test_processing_stats_name_the_raw_files_and_the_header_states_counts(make, convert):
    games = flat(make.dicts(make.games(3), 2))
    make.write("a.pkl.gz", games, processing_stats={"examples_generated": len(games), "valid_games": 4})
    write(make, "processing_stats.json", [{"file_path": "data/mine.trmph", "file_idx": 2}, {"file_idx": 3}])
    store = convert(make.folder)
    assert [game["origin"] for game in store.games()] == ["data/mine.trmph"] * 3
    (note,) = store.notes()
    assert note.endswith(": 4 and 3")


CORRUPT = [b"\xff\xfe", b"[" * 100_000, b"null", b'[[1], "x", {"stats": 3}]', b'{"0": 1, "x": "y"}']


def test_a_companion_that_cannot_be_used_only_causes_a_note(make, convert, monkeypatch):
    names = ("processing_stats.json", "file_lookup_1.json")
    for number, content in enumerate(CORRUPT):
        make.v2(f"{number}/a.pkl.gz", make.games(1, start=2 * number))
        make.v2(f"{number}/b.pkl.gz", make.games(1, start=2 * number + 1))
        for name in names:
            write(make, f"{number}/{name}", content)
    make.v2("folder/a.pkl.gz", make.games(1, start=20))
    (make.folder / "folder" / names[0]).mkdir()
    monkeypatch.setattr("hexdata.convert.companions.MAX_BYTES", 200)
    make.v2("large/a.pkl.gz", make.games(1, start=21))
    write(make, f"large/{names[0]}", [*range(100)])
    store = convert(make.folder)
    assert (store.result.games, store.result.rejected) == (12, 0)
    noted = {source: len(notes) for source, notes in store.result.file_notes.items()}
    expected = {"0": 2, "1": 2, "folder": 1, "large": 1}
    assert noted == {f"legacy/{folder}/a.pkl.gz": count for folder, count in expected.items()}
