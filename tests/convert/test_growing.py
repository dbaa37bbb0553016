"""TRMPH files to which games are appended: the next run reads only the new lines."""

from __future__ import annotations

import gzip
import json
import random
from contextlib import contextmanager
from itertools import chain, pairwise

import pytest

from hexdata.board import format_moves
from hexdata.convert import run
from hexdata.errors import InputError, RejectRateError, SourceChangedError
from hexdata.export import PicklesOptions, export_pickles
from hexdata.formats import FilePart, open_source
from hexdata.formats.trmph import TrmphReader
from hexdata.progress import Silent
from hexdata.verify import check_round_trip, verify_store
from tests.pairs import FULL


def lines_of(make, count, start=0, newline="\n"):
    """Return the text of games, one line each."""
    games = make.games(count, start=start)
    return "".join(f"#{make.n},{format_moves(m, make.n)} {'br'[winner]}{newline}" for m, winner in games)


def append(path, text):
    with path.open("ab") as file:
        file.write(text.encode())


@pytest.fixture
def grow(make, convert):
    """Return ``grow(*texts, **options)``: convert a file after each text is appended to it."""

    def all_runs(*texts, name="a.trmph", **options):
        path = make.write_bytes(name, b"")
        for text in texts:
            append(path, text)
            store = convert(make.folder, **options)
        return store

    return all_runs


def rows_of(store, *columns):
    return [tuple(row[name] for name in columns) for row in store.rows("sources")]


def moves_of(store):
    return [(game["moves"], game["winner"], game["line_idx"]) for game in store.games()]


def check_store(store, folder):
    """Check that the store verifies, and that its sources are restored from the file."""
    verify_store(store.path).require()
    assert all(found.ok for found in check_round_trip(store.path, folder))


def test_only_the_new_lines_of_a_grown_file_are_read(make, convert, grow):
    texts = ["# header\n\n" + lines_of(make, 5), lines_of(make, 3, start=5), lines_of(make, 4, start=8)]
    store = grow(*texts)
    once = convert(make.folder, store="once")
    assert moves_of(store) == moves_of(once)
    assert [line for _, _, line in moves_of(store)] == list(range(2, 14))
    assert store.table("positions")["board"] == once.table("positions")["board"]
    assert store.result.games == 4
    ends = [sum(map(len, texts[: i + 1])) for i in range(3)]
    assert rows_of(store, "name", "games", "bytes") == [
        ("legacy/a.trmph", games, end) for games, end in zip((5, 3, 4), ends, strict=True)
    ]
    headers = [json.loads(row["header"]) for row in store.rows("sources")]
    assert [header.get("continues") for header in headers] == [
        None,
        {"source_id": 0, "bytes": ends[0]},
        {"source_id": 1, "bytes": ends[1]},
    ]
    check_store(store, make.folder)


def test_old_positions_keep_their_ids_and_new_ones_follow_all_others(make, convert):
    path = make.write_bytes("a.trmph", lines_of(make, 5).encode())
    make.write_bytes("b.trmph", lines_of(make, 5, start=5).encode())
    before = convert(make.folder)
    files = before.files()
    append(path, lines_of(make, 2, start=10))
    make.write_bytes("0.trmph", lines_of(make, 1, start=20).encode())
    store = convert(make.folder)
    assert rows_of(store, "source_id", "name", "games") == [
        (0, "legacy/a.trmph", 5),
        (1, "legacy/b.trmph", 5),
        (2, "legacy/0.trmph", 1),
        (3, "legacy/a.trmph", 2),
    ]
    kept = {name: data for name, data in files.items() if name != "manifest.json"}
    assert {name: store.files()[name] for name in kept} == kept
    check_store(store, make.folder)
    again = convert(make.folder)
    assert (again.result.sources, again.result.skipped) == (0, 3)
    assert again.files() == store.files()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_way_to_cut_a_file_gives_the_same_games(make, convert, newline):
    """A cut within a line is an error if a game was read from it; otherwise, the line is read again."""
    text = lines_of(make, 2, newline=newline) + "# comment" + newline + newline
    text += lines_of(make, 2, start=2, newline=newline)
    path = make.write_bytes("whole/a.trmph", text.encode())
    expected = moves_of(convert(path, store="whole"))
    first_line = len(lines_of(make, 1, newline=newline))
    cuts = [
        *random.Random(1).sample(range(first_line, len(text)), 6 if FULL else 3),
        len(text) - len(newline),
        len(text) - 1,
    ]
    for cut in sorted({*cuts, text.index("#", first_line + 1), text.index(" comment")}):
        path = make.write_bytes(f"{cut}/a.trmph", text[:cut].encode())
        store = f"store-{cut}"
        first = convert(path, store=store, max_reject_rate=1.0)
        append(path, text[cut:])
        last = text[:cut].rpartition("\n")[2]
        if last.startswith("#5,") and not first.result.rejected and not text[cut:].startswith(("\n", "\r\n")):
            with pytest.raises(SourceChangedError, match="the last game of this source was incomplete"):
                convert(path, store=store)
            continue
        found = convert(path, store=store)
        assert moves_of(found) == expected, cut
        assert len(found.rows("rejected")) == first.result.rejected <= 1
        assert all(source.ok for source in check_round_trip(found.path, path.parent))


