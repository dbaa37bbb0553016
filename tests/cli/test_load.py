"""``hexdata load`` and ``hexdata demo``: their arguments, and what they print."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.loader import Loader
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.demo_games import demo_games
from tests.kit.command_line import hexdata_run
from tests.legacy_pickles import example, save_pickle, top_level

TIMES = r"{} mode, seed 0: opened in \d+\.\d{{3}} s, first batch \d+\.\d{{3}} s later"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported store of 40 games, and 7 positions without a game."""
    folder = tmp_path_factory.mktemp("load")
    write_trmph(folder / "a.trmph", demo_games(40, seed=1, board_size=5), 5)
    save_pickle(folder / "b.pkl.gz", top_level([example(0, ply, 10) for ply in range(3, 10)]))
    inputs = [folder / "a.trmph", folder / "b.pkl.gz"]
    convert_sources(inputs, folder / "store", ConvertOptions(workers=1, val=0, test=0))
    shuffle_store(folder / "store", ShuffleOptions(threads=1))
    export_shards(folder / "store", ExportOptions(workers=1))
    return folder / "store"


def test_the_argument_is_a_store_its_shards_or_a_command(store: Path) -> None:
    """Like the first argument of ``Loader``. The default mode depends on it."""
    positions = Loader(store).positions
    for mode, location, *options in (
        ("exact", store),
        ("exact", store / "shards"),
        ("stream", f"pipe:cat {store}/shards/{{name}}", "--cache", store.parent / "cache"),
        ("games", store, "--mode", "games"),
        ("stream", store, "--mode", "stream", "--no-cache"),
    ):
        facts = hexdata_run("load", location, *options, "--batch-size", 64, "--json").facts
        assert (facts["mode"], facts["seed"], facts["positions"]) == (mode, 0, positions)
        assert facts["seconds_to_open"] > 0
        assert 0 < facts["seconds_to_first_batch"] < facts["epochs"][0]["seconds"]


def test_the_output_describes_the_epoch(store: Path) -> None:
    loader = Loader(store, batch_size=64)
    batches = len(list(loader))
    out = hexdata_run("load", store, "--batch-size", 64).out
    for part in (f"\t{batches:,}\t{loader.positions:,}\t", str(loader.epoch_digest), "board float32"):
        assert part in out
    assert re.search(TIMES.format("exact"), out)
    out = hexdata_run("load", store, "--mode", "games").out
    assert f"{loader.positions - 7:,} positions of 40 games, and 7 packed positions\n" in out
    assert re.search(TIMES.format("games"), out)
    out = hexdata_run("load", store, "--weights", "2").out
    assert f"{2 * loader.positions:,} positions delivered, {loader.positions:,} of them different" in out
    fields = hexdata_run("load", store, "--fields", "move, policy_mask", "--json").facts["fields"]
    assert list(fields) == ["move", "policy_mask", "value", "position_id"]


def test_the_demo_prints_lines_that_train_from_its_games(tmp_path: Path) -> None:
    out = hexdata_run("demo", tmp_path / "demo", "--games", 8).out
    lines = out[out.index("To train") :].splitlines()[1:]
    names: dict[str, Any] = {}
    exec(textwrap.dedent("\n".join(lines)), names)
    assert (names["loader"].options.mode, names["loader"].epoch) == ("games", 1)
    assert len(names["board"]) == len(names["policy"]) == len(names["value"]) > 0
