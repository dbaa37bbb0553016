"""Invalid records: each has a row in ``rejected``, the rest is converted, and the counts agree."""

from __future__ import annotations

import errno
import gzip
import json
import os
import pickle
import shutil
from itertools import chain

import numpy as np
import pytest

from hexdata.convert import inputs, spool
from hexdata.errors import BudgetError, ConfigError, InputError, RejectRateError
from hexdata.formats import open_source
from hexdata.formats.legacy import LegacyReader
from hexdata.formats.trmph import write_trmph
from hexdata.progress import Silent
from hexdata.storage import LocalStorage
from hexdata.store import Store


def wrong_shape(example):
    example["board"] = np.zeros((2, 5, 4), dtype=np.float32)


def two_in_a_cell(example):
    example["board"][0, 2, 2] = 2


def blue_and_red(example):
    example["board"][:, 2, 2] = 1


def nan_policy(example):
    example["policy"] = np.full(25, np.nan, dtype=np.float32)


def another_size(example):
    example["board"] = np.zeros((2, 7, 7), dtype=np.float32)
    example["policy"] = None


def value_above_one(example):
    example["value"] = 1.5


def no_example(example):
    del example["value"]


RECORDS = {
    "board-shape": wrong_shape,
    "board-cells": two_in_a_cell,
    "board-overlap": blue_and_red,
    "policy-values": nan_policy,
    "board-size": another_size,
    "value-range": value_above_one,
    "example-layout": no_example,
}


@pytest.mark.parametrize("reason", RECORDS)
def test_a_bad_record_is_rejected_and_the_rest_goes_on(reason, make, convert):
    examples = list(chain.from_iterable(make.dicts(make.games(3))))
    RECORDS[reason](examples[4])
    make.write("a_bad.pkl.gz", examples)
    make.v2("b_good.pkl.gz", make.games(3, start=3))
    store = convert(make.folder, max_reject_rate=0.1)
    (row,) = store.rows("rejected")
    assert (row["source_id"], row["record"], row["reason"]) == (0, 4, reason)
    assert row["detail"]
    assert store.result.reasons == {reason: 1}
    bad = store.source("a_bad.pkl.gz")
    assert (bad["records"], bad["positions"], bad["rejected"]) == (len(examples), len(examples) - 1, 1)
    kept = np.stack([e["board"] for i, e in enumerate(examples) if i != 4])
    assert np.array_equal(store.boards()[: len(kept)], kept)
    assert store.source("b_good.pkl.gz")["rejected"] == 0


def test_a_game_with_a_rejected_record_has_no_moves(make, convert):
    (one, other) = make.dicts(make.games(2))
    two_in_a_cell(one[4])
    games = convert(make.write("a.pkl.gz", one + other), max_reject_rate=0.1).games()
    assert [game["moves"] is None for game in games] == [True, False]
    assert [game["positions"] for game in games] == [len(one) - 1, len(other)]


TORCH = b"\x80\x02}X\x06\x00\x00\x00boardsctorch._utils\n_rebuild_tensor_v2\n)Rs."
"""{"boards": torch._utils._rebuild_tensor_v2()}, written by hand, since torch need not be there."""
SYSTEM = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
"""os.system("true")."""


def zipped(content):
    return gzip.compress(content, 1)


