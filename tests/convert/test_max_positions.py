"""The option max_positions: whole files in the order of their names, up to a number of positions."""

from __future__ import annotations

import pytest

from hexdata.convert import run
from hexdata.errors import ConfigError
from hexdata.progress import Silent


class Notes(Silent):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


@pytest.fixture
def sizes(make):
    """Write six files; return the number of positions of each by name, in the order of the names."""
    games = make.games(12)
    found = {}
    for index in range(6):
        own = games[2 * index : 2 * index + 2]
        make.v2(f"{index}.pkl.gz", own, file_idx=index)
        found[f"legacy/{index}.pkl.gz"] = sum(len(moves) + 1 for moves, _ in own)
    return found


def names_of(store):
    return [row["name"] for row in store.rows("sources")]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_files_up_to_the_maximum_are_converted(make, convert, sizes, workers):
    names, notes = [*sizes], Notes()
    most = sum([*sizes.values()][:3])
    store = convert(make.folder, max_positions=most, workers=workers, progress=notes)
    assert names_of(store) == names[:3]
    assert store.result.positions == len(store.rows("positions")) == most
    assert store.result.records == store.result.positions + store.result.rejected
    assert store.result.skipped_files == dict.fromkeys(names[3:], "max-positions")
    assert notes.texts == [
        f"skipped 3 files beyond {most:,} positions: {', '.join(names[3:])}",
    ]
    below = convert(make.folder, store="below", max_positions=most - 1)
    assert names_of(below) == names[:2]
    assert list(below.result.skipped_files) == names[2:]


def test_the_maximum_is_that_of_the_store(make, convert, sizes):
    names, counts = [*sizes], [*sizes.values()]
    convert(make.folder, max_positions=sum(counts[:2]))
    again = convert(make.folder, max_positions=sum(counts[:2]))
    assert names_of(again) == names[:2]
    assert again.result.sources == 0
    assert set(again.result.skipped_files.values()) == {"known-bytes", "max-positions"}
    more = convert(make.folder, max_positions=sum(counts[:5]) + 1)
    assert names_of(more) == names[:5]
    everything = convert(make.folder)
    assert names_of(everything) == names
    once = convert(make.folder, store="once")
    assert everything.table("positions") == once.table("positions")


def test_files_after_the_maximum_are_not_read(make, convert, sizes, monkeypatch):
    read = []

    def read_source(path, *arguments):
        read.append(path.name)
        return original(path, *arguments)

    original = run.read_source
    monkeypatch.setattr(run, "read_source", read_source)
    store = convert(make.folder, max_positions=sum([*sizes.values()][:2]))
    assert names_of(store) == [*sizes][:2]
    assert read == ["0.pkl.gz", "1.pkl.gz"]


def test_a_maximum_below_the_first_file_is_refused(make, convert, sizes):
    first = next(iter(sizes.values()))
    with pytest.raises(ConfigError, match="first file") as caught:
        convert(make.folder, max_positions=first - 1)
    assert f"at least {first}" in str(caught.value)
    with pytest.raises(ConfigError):
        convert(make.folder, max_positions=0)
