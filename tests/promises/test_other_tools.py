"""Other programs read a store of several formats, table by table, without options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.formats.trmph import write_trmph
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.demo_games import demo_games
from tests.legacy_pickles import example, save_pickle

Found = tuple[list[str], int]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of texts and pickles from three runs. Each of the last two adds a column of positions."""
    folder = tmp_path_factory.mktemp("tools")
    write_trmph(folder / "a.trmph", demo_games(5, seed=1, board_size=5), 5)
    with (folder / "a.trmph").open("a") as file:
        file.write("#5,a1zz9 b\n")
    for name, numbers in (("b", {"visits": 7}), ("c", {"komi": 0.5})):
        examples = [example(1, ply) | numbers for ply in range(4)]
        save_pickle(folder / f"{name}.pkl.gz", {"examples": examples})
    options = ConvertOptions(max_reject_rate=0.5, value_convention="blue-is-0")
    for name in ("a.trmph", "b.pkl.gz", "c.pkl.gz"):
        convert_sources(folder / name, folder / "store", options)
    shuffle_store(folder / "store", ShuffleOptions(seed=1, buckets=2))
    return folder / "store"


def with_datasets(paths: list[str]) -> Found:
    datasets: Any = pytest.importorskip("datasets")
    cache = str(Path(paths[0]).parents[1].parent / "cache")
    found = datasets.load_dataset("parquet", data_files=paths, split="train", cache_dir=cache)
    return found.column_names, found.num_rows


def with_duckdb(paths: list[str]) -> Found:
    found = duckdb.sql(f"FROM read_parquet({paths})")
    return found.columns, len(found.fetchall())


def with_pandas(paths: list[str]) -> Found:
    found: Any = pytest.importorskip("pandas").read_parquet(paths)
    return list(found.columns), len(found)


def with_polars(paths: list[str]) -> Found:
    found: Any = pytest.importorskip("polars").read_parquet(paths)
    return found.columns, found.height


def with_pyarrow(paths: list[str]) -> Found:
    found = pq.read_table(paths)
    return found.column_names, found.num_rows


@pytest.mark.parametrize("read", [with_datasets, with_duckdb, with_pandas, with_polars, with_pyarrow])
def test_a_program_reads_every_table(store: Path, read: Callable[[list[str]], Found]) -> None:
    positions = sum(len(game.moves) + 1 for game in demo_games(5, seed=1, board_size=5)) + 2 * 4
    rows = {"positions": positions, "shuffled": positions, "games": 7, "sources": 3, "rejected": 1}
    for table, count in rows.items():
        paths = sorted(map(str, (store / table).rglob("*.parquet")))
        assert len(paths) > 1 or table == "rejected"
        columns, found = read(paths)
        assert (columns, found) == (pq.read_schema(paths[0]).names, count), table
        assert table not in ("positions", "shuffled") or {"visits", "extra.komi"} <= {*columns}
