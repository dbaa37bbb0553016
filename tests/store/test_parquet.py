"""Parquet parts: the same bytes for the same rows, and reading of any range of rows."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import StoreError
from hexdata.store import parquet
from hexdata.store.parquet import ParquetRows, open_parquet, read_parquet, read_rows, regroup, write_parquet

SCHEMA = pa.schema(
    [
        pa.field("n", pa.int64(), nullable=False),
        pa.field("winner", pa.dictionary(pa.int8(), pa.string())),
        pa.field("policy", pa.list_(pa.float32())),
        pa.field("extra", pa.string()),
    ]
)


@pytest.fixture(scope="module", autouse=True)
def small_row_groups() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 16)
        yield


def rows(start: int, stop: int) -> pa.Table:
    """Return rows ``start`` to ``stop`` - 1; the dictionary contains only the values that they use."""
    numbers = range(start, stop)
    winners = [(None, "RED", "BLUE")[n // 10 % 3] for n in numbers]
    return pa.table(
        [
            pa.array(numbers, pa.int64()),
            pa.array(winners, pa.string()).dictionary_encode().cast(SCHEMA.field("winner").type),
            pa.array([[n / 2, 0.5] if n % 3 else None for n in numbers], pa.list_(pa.float32())),
            pa.array([None if n % 2 else "é" * (n % 5) for n in numbers]),
        ],
        schema=SCHEMA,
    )


def cut(bounds: list[int]) -> list[pa.Table]:
    return [rows(start, stop) for start, stop in pairwise(bounds)]


@given(st.lists(st.integers(0, 60), max_size=8).map(lambda inner: [0, *sorted(inner), 60]))
def test_bytes_do_not_depend_on_the_batches(
    tmp_path_factory: pytest.TempPathFactory, bounds: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    whole = write_parquet(folder / "whole.parquet", SCHEMA, [rows(0, 60)])
    sliced = [rows(0, 60).slice(start, stop - start) for start, stop in pairwise(bounds)]
    batches = [batch for table in cut(bounds) for batch in table.to_batches()]
    for name, pieces in (("cut", cut(bounds)), ("sliced", sliced), ("batches", batches)):
        assert write_parquet(folder / name, SCHEMA, pieces) == whole
    with pq.ParquetFile(folder / "cut") as file:
        groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert groups == [16, 16, 16, 12]


def test_a_part_has_its_schema_and_its_rows(tmp_path: Path) -> None:
    facts = write_parquet(tmp_path / "part", SCHEMA, cut([0, 7, 40]))
    with pq.ParquetFile(tmp_path / "part") as file:
        assert file.schema_arrow.equals(SCHEMA)
        assert file.metadata.num_rows == facts.rows == 40
        assert file.read().to_pylist() == rows(0, 40).to_pylist()


def test_a_part_without_rows_can_be_read(tmp_path: Path) -> None:
    assert write_parquet(tmp_path / "part", SCHEMA, []).rows == 0
    assert write_parquet(tmp_path / "part", SCHEMA, [SCHEMA.empty_table()]).rows == 0
    assert list(read_rows(ParquetRows(((tmp_path / "part", 0),), 0, 0), SCHEMA)) == []


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40))
def test_regroup_cuts_into_equal_tables(sizes: list[int], size: int) -> None:
    bounds = [0]
    for step in sizes:
        bounds.append(bounds[-1] + step)
    tables = list(regroup(cut(bounds), SCHEMA, size))
    assert all(table.num_rows == size for table in tables[:-1])
    assert not tables or 0 < tables[-1].num_rows <= size
    joined = pa.concat_tables([SCHEMA.empty_table(), *tables])
    assert joined.to_pylist() == rows(0, bounds[-1]).to_pylist()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Path, int], ...]:
    """Write parts of 20, 0, 33 and 7 rows, together rows 0 to 59."""
    folder = tmp_path_factory.mktemp("parts")
    bounds = [0, 20, 20, 53, 60]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        write_parquet(folder / f"part-{number}", SCHEMA, [rows(start, stop)])
    return tuple((folder / f"part-{i}", stop - start) for i, (start, stop) in enumerate(pairwise(bounds)))


@given(st.integers(0, 60), st.integers(0, 60))
def test_any_range_is_read_back(parts: tuple[tuple[Path, int], ...], start: int, stop: int) -> None:
    batches = list(read_rows(ParquetRows(parts, start, stop), SCHEMA))
    assert pa.Table.from_batches(batches, SCHEMA).to_pylist() == rows(start, max(start, stop)).to_pylist()


@given(st.integers(0, 70), st.integers(0, 70))
def test_a_range_keeps_only_its_files(parts: tuple[tuple[Path, int], ...], start: int, stop: int) -> None:
    ranged = ParquetRows.over(parts, start, stop)
    batches = list(read_rows(ranged, SCHEMA))
    expected = rows(min(start, 60), max(min(start, 60), min(stop, 60)))
    assert pa.Table.from_batches(batches, SCHEMA).to_pylist() == expected.to_pylist()
    touched = {parts.index(file) for file in ranged.files if file[1]}
    bounds = ((0, 0, 20), (2, 20, 53), (3, 53, 60))
    assert touched <= {
        number for number, first, end in bounds if start < end and (first < stop or first <= start)
    }


def test_row_groups_outside_the_range_are_not_read(
    parts: tuple[tuple[Path, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = pq.ParquetFile.iter_batches

    def record(self: pq.ParquetFile, rows: int, *, row_groups: list[int], **kwargs: object) -> object:
        read.extend(row_groups)
        return original(self, rows, row_groups=row_groups, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", record)
    list(read_rows(ParquetRows(parts, 40, 52), SCHEMA))  # rows 20 … 31 of the third part
    assert read == [1]


def test_a_damaged_page_is_a_store_error_but_a_memory_error_is_not(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write_parquet(path, SCHEMA, [rows(0, 60)])
    data = bytearray(path.read_bytes())
    data[4:64] = b"\xff" * 60  # the header of the first page
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"part\.parquet: a file of the store is missing or damaged"):
        read_parquet(path, SCHEMA.names)
    with pytest.raises(MemoryError), open_parquet(path):
        raise pa.ArrowMemoryError("malloc of size 64 failed")
    with pytest.raises(OSError, match="No space left") as full, open_parquet(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.errno == errno.ENOSPC