GOOD = zipped(pickle.dumps({"examples": list(range(2000))}, 4))
FILES = {
    "truncated": GOOD[: len(GOOD) // 2],
    "corrupt-gzip": GOOD[:20] + bytes(len(GOOD) - 20),
    "empty-file": b"",
    "unknown-layout": b"PAR1 this is no pickle",
    "torch-tensors": zipped(TORCH),
    "unsafe-global": zipped(SYSTEM),
}


@pytest.mark.parametrize("reason", FILES)
def test_a_bad_file_is_rejected_and_the_rest_goes_on(reason, make, convert):
    make.write_bytes("a_bad.pkl.gz", FILES[reason])
    make.v2("b_good.pkl.gz", make.games(3))
    store = convert(make.folder, max_reject_rate=0.9)
    (row,) = store.rows("rejected")
    assert (row["source_id"], row["record"], row["reason"]) == (0, None, reason)
    assert store.result.failed_files == {"legacy/a_bad.pkl.gz": f"{reason}: {row['detail']}"}
    bad = store.source("a_bad.pkl.gz")
    assert (bad["records"], bad["positions"], bad["rejected"], bad["games"]) == (1, 0, 1, 0)
    assert store.result.games == 3
    assert store.table("positions")["position_id"][0].as_py() == 0


def test_nothing_of_a_truncated_file_is_kept(make, convert):
    """Some thousand examples before the damage are complete, but a file is used completely or not at all."""
    whole = make.v2("a.pkl.gz", make.games(300)).read_bytes()
    make.write_bytes("a.pkl.gz", whole[: int(len(whole) * 0.9)])
    store = convert(make.folder, max_reject_rate=1.0)
    assert store.result.failed_files["legacy/a.pkl.gz"].startswith("truncated")
    assert (store.result.records, store.result.positions, store.result.rejected) == (1, 0, 1)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0,
    reason="Windows has other rights, and root may read everything",
)
def test_a_file_without_permission_is_rejected(make, convert):
    make.v2("a.pkl.gz", make.games(3)).chmod(0)
    check_unreadable(make, convert, "Permission denied")


def test_a_broken_link_is_rejected(make, convert):
    make.folder.mkdir()
    (make.folder / "a.pkl.gz").symlink_to("nowhere.pkl.gz")
    check_unreadable(make, convert, "No such file or directory")


def check_unreadable(make, convert, detail):
    make.v2("b.pkl.gz", make.games(3, start=3))
    store = convert(make.folder, max_reject_rate=0.99)
    (row,) = store.rows("rejected")
    assert (row["record"], row["reason"], row["detail"]) == (None, "unreadable", detail)
    assert store.source("a.pkl.gz")["sha256"] == ""
    assert store.result.games == 3


def failing_at(monkeypatch, module, name, number, only="a.pkl.gz"):
    """Let a function of a module raise a system error for one file."""
    function = getattr(module, name)

    def fail(path, *args, **options):
        if path.name == only:
            raise OSError(number, os.strerror(number), str(path))
        return function(path, *args, **options)

    monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("where", [(spool, "open_source"), (inputs, "digest_file")])
def test_a_disk_that_fails_to_read_a_source_ends_the_run(make, convert, monkeypatch, where, number):
    """However small the file is, nothing is published. The next run reads only that file."""
    make.v2("a.pkl.gz", make.games(3))
    make.v2("b.pkl.gz", make.games(400, start=3))
    failing_at(monkeypatch, *where, number)
    with pytest.raises(
        InputError, match=r"legacy/a\.pkl\.gz: the system failed to read this source"
    ) as caught:
        convert(make.folder, max_reject_rate=0.9)
    assert type(caught.value) is InputError
    assert os.strerror(number) in str(caught.value.found)
    assert "run the command again" in caught.value.hint
    assert "move it out of the inputs" in caught.value.hint
    monkeypatch.undo()
    result = convert(make.folder).result
    assert (result.rejected, result.games) == (0, 403)


def test_a_disk_that_fails_to_read_a_companion_ends_the_run(make, convert, monkeypatch):
    """Without the companion, origins would silently be missing."""
    make.v2("a.pkl.gz", make.games(3))
    (make.folder / "processing_state.json").write_text("{}")
    opened = LocalStorage.open

    def fail(storage, **options):
        if storage.path.name == "processing_state.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(storage.path))
        return opened(storage, **options)

    monkeypatch.setattr(LocalStorage, "open", fail)
    with pytest.raises(InputError, match=r"processing_state\.json: the system failed to read"):
        convert(make.folder)
    monkeypatch.undo()
    assert convert(make.folder).result.games == 3


def test_a_failed_write_of_the_spool_does_not_reject_the_source(make, convert, monkeypatch):
    make.v2("a.pkl.gz", make.games(3))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(spool, "write_arrow", full)
        with pytest.raises(BudgetError, match=r"the disk is full.*No space left.*Free disk space"):
            convert(make.folder, max_reject_rate=1.0)
    assert convert(make.folder).result.rejected == 0


