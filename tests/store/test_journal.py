"""The journal of stages: one line per finished run; a failure never stops a stage or a reader."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata import __version__
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.journal import JOURNAL_NAME, journaled, read_journal

if TYPE_CHECKING:
    from tests.conftest import CopyStore, DemoTrmph, StoreBytes

LINE: dict[str, Any] = {
    "stage": "shuffle",
    "finished": "2026-01-31T12:00:00Z",
    "seconds": 1.5,
    "positions": 7,
    "bytes": 70,
    "peak_bytes": 1000,
    "resumed": False,
    "version": "0.1.0",
}


def lines(store: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (store / JOURNAL_NAME).read_text().splitlines()]


def test_every_stage_writes_a_line(trmph_store: Path, copy_store: CopyStore) -> None:
    """Compares positions and bytes with those of the files."""
    store = copy_store(trmph_store)
    before = len(lines(store))
    shuffle_store(store, ShuffleOptions(threads=1))
    export_shards(store, ExportOptions(workers=1))
    export_pickles(store, PicklesOptions(workers=1, order="shuffled"))
    made = lines(store)[before:]
    folders = {"shuffle": "shuffled", "export": "shards", "pickles-shuffled": "pickles/shuffled"}
    assert [line["stage"] for line in made] == list(folders)
    positions = Store.open(store).manifest.counts["positions"]
    for line in made:
        paths = [path for path in (store / folders[line["stage"]]).rglob("*.*") if path.suffix != ".md"]
        assert line["bytes"] == sum(path.stat().st_size for path in paths)
        assert line["positions"] == positions
        assert line["peak_bytes"] > 10_000_000  # Python with Arrow and DuckDB needs more
        assert line["seconds"] > 0
        assert line["version"] == __version__
        assert not line["resumed"]
        age = datetime.now(UTC) - datetime.fromisoformat(line["finished"])
        assert timedelta(0) <= age < timedelta(hours=1)


def test_a_line_counts_only_what_was_added(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    store, inputs = tmp_path / "store", demo_trmph(tmp_path / "games", games=12, files=2)
    sizes = []
    for path in inputs:
        convert_sources([path], store, ConvertOptions(workers=1))
        sizes.append(sum(facts.bytes for facts in Store.open(store).manifest.files.values()))
    first, second = lines(store)
    assert (first["bytes"], second["bytes"]) == (sizes[0], sizes[1] - sizes[0])
    assert first["positions"] + second["positions"] == Store.open(store).manifest.counts["positions"]


def test_a_stage_that_was_already_done_writes_no_line(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    for _ in range(2):
        shuffle_store(store, ShuffleOptions(threads=1))
        export_shards(store, ExportOptions(workers=1))
    assert [line["stage"] for line in lines(store)] == ["convert", "shuffle", "export"]


def test_a_stage_that_fails_writes_no_line(tmp_path: Path) -> None:
    def fail() -> None:
        with journaled(tmp_path, "shuffle") as watched:
            watched.finish(positions=1, bytes=1)
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail()
    with journaled(tmp_path, "shuffle"):
        pass  # ``finish`` was not called
    assert not (tmp_path / JOURNAL_NAME).exists()


def test_a_journal_that_cannot_be_written_is_a_warning(
    trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store, other = copy_store(trmph_store), copy_store(trmph_store, "other")
    (store / JOURNAL_NAME).unlink()
    (store / JOURNAL_NAME).mkdir()
    with pytest.warns(
        UserWarning, match="the stage is complete, but its line in the journal was not written"
    ):
        shuffle_store(store, ShuffleOptions(threads=1))
    shuffle_store(other, ShuffleOptions(threads=1))
    assert store_bytes(store) == store_bytes(other)
    assert read_journal(store) == []


def test_a_store_without_a_journal_has_no_runs(tmp_path: Path) -> None:
    assert read_journal(tmp_path) == []


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    damaged = [
        b"",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"stage": "shuffle"}',
        json.dumps({**LINE, "seconds": "long"}).encode(),
        json.dumps({**LINE, "positions": True}).encode(),
        json.dumps({**LINE, "positions": -1}).encode(),
        json.dumps({**LINE, "seconds": float("nan")}).encode(),
        json.dumps({**LINE, "positions": 10**400}).encode(),
        json.dumps({**LINE, "seconds": 10**400}).encode(),
        json.dumps({**LINE, "peak_bytes": -1}).encode(),
        json.dumps({**LINE, "more": 1}).encode(),
        json.dumps({**LINE, "stage": "x" * 10_000}).encode(),
        b"[" * 3000,
        json.dumps(LINE).encode()[:-5],
    ]
    path = tmp_path / JOURNAL_NAME
    path.parent.mkdir()
    whole = [json.dumps({**LINE, "positions": number}).encode() for number in range(len(damaged) + 1)]
    mixed = [line for pair in zip(whole, damaged, strict=False) for line in pair] + whole[-1:]
    path.write_bytes(b"\n".join(mixed))
    assert [entry.positions for entry in read_journal(tmp_path)] == list(range(len(whole)))


def test_only_the_end_of_a_huge_journal_is_read(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    path.parent.mkdir()
    line = json.dumps(LINE).encode() + b"\n"
    path.write_bytes(line + bytes(3 << 20) + b"\n" + line * 5)
    assert len(read_journal(tmp_path)) == 5


@given(st.binary(max_size=200))
def test_no_bytes_fail_a_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    store = tmp_path_factory.mktemp("journal")
    (store / JOURNAL_NAME).parent.mkdir()
    (store / JOURNAL_NAME).write_bytes(content + b"\n" + json.dumps(LINE).encode())
    assert read_journal(store)[-1].positions == 7
