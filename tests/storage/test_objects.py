"""Publishing, conditional puts, reading and queries of objects, on a real S3 server with injected faults."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from hexdata.errors import StoreError
from hexdata.storage import ObjectStorage, as_path, storage_of
from hexdata.storage.errors import Changed, ObjectStoreError
from hexdata.storage.query_filesystem import QueryFileSystem
from hexdata.store.parquet import write_parquet
from hexdata.store.session import duckdb_session, read_parquet_sql
from tests.object_store import Fault


def upload(data, target, *, replace=True):
    with storage_of(target).publish(replace=replace) as file:
        file.write(data)


@pytest.mark.parametrize(
    "fault", [Fault("GET", "/a", status=503, count=4), Fault("GET", "/a", cut=500, count=2)]
)
def test_reading_outlasts_a_failing_server(bucket, object_store, fault):
    data = os.urandom(9 << 20)
    upload(data, bucket / "a")
    object_store.fail(fault)
    assert storage_of(bucket / "a").read_range(5, 5000) == data[5:5000]
    assert object_store.all_met()
    object_store.fail(fault)
    with storage_of(bucket / "a").open() as file:
        assert file.read() == data
    assert object_store.all_met()


@pytest.mark.parametrize(
    "fault",
    [Fault("PUT", status=500, count=3), Fault("PUT", status=503, lose=True), Fault("PUT", delay=0.5)],
    ids=["500 three times", "the answer is lost", "slow"],
)
def test_an_upload_outlasts_a_failing_server(bucket, object_store, fault):
    object_store.fail(fault)
    upload(b"123", bucket / "a")
    assert (bucket / "a").read_bytes() == b"123"


@pytest.mark.parametrize("size", [1, 17 << 20])
def test_an_upload_that_replaces_nothing(bucket, object_store, size):
    """Nor does it mistake for another's what it has put itself, though the answer was lost."""
    data = bytes(size)
    object_store.fail(Fault("POST" if size > 1 else "PUT", "/a", status=500, lose=True, skip=int(size > 1)))
    upload(data, bucket / "a", replace=False)
    assert object_store.all_met()
    upload(data, bucket / "a", replace=False)
    with pytest.raises(StoreError, match="the object differs from what was written"):
        upload(b"x" * size, bucket / "a", replace=False)
    assert (bucket / "a").read_bytes() == data
    listed = bucket.fs.call_s3("list_multipart_uploads", Bucket=bucket.path.strip("/"))
    assert not listed.get("Uploads")


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
def test_a_put_in_conflict_with_another_request_is_repeated(bucket, object_store, condition):
    tag = storage_of(bucket / "a").put(b"1", None) if condition == "If-Match" else None
    object_store.fail(Fault("PUT", header=condition, status=409, code="ConditionalRequestConflict", count=2))
    storage_of(bucket / "a").put(b"2", tag)
    assert object_store.all_met()
    assert (bucket / "a").read_bytes() == b"2"


@pytest.mark.parametrize("protocol", ["s3", "memory"])
def test_a_put_on_a_condition(bucket, protocol):
    """In stores other than S3, the tags are compared before the put."""
    path = bucket / "a" if protocol == "s3" else as_path(f"memory://{os.urandom(6).hex()}/a")
    first = storage_of(path).put(b"1", None)
    assert storage_of(path).read_tagged(9) == (b"1", first)
    second = storage_of(path).put(b"2", first)
    assert second != first
    for tag in (None, first):
        with pytest.raises(Changed):
            storage_of(path).put(b"3", tag)
    assert storage_of(path).read_tagged(9) == (b"2", second)


def test_an_object_that_is_missing_or_replaced(bucket):
    (bucket / "folder" / "a").write_bytes(bytes(9 << 20))
    for name in ("none", "folder"):
        assert storage_of(bucket / name).size() is None
        assert storage_of(bucket / name).version() is None
    missing = storage_of(bucket / "none")
    assert (missing.exists(), missing.files(), missing.names()) == (False, {}, [])
    missing.remove()
    missing.remove_tree()
    for read in (missing.open, lambda: missing.read_tagged(9), lambda: missing.read_range(0, 9)):
        with pytest.raises(FileNotFoundError, match=str(bucket / "none")):
            read()
    assert storage_of(bucket / "folder").files() == {"a": 9 << 20}
    path = bucket / "folder" / "a"
    assert storage_of(path).files() == {"": 9 << 20}
    with storage_of(path).open() as file:
        file.read(1)
        path.write_bytes(bytes([1]) * (9 << 20))
        with pytest.raises(ObjectStoreError, match=str(path)):  # an open object is of one version
            file.read()


# --- queries ------------------------------------------------------------------------------------------


def test_threads_that_share_a_handle_read_where_they_are(bucket):
    data = os.urandom(1 << 20)
    (bucket / "a").write_bytes(data)
    handle = QueryFileSystem(ObjectStorage(bucket)).open(str(bucket / "a"))
    together = threading.Barrier(4)

    def read(number):
        for step in range(20):
            handle.seek(number * 100_000 + step * 1_000)
            together.wait(300)
            yield handle.read(1_000)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: b"".join(read(number)), range(4)))
    handle.close()
    assert found == [data[start : start + 20_000] for start in range(0, 400_000, 100_000)]


@pytest.mark.parametrize("name", ["a", ".work/a"])
def test_another_version_of_an_object_is_not_read(bucket, name):
    path = bucket / name
    path.write_bytes(b"before")
    system = QueryFileSystem(ObjectStorage(bucket))
    handle = system.open(str(path))
    path.write_bytes(b"after!")
    with pytest.raises(OSError, match=str(path)):
        handle.read(6)
    assert isinstance(system.failure, OSError)


@pytest.mark.parametrize(("status", "kind"), [(403, ObjectStoreError), (404, StoreError)])
def test_what_fails_in_a_query_comes_out_as_it_was(bucket, object_store, status, kind):
    table, path = pa.table({"a": [1, 2, 3]}), bucket / "a.parquet"
    write_parquet(path, table.schema, [table])
    object_store.fail(Fault("GET", "a.parquet", status=status, count=99))
    with (
        pytest.raises(kind, match=r"a\.parquet"),
        duckdb_session(memory=64 << 20, threads=1, store=path) as con,
    ):
        con.sql(f"SELECT sum(a) FROM {read_parquet_sql([path])}").fetchall()
