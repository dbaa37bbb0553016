"""Parquet parts: the same bytes for the same rows, and reading of any range of rows."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import StoreError
from hexdata.store import parquet
from hexdata.store.parquet import ParquetRows, open_parquet, read_parquet, read_rows, write_parquet

SCHEMA = pa.schema(
    [
        pa.field("n", pa.int64(), nullable=False),
        pa.field("winner", pa.dictionary(pa.int8(), pa.string())),
        pa.field("policy", pa.list_(pa.float32())),
        pa.field("extra", pa.string()),
    ]
)


@pytest.fixture(scope="module", autouse=True)
def small_row_groups():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 16)
        yield


def rows(start, stop):
    """Return rows ``start`` to ``stop`` - 1; the dictionary contains only the values that they use."""
    numbers = range(start, stop)
    winners = pa.array([(None, "RED", "BLUE")[n // 10 % 3] for n in numbers], pa.string())
    columns = [
        pa.array(numbers, pa.int64()),
        winners.dictionary_encode().cast(SCHEMA.field("winner").type),
        pa.array([[n / 2, 0.5] if n % 3 else None for n in numbers], pa.list_(pa.float32())),
        pa.array([None if n % 2 else "é" * (n % 5) for n in numbers]),
    ]
    return pa.table(columns, schema=SCHEMA)


def group_sizes(size):
    """Return the rows of the row groups of 60 rows, if their lists and texts have at most ``size`` bytes."""
    found, held = [0], 0
    for row in rows(0, 60).to_pylist():
        added = 8 * len(row["policy"] or []) + len((row["extra"] or "").encode()) + len(row["winner"] or "")
        if found[-1] and (found[-1] == 16 or held + added > size):
            found, held = [*found, 0], 0
        found[-1], held = found[-1] + 1, held + added
    return found


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 60), max_size=8).map(lambda inner: [0, *sorted(inner), 60]),
    st.sampled_from([10, 120, 10_000]),
)
def test_bytes_do_not_depend_on_the_batches(tmp_path_factory, bounds, size):
    folder = tmp_path_factory.mktemp("parts")
    cut = [rows(start, stop) for start, stop in pairwise(bounds)]
    sliced = [rows(0, 60).slice(start, stop - start) for start, stop in pairwise(bounds)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", size)
        whole = write_parquet(folder / "whole", SCHEMA, [rows(0, 60)])
        for pieces in (cut, sliced, [batch for table in cut for batch in table.to_batches()]):
            assert write_parquet(folder / "again", SCHEMA, pieces) == whole
    footer = pq.read_metadata(folder / "whole")
    found = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
    assert found == group_sizes(size)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Parts of 20, 0, 33 and 7 rows, together rows 0 to 59."""
    folder, found = tmp_path_factory.mktemp("parts"), []
    for start, stop in pairwise([0, 20, 20, 53, 60]):
        write_parquet(folder / f"{len(found)}", SCHEMA, [rows(start, stop)])
        found.append((folder / f"{len(found)}", stop - start))
    return tuple(found)


@pytest.mark.parametrize(("start", "stop"), [(0, 60), (5, 41), (21, 59), (30, 31)])
def test_any_range_is_read_in_batches_of_few_bytes(parts, monkeypatch, start, stop):
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 16)
    batches = list(read_rows(ParquetRows(parts, start, stop), SCHEMA))
    assert max(batch.num_rows for batch in batches) < 16
    assert pa.Table.from_batches(batches, SCHEMA).to_pylist() == rows(start, stop).to_pylist()


def test_a_whole_table_has_no_other_columns_and_rows(parts):
    (path, count), *_ = parts
    with open_parquet(path, SCHEMA, whole=count) as file:
        assert file.metadata.num_rows == count
    for schema, rows_of_table in ((SCHEMA, count + 1), (pa.schema(list(SCHEMA)[:3]), count)):
        with pytest.raises(StoreError, match=path.name), open_parquet(path, schema, whole=rows_of_table):
            pytest.fail("accepted")


def test_a_damaged_page_is_a_store_error_but_a_memory_error_is_not(tmp_path):
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


def test_two_threads_leave_the_allocator_of_arrow_as_it_was() -> None:
    before, first, second = pa.default_memory_pool().backend_name, ExitStack(), ExitStack()
    for stack in (first, second):
        stack.enter_context(parquet.memory_returned())
    for stack in (first, second):
        stack.close()
    assert pa.default_memory_pool().backend_name == before