def test_a_rejected_line_is_not_rejected_again(make, convert):
    """A part without positions is continued, too."""
    path = make.write_bytes("a.trmph", lines_of(make, 3).encode())
    convert(path)
    for number, text in enumerate(("#5,zz b\n", "# only a comment\n", lines_of(make, 1, start=3))):
        append(path, text)
        store = convert(path, max_reject_rate=1.0)
        assert len(store.rows("sources")) == number + 2
    assert rows_of(store, "records", "positions", "rejected")[1:3] == [(1, 0, 1), (0, 0, 0)]
    assert [game["line_idx"] for game in store.games()] == [1, 2, 3, 6]
    assert [
        json.loads(row["header"]).get("continues", {}).get("source_id") for row in store.rows("sources")
    ] == [
        None,
        0,
        1,
        2,
    ]
    check_store(store, path)


def test_a_game_of_another_size_in_the_new_lines_is_a_rejected_record(make, convert):
    path = make.write_bytes("a.trmph", lines_of(make, 3).encode())
    convert(path)
    append(path, "#4,a1b2 b\n" + lines_of(make, 3, start=3))
    store = convert(path, max_reject_rate=1.0)
    assert [row["reason"] for row in store.rows("rejected")] == ["board-size"]
    assert store.result.games == 3
    check_store(store, path)


def test_the_reject_rate_refers_to_the_new_lines(make, convert):
    path = make.write_bytes("a.trmph", lines_of(make, 20).encode())
    before = convert(path).files()
    append(path, lines_of(make, 1, start=20) + "#5,zz b\n")
    with pytest.raises(RejectRateError, match="found 1 of "):
        convert(path)
    assert convert(path, store="other", max_reject_rate=0.01).result.rejected == 1
    after = convert(path, max_reject_rate=1.0).files()
    assert all(after[name] == before[name] for name in before if name != "manifest.json")


def test_a_file_whose_old_bytes_changed_is_refused(make, convert):
    text = lines_of(make, 5)
    path = make.write_bytes("a.trmph", text.encode())
    convert(path)
    for changed in (
        text.replace("b\n", "r\n", 1) + text,
        text[:-10],
        "\n" + text,
        lines_of(make, 9, start=1),
    ):
        path.write_text(changed)
        with pytest.raises(SourceChangedError, match=r"or the same bytes with lines added"):
            convert(path)
    path.write_text(text)
    assert convert(path).result.skipped == 1


def test_gzip_and_pickles_that_grow_are_refused(make, convert):
    path = make.write_bytes("a.trmph.gz", gzip.compress(lines_of(make, 5).encode()))
    other = make.v2("b.pkl", make.games(3))
    convert(make.folder)
    for grown in (path, other):
        content = grown.read_bytes()
        grown.write_bytes(content + gzip.compress(lines_of(make, 1, start=9).encode()))
        with pytest.raises(SourceChangedError):
            convert(make.folder)
        grown.write_bytes(content)


def test_duplicates_are_found_across_the_parts(make, grow):
    text = lines_of(make, 3)
    store = grow(text, text)
    assert [game["duplicate_of"] for game in store.games()] == [None, None, None, 0, 1, 2]


def test_a_note_names_the_grown_files(make, convert):
    path = make.write_bytes("a.trmph", lines_of(make, 3).encode())
    convert(path)
    append(path, lines_of(make, 1, start=3))
    notes = []

    class Watcher(Silent):
        def note(self, message):
            notes.append(message)

    convert(path, progress=Watcher())
    assert notes == ["reading only the new lines of 1 file: legacy/a.trmph"]


def test_an_interrupted_run_gives_the_same_bytes(make, convert, monkeypatch):
    """Also if the file grows again between the runs."""
    for folder in ("one", "two"):
        for name in ("a.trmph", "b.trmph"):
            make.write_bytes(f"{folder}/in/{name}", lines_of(make, 5, start=ord(name[0])).encode())
        convert(make.folder / folder / "in", store=folder)

    def grow(folder, start):
        for name in ("a.trmph", "b.trmph"):
            append(make.folder / folder / "in" / name, lines_of(make, 3, start=start + ord(name[0])))

    real, done = run.publish_positions, []

    def publish_once(spool, path, assigned):
        if done:
            raise KeyboardInterrupt
        done.append(path)
        return real(spool, path, assigned)

    for start in (1000, 2000):
        for folder in ("one", "two"):
            grow(folder, start)
        with monkeypatch.context() as context:
            context.setattr(run, "publish_positions", publish_once)
            done.clear()
            with pytest.raises(KeyboardInterrupt):
                convert(make.folder / "two" / "in", store="two")
    convert(make.folder / "one" / "in", store="one")
    one, two = (convert(make.folder / folder / "in", store=folder) for folder in ("one", "two"))
    assert one.files() == two.files()
    check_store(two, make.folder / "two")