def test_a_failing_reader_rejects_only_its_file(make, convert, monkeypatch):
    make.v2("a.pkl.gz", make.games(3))
    make.v2("b.pkl.gz", make.games(30))

    def fails(path, **options):
        return [][1] if path.name == "a.pkl.gz" else open_source(path, **options)

    monkeypatch.setattr(spool, "open_source", fails)
    store = convert(make.folder, max_reject_rate=0.5, workers=1)
    (row,) = store.rows("rejected")
    assert (row["record"], row["reason"]) == (None, "reader-error")
    assert row["detail"] == "its reader failed: IndexError; found list index out of range"
    assert store.rows("positions")


def test_a_failure_in_a_record_names_the_record(make, convert, monkeypatch):
    make.v2("a.pkl.gz", make.games(3))
    make.v2("b.pkl.gz", make.games(30))
    spell = LegacyReader._convert_block

    def fails(reader, items, count):
        return {}["lost"] if reader.path.name == "a.pkl.gz" else spell(reader, items, count)

    monkeypatch.setattr(LegacyReader, "_convert_block", fails)
    store = convert(make.folder, max_reject_rate=0.5, workers=1)
    (row,) = store.rows("rejected")
    assert row["reason"] == "reader-error"
    assert row["detail"].startswith("record 0 or one of the 8,192 after it")


def test_a_file_with_too_many_rejected_records_is_rejected(make, convert, monkeypatch):
    monkeypatch.setattr(spool, "MAX_SURPLUS_REJECTED", 50)
    make.v2("b.pkl.gz", make.games(30))
    (make.folder / "a.pkl").write_bytes(pickle.dumps({"examples": [None] * 200}))
    store = convert(make.folder, max_reject_rate=0.5)
    (row,) = store.rows("rejected")
    assert row["reason"] == "limit-rejected"
    assert "example-layout" in row["detail"]


def test_an_empty_game_id_is_a_rejected_record(make, convert):
    make.v2("b.pkl.gz", make.games(30))
    board = np.zeros((2, make.n, make.n), "f4")
    example = {"board": board, "policy": None, "value": 0.0, "metadata": {"game_id": ()}}
    (make.folder / "a.pkl").write_bytes(pickle.dumps({"examples": [example]}))
    store = convert(make.folder, max_reject_rate=0.5)
    assert [row["reason"] for row in store.rows("rejected")] == ["game-id"]


# One board size per store.


def other_size(make, name, size, start=0):
    n, make.n = make.n, size
    path = make.v2(name, make.games(3, start=start))
    make.n = n
    return path


def test_several_board_sizes_are_an_error_with_the_command_for_each(make, convert, tmp_path):
    make.v2("a.pkl.gz", make.games(30))
    other_size(make, "b.pkl.gz", 4)
    other_size(make, "sub/c.pkl.gz", 4, start=3)
    with pytest.raises(
        InputError, match=r"one board size; nothing was published; found 4 x 4, 5 x 5"
    ) as caught:
        convert(make.folder, max_reject_rate=1.0)
    assert [line.partition(",")[0] for line in caught.value.lines] == [
        "2 files: 4 x 4 boards",
        "  legacy/b.pkl.gz",
        "  legacy/sub/c.pkl.gz",
        "legacy/a.pkl.gz: 5 x 5 boards",
    ]
    store = tmp_path / "store"
    options = "--workers 1 --max-reject-rate 1.0"
    assert caught.value.commands == (
        f"hexdata convert {make.folder} {store}-4x4 {options} --board-size 4",
        f"hexdata convert {make.folder} {store} {options} --board-size 5",
    )
    assert not store.exists()
    chosen = convert(make.folder, board_size=5)
    assert (chosen.result.sources, chosen.result.rejected, chosen.result.games) == (1, 0, 30)
    assert chosen.result.skipped_files == dict.fromkeys(
        ["legacy/b.pkl.gz", "legacy/sub/c.pkl.gz"], "board-size: 4 x 4"
    )


@pytest.mark.parametrize("size", [4, 5])
def test_files_of_other_board_sizes_leave_no_trace_in_the_store(make, convert, size):
    """The store has the bytes of a run without these files."""
    make.v2("a.pkl.gz", make.games(30))
    other_size(make, "b.pkl.gz", 4)
    shutil.copy(make.folder / "b.pkl.gz", make.folder / "c.pkl.gz")
    store = convert(make.folder, board_size=size)
    assert (store.result.sources, store.result.skipped) == (1, 2)
    alone = convert(make.folder / ("a.pkl.gz" if size == 5 else "b.pkl.gz"), store="alone")
    assert store.files() == alone.files()
    again = convert(make.folder, board_size=size)
    assert again.files() == store.files()
    assert (again.result.sources, again.result.skipped) == (0, 3)


