"""Summary of a store, and ``hexdata info``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import ConfigError, StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.info import StoreInfo, store_info
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from tests.cli.test_cli import hexdata_run
from tests.conftest import CopyStore


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with shards and one game."""
    folder = tmp_path_factory.mktemp("info")
    (folder / "games.trmph").write_text("#5,a1b2c3d4e5 b\n")
    convert_sources(folder / "games.trmph", folder / "store", ConvertOptions(workers=1, val=0.0, test=0.0))
    shuffle_store(folder / "store", ShuffleOptions(seed=3, buckets=2, threads=1))
    export_shards(folder / "store", ExportOptions(workers=1, shard_size=1024, block_size=256))
    return folder / "store"


def states(facts: StoreInfo) -> dict[str, str]:
    return {stage.stage: stage.state for stage in facts.stages if stage.state != "not run"}


def commands(facts: StoreInfo) -> list[str]:
    return [line.replace(facts.store, "STORE") for _, line in facts.steps]


def test_a_converted_store(trmph_store: Path) -> None:
    facts = store_info(trmph_store)
    manifest = Store.open(trmph_store).manifest
    assert (facts.board_size, facts.counts["games"], facts.counts["rejected"]) == (7, 80, 1)
    assert (facts.counts["sources"], facts.counts["positions"]) == (3, manifest.counts["positions"])
    assert list(facts.splits) == ["train", "val", "test"]
    assert sum(facts.splits.values()) == 80
    assert (facts.bytes, facts.files) == (manifest.total_bytes, len(manifest.files))
    assert states(facts) == {"convert": "complete"}
    assert facts.stages[0].finished is not None
    assert commands(facts) == ["hexdata browse STORE", "hexdata shuffle STORE", "hexdata load STORE"]
    assert (facts.missing, facts.writer, facts.notes) == ([], None, [])


def test_the_stages_of_an_exported_store(exported: Path) -> None:
    facts = store_info(exported)
    assert states(facts) == {"convert": "complete", "shuffle": "complete", "export": "complete"}
    shuffle = facts.stages[1]
    assert shuffle.positions == 6
    assert shuffle.bytes == sum(file.stat().st_size for file in exported.glob("shuffled/*/*"))
    assert commands(facts) == ["hexdata browse STORE", "hexdata verify STORE", "hexdata load STORE"]


def test_new_data_makes_later_stages_outdated(exported: Path, copy_store: CopyStore, tmp_path: Path) -> None:
    store = copy_store(exported)
    (tmp_path / "more.trmph").write_text("#5,e5d4c3 r\n")
    convert_sources(tmp_path / "more.trmph", store, ConvertOptions(workers=1, val=0.0, test=0.0))
    facts = store_info(store)
    assert states(facts) == {"convert": "complete", "shuffle": "outdated", "export": "outdated"}
    assert commands(facts)[:2] == [
        "hexdata shuffle STORE --seed 3 --buckets 2",
        "hexdata export STORE --shard-size 1024 --block-size 256 --layout blocks",
    ]
    assert "older than the positions" in facts.notes[0]
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
def test_missing_files_come_first(
    exported: Path, copy_store: CopyStore, folder: str, stage: str, command: str
) -> None:
    store = copy_store(exported)
    damaged = next(file for file in sorted((store / folder).iterdir()) if file.suffix not in (".json", ".md"))
    damaged.write_bytes(b"")
    facts = store_info(store)
    assert facts.missing == [damaged.relative_to(store).as_posix()]
    assert states(facts)[stage] == "damaged"
    assert commands(facts)[0] == "hexdata verify STORE"
    assert commands(facts)[1].startswith(command)
    assert bool(facts.splits) == (folder != "games")


def test_an_interrupted_stage_is_finished_first(trmph_store: Path, copy_store: CopyStore) -> None:
    store, options = copy_store(trmph_store), ShuffleOptions(seed=77, buckets=2, where="move > 3", threads=1)
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(store, options, Stop())
    facts = store_info(store)
    assert states(facts) == {"convert": "complete", "shuffle": "interrupted"}
    words = shlex.split(commands(facts)[0])
    assert words[:3] == ["hexdata", "shuffle", "STORE"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given == {"--seed": "77", "--buckets": "2", "--where": "move > 3", "--threads": "1"}
    with pytest.raises(ConfigError):
        shuffle_store(store, ShuffleOptions(where="no_such_column > 3"))
    assert commands(store_info(store)) == commands(facts)
    assert hexdata_run("shuffle", store, *words[3:]).status == 0
    assert states(store_info(store)) == {"convert": "complete", "shuffle": "complete"}


class Stop(Silent):
    """A user who presses Ctrl-C in the middle of a shuffle."""

    def advance(self, amount: int) -> None:
        if amount:
            raise KeyboardInterrupt


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


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a hexdata store"):
        store_info(tmp_path)


def test_the_command_prints_all_of_it(exported: Path) -> None:
    ran = hexdata_run("info", exported)
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[:3] == [
        str(exported),
        "board size 5, 1 game, 6 positions",
        "from 1 source file, 0 rejected records",
    ]
    assert any(line.startswith("export\tcomplete\t6\t") for line in lines)
    assert lines[-1].endswith(f"hexdata load {exported}")
    facts = hexdata_run("info", exported, "--json").facts
    assert facts == json.loads(json.dumps(facts))
    assert (facts["board_size"], facts["stages"][1]["state"]) == (5, "complete")


def test_the_command_lists_missing_files(exported: Path, copy_store: CopyStore) -> None:
    store = copy_store(exported)
    (store / "shards" / "train-000000.tar").unlink()
    ran = hexdata_run("info", store)
    assert ran.status == 0
    assert "recorded: shards/train-000000.tar\n" in ran.out
    assert "List all damaged files:\n" in ran.out


def test_a_changed_byte_in_the_games_is_damage(exported: Path, copy_store: CopyStore) -> None:
    """Its size is right, and the counts of the splits would be read from it."""
    store = copy_store(exported)
    damaged = next((store / "games").iterdir())
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    facts = store_info(store)
    assert facts.missing == [damaged.relative_to(store).as_posix()]
    assert states(facts)["convert"] == "damaged"
    assert facts.splits == {}
