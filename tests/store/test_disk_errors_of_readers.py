"""Errors of the disk that callers of the library receive from ``run_query``, ``read_game`` and ``Loader``."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hexdata.errors import StoreError
from hexdata.loader import Loader
from hexdata.show import read_game, read_position
from hexdata.sql import run_query


def query(store: Path) -> None:
    with run_query(store, "SELECT * FROM games") as result:
        list(result.batches)


def load(store: Path) -> None:
    list(Loader(store, mode="games", batch_size=64))


READERS: dict[str, Callable[[Path], Any]] = {
    "read_game": lambda store: read_game(store, 0),
    "read_position": lambda store: read_position(store, 0),
    "load": load,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_names_the_file_that_the_disk_fails_to_read(
    reader: str, trmph_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(trmph_store / "games/part-000000.parquet"))

    READERS[reader](trmph_store)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", fail)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    with pytest.raises(StoreError, match=r"games/part-000000\.parquet: the system cannot read") as caught:
        READERS[reader](trmph_store)
    assert caught.value.found == "Input/output error"
    assert "Check the disk" in caught.value.hint


def test_an_error_of_the_caller_passes_through_a_query(trmph_store: Path, tmp_path: Path) -> None:
    def write() -> None:
        with run_query(trmph_store, "SELECT * FROM games") as result:
            list(result.batches)
            raise OSError(errno.EIO, "of the caller", str(tmp_path))

    with pytest.raises(OSError, match="of the caller") as caught:
        write()
    assert type(caught.value) is OSError


def test_a_query_names_the_disk_that_fails(trmph_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query(trmph_store)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(trmph_store / "games"))

    monkeypatch.setattr("hexdata.sql.run.check_query", fail)
    with pytest.raises(StoreError, match="Check the disk"):
        query(trmph_store)