def test_a_damaged_file_of_another_board_size_is_skipped_in_every_run(make, convert, monkeypatch):
    """A run that reuses the temporary files of a failed run gives the bytes of a run from scratch."""
    make.v2("a.pkl.gz", make.games(300))
    other_size(make, "b.pkl.gz", 4)
    n, make.n = make.n, 4
    whole = make.v2("c.pkl.gz", make.games(1500, start=10)).read_bytes()
    make.n = n
    make.write_bytes("c.pkl.gz", whole[: int(len(whole) * 0.9)])
    with pytest.raises(InputError, match="one board size"):
        convert(make.folder, max_reject_rate=1.0)
    store = convert(make.folder, max_reject_rate=1.0, board_size=5)
    fresh = convert(make.folder, max_reject_rate=1.0, board_size=5, store="fresh")
    assert store.result == fresh.result
    assert store.files() == fresh.files()
    assert (store.result.sources, store.result.skipped, store.result.rejected) == (1, 2, 0)


def test_a_store_without_positions_has_no_board_size(make, convert):
    make.write("a.pkl.gz", [])
    assert Store.open(convert(make.folder, board_size=5).path).manifest.board_size is None


def test_later_sources_must_have_the_board_size_of_the_store(make, convert, tmp_path):
    before = convert(make.v2("b.pkl.gz", make.games(3))).files()
    other = other_size(make, "a.pkl.gz", 4)
    with pytest.raises(InputError, match="found 4 x 4; in the store, 5 x 5") as caught:
        convert(other, max_reject_rate=1.0)
    store = tmp_path / "store"
    options = "--workers 1 --max-reject-rate 1.0"
    assert caught.value.commands == (
        f"hexdata convert {other} {store}-4x4 {options} --board-size 4",
        f"hexdata convert {other} {store} {options} --board-size 5",
    )
    result = convert(make.folder, board_size=5).result
    assert (result.sources, result.skipped) == (0, 2)
    with pytest.raises(ConfigError, match="another board size; found --board-size 4; expected 5"):
        convert(other, board_size=4)
    assert {
        name: data for name, data in convert(other, board_size=5).files().items() if name in before
    } == before


def test_a_board_size_that_no_file_has_is_an_error(make, convert):
    make.v2("a.pkl.gz", make.games(3))
    with pytest.raises(InputError, match="found 5 x 5 in 1 file; expected 7 x 7"):
        convert(make.folder, board_size=7)
    for size in (2, 33, True, "5"):
        with pytest.raises(ConfigError, match="board_size"):
            convert(make.folder, board_size=size)


def test_a_file_of_another_board_size_is_not_read_to_its_end(make, convert, monkeypatch):
    make.v2("a.pkl.gz", make.games(3))
    n, make.n = make.n, 4
    big = make.v2("b.pkl.gz", make.games(1500))
    make.n = n
    monkeypatch.setattr("hexdata.formats.legacy.reader._BLOCK", 1000)
    read = []
    batches = LegacyReader.batches

    def count(reader):
        for batch in batches(reader):
            read.append((reader.path, batch.records))
            yield batch

    monkeypatch.setattr(LegacyReader, "batches", count)
    assert convert(make.folder, board_size=5).result.games == 3
    assert 0 < sum(records for path, records in read if path == big) < 5000


def test_a_file_of_another_board_size_can_be_removed_afterwards(make, convert):
    other_file = other_size(make, "a.pkl.gz", 4)
    make.v2("b.pkl.gz", make.games(30))
    with pytest.raises(InputError, match="one board size"):
        convert(make.folder)
    other_file.unlink()
    assert convert(make.folder).result.games == 30


# The rate.


def spoiled(make, name, games=3, bad=5):
    examples = list(chain.from_iterable(make.dicts(make.games(games))))
    for example in examples[:bad]:
        two_in_a_cell(example)
    return make.write(name, examples)


def published(store):
    return sorted(
        p.name for p in store.rglob("*") if p.is_file() and ".work" not in p.parts and p.name != ".lock"
    )


