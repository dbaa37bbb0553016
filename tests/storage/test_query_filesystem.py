"""The file system of queries: shared handles, the number of requests, and objects that change."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from hexdata.errors import StoreError
from hexdata.storage.query_filesystem import QueryFileSystem
from hexdata.store.parquet import write_parquet
from hexdata.store.session import duckdb_session, read_parquet_sql
from tests.conftest import needs_conditions
from tests.object_store import Fault

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore


def methods(object_store: ObjectStore, bucket: UPath) -> list[str]:
    """Return how this bucket was asked since the last call; what other tests left at work asks others."""
    asked = f"/{bucket.path.strip('/')}"
    return [method for method, path in object_store.requests() if path.startswith(asked)]


def test_threads_that_share_a_handle_read_where_they_are(bucket: UPath) -> None:
    data = os.urandom(1 << 20)
    (bucket / "a").write_bytes(data)
    handle = QueryFileSystem(bucket.fs, "s3").open(str(bucket / "a"))
    together = threading.Barrier(4)

    def read(number: int) -> list[bytes]:
        found = []
        for step in range(20):
            handle.seek(number * 100_000 + step * 1_000)
            together.wait(300)
            found.append(handle.read(1_000))
        return found

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, range(4)))
    handle.close()
    for number, pieces in enumerate(found):
        start = number * 100_000
        assert b"".join(pieces) == data[start : start + 20_000]


def test_objects_of_a_folder_are_asked_for_together(bucket: UPath, object_store: ObjectStore) -> None:
    for number in range(5):
        (bucket / "folder" / str(number)).write_bytes(bytes(number))
    object_store.requests()
    system = QueryFileSystem(bucket.fs, "s3")
    for number in range(5):
        path = str(bucket / "folder" / str(number))
        assert system.exists(path)
        assert system.glob(path) == [path.removeprefix("s3://")]
        assert system.info(path)["size"] == system.size(path) == number
        assert system.modified(path) is not None
    assert methods(object_store, bucket) == ["GET"]
    assert not system.exists(str(bucket / "folder" / "none"))
    assert system.glob(str(bucket / "folder" / "[34]")) == [f"{bucket.path}folder/{n}" for n in (3, 4)]


@needs_conditions
@pytest.mark.parametrize("name", ["a", ".work/a"])
def test_another_version_of_an_object_is_not_read(bucket: UPath, name: str) -> None:
    path = bucket / name
    path.write_bytes(b"before")
    system = QueryFileSystem(bucket.fs, "s3")
    handle = system.open(str(path))
    path.write_bytes(b"after!")
    with pytest.raises(OSError, match=str(path)):
        handle.read(6)
    assert isinstance(system.failure, OSError)


def test_an_object_of_unfinished_work_is_asked_for_once(bucket: UPath, object_store: ObjectStore) -> None:
    """Objects that are written later are found too."""
    system = QueryFileSystem(bucket.fs, "s3")
    for name in "ab":
        path = bucket / ".work" / name
        assert not system.exists(str(path))
        path.write_bytes(name.encode())
        object_store.requests()
        for _ in range(3):  # as DuckDB opens it
            assert system.exists(str(path))
            assert system.size(str(path)) == 1
            assert system.modified(str(path)) is not None
            handle = system.open(str(path))
            assert handle.read() == name.encode()
            handle.close()
        assert methods(object_store, bucket) == ["HEAD", "GET"]


def test_the_end_of_an_object_is_read_once(bucket: UPath, object_store: ObjectStore) -> None:
    """Ends of up to 1 MiB are kept, 2 MiB in all, so those of the last two objects."""
    data = os.urandom(1 << 20)
    for number in range(3):
        (bucket / str(number)).write_bytes(b"x" + data[number:])
    system = QueryFileSystem(bucket.fs, "s3")
    system.info(str(bucket / "0"))
    object_store.requests()

    def read_end(number: int) -> list[str]:
        handle = system.open(str(bucket / str(number)))
        handle.seek(1)
        assert handle.read(len(data)) == data[number:]
        size = 1 + len(data) - number
        assert handle.tell() == size
        assert handle.read(1) == b""
        for start, count in ((size - 8, 8), (size - 100, 200), (size - 10, -1)):
            handle.seek(start)
            assert handle.read(count) == data[start - size :]
            assert handle.tell() == size
        handle.close()
        return methods(object_store, bucket)

    assert [read_end(number) for number in (0, 0, 1, 0, 2, 0)] == [["GET"], [], ["GET"], [], ["GET"], []]
    assert read_end(1) == ["GET"]  # it was removed for 2
    handle = system.open(str(bucket / "0"))
    assert handle.read(5) == b"x" + data[:4]
    assert handle.read(1 << 21) == data[4:]
    handle.close()


@pytest.mark.parametrize("rows", [1 << 16, 1 << 19])
def test_queries_in_one_session_read_a_footer_once(
    bucket: UPath, object_store: ObjectStore, rows: int
) -> None:
    """DuckDB reads a small file whole, and of a larger one first the end."""
    table = pa.table({"a": range(rows), "b": [os.urandom(8) for _ in range(rows)]})
    path = bucket / "a.parquet"
    write_parquet(path, table.schema, [table])
    object_store.requests()
    with duckdb_session(memory=64 << 20, threads=1, store=path) as con:
        for _ in range(4):
            assert con.sql(f"SELECT count(*) FROM {read_parquet_sql([path])}").fetchall() == [(rows,)]
    assert methods(object_store, bucket) == ["GET", "GET"]  # the folder and the end


def test_objects_are_found_by_the_name_that_queries_use(bucket: UPath) -> None:
    """Of several that the library knows; DuckDB writes found paths with the protocol of the file system."""
    write_parquet(bucket / "a.parquet", pa.schema({"a": pa.int64()}), [pa.table({"a": [1, 2]})])
    for protocol in bucket.fs.protocol:
        path = type(bucket)(str(bucket / "a.parquet").replace("s3://", f"{protocol}://"))
        with duckdb_session(memory=64 << 20, threads=1, store=path) as con:
            (found,) = con.sql(
                f"SELECT DISTINCT filename FROM {read_parquet_sql([path], row_location=True)}"
            ).fetchall()
        assert found == (str(path),)


def test_objects_are_only_read(bucket: UPath) -> None:
    with pytest.raises(NotImplementedError):
        QueryFileSystem(bucket.fs, "s3").open(str(bucket / "a"), "wb")


def test_queries_in_threads_find_what_they_find_in_a_file(bucket: UPath, tmp_path: Path) -> None:
    rows = 65_536 * 4
    table = pa.table({"a": pa.array(range(rows), pa.int64()), "b": [f"{i:x}" for i in range(rows)]})
    for path in (tmp_path / "a.parquet", bucket / "a.parquet"):
        write_parquet(path, table.schema, [table])
    found = []
    for path in (tmp_path / "a.parquet", bucket / "a.parquet"):
        source = read_parquet_sql([path])
        with duckdb_session(memory=400 << 20, threads=4, store=path) as con:
            found.append(
                con.sql(f"""
                    SELECT count(*), sum(x.a), max(y.b), bit_xor(hash(x.a, y.b))
                    FROM {source} x JOIN {source} y USING (a)
                """).fetchall()
            )
    assert found[0] == found[1]
    assert found[0][0][:2] == (rows, rows * (rows - 1) // 2)


@pytest.mark.parametrize(("status", "kind"), [(403, PermissionError), (404, StoreError)])
def test_what_fails_in_a_query_comes_out_as_it_was(
    bucket: UPath, object_store: ObjectStore, status: int, kind: type[Exception]
) -> None:
    table = pa.table({"a": [1, 2, 3]})
    write_parquet(bucket / "a.parquet", table.schema, [table])
    object_store.fail(Fault("GET", "a.parquet", status=status, count=99))
    with (
        pytest.raises(kind, match=r"a\.parquet"),
        duckdb_session(memory=64 << 20, threads=1, store=bucket) as con,
    ):
        con.sql(f"SELECT sum(a) FROM {read_parquet_sql([bucket / 'a.parquet'])}").fetchall()
