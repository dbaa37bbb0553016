"""Bad records and bad files: each has rows in ``rejected``, the rest is converted, and the counts agree."""

from __future__ import annotations

import errno
import gzip
import os
import pickle
import shutil

import pytest

from hexdata.convert import inputs, read, run
from hexdata.errors import BudgetError, ConfigError, InputError, RejectRateError
from hexdata.formats.legacy import LegacyReader
from hexdata.progress import Silent
from hexdata.verify import verify_store
from tests.convert.conftest import Changing, flat


def two_in_a_cell(example):
    example["board"][0, 2, 2] = 2


GOOD = gzip.compress(pickle.dumps({"examples": list(range(2000))}, 4), 1)
TORCH = b"\x80\x02}X\x06\x00\x00\x00boardsctorch._utils\n_rebuild_tensor_v2\n)Rs."
"""{"boards": torch._utils._rebuild_tensor_v2()}, written by hand, since torch need not be there."""
SYSTEM = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
"""os.system("true")."""
FILES = {
    "corrupt-gzip": GOOD[:20] + bytes(len(GOOD) - 20),
    "torch-tensors": gzip.compress(TORCH),
    "truncated": GOOD[: len(GOOD) // 2],
    "unknown-layout": b"PAR1 this is no pickle",
    "unsafe-global": gzip.compress(SYSTEM),
}


@pytest.mark.parametrize("salvage", [False, True])
def test_bad_files_are_rejected_and_the_rest_goes_on(make, convert, salvage):
    """A file without a complete example cannot be salvaged, and an unsafe one never is."""
    for reason, content in FILES.items():
        make.write_bytes(f"a_{reason}.pkl.gz", content)
    make.write_bytes("a_\udcff.pkl.gz", b"no legacy file")  # a name that UTF-8 cannot hold
    make.v2("b_good.pkl.gz", make.games(3))
    store = convert(make.folder, make.folder / "a_\udcff.pkl.gz", max_reject_rate=0.99, salvage=salvage)
    rejected = {row["source_id"]: (row["reason"], row["record"]) for row in store.rows("rejected")}
    expected = ["unknown-layout", *FILES]
    assert rejected == {number: (reason, None) for number, reason in enumerate(expected)}
    assert [text.partition(": ")[0] for text in store.result.failed_files.values()] == expected
    assert "pickle.load" in store.result.failed_files["legacy/a_unsafe-global.pkl.gz"]  # the hint
    assert [row["name"] for row in store.rows("sources")] == [
        "legacy/a_\\udcff.pkl.gz",
        *(f"legacy/a_{reason}.pkl.gz" for reason in FILES),
        "legacy/b_good.pkl.gz",
    ]
    bad = store.source("a_truncated.pkl.gz")
    assert (bad["records"], bad["positions"], bad["rejected"], bad["games"]) == (1, 0, 1, 0)
    assert bad["salvaged"] == (False if salvage else None)
    assert store.result.games == 3
    assert store.table("positions")["position_id"][0].as_py() == 0


def test_rejected_records_of_many_small_files_are_written_once_and_in_order(make, convert):
    """Small files share temporary files, which are not read again for each of them."""
    files = 300
    for number in range(files):
        make.write_bytes(f"{number:03}.trmph", f"#5,zz{number} b\n#5,a1b2c3d4e5a2 b\n#5,a1a1 b\n".encode())
    store = convert(make.folder, max_reject_rate=1.0)
    rows = [(row["source_id"], row["record"], row["reason"]) for row in store.rows("rejected")]
    assert [row[0] for row in rows] == [number for number in range(files) for _ in range(2)]
    assert {row[1:] for row in rows} == {rows[0][1:], rows[1][1:]}
    assert {row[2] for row in rows} == {"trmph-cell", "repeated-move"}


def failing_at(monkeypatch, module, name, number):
    """Let a function of a module raise a system error for the file a.pkl.gz."""
    function = getattr(module, name)

    def fail(path, *args, **options):
        if path.name == "a.pkl.gz":
            raise OSError(number, os.strerror(number), str(path))
        return function(path, *args, **options)

    monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("where", [(read, "open_source"), (inputs, "source_version")])
def test_a_disk_that_fails_to_read_a_source_ends_the_run(make, convert, monkeypatch, where):
    """However small the file is, nothing is published. The next run reads only that file."""
    make.v2("a.pkl.gz", make.games(3))
    make.v2("b.pkl.gz", make.games(100, start=3))
    for number in (errno.EIO, errno.EMFILE):
        failing_at(monkeypatch, *where, number)
        with pytest.raises(InputError, match=r"legacy/a\.pkl\.gz: ") as caught:
            convert(make.folder, max_reject_rate=0.9)
        assert type(caught.value) is InputError
        assert os.strerror(number) in str(caught.value.found)
        assert "run the command again" in caught.value.hint
        monkeypatch.undo()
    result = convert(make.folder).result
    assert (result.rejected, result.games) == (0, 103)


def test_a_failed_write_of_temporary_files_does_not_reject_the_source(make, convert, monkeypatch):
    make.v2("a.pkl.gz", make.games(3))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(read, "write_arrow", full)
        with pytest.raises(BudgetError, match=r"the disk is full"):
            convert(make.folder, max_reject_rate=1.0)
    assert convert(make.folder).result.rejected == 0


def test_a_defect_of_a_reader_and_too_many_rejected_records_reject_the_file(make, convert, monkeypatch):
    make.v2("a.pkl.gz", make.games(3))
    make.v2("b.pkl.gz", make.games(30))
    (make.folder / "c.pkl").write_bytes(pickle.dumps({"examples": [None] * 200}))
    batches = LegacyReader.batches

    def fails(reader):
        return {}["lost"] if reader.path.name == "a.pkl.gz" else batches(reader)

    monkeypatch.setattr(LegacyReader, "batches", fails)
    monkeypatch.setattr(read, "MAX_SURPLUS_REJECTED", 50)
    store = convert(make.folder, max_reject_rate=0.9)
    rows = store.rows("rejected")
    assert [row["reason"] for row in rows] == ["reader-error", "limit-rejected"]
    assert rows[0]["detail"].startswith("record 0 ")
    assert "example-layout" in rows[1]["detail"]


# One board size per store: tests/promises/test_board_sizes.py shows that every format converts one size


@pytest.mark.parametrize("size", [4, 5])
def test_files_of_other_board_sizes_leave_no_trace_in_the_store(make, convert, monkeypatch, size):
    """The store has the bytes of a run without these files, also if they are large and damaged."""
    monkeypatch.setattr(read, "_JOINED_ROWS", 100)
    paths = [make.v2("a.pkl.gz", make.games(10))]
    make.n = 4
    paths.insert(0, make.v2("b.pkl.gz", make.games(10)))
    shutil.copy(make.folder / "b.pkl.gz", make.folder / "c.pkl.gz")
    if size == 5:
        whole = make.v2("d.pkl.gz", make.games(1000, start=10)).read_bytes()
        make.write_bytes("d.pkl.gz", whole[: int(len(whole) * 0.9)])
    with pytest.raises(InputError, match="one board size"):
        convert(make.folder, max_reject_rate=1.0)
    store = convert(make.folder, board_size=size, max_reject_rate=0)  # with what the failed run has read
    alone = convert(paths[size - 4], store="alone")
    assert (store.result.sources, store.result.skipped) == (1, size - 2)
    assert store.files() == alone.files()
    again = convert(make.folder, board_size=size)
    assert (again.files(), again.result.sources) == (store.files(), 0)
    with pytest.raises(ConfigError, match="the store has board size"):
        convert(make.folder, board_size=9 - size)


# The largest accepted share


def test_above_the_rate_nothing_is_published_and_nothing_is_read_again(make, convert, tmp_path, request):
    make.v2("good.pkl.gz", make.games(3, start=3))
    convert(make.folder)
    before = {p: p.read_bytes() for p in tmp_path.rglob("store/[pgsrm]*/*.parquet")}
    examples = flat(make.dicts(make.games(3)))
    for example in examples[:5]:
        two_in_a_cell(example)
    make.write("bad.pkl.gz", examples)
    with pytest.raises(RejectRateError) as caught:
        convert(make.folder)
    (line,) = caught.value.lines
    assert line.startswith("legacy/bad.pkl.gz: board-cells: 5 records")
    assert "--max-reject-rate" in caught.value.hint
    assert {p: p.read_bytes() for p in tmp_path.rglob("store/[pgsrm]*/*.parquet")} == before
    request.getfixturevalue("no_reader")
    store = convert(make.folder, max_reject_rate=1.0)
    assert (store.result.rejected, store.result.positions) == (5, len(examples) - 5)


def test_the_rate_is_also_a_share_of_the_bytes(make, convert):
    """An unreadable file counts as one rejected record, regardless of its size."""
    good = make.v2("good.pkl.gz", make.games(3)).stat().st_size
    lost = make.write_bytes("lost.pkl.gz", bytes(good)).stat().st_size
    with pytest.raises(RejectRateError, match=rf"1 of 2 files \({lost / (good + lost):.2%} of the bytes\)"):
        convert(make.folder, max_reject_rate=0.49)
    assert convert(make.folder, max_reject_rate=lost / (good + lost)).result.rejected == 1


@pytest.mark.usefixtures("no_reader")
def test_an_unreadable_file_is_not_answered_with_the_reject_rate(make, convert, monkeypatch):
    """The error is raised before any file is read."""
    version_of = inputs.source_version

    def source_version(path, beside):
        if path.name.startswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return version_of(path, beside)

    monkeypatch.setattr(inputs, "source_version", source_version)
    make.v2("good.pkl.gz", make.games(30))
    for number in range(7):
        make.write_bytes(f"locked{number}.pkl.gz", b"x" * 1000)
    with pytest.raises(RejectRateError, match="7 files: unreadable: Permission denied") as caught:
        convert(make.folder)
    assert "readable" in str(caught.value)
    assert "--max-reject-rate" not in str(caught.value)


def test_a_file_that_disappears_before_it_is_read_is_read_later(make, convert, monkeypatch):
    """The store does not have its bytes although they were digested; nor those that were added to a file."""
    monkeypatch.setattr(run, "_HELD_BYTES", 0)  # read again, as large files are
    new, grown = make.folder / "new.trmph", make.folder / "grown.trmph"
    lines = make.lines(5).splitlines(keepends=True)

    hides = Changing("read", lambda: (new.unlink(), grown.unlink()))
    make.write_bytes("grown.trmph", "".join(lines[:2]).encode())
    convert(make.folder)
    make.write_bytes("a.trmph", lines[4].encode())
    for progress, games in ((hides, 1), (Silent(), 2)):
        new.write_text(lines[3])
        grown.write_text("".join(lines[:3]))
        assert convert(make.folder, max_reject_rate=1.0, progress=progress).result.games == games
    assert convert(make.folder).result.sources == 0


def test_a_file_that_yielded_nothing_may_have_other_bytes_later(make, convert):
    """And one that still cannot be read is not rejected twice."""
    whole = make.v2("later/b.pkl.gz", make.games(3)).read_bytes()
    make.write_bytes("b.pkl.gz", whole[:-100])
    (make.folder / "a.pkl.gz").symlink_to("missing.pkl.gz")
    shutil.rmtree(make.folder / "later")
    assert convert(make.folder, max_reject_rate=1.0).result.rejected == 2
    again = convert(make.folder, max_reject_rate=1.0)
    assert (again.result.sources, again.result.skipped, len(again.rows("rejected"))) == (0, 2, 2)
    make.write_bytes("b.pkl.gz", whole)
    make.v2("missing.pkl.gz", make.games(2, start=3))
    store = convert(make.folder / "a.pkl.gz", make.folder / "b.pkl.gz")
    assert store.result.games == 5
    assert [(s["name"], s["games"]) for s in store.rows("sources")] == [
        *(("legacy/a.pkl.gz", 0), ("legacy/b.pkl.gz", 0)),
        *(("legacy/b.pkl.gz", 3), ("legacy/missing.pkl.gz", 2)),
    ]


# Salvage of what precedes the damage


def test_complete_examples_before_the_damage_are_kept(make, convert):
    """Later too, but once; the game that the end of the file cuts lacks positions."""
    total = len(flat(make.dicts(make.games(30))))
    path = make.v2("a.pkl.gz", make.games(30))
    path.write_bytes(path.read_bytes()[: int(0.7 * path.stat().st_size)])
    make.v2("b.pkl.gz", make.games(9, start=50))
    with pytest.raises(RejectRateError, match="--salvage"):
        convert(make.folder, store="strict")
    convert(make.folder, max_reject_rate=1.0)
    before = convert(make.folder).files()
    del before["manifest.json"]
    later = convert(make.folder, salvage=True)
    assert (later.result.sources, later.result.positions > 0.3 * total) == (1, True)
    assert later.files().items() >= before.items()
    assert convert(make.folder, salvage=True).result.sources == 0
    assert verify_store(later.path).ok

    store = convert(make.folder, store="at once", salvage=True)
    source = store.source("a.pkl.gz")
    assert source["positions"] == later.result.positions < total
    assert (source["salvaged"], source["records"], source["rejected"]) == (True, source["positions"] + 1, 1)
    assert [str(source["positions"]) in note for note in store.notes()] == [True]
    (rejected,) = store.rows("rejected")
    assert (rejected["record"], rejected["reason"]) == (source["positions"], "truncated")
    cut = ["missing-positions" in game["flags"] for game in store.games() if game["source_id"] == 0]
    assert cut == [False] * (len(cut) - 1) + [True]
