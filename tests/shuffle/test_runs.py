"""Runs: each row is in a piece of its unit, and errors about damaged runs contain a hint."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hexdata.shuffle.runs import (
    MergedRunIndex,
    RunIndex,
    RunPiece,
    as_run,
    join_columns,
    read_pieces,
    run_schema,
    write_run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import StoreError
from tests.conftest import BOARD_SIZE, odd_positions

ROWS = 120
SCHEMA = run_schema(BOARD_SIZE)
UNITS = st.lists(st.lists(st.integers(0, 70_000), min_size=1, max_size=ROWS), min_size=1, max_size=4)


def run_rows(count: int) -> pa.Table:
    """Return the first odd positions as a query returns them: dictionaries as text, and a bucket."""
    rows = odd_positions(ROWS).slice(0, count)
    winner = rows.schema.get_field_index("winner")
    rows = rows.set_column(winner, "winner", rows.column("winner").cast(pa.string()))
    return as_run(rows.append_column("bucket", pa.array(np.arange(count), pa.uint32())), BOARD_SIZE)


@given(UNITS)
def test_pieces_hold_the_rows_of_their_unit_in_order(
    tmp_path_factory: pytest.TempPathFactory, units: list[list[int]]
) -> None:
    """Also with more units than a radix sort supports, and with runs without rows of a unit."""
    folder = tmp_path_factory.mktemp("runs")
    tables = [run_rows(len(unit)) for unit in units]
    paths = [folder / f"{number}.arrow" for number in range(len(units))]
    for path, rows, unit in zip(paths, tables, units, strict=True):
        assert write_run(path, rows, np.array(unit, np.uint32)) == path.stat().st_size
    runs = RunIndex.read(paths)
    for number in {*np.concatenate(units).tolist(), 70_001}:
        plain = [
            row
            for rows, unit in zip(tables, units, strict=True)
            for row, own in zip(rows.to_pylist(), unit, strict=True)
            if own == number
        ]
        pieces = runs.pieces(number)
        assert sum(piece.rows for piece in pieces) == len(plain)
        assert [row for batch in read_pieces(pieces, SCHEMA) for row in batch.to_pylist()] == plain
        assert all(piece.bytes >= 40 * piece.rows for piece in pieces)


@settings(max_examples=25)
@given(UNITS, st.integers(1, 400), st.integers(0, 70_000), st.integers(1, 70_000), st.integers(1, 70_000))
def test_a_merged_index_returns_the_pieces_of_the_runs(
    tmp_path_factory: pytest.TempPathFactory,
    units: list[list[int]],
    block_bytes: int,
    start: int,
    first: int,
    second: int,
) -> None:
    """Whatever it keeps in memory. The ranges of the pieces of a few units adjoin those of the next ones."""
    folder = tmp_path_factory.mktemp("runs")
    paths = [folder / f"{number}.arrow" for number in range(len(units))]
    for path, unit in zip(paths, units, strict=True):
        write_run(path, run_rows(len(unit)), np.array(unit, np.uint32))
    whole = RunIndex.read(paths)
    parts = [range(start), range(start, start + first), range(start + first, start + first + second)]
    with closing(MergedRunIndex(paths, folder / "spill", block_bytes=block_bytes)) as merged:
        found = [merged.only(part) for part in [*parts, parts[0], range(200_000)]]
    for part, index in zip(parts, found[:3], strict=True):
        for unit in {unit for own in units for unit in own if unit in part}:
            assert index.pieces(unit) == whole.pieces(unit)
    assert [unit for index in found[:3] for unit in index.table["unit"]] == [
        unit for unit in whole.table["unit"] if unit < parts[2].stop
    ]
    assert found[3].table.tolist() == found[0].table.tolist()
    assert found[4].table.tolist() == whole.table.tolist()
    assert not any((folder / "spill").glob("*"))
    spans: dict[Path, list[tuple[int, int]]] = {path: [] for path in paths}
    for index in found[:3]:
        for path, begin, stop in index.spans():
            spans[path].append((begin, stop))
    covered = [(path, own[0][0], own[-1][1]) for path, own in spans.items() if own]
    assert all(before[1] == after[0] for own in spans.values() for before, after in pairwise(own))
    assert covered == whole.only(range(parts[2].stop)).spans()


def test_joined_columns_are_the_concatenated_batches() -> None:
    rows = run_rows(ROWS)
    batches = rows.to_batches(max_chunksize=17)
    joined = join_columns(batches, SCHEMA)
    assert batches == []
    assert joined.equals(rows)
    assert all(column.num_chunks == 1 for column in joined.columns)


@pytest.mark.parametrize("damage", [b"", b"no run", bytes(2_000)])
def test_a_damaged_run_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "run.arrow"
    path.write_bytes(damage)
    with pytest.raises(StoreError, match=rf"{path}: .*missing or damaged.*Remove {tmp_path} and run"):
        RunIndex.read([path])
    path.unlink()
    with pytest.raises(StoreError, match="missing or damaged"):
        list(read_pieces([RunPiece(path, 1, 1, 0, 100, 0)], SCHEMA))


def test_a_run_damaged_after_its_index_was_read(tmp_path: Path) -> None:
    path = tmp_path / "run.arrow"
    write_run(path, run_rows(ROWS), np.arange(ROWS) // 60)
    content = bytearray(path.read_bytes())
    runs = RunIndex.read([path])
    content[1_000:-2_000] = bytes(len(content) - 3_000)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="missing or damaged"):
        list(read_pieces(runs.pieces(1), SCHEMA))


SHORT_OF_MEMORY = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from hexdata.shuffle.runs import RunIndex, read_pieces, run_schema

pa.set_memory_pool(pa.system_memory_pool())
runs = RunIndex.read([Path(sys.argv[1])])
size = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0]) + (32 << 20)
resource.setrlimit(resource.RLIMIT_AS, (size, size))
try:
    list(read_pieces(runs.pieces(0), run_schema(int(sys.argv[2]))))
except MemoryError:
    print("short")
"""


def test_a_lack_of_memory_is_not_reported_as_a_damaged_run(tmp_path: Path) -> None:
    """In a new process: the limit on the address space cannot be raised again, and a process that has grown
    may have enough free memory for the whole run.
    """
    path, count = tmp_path / "run.arrow", 60_000
    rows = pa.concat_tables([run_rows(ROWS)] * (count // ROWS)).combine_chunks()
    column = rows.schema.get_field_index("metadata")
    rows = rows.set_column(column, "metadata", pa.array(["x" * 2_000] * count))
    write_run(path, rows, np.zeros(count, np.uint8))
    command = [sys.executable, "-c", SHORT_OF_MEMORY, str(path), str(BOARD_SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "short\n"), done.stderr