def test_above_the_rate_nothing_is_published(make, convert, tmp_path):
    make.v2("good.pkl.gz", make.games(3, start=3))
    spoiled(make, "bad.pkl.gz")
    with pytest.raises(RejectRateError) as caught:
        convert(make.folder)
    message = str(caught.value)
    assert "5 of " in message
    assert "\n  legacy/bad.pkl.gz: board-cells: 5 records, such as: " in message
    assert "--max-reject-rate" in message
    assert published(tmp_path / "store") == []


def test_the_rate_is_a_share_of_the_records(make, convert):
    records = sum(len(game.moves) + 1 for game in make.games(3))
    spoiled(make, "bad.pkl.gz")
    with pytest.raises(RejectRateError):
        convert(make.folder, max_reject_rate=4.9 / records)
    assert convert(make.folder, max_reject_rate=5 / records).result.rejected == 5


def test_the_rate_is_also_a_share_of_the_bytes(make, convert):
    """An unreadable file counts as one rejected record, regardless of its size."""
    good = make.v2("good.pkl.gz", make.games(3)).stat().st_size
    lost = make.write_bytes("lost.pkl.gz", bytes(good)).stat().st_size
    with pytest.raises(RejectRateError, match=r"1 of 2 files; .*\n  legacy/lost\.pkl\.gz: unknown-layout: "):
        convert(make.folder, max_reject_rate=0.49)
    assert convert(make.folder, max_reject_rate=lost / (good + lost)).result.rejected == 1


def test_files_without_a_size_count_as_rejected(make, convert):
    make.folder.mkdir()
    for number in range(3):
        (make.folder / f"{number}.pkl.gz").symlink_to("nowhere.pkl.gz")
    with pytest.raises(RejectRateError, match="3 of 3 files") as caught:
        convert(make.folder)
    assert caught.value.lines == (
        "3 files: unreadable: No such file or directory",
        "  legacy/0.pkl.gz",
        "  legacy/1.pkl.gz",
        "  legacy/2.pkl.gz",
    )


@pytest.fixture
def unreadable(monkeypatch):
    """Make files whose names begin with ``locked`` unreadable, also for root."""
    digest = inputs.digest_file

    def digest_file(path):
        if path.name.startswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return digest(path)

    monkeypatch.setattr(inputs, "digest_file", digest_file)


def test_an_unreadable_file_is_not_answered_with_the_reject_rate(make, convert, unreadable, no_reader):
    """The error is raised before any file is read."""
    make.v2("good.pkl.gz", make.games(30))
    for number in range(7):
        make.write_bytes(f"locked{number}.pkl.gz", b"x" * 1000)
    with pytest.raises(RejectRateError) as caught:
        convert(make.folder)
    assert caught.value.lines[0] == "7 files: unreadable: Permission denied"
    assert caught.value.lines[-2:] == ("  legacy/locked4.pkl.gz", "  … and 2 more")
    assert "Make the unreadable files readable" in str(caught.value)
    assert "--max-reject-rate" not in str(caught.value)


def test_other_rejected_files_beside_an_unreadable_one_have_their_own_hint(make, convert, unreadable):
    make.v2("good.pkl.gz", make.games(100))
    make.write_bytes("locked.pkl.gz", b"x")
    spoiled(make, "bad.pkl.gz")
    with pytest.raises(RejectRateError) as caught:
        convert(make.folder, max_reject_rate=0.001)
    assert "Make the unreadable files readable" in str(caught.value)
    assert "raise --max-reject-rate" in str(caught.value)


def test_a_file_with_games_of_several_sizes_has_a_hint(make, convert):
    make.folder.mkdir()
    write_trmph(make.folder / "a.trmph", make.games(3), make.n)
    with (make.folder / "a.trmph").open("a") as file:
        file.write("#4,a1b2c3 b\n" * 20)
    with pytest.raises(
        RejectRateError, match=r"board-size: 20 records.*\n  Split files with games of several"
    ):
        convert(make.folder)


def test_a_pickle_without_examples_has_a_note(make, convert):
    make.write("a.pkl.gz", [])
    make.v2("b.pkl.gz", make.games(3))
    store = convert(make.folder)
    assert store.result.file_notes == {"legacy/a.pkl.gz": ["contains no examples"]}
    assert json.loads(store.source("a.pkl.gz")["notes"]) == ["contains no examples"]
    assert (store.result.sources, store.result.rejected) == (2, 0)


