"""The sources of a run: which files they are, in which order, and what a store has already."""

from __future__ import annotations

import os
import shutil
import socket
from datetime import date
from pathlib import Path

import pytest

from hexdata.convert.inputs import find_sources
from hexdata.errors import ConfigError, InputError
from hexdata.formats.trmph import write_trmph
from hexdata.progress import Silent
from hexdata.sql import run_query
from hexdata.store import Store
from hexdata.verify import verify_store
from tests.convert.conftest import flat


@pytest.fixture
def tree(tmp_path):
    """Return ``tree(*names)``, which creates a folder with an empty file at each path."""

    def make(*names):
        root = tmp_path / "data"
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        return root

    return make


def names(*inputs):
    return [source.name for source in find_sources(inputs, Path("/nowhere"))[0]]


def test_the_files_below_a_folder_are_sources_if_their_names_are(tree, tmp_path):
    """In the order of their names, without hidden files and the statistics of the legacy tools."""
    root = tree(
        *("b.PKL.GZ", "a/z.trmph", "a/b/c.pkl", "C.TRMPH", "c.pickle", "sub/d.trmph.gz"),
        *(".hidden", ".git/b.trmph", "processing_stats.json", "a/processing_state.json"),
        *("file_lookup_2.json", "file_lookup_2.trmph"),  # only the former is a companion
        *("README", "sub/0001.pt", "sub/eval.csv"),
    )
    found, skipped = find_sources([root], Path("/nowhere"))
    assert [source.name for source in found] == [
        *("data/C.TRMPH", "data/a/b/c.pkl", "data/a/z.trmph", "data/b.PKL.GZ", "data/c.pickle"),
        *("data/file_lookup_2.trmph", "data/sub/d.trmph.gz"),
    ]
    others = ("README", "sub/0001.pt", "sub/eval.csv")
    assert skipped == {f"data/{name}": "unknown-name" for name in others}
    (root / ".hidden").write_text("#5,a1b2 b\n")
    assert names(root / ".hidden") == ["data/.hidden"]  # given by its own path, so it is a source


def test_the_name_of_a_source_begins_with_its_folder(tree, monkeypatch):
    root = tree("a.trmph", "b.trmph")
    monkeypatch.chdir(root)
    for path in (root / "a.trmph", Path("a.trmph"), Path("../data/a.trmph")):
        assert names(path) == ["data/a.trmph"]
    assert names(Path(), Path("a.trmph")) == ["data/a.trmph", "data/b.trmph"]


def test_links_are_followed_once_and_what_is_no_file_is_skipped(tree, tmp_path, monkeypatch):
    root = tree("a/one.trmph", "b/two.trmph")
    monkeypatch.chdir(root)  # the path of a socket must be short
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "three.trmph").touch()
    for link, to in (("c", tmp_path / "far"), ("d", tmp_path / "far"), ("a/loop", root), ("self", "self")):
        (root / link).symlink_to(to)
    (root / "broken.trmph").symlink_to("nowhere")
    (root / "zero.pkl").symlink_to("/dev/zero")
    for pipe in ("pipe", "pipe.trmph"):
        os.mkfifo(root / pipe)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.pkl")
        found, skipped = find_sources([root], Path("/nowhere"))
    assert [source.name for source in found] == [
        f"data/{n}.trmph" for n in ("a/one", "b/two", "broken", "c/three")
    ]
    no_files = dict.fromkeys(("data/pipe.trmph", "data/socket.pkl", "data/zero.pkl"), "no-file")
    assert skipped == {"data/pipe": "unknown-name", "data/self": "unknown-name", **no_files}
    for path in (root / "pipe", Path("/dev/null"), root / "self"):
        with pytest.raises(InputError, match=r"neither a file nor a folder|no such file"):
            names(path)


def test_a_file_given_by_its_path_is_detected_by_its_content(tree):
    root = tree("a.trmph", "games.txt", "README.md", "eval.csv", "empty", "binary")
    (root / "games.txt").write_text("#5,a1b2 b\n")
    for name in ("README.md", "eval.csv"):
        (root / name).write_text(name)
    (root / "binary").write_bytes(bytes(range(256)))
    assert names(root / "games.txt", root / "empty") == ["data/empty", "data/games.txt"]
    found, skipped = find_sources([root, root / "games.txt"], Path("/nowhere"))
    assert [source.name for source in found] == ["data/a.trmph", "data/games.txt"]
    assert "data/games.txt" not in skipped
    with pytest.raises(InputError, match="3 files without a known format") as caught:
        names(*root.iterdir())
    assert {line.partition(": ")[0] for line in caught.value.lines} == {
        str(root / name) for name in ("README.md", "eval.csv", "binary")
    }


def test_inputs_without_files_are_refused(tree, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"missing: no such file or folder"):
        names(tmp_path / "missing")
    root = tree(".hidden")
    with pytest.raises(InputError, match=r"no files to convert; expected .*\*\.pkl"):
        names(root)
    tree("1.pt", "2.pt", "eval.csv", "b/c.trmph")
    real = os.scandir

    def scandir(path="."):
        if str(path) == str(root / "b"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=r"/b: .*Permission denied"):
        names(root)
    (root / "b/c.trmph").unlink()
    (root / "b").rmdir()
    with pytest.raises(InputError, match=r"data/1\.pt, data/2\.pt, data/eval\.csv"):
        names(root)


def test_a_store_is_refused_as_an_input(trmph_store):
    with pytest.raises(InputError, match="found a store of hexdata"):
        names(trmph_store)


# Ids and bytes depend only on the sources


