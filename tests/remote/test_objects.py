"""Objects: put whole, put on a condition, read with their tag; a real S3 server that fails on request."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.remote import Changed, abort_uploads, put_if, read_tagged, upload
from tests.object_store import Fault

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    return path


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def test_what_was_uploaded_is_there(bucket: UPath, file: Path) -> None:
    upload(file, bucket / "a" / "b", md5=md5(file))
    assert (bucket / "a" / "b").read_bytes() == file.read_bytes()


def test_an_upload_is_held_against_its_bytes(bucket: UPath, file: Path, object_store: ObjectStore) -> None:
    """With the MD5 at hand nothing is read back; without it the object is."""
    upload(file, bucket / "a", md5=md5(file))
    assert [method for method, _ in object_store.requests()].count("GET") == 0
    upload(file, bucket / "b")
    assert "GET" in [method for method, _ in object_store.requests()]


@pytest.mark.parametrize(
    "fault",
    [Fault("PUT", status=500, count=3), Fault("PUT", status=503, lose=True), Fault("PUT", delay=0.5)],
    ids=["500 three times", "the answer is lost", "slow"],
)
def test_an_upload_outlasts_a_failing_server(
    bucket: UPath, file: Path, object_store: ObjectStore, fault: Fault
) -> None:
    object_store.fail(fault)
    upload(file, bucket / "a", md5=md5(file))
    assert (bucket / "a").read_bytes() == file.read_bytes()


def test_a_put_on_a_condition(bucket: UPath) -> None:
    first = put_if(bucket / "a", b"1", None)
    assert read_tagged(bucket / "a") == (b"1", first)
    second = put_if(bucket / "a", b"2", first)
    assert second != first
    for tag in (None, first):
        with pytest.raises(Changed):
            put_if(bucket / "a", b"3", tag)
    assert (bucket / "a").read_bytes() == b"2"


def test_a_put_whose_answer_was_lost_is_ours(bucket: UPath, object_store: ObjectStore) -> None:
    object_store.fail(Fault("PUT", status=500, lose=True))
    tag = put_if(bucket / "a", b"1", None)
    assert read_tagged(bucket / "a") == (b"1", tag)


def test_uploads_that_nobody_will_finish_are_ended(bucket: UPath) -> None:
    name = bucket.path.strip("/")
    for key in ("store/a", "store/b", "storehouse/c"):
        bucket.fs.call_s3("create_multipart_upload", Bucket=name, Key=key)
    assert abort_uploads(bucket / "store") == 2
    assert abort_uploads(bucket / "store") == 0
    assert abort_uploads(bucket) == 1
