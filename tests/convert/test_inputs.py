"""Input files: which of them are sources, their names, and which the store already has."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hexdata.convert.inputs import (
    KnownSource,
    SourceFile,
    digest_source,
    find_new_lines,
    find_sources,
    new_sources,
)
from hexdata.errors import InputError, SourceChangedError
from hexdata.text import encodable


@pytest.fixture
def tree(tmp_path):
    """Return ``tree(*file_names)``, which creates a folder with a file at each path."""

    def make(*file_names):
        root = tmp_path / "data"
        for file_name in file_names:
            path = root / file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file_name)
        return root

    return make


def names(*inputs, store="/nowhere"):
    return [source.name for source in find_sources(inputs, Path(store)).sources]


def test_all_files_below_a_folder_are_sorted_by_name(tree):
    root = tree("b.pkl.gz", "a/z.trmph", "a/b/c.pkl", "C.TRMPH")
    assert names(root) == ["data/C.TRMPH", "data/a/b/c.pkl", "data/a/z.trmph", "data/b.pkl.gz"]
    assert [source.path.read_text() for source in find_sources([root], Path("/nowhere")).sources] == [
        "C.TRMPH",
        "a/b/c.pkl",
        "a/z.trmph",
        "b.pkl.gz",
    ]


def test_companions_and_hidden_files_are_not_sources(tree):
    root = tree(
        "a.trmph",
        ".hidden",
        ".git/b.trmph",
        "processing_stats.json",
        "deep/processing_state.json",
        "file_lookup_20250730.json",
    )
    found = find_sources([root], Path("/nowhere"))
    assert [source.name for source in found.sources] == ["data/a.trmph"]
    assert found.skipped == {}
    (root / ".hidden").write_text("#5,a1b2 b\n")
    assert names(root / ".hidden") == ["data/.hidden"]  # given by its own path, so it is a source


def test_files_of_the_store_are_not_sources(tree):
    root = tree("a.trmph", "store/manifest.json", "store/positions/part-000000.parquet")
    assert names(root, store=root / "store") == ["data/a.trmph"]


def test_the_name_of_a_source_begins_with_its_folder(tree, monkeypatch):
    root = tree("a.trmph", "b.trmph")
    monkeypatch.chdir(root)
    assert (
        names(root / "a.trmph")
        == names(Path("a.trmph"))
        == names(Path("../data/a.trmph"))
        == ["data/a.trmph"]
    )
    assert names(Path(), Path("a.trmph")) == ["data/a.trmph", "data/b.trmph"]


def test_linked_folders_are_visited_once(tree, tmp_path):
    root = tree("a/one.trmph", "b/two.trmph")
    far = tmp_path / "far"
    far.mkdir()
    (far / "three.trmph").write_text("")
    (root / "c").symlink_to(far)
    (root / "d").symlink_to(far)
    (root / "a" / "loop").symlink_to(root)
    assert names(root) == ["data/a/one.trmph", "data/b/two.trmph", "data/c/three.trmph"]


def test_a_broken_link_is_a_source_and_a_pipe_is_not(tree, monkeypatch):
    root = tree("a.trmph")
    monkeypatch.chdir(root)  # the path of a socket must be short
    (root / "b.trmph").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    os.mkfifo(root / "pipe.trmph")
    (root / "zero.pkl").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.pkl")
        found = find_sources([root], Path("/nowhere"))
    assert [source.name for source in found.sources] == ["data/a.trmph", "data/b.trmph"]
    assert found.skipped == {
        "data/pipe": "unknown-name",
        "data/pipe.trmph": "no-file: a pipe (FIFO)",
        "data/socket.pkl": "no-file: a socket",
        "data/zero.pkl": "no-file: a device",
    }


def test_files_with_unknown_names_are_skipped(tree):
    root = tree("a.trmph", "b.PKL.GZ", "c.pickle", "README", "sub/0001.pt", "sub/eval.csv", "sub/d.trmph.gz")
    found = find_sources([root], Path("/nowhere"))
    assert [source.name for source in found.sources] == [
        "data/a.trmph",
        "data/b.PKL.GZ",
        "data/c.pickle",
        "data/sub/d.trmph.gz",
    ]
    assert found.skipped == dict.fromkeys(
        ["data/README", "data/sub/0001.pt", "data/sub/eval.csv"], "unknown-name"
    )


def test_a_file_given_by_its_path_is_detected_by_its_content(tree):
    root = tree("a.trmph", "games.txt")
    (root / "games.txt").write_text("#5,a1b2 b\n")
    assert names(root / "games.txt") == ["data/games.txt"]
    found = find_sources([root, root / "games.txt"], Path("/nowhere"))
    assert [source.name for source in found.sources] == ["data/a.trmph", "data/games.txt"]
    assert found.skipped == {}


def test_a_file_given_by_its_path_without_a_known_format_is_an_error(tree):
    root = tree("a.trmph", "README.md", "eval.csv", "empty")
    with pytest.raises(
        InputError,
        match=r"README.md: this file has no known format; found a text that begins with 'README.md'",
    ):
        names(root / "a.trmph", root / "README.md")
    (root / "empty").write_bytes(b"")
    with pytest.raises(InputError, match="3 of the files have no known format") as caught:
        names(root / "a.trmph", root / "README.md", root / "eval.csv", root / "empty")
    assert [line.partition(": ")[0] for line in caught.value.lines] == [
        str(root / name) for name in ("README.md", "eval.csv", "empty")
    ]


def test_skipped_files_of_equal_names_are_both_listed(tree, tmp_path):
    first = tree("a.trmph", "README")
    second = tmp_path / "other" / "data"
    second.mkdir(parents=True)
    for name in ("b.trmph", "README"):
        (second / name).write_text(name)
    skipped = find_sources([first, second, first], Path("/nowhere")).skipped
    assert set(skipped) == {"data/README", str(second / "README")}


def test_empty_inputs_are_refused(tree, tmp_path):
    with pytest.raises(InputError, match=r"missing: no such file or folder"):
        names(tmp_path / "missing")
    root = tree(".hidden")
    with pytest.raises(InputError, match=r"no files to convert; expected \*\.pkl\.gz"):
        names(root)
    for name in ("1.pt", "2.pt", "eval.csv"):
        (root / name).write_text("")
    os.mkfifo(root / "a.trmph")
    with pytest.raises(InputError, match=r"found 2 \*\.pt, 1 \*\.csv, 1 that are pipes.*by its own path"):
        names(root)


def test_a_folder_that_cannot_be_listed_is_an_error(tree, monkeypatch):
    root = tree("a.trmph", "b/c.trmph")
    real = os.scandir

    def scandir(path="."):
        if Path(path) == root / "b":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=r"/b: this folder cannot be listed.*found Permission denied"):
        names(root)


def test_names_are_valid_utf8():
    assert encodable("häuser.pkl") == "häuser.pkl"
    assert encodable(os.fsdecode(b"h\xe4user.pkl")) == "h\\udce4user.pkl"


def test_an_unreadable_file_has_a_problem_instead_of_a_digest(tree):
    root = tree("a.trmph")
    size, sha256, problem, _ = digest_source(root / "a.trmph")
    assert (size, len(sha256), problem) == (7, 64, "")
    assert digest_source(root / "b.trmph") == (0, "", "No such file or directory", "")
    assert digest_source(root)[1:3] == ("", "Is a directory")


def source(name, sha256="", problem=""):
    return SourceFile(name, Path(name), 1, sha256, problem)


def parted(sources, known):
    new, same = new_sources(sources, [KnownSource(*source) for source in known])
    return [s.name for s in new], [(s.name, name) for s, name in same]


def test_sources_are_known_by_their_bytes():
    known = [("a", "1" * 64, 10)]
    assert parted([source("a", "1" * 64), source("b", "2" * 64)], known) == (["b"], [("a", "a")])
    assert parted([source("c", "1" * 64)], known) == ([], [("c", "a")])
    assert parted([source("c", "3" * 64), source("d", "3" * 64)], known) == (["c"], [("d", "c")])


def test_a_known_name_with_other_bytes_has_changed():
    base = KnownSource("a", "1" * 64, 10)
    for changed, found in (
        (source("a", "2" * 64), "sha256 2222222222222222…"),
        (source("a", problem="Permission denied"), "Permission denied"),
    ):
        (new,), _ = new_sources([changed], [base])
        assert new.base == base
        with pytest.raises(SourceChangedError, match=f"found {found}; expected sha256 1111"):
            find_new_lines(new, base, lambda: False, 5)


def test_a_source_without_positions_may_be_replaced():
    known = [("a", "1" * 64, 0), ("b", "", 0)]
    assert parted([source("a", "2" * 64), source("b", "3" * 64)], known) == (["a", "b"], [])
    assert parted([source("b", problem="Permission denied")], known) == ([], [("b", "b")])


def test_a_pipe_and_a_device_are_named_in_the_error(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match=r"neither a file nor a folder.*pipe \(FIFO\)"):
        find_sources([pipe], tmp_path / "store")
    with pytest.raises(InputError, match="a device"):
        find_sources([Path("/dev/null")], tmp_path / "store")
