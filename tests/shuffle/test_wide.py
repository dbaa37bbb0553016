"""A store with wide rows in some files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.schema import positions_schema
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.shuffle.options import MINIMUM_MEMORY
from hexdata.store import Store
from hexdata.store.parquet import write_parquet
from hexdata.verify import verify_store
from tests.shuffle.shuffle_script import sort_in_passes

if TYPE_CHECKING:
    from tests.conftest import CopyStore, StoreBytes

TEXT = '{"comment": "' + "ä" * 2_000 + '"}'
"""Equal in all rows, so that a file stores it once."""


def test_wide_rows_are_shuffled_to_the_same_bytes(
    odd_store: Path, copy_store: CopyStore, store_bytes: StoreBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of the first of three files has a long text."""
    path = copy_store(odd_store, "wide")
    store, name = Store.open(path), "positions/part-000000.parquet"
    rows = pq.read_table(path / name)
    column = rows.schema.get_field_index("metadata")
    rows = rows.set_column(column, rows.schema.field(column), pa.array([TEXT] * rows.num_rows))
    store.manifest.files[name] = write_parquet(path / name, positions_schema(5), [rows])
    assert (path / name).stat().st_size < rows.num_rows * len(TEXT) / 10
    store.manifest.save(path)
    other = copy_store(path, "other")
    shuffle_store(other, ShuffleOptions(buckets=3, memory=2 * 10**9))
    sort_in_passes(monkeypatch, 2)
    shuffle_store(path, ShuffleOptions(buckets=3, threads=1, memory=MINIMUM_MEMORY))
    assert store_bytes(path) == store_bytes(other)
    verify_store(path).require()