def test_pickles_of_all_parts_can_be_exported(make, grow):
    store = grow(lines_of(make, 3), lines_of(make, 2, start=3))
    export_pickles(store.path, PicklesOptions(order="original", workers=1))
    assert sorted(path.name for path in (store.path / "pickles/original/legacy").iterdir()) == [
        "a_processed.source-0.pkl.gz",
        "a_processed.source-1.pkl.gz",
    ]
    check_store(store, make.folder)


def test_the_round_trip_needs_the_bytes_that_were_converted(make, grow):
    store = grow(lines_of(make, 3), lines_of(make, 2, start=3))
    path = make.folder / "a.trmph"
    whole = path.read_bytes()
    append(path, lines_of(make, 1, start=9))
    with pytest.raises(InputError, match="none of the store's sources"):
        check_round_trip(store.path, make.folder)
    path.write_bytes(whole[: len(lines_of(make, 3))])
    assert [found.ok for found in check_round_trip(store.path, make.folder)] == [True, False]


@pytest.fixture
def while_reading(monkeypatch):
    """Return a context manager that calls a function at the end of the first reading of a file."""

    @contextmanager
    def patch(change):
        real, done = TrmphReader.batches, []

        def batches(reader):
            yield from real(reader)
            if not done:
                done.append(reader)
                change()

        with monkeypatch.context() as context:
            context.setattr(TrmphReader, "batches", batches)
            yield

    return patch


def test_lines_appended_during_the_run_are_read_in_the_next_one(make, convert, while_reading):
    path = make.write_bytes("a.trmph", b"")
    games = 0
    for number in range(3):
        append(path, lines_of(make, 3, start=10 * number))
        with while_reading(lambda number=number: append(path, lines_of(make, 2, start=10 * number + 5))):
            store = convert(path)
        games += 3 + (2 if number else 0)
        assert len(store.games()) == games
    convert(path)
    store = convert(path)
    assert len(store.games()) == 15
    verify_store(store.path).require()


def test_a_file_that_grows_during_the_run_gives_the_store_of_its_old_bytes(make, convert, while_reading):
    path = make.write_bytes("one/a.trmph", lines_of(make, 3).encode())
    calm = convert(path, store="calm").files()
    with while_reading(lambda: append(path, "#5,a1b2" + lines_of(make, 2, start=5))):
        store = convert(path, store="busy")
    assert store.files() == calm


def test_another_change_during_the_run_is_an_error(make, convert, while_reading):
    text = lines_of(make, 3)
    path = make.write_bytes("a.trmph", text.encode())
    for changed in (text.replace("b\n", "r\n", 1) + text, text[:-4], "# x\n" + text):
        with (
            while_reading(lambda changed=changed: path.write_text(changed)),
            pytest.raises(SourceChangedError, match="changed while it was being converted"),
        ):
            convert(path)
        path.write_text(text)
    zipped = make.write_bytes("b.trmph.gz", gzip.compress(text.encode()))
    with (
        while_reading(lambda: zipped.write_bytes(zipped.read_bytes() + gzip.compress(b"#5,a1 b\n"))),
        pytest.raises(SourceChangedError, match="changed while it was being converted"),
    ):
        convert(zipped)


def test_a_part_has_the_line_numbers_of_the_whole_file(tmp_path):
    """Every part from the start of a line to the end, with a byte order mark, blank and overlong lines."""
    overlong = b"x" * 200_000
    lines = [
        b"\xef\xbb\xbf\n",
        b"#5,a1b2 b\n",
        b" \n",
        b"# c\n",
        overlong + b"\n",
        b" " * 70_000 + b"\n",
        b"#5,zz\n",
    ]
    lines += [b"#5,c3d4 r\r\n", b"\r\n", b"#5,e5a1 b"]
    path = tmp_path / "a.trmph"
    path.write_bytes(b"".join(lines))
    size = path.stat().st_size
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]

    def read(part):
        with open_source(path, part=part) as reader:
            found = []
            for batch in reader.batches():
                found += [("game", line) for line in batch.positions["line_idx"].to_pylist()]
                found += [(one.reason, one.detail) for one in batch.rejected]
            return found

    whole = read(None)
    assert len(whole) > 8
    for start in starts:
        assert sorted(read(FilePart(0, start, 5)) + read(FilePart(start, size, 5))) == whole, start
    for first, last in pairwise(starts):
        parts = FilePart(0, first, 5), FilePart(first, last, 5), FilePart(last, size, 5)
        assert sorted(chain.from_iterable(map(read, parts))) == whole
