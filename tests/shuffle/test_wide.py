"""Stores with wide rows in some files: their width is measured, and fewer of them are loaded at a time."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hexdata.shuffle.layout import Slice, make_limits, row_bytes, scatter_cost
from hexdata.shuffle.prepare import Prepared, prepare
from hexdata.shuffle.runs import RunIndex, read_pieces, run_schema
from hexdata.shuffle.tasks import ShuffleTasks, TaskReport

from hexdata.retry import RetryPolicy
from hexdata.schema import positions_schema
from hexdata.shuffle import ShuffleOptions, layout, shuffle_store, tasks
from hexdata.store import Store
from hexdata.store.parquet import write_parquet
from hexdata.verify import verify_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore, StoreBytes

WIDE_ROWS = 300
TEXT = '{"comment": "' + "ä" * 2_000 + '"}'
"""Equal in all rows, so that a file stores it once."""


@pytest.fixture
def wide_store(odd_store: Path, copy_store: CopyStore) -> Path:
    """A store with three files of positions; each row of the first has a long text."""
    path = copy_store(odd_store, "wide")
    store, name = Store.open(path), "positions/part-000000.parquet"
    rows = pq.read_table(path / name)
    assert rows.num_rows == WIDE_ROWS
    column = rows.schema.get_field_index("metadata")
    rows = rows.set_column(column, rows.schema.field(column), pa.array([TEXT] * WIDE_ROWS))
    store.manifest.files[name] = write_parquet(path / name, positions_schema(5), [rows])
    assert (path / name).stat().st_size < WIDE_ROWS * len(TEXT) / 10
    store.manifest.save(path)
    return path


def prepared(store: Path, folder: Path, **options: str) -> Prepared:
    return prepare(Store.open(store), ShuffleOptions(threads=1, **options), folder, None)


def widths(store: Path) -> list[int]:
    """Return the bytes of the policy and text of each row."""
    rows = [row for path in Store.open(store).files("positions") for row in pq.read_table(path).to_pylist()]
    return [6 * len(row["policy"] or ()) + len((row["metadata"] or "").encode()) for row in rows]


def test_limits_depend_on_the_memory_of_the_rows(wide_store: Path, tmp_path: Path) -> None:
    wide, options = widths(wide_store), ShuffleOptions(threads=1)
    parts = [wide[i : i + WIDE_ROWS] for i in range(0, len(wide), WIDE_ROWS)]
    mean, widest = (row_bytes(5, sum(part) / len(part)) for part in (wide, max(parts, key=sum)))
    limits = prepared(wide_store, tmp_path).limits
    # The widest policies and the widest texts may be in different files, so the limits may be lower.
    assert make_limits(options, 900, mean, widest + 25).duckdb_memory >= limits.duckdb_memory
    assert limits.duckdb_memory >= make_limits(options, 900, mean, widest).duckdb_memory
    assert make_limits(options, 900, mean + 1, widest).sort_rows <= limits.sort_rows
    assert limits.sort_rows <= make_limits(options, 900, mean - 1, widest).sort_rows


def test_footers_give_the_games_of_each_file(trmph_store: Path, tmp_path: Path) -> None:
    """Also if the name of the store contains characters that are special in patterns."""
    store = shutil.copytree(trmph_store, tmp_path / "store[1]*")
    made, paths = prepared(store, tmp_path), Store.open(store).files("positions")
    games = [{*pq.read_table(path)["game_id"].to_pylist()} for path in paths]
    assert made.placement.game_ranges == tuple(range(min(ids), max(ids) + 1) for ids in games)
    assert len({*made.placement.game_ranges}) == len(paths) > 1


def test_a_selection_of_wide_rows_lowers_the_limits(wide_store: Path, tmp_path: Path) -> None:
    everything = prepared(wide_store, tmp_path).limits
    chosen = prepared(wide_store, tmp_path, where="length(metadata) > 1000").limits
    others = prepared(wide_store, tmp_path, where="policy IS NULL").limits
    assert chosen.sort_rows < everything.sort_rows / 2
    assert others.sort_rows <= everything.sort_rows


def test_runs_contain_fewer_wide_rows(
    wide_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "BATCH_ROWS", 10)
    made = prepared(wide_store, tmp_path)
    limits = replace(made.limits, chunk_bytes=scatter_cost(50, 50 * len(TEXT.encode())))
    scattering = ShuffleTasks(
        store=wide_store,
        folder=tmp_path,
        spill=None,
        key=made.selection.key,
        board_size=5,
        targets=(),
        layout=made.layout,
        limits=limits,
        retry=RetryPolicy(),
    )
    sizes = scattering.scatter(Slice(0, 0, 900), made.placement.slice_sql(0, 900), TaskReport())
    runs = [
        pa.Table.from_batches(
            batch
            for unit in range(made.layout.units)
            for batch in read_pieces(RunIndex.read([path]).pieces(unit), run_schema(5))
        )
        for path in sorted(tmp_path.glob("run-*"))
    ]
    assert len(runs) == len(sizes)
    assert sorted(i for run in runs for i in run["position_id"].to_pylist()) == list(range(900))
    assert all(limits.may_scatter(run.num_rows, run.nbytes) for run in runs)
    wide = [run.num_rows for run in runs if run["metadata"].to_pylist().count(TEXT) > run.num_rows / 2]
    assert sum(wide) > WIDE_ROWS * 0.8
    assert max(wide) <= 60
    assert max(run.num_rows for run in runs) > 400


@pytest.mark.parametrize("max_rows", [40, 900])
def test_wide_rows_are_shuffled_to_the_same_bytes(
    wide_store: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    monkeypatch: pytest.MonkeyPatch,
    max_rows: int,
) -> None:
    other = copy_store(wide_store, "other")
    shuffle_store(other, ShuffleOptions(buckets=3, memory=2 * 10**9))
    monkeypatch.setattr(layout, "MAX_ROWS", max_rows)
    shuffle_store(wide_store, ShuffleOptions(buckets=3, threads=2, memory=4 * 10**9))
    assert store_bytes(wide_store) == store_bytes(other)
    verify_store(wide_store).require()
