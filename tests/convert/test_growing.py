"""TRMPH files to which games are appended: the next run reads only the new lines."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from hexdata.errors import SourceChangedError
from hexdata.formats.trmph import TrmphReader
from hexdata.verify import check_round_trip, verify_store
from tests.convert.conftest import Changing
from tests.pairs import FULL


def append(path, text):
    with path.open("ab") as file:
        file.write(text.encode())


def rows_of(store, *columns):
    return [tuple(row[name] for name in columns) for row in store.rows("sources")]


def moves_of(store):
    return [(game["moves"], game["winner"], game["line_idx"]) for game in store.games()]


def check_store(store, folder):
    """Check that the store verifies, and that its sources are restored from the file."""
    verify_store(store.path).require()
    assert all(found.ok for found in check_round_trip(store.path, folder))


def continued(store):
    headers = [json.loads(header) for (header,) in rows_of(store, "header")]
    return [header.get("continues", {}).get("source_id") for header in headers]


def test_only_the_new_lines_of_a_grown_file_are_read(make, convert):
    """Old positions keep their ids, new ones follow all others, and header lines belong to their own run."""
    model = "# Model: {}\n\n# Random seed: 7\n"
    texts = [
        model.format("a") + make.lines(5),
        make.lines(3, start=5),
        model.format("b") + make.lines(4, start=8),
    ]
    ends = [sum(map(len, texts[: i + 1])) for i in range(3)]
    path = make.write_bytes("a.trmph", texts[0].encode())
    make.write_bytes("b.trmph", make.lines(5, start=20).encode())
    files = convert(make.folder).files()
    del files["manifest.json"]
    append(path, texts[1])
    make.write_bytes("0.trmph", make.lines(1, start=30).encode())
    convert(make.folder)
    append(path, texts[2])
    store = convert(make.folder)
    assert store.result.games == 4
    assert {name: store.files()[name] for name in files} == files
    assert rows_of(store, "source_id", "name", "games", "bytes", "model") == [
        (0, "legacy/a.trmph", 5, ends[0], "a"),
        (1, "legacy/b.trmph", 5, len(make.lines(5, start=20)), None),
        (2, "legacy/0.trmph", 1, len(make.lines(1, start=30)), None),
        (3, "legacy/a.trmph", 3, ends[1], "a"),
        (4, "legacy/a.trmph", 4, ends[2], "b"),
    ]
    assert continued(store) == [None, None, None, 0, 3]
    check_store(store, make.folder)
    grown = [game for game in store.games() if game["source_id"] in (0, 3, 4)]
    once = convert(path, store="once")
    assert [(game["moves"], game["line_idx"]) for game in grown] == [
        (game["moves"], game["line_idx"]) for game in once.games()
    ]
    again = convert(make.folder)
    assert (again.result.sources, again.result.skipped) == (0, 3)
    assert again.files() == store.files()


def test_every_way_to_cut_a_file_gives_the_same_games(make, convert):
    """A cut within a line is an error if a game was read from it; otherwise, the line is read again."""
    newline = "\r\n"
    text = make.lines(2, newline=newline) + "# comment" + newline + newline
    text += make.lines(2, start=2, newline=newline)
    expected = moves_of(convert(make.write_bytes("whole/a.trmph", text.encode()), store="whole"))
    first = len(make.lines(1, newline=newline))
    cuts = {*random.Random(1).sample(range(first, len(text)), 6 if FULL else 3), len(text) - 2, len(text) - 1}
    for cut in sorted({*cuts, text.index("#", first + 1), text.index(" comment")}):
        path = make.write_bytes(f"{cut}/a.trmph", text[:cut].encode())
        store = f"store-{cut}"
        rejected = convert(path, store=store, max_reject_rate=1.0).result.rejected
        append(path, text[cut:])
        last = text[:cut].rpartition("\n")[2]
        if last.startswith("#5,") and not rejected and not text[cut:].startswith(("\n", "\r\n")):
            with pytest.raises(SourceChangedError, match="incomplete"):
                convert(path, store=store)
            continue
        found = convert(path, store=store)
        assert moves_of(found) == expected, cut
        assert len(found.rows("rejected")) == rejected <= 1
        assert all(source.ok for source in check_round_trip(found.path, path.parent))


def test_a_part_without_positions_is_continued_and_its_rejected_line_not_rejected_again(make, convert):
    path = make.write_bytes("a.trmph", make.lines(3).encode())
    convert(path)
    for text in ("#5,zz b\n", "# only a comment\n", make.lines(1, start=3)):
        append(path, text)
        store = convert(path, max_reject_rate=1.0)
    assert rows_of(store, "records", "positions", "rejected")[1:3] == [(1, 0, 1), (0, 0, 0)]
    assert [game["line_idx"] for game in store.games()] == [1, 2, 3, 6]
    assert continued(store) == [None, 0, 1, 2]
    check_store(store, path)


def test_a_file_that_changed_otherwise_is_refused(make, convert):
    text = make.lines(5)
    path = make.write_bytes("a.trmph", text.encode())
    zipped = make.write_bytes("b.trmph.gz", gzip.compress(make.lines(5, start=5).encode()))
    other = make.v2("c.pkl", make.games(3))
    returns = make.write_bytes("d.trmph", b"#5,a1b1 r\r#5,a1b2 r\r")
    convert(make.folder)
    more = gzip.compress(make.lines(1, start=9).encode())
    changes = [
        (path, (text.replace("b\n", "r\n", 1) + text).encode()),
        (path, text[:-10].encode()),
        (path, ("\n" + text).encode()),
        (zipped, zipped.read_bytes() + more),
        (other, other.read_bytes() + more),
        (returns, returns.read_bytes() + b"#5,a1b3 r\n"),  # the text now is one line
    ]
    for changed, content in changes:
        before = changed.read_bytes()
        changed.write_bytes(content)
        with pytest.raises(SourceChangedError, match="changed since it was converted"):
            convert(make.folder)
        changed.write_bytes(before)
    assert convert(make.folder).result.skipped == 4


@pytest.mark.parametrize("what", ["file", "sidecar"])
def test_a_file_that_is_replaced_or_gets_a_sidecar_while_it_is_read_is_an_error(make, convert, what):
    path = make.write_bytes("a.trmph.gz", gzip.compress(make.lines(1).encode()))

    def change():
        before = path.stat()
        if what == "sidecar":
            (path.parent / "a.provenance.jsonl").write_text("{}\n")
        else:  # by one of the same size and time
            path.write_bytes(b"\0" + path.read_bytes()[1:])
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(SourceChangedError, match="changed"):
        convert(path, progress=Changing("read", change), max_reject_rate=1.0)


@pytest.mark.parametrize("games", [0, 1])
def test_games_that_are_added_after_the_digest_are_read_by_the_next_run_only(make, convert, games):
    path, more = make.write_bytes("a.trmph", make.lines(games).encode()), make.lines(3, start=1)
    assert convert(path, progress=Changing("read", lambda: append(path, more))).result.games == games
    store = convert(path)
    assert (store.result.games, len(store.games())) == (3, games + 3)
    verify_store(store.path).require()


def test_a_source_that_changes_while_it_is_read_is_an_error_or_read_later(make, convert, monkeypatch):
    text = make.lines(3)
    path = make.write_bytes("a.trmph", text.encode())
    zipped = make.write_bytes("b.trmph.gz", gzip.compress(text.encode()))
    real, changes = TrmphReader.batches, {path: (text + make.lines(1, start=3)).encode()}
    changes[zipped] = zipped.read_bytes() + gzip.compress(b"#5,a1 b\n")

    def batches(reader):
        yield from real(reader)
        Path(reader.path).write_bytes(changes[Path(reader.path)])

    monkeypatch.setattr(TrmphReader, "batches", batches)
    with pytest.raises(SourceChangedError, match="changed while it was being converted"):
        convert(zipped)
    # Of a small text, the bytes that were digested are those that are read.
    assert convert(path).result.games == 3
    monkeypatch.undo()
    store = convert(path)
    assert (store.result.games, continued(store)) == (1, [None, 0])
    check_store(store, path)
