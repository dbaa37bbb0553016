"""The logs of the stages: a line for each source, bucket and shard."""

from __future__ import annotations

import re
from pathlib import Path

from hexdata import Loader, PositionDataset, convert_sources, export_shards, shuffle_store
from hexdata.convert import ConvertOptions
from hexdata.export import ExportOptions
from hexdata.loader import Mixture
from hexdata.shuffle import ShuffleOptions
from tests.conftest import DemoTrmph


def entries(store: Path, stage: str) -> dict[str, int]:
    """Return the number of records or positions of each file in a log, by name."""
    lines = (store / "logs" / f"{stage}.log").read_text().splitlines()
    found = [
        re.fullmatch(r"\S+Z (\S+): ([\d,]+) (?:records|rows|positions)\b.* in \d+\.\d\d s.*", line)
        for line in lines
    ]
    return {match[1]: int(match[2].replace(",", "")) for match in found if match}


def test_each_stage_logs_its_files(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    paths = demo_trmph(tmp_path / "in", games=30, files=3)
    with paths[0].open("a") as file:
        file.write("#7,a1zz9 b\n")
    (tmp_path / "in" / "empty\nname.trmph").touch()
    store = tmp_path / "store"
    result = convert_sources([tmp_path / "in"], store, ConvertOptions(workers=1, max_reject_rate=0.5))
    found = entries(store, "convert")
    assert {f"in/{path.name}" for path in paths} <= found.keys()
    assert len((store / "logs" / "convert.log").read_text().splitlines()) == 4, "one line for each source"
    assert sum(found.values()) == result.positions + 1
    shuffle_store(store, ShuffleOptions(seed=9, buckets=2, threads=1))
    export_shards(store, ExportOptions(shard_size=64, block_size=16, workers=1))
    for stage, pattern in (("shuffle", "shuffled/**/*.parquet"), ("export", "shards/*.tar")):
        found = entries(store, stage)
        files = {path.relative_to(store).as_posix() for path in store.glob(pattern)}
        assert found.keys() == files
        assert sum(found.values()) == result.positions
        assert '"seed": 9' in (store / "logs" / f"{stage}.log").read_text()


def test_loaders_show_their_data(trmph_store: Path) -> None:
    loader = Loader(trmph_store, split="val", seed=7)
    shown = repr(loader)
    facts = [str(trmph_store), "'val'", f"{loader.positions:,}", "'games'", "seed=7"]
    assert all(fact in shown for fact in facts)
    assert shown in repr(Mixture([loader, loader], [1, 1]))
    assert str(trmph_store) in repr(PositionDataset(trmph_store))
