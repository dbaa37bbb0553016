"""Errors of a disk on reading: Arrow, DuckDB and Python name the file in different ways, hexdata in one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import duckdb
import pytest

from hexdata.errors import StoreError
from hexdata.shards.manifest import ShardManifest
from hexdata.storage import add_path_to_error, error_number, open_file
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.session import duckdb_session

ARROW = "Failed to read message body, error IOError: Error reading bytes from file. Detail: [errno 5] Failed"
DUCKDB = 'Could not read from file "store/games/part-000000.parquet": '


def test_an_error_on_reading_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    path.write_bytes(b"content")
    file = open_file(path)
    other = os.open(tmp_path, os.O_RDONLY)
    os.dup2(other, file.fileno())  # a folder cannot be read
    os.close(other)
    with file, pytest.raises(OSError, match="part") as caught:
        file.read()
    assert caught.value.filename == str(path)


def test_the_number_in_a_text_of_arrow_is_found() -> None:
    """Arrow gives no ``errno`` if a record batch cannot be read."""
    assert error_number(OSError(ARROW)) == errno.EIO
    assert error_number(OSError("Couldn't deserialize thrift")) is None
    with pytest.raises(OSError, match="games") as caught, add_path_to_error("games.arrow"):
        raise OSError(ARROW)
    assert caught.value.errno == errno.EIO
    with pytest.raises(StoreError, match="Check the disk"), translate_disk_full(Path("store")):
        raise caught.value


@pytest.mark.parametrize("code", [errno.EINTR, errno.EIO])
def test_the_file_in_a_text_of_duckdb_is_found(code: int) -> None:
    with (
        pytest.raises(StoreError, match="Check the disk") as caught,
        translate_disk_full(Path("store")),
        duckdb_session(memory=64 << 20, threads=1),
    ):
        raise duckdb.IOException(DUCKDB + os.strerror(code))
    assert caught.value.path == "store/games/part-000000.parquet"
    assert str(caught.value.found) == os.strerror(code)


def test_a_shard_manifest_that_cannot_be_read_has_a_hint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(StoreError, match="Check the disk") as caught:
        ShardManifest.load(tmp_path)
    assert caught.value.path == str(tmp_path / "manifest.json")
