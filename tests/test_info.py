"""Facts of a store, and what ``hexdata info`` recommends. ``promises/test_advice`` kills the stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.info import StoreInfo, store_info
from hexdata.loader import Loader
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from tests.conftest import CopyStore
from tests.kit.command_line import hexdata_run

ALL = ConvertOptions(workers=1, val=0.0, test=0.0)
EXPORT = ExportOptions(workers=1, shard_size=1024, block_size=256)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with shards and one game of six positions."""
    folder = tmp_path_factory.mktemp("info")
    (folder / "games.trmph").write_text("#5,a1b2c3d4e5 b\n")
    convert_sources(folder / "games.trmph", folder / "store", ALL)
    shuffle_store(folder / "store", ShuffleOptions(seed=3, buckets=2, threads=1))
    export_shards(folder / "store", EXPORT)
    return folder / "store"


def states(facts: StoreInfo) -> dict[str, str]:
    return {stage.stage: stage.state for stage in facts.stages if stage.state != "not run"}


def commands(facts: StoreInfo) -> list[str]:
    return [line.replace(facts.store, "STORE") for _, line in facts.steps]


def test_a_converted_store(trmph_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = store_info(trmph_store)
    manifest = Store.open(trmph_store).manifest
    assert (facts.board_size, facts.counts["games"], facts.counts["rejected"]) == (7, 80, 1)
    assert (facts.counts["sources"], facts.counts["positions"]) == (3, manifest.counts["positions"])
    assert list(facts.splits) == ["train", "val", "test"]
    assert sum(facts.splits.values()) == 80
    assert (facts.bytes, facts.files) == (manifest.total_bytes, len(manifest.files))
    assert states(facts) == {"convert": "complete"}
    assert facts.stages[0].finished is not None
    assert commands(facts) == ['Loader("STORE")', "hexdata browse STORE", "hexdata shuffle STORE"]
    assert facts.input_order is not None
    assert facts.input_order.kind == "games"
    assert (facts.missing, facts.writer, facts.notes) == ([], None, [])
    monkeypatch.chdir(trmph_store)
    ran = hexdata_run("info")  # of this folder
    assert ran.status == 0
    shown = (
        "board size 7, 80 games",
        "from 3 source files, 1 rejected record",
        'Loader("',
        "game after game",
    )
    assert all(text in ran.out for text in shown)


def test_the_stages_of_an_exported_store(exported: Path) -> None:
    facts = store_info(exported)
    assert states(facts) == {"convert": "complete", "shuffle": "complete", "export": "complete"}
    shuffle, export = facts.stages[1:3]
    assert shuffle.positions == 6
    # One digest identifies an export, wherever it is named.
    again, shards = export_shards(exported, EXPORT), load_manifest(make_source(exported / "shards"))
    assert (
        export.digest
        == again.digest
        == shards.digest
        == Loader(exported, batch_size=2).state_dict()["digest"]
    )
    assert shuffle.bytes == sum(file.stat().st_size for file in exported.glob("shuffled/*/*"))
    assert commands(facts) == ['Loader("STORE")', "hexdata browse STORE", "hexdata verify STORE"]


def test_new_data_makes_later_stages_outdated(exported: Path, copy_store: CopyStore, tmp_path: Path) -> None:
    store = copy_store(exported)
    (tmp_path / "more.trmph").write_text("#5,e5d4c3 r\n")
    convert_sources(tmp_path / "more.trmph", store, ALL)
    facts = store_info(store)
    assert states(facts) == {"convert": "complete", "shuffle": "outdated", "export": "outdated"}
    assert commands(facts)[:2] == [
        "hexdata shuffle STORE --seed 3 --buckets 2",
        "hexdata export STORE --shard-size 1024 --block-size 256",
    ]
    for _, line in facts.steps[:2]:
        assert hexdata_run(*line.split()[1:]).status == 0
    assert set(states(store_info(store)).values()) == {"complete"}


@pytest.mark.parametrize(
    ("folder", "stage", "command"),
    [
        ("shards", "export", "hexdata export STORE --shard-size"),
        ("shuffled/train", "shuffle", "hexdata shuffle STORE --seed"),
        ("games", "convert", "hexdata convert INPUT... STORE-again"),
    ],
)
def test_damaged_files_come_first(
    exported: Path, copy_store: CopyStore, folder: str, stage: str, command: str
) -> None:
    store = copy_store(exported)
    files = sorted(path for path in (store / folder).iterdir() if path.suffix not in (".json", ".md"))
    content = files[0].read_bytes()
    # A changed byte in a table is found, too: the counts of the splits would be read from it.
    files[0].write_bytes(
        content[:100] + bytes([content[100] ^ 1]) + content[101:] if folder == "games" else b""
    )
    facts = store_info(store)
    assert facts.missing == [files[0].relative_to(store).as_posix()]
    assert states(facts)[stage] == "damaged"
    assert commands(facts)[0] == "hexdata verify STORE"
    assert commands(facts)[1].startswith(command)
    assert bool(facts.splits) == (folder != "games")
    assert files[0].name in hexdata_run("info", store).out


@pytest.mark.parametrize("loss", ["rejected", "sizes", "shares"])
def test_a_refused_first_convert_leaves_no_folder(tmp_path: Path, loss: str) -> None:
    (tmp_path / "a.trmph").write_text("#5,a1b2c3 b\n" + ("#5,a1zz b\n" if loss == "rejected" else ""))
    (tmp_path / "b.trmph").write_text("#7,a1b2c3 b\n" if loss == "sizes" else "#5,c3b2 r\n")
    options = ("--val", "2") if loss == "shares" else ("--val", "0")
    files = (tmp_path / "a.trmph", tmp_path / "b.trmph")
    assert hexdata_run("convert", *files, tmp_path / "store", *options).status
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.trmph", "b.trmph"]


def test_a_process_that_writes_is_named(trmph_store: Path, copy_store: CopyStore) -> None:
    store = Store.open(copy_store(trmph_store))
    with store.writing("shuffle"):
        facts = store_info(store.path)
    assert facts.writer is not None
    assert "(shuffle)" in facts.writer
    assert facts.notes[0].startswith(facts.writer)