@pytest.fixture
def collection(make):
    """A folder with every kind of source: tuples, dicts, TRMPH, shuffled, broken and empty files."""
    games = make.games(24)
    make.v1("v1/a_processed.pkl.gz", games[:6])
    make.v2("v2/b_processed.pkl.gz", games[4:10])
    (make.folder / "raw").mkdir()
    write_trmph(make.folder / "raw/c.trmph", games[8:14], make.n)
    make.shuffled(flat(make.dicts(games[14:])), "shuffled")
    make.write_bytes("z/broken.pkl.gz", b"not a pickle")
    make.write("z/empty.pkl.gz", [])
    (make.folder / "processing_stats.json").write_text("{}")
    return make.folder


def test_the_bytes_depend_on_the_sources_alone(collection, make, convert, monkeypatch):
    """Not on the size of the temporary tables that small sources share."""
    for number, game in enumerate(make.games(20, start=30)):
        examples = make.game(game, (number, 1))
        for example in examples if number == 10 else []:  # it has the other value convention
            example["value"] = 1.0 - example["value"]
        make.write(f"many/{number:02}.pkl.gz", examples)
    one = convert(collection, store="one", max_reject_rate=1.0)
    assert one.result.games == 48
    assert verify_store(one.path).ok
    for rows in (40, 150):
        monkeypatch.setattr("hexdata.convert.read._JOINED_ROWS", rows)
        made = convert(collection, store=f"{rows} rows", max_reject_rate=1.0)
        assert (made.result, made.files()) == (one.result, one.files())


def test_batches_that_are_removed_once_converted_give_the_store_of_one_run(collection, make, convert):
    """Each batch leaves the files of those before it unchanged."""
    folders = sorted(path for path in collection.iterdir() if path.is_dir())
    whole = convert(*folders, store="whole", max_reject_rate=1.0)
    records, files = 0, {}
    for folder in folders:
        batches = convert(folder, store="batches", max_reject_rate=1.0)
        assert batches.files().items() >= files.items()
        files = {name: data for name, data in batches.files().items() if name != "manifest.json"}
        shutil.rmtree(folder)
        assert batches.result.records == batches.result.positions + batches.result.rejected
        records += batches.result.records
    assert records == whole.result.records
    assert Store.open(batches.path).manifest.counts == Store.open(whole.path).manifest.counts
    for table in ("positions", "games", "sources", "rejected"):
        assert batches.rows(table) == whole.rows(table)
    assert verify_store(batches.path).ok
    with pytest.raises(ConfigError, match=r"has val 0\.05, not"):  # a game's split depends on the shares
        convert(make.v2("new.pkl.gz", make.games(3)), store="batches", val=0.06)


class Notes(Silent):
    def __init__(self):
        self.texts = []

    def note(self, message):
        self.texts.append(message)


def test_known_bytes_are_skipped_under_any_name(collection, convert):
    shutil.copy(collection / "v1/a_processed.pkl.gz", collection / "v1/copy.pkl.gz")
    first = convert(collection, max_reject_rate=1.0)
    copied = {"legacy/v1/copy.pkl.gz": "known-bytes: same bytes as legacy/v1/a_processed.pkl.gz"}
    assert first.result.skipped_files == copied
    assert "legacy/v1/copy.pkl.gz" not in [source["name"] for source in first.rows("sources")]
    notes = Notes()
    again = convert(collection, progress=notes)
    assert (again.result.sources, again.result.skipped, again.result.positions) == (0, 8, 0)
    assert again.files() == first.files()
    assert ["8 files" in note for note in notes.texts] == [True]
    others = dict.fromkeys((row["name"] for row in first.rows("sources")), "known-bytes")
    assert again.result.skipped_files == others | copied


def test_two_inputs_with_the_same_name_are_refused(make, convert):
    one = make.v2("one/data/a.pkl.gz", make.games(2)).parent
    other = make.v2("other/data/a.pkl.gz", make.games(2, start=2)).parent
    with pytest.raises(InputError, match="same name"):
        convert(one, other)


# Columns of sources that describe runs of self-play

HEADER = """\
# Self-play games - 2025-09-08T12:11:06.123456
# Model: {model}
# MCTS simulations: 500
# Temperature: 0.5
# Random seed: 4294967295
# Git commit: 941efd55+
"""
COLUMNS = ("model", "simulations", "temperature", "seed", "commit", "date")


def test_header_lines_and_names_fill_the_columns_of_sources(make, convert):
    def write(name, text):
        make.write_bytes(name, text.encode())

    write("a.trmph", HEADER.format(model="m/a.pt.gz") + make.lines(2))
    write("tournament_20250930_1530/b.trmph", "# Model: b\n" + make.lines(2, start=2))
    write("c.trmph", make.lines(2, start=4))
    make.v2("d_20250102_processed.pkl.gz", make.games(1, start=6))
    store = convert(make.folder)
    none = (None,) * 5
    assert {row["name"]: tuple(row[name] for name in COLUMNS) for row in store.rows("sources")} == {
        "legacy/a.trmph": ("m/a.pt.gz", 500, 0.5, 4294967295, "941efd55+", date(2025, 9, 8)),
        "legacy/tournament_20250930_1530/b.trmph": ("b", *none[1:], date(2025, 9, 30)),
        "legacy/c.trmph": (*none, None),
        "legacy/d_20250102_processed.pkl.gz": (*none, date(2025, 1, 2)),
    }
    query = "SELECT model, count(*) FROM games JOIN sources USING (source_id) GROUP BY 1 ORDER BY 1"
    with run_query(store.path, query) as result:
        rows = [tuple(row.values()) for batch in result.batches for row in batch.to_pylist()]
    assert rows == [("b", 2), ("m/a.pt.gz", 2), (None, 3)]