def test_files_with_unknown_names_leave_no_trace_in_the_store(make, convert):
    make.v2("a.pkl.gz", make.games(3))
    files = convert(make.folder).files()
    for name in ("README.md", "checkpoints/1.pt", "eval.csv"):
        make.write_bytes(name, b"x")
    notes = []

    class Watcher(Silent):
        def note(self, message):
            notes.append(message)

    store = convert(make.folder, store="other", progress=Watcher())
    assert store.files() == files
    assert notes == ["skipped 3 files of unknown type: 1 *.csv, 1 *.md, 1 *.pt"]
    assert (store.result.sources, store.result.skipped) == (1, 3)
    assert set(store.result.skipped_files.values()) == {"unknown-name"}


def test_a_run_with_a_higher_rate_reuses_the_spools(make, convert, monkeypatch, request):
    make.v2("good.pkl.gz", make.games(3, start=3))
    convert(make.folder)
    spoiled(make, "bad.pkl.gz")
    make.write_bytes("worse.pkl.gz", b"not a pickle")
    with pytest.raises(RejectRateError):
        convert(make.folder)
    request.getfixturevalue("no_reader")
    store = convert(make.folder, max_reject_rate=1.0)
    assert store.result.rejected == 6
    monkeypatch.undo()
    at_once = convert(make.folder, store="at-once", max_reject_rate=1.0)
    assert len(store.rows("positions")) == len(at_once.rows("positions"))


def test_in_equals_out_plus_rejected_for_every_source(make, convert):
    make.v2("a.pkl.gz", make.games(3))
    spoiled(make, "b.pkl.gz", bad=9)
    make.write_bytes("c.pkl.gz", FILES["truncated"])
    make.write("d.pkl.gz", [])
    make.folder.joinpath("e.trmph").write_text("# a comment\n#5,a1zz9 b\n")
    write_trmph(make.folder / "f.trmph", make.games(2, start=3), make.n)
    store = convert(make.folder, max_reject_rate=1.0)
    rejected = [row["source_id"] for row in store.rows("rejected")]
    positions = store.table("positions").num_rows
    found = {s["source_id"]: (s["records"], s["positions"], s["rejected"]) for s in store.rows("sources")}
    assert [rejected.count(source_id) for source_id in found] == [0, 9, 1, 0, 1, 0]
    assert all(records == out + lost for records, out, lost in found.values())
    assert [lost for _, _, lost in found.values()] == [0, 9, 1, 0, 1, 0]
    assert sum(out for _, out, _ in found.values()) == positions == store.result.positions
    assert store.result.records == positions + 11


def test_a_store_may_contain_only_rejected_files(make, convert):
    make.write_bytes("a.pkl.gz", FILES["unknown-layout"])
    store = convert(make.folder, max_reject_rate=1.0)
    assert (store.result.positions, len(store.rows("rejected")), store.rows("positions")) == (0, 1, [])
    make.v2("b.pkl.gz", make.games(2))
    assert convert(make.folder).result.games == 2


def test_a_repaired_file_is_converted(make, convert):
    """The file yielded no positions before, so it may have other bytes now."""
    whole = make.v2("b.pkl.gz", make.games(3)).read_bytes()
    make.write_bytes("b.pkl.gz", whole[:-100])
    make.v2("a.pkl.gz", make.games(3, start=3))
    convert(make.folder, max_reject_rate=1.0)
    make.write_bytes("b.pkl.gz", whole)
    store = convert(make.folder)
    assert store.result.games == 3
    assert [(s["name"], s["positions"] > 0) for s in store.rows("sources")] == [
        ("legacy/a.pkl.gz", True),
        ("legacy/b.pkl.gz", False),
        ("legacy/b.pkl.gz", True),
    ]


def test_a_file_that_still_cannot_be_read_is_not_rejected_twice(make, convert):
    make.folder.mkdir()
    (make.folder / "a.pkl.gz").symlink_to("later.pkl.gz")
    assert convert(make.folder, max_reject_rate=1.0).result.rejected == 1
    again = convert(make.folder, max_reject_rate=1.0)
    assert (again.result.sources, again.result.skipped, len(again.rows("rejected"))) == (0, 1, 1)
    make.v2("later.pkl.gz", make.games(2))
    store = convert(make.folder / "a.pkl.gz")
    assert store.result.games == 2
