"""Uploads, conditional puts and tagged reads, on a real S3 server with injected faults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.errors import StoreError
from hexdata.storage import Changed, as_path, objects, storage_of
from hexdata.storage.conditions import tag_of
from hexdata.storage.reading import list_objects, object_info
from hexdata.storage.upload import abort_uploads, upload
from tests.conftest import needs_conditions
from tests.object_store import SERVER, Fault

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore


def methods(object_store: ObjectStore, bucket: UPath) -> list[str]:
    """Return how this bucket was asked since the last call; what other tests left at work asks others."""
    asked = f"/{bucket.path.strip('/')}"
    return [method for method, path in object_store.requests() if path.startswith(asked)]


def unfinished(bucket: UPath) -> list[str]:
    """Return the keys of the unfinished uploads; without any, rclone answers with an error."""
    try:
        listed = bucket.fs.call_s3("list_multipart_uploads", Bucket=bucket.path.strip("/"))
    except FileNotFoundError:
        return []
    return [one["Key"] for one in listed.get("Uploads", [])]


@pytest.fixture
def probed_bucket(bucket: UPath) -> UPath:
    """A bucket of which this process knows whether it heeds conditions, as always under the lock."""
    probe = storage_of(bucket / "probe")
    probe.put(b"", None)
    probe.guards_writes(b"")
    return bucket


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    return path


def test_what_was_uploaded_is_there(bucket: UPath, file: Path) -> None:
    upload(file, bucket / "a" / "b")
    assert (bucket / "a" / "b").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 9 << 20, 17 << 20])
def test_an_upload_is_held_against_the_digest_that_the_store_names(
    bucket: UPath, tmp_path: Path, object_store: ObjectStore, size: int
) -> None:
    """In one part or in several, so that nothing is read back."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(size))
    upload(file, bucket / "a")
    asked = methods(object_store, bucket)
    assert "GET" not in asked
    assert asked
    assert (bucket / "a").read_bytes() == file.read_bytes()


def test_what_a_store_holds_otherwise_is_told(
    bucket: UPath, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = bucket.fs._call_s3
    sent = bytes(file.stat().st_size)

    async def put_altered(method: str, *options: Any, **arguments: Any) -> Any:
        if method == "put_object":
            arguments["Body"] = sent
        return await call(method, *options, **arguments)

    monkeypatch.setattr(bucket.fs, "_call_s3", put_altered)
    with pytest.raises(StoreError, match=r"the uploaded object differs from the file.*sha256"):
        upload(file, bucket / "a")
    sent = b""
    with pytest.raises(StoreError, match="found 0 bytes; expected 1048576 bytes"):
        upload(file, bucket / "a")


@pytest.mark.parametrize(
    "fault",
    [Fault("PUT", status=500, count=3), Fault("PUT", status=503, lose=True), Fault("PUT", delay=0.5)],
    ids=["500 three times", "the answer is lost", "slow"],
)
def test_an_upload_outlasts_a_failing_server(
    bucket: UPath, file: Path, object_store: ObjectStore, fault: Fault
) -> None:
    object_store.fail(fault)
    upload(file, bucket / "a")
    assert (bucket / "a").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("size", [1, 17 << 20])
def test_an_upload_that_replaces_nothing(
    probed_bucket: UPath, tmp_path: Path, object_store: ObjectStore, size: int
) -> None:
    """Nor does it mistake for another's what it has put itself, though the answer was lost."""
    file, bucket = tmp_path / "file", probed_bucket
    file.write_bytes(bytes(size))
    object_store.fail(Fault("POST" if size > 1 else "PUT", "/a", status=500, lose=True, skip=int(size > 1)))
    upload(file, bucket / "a", replace=False)
    assert object_store.all_met()
    upload(file, bucket / "a", replace=False)
    file.write_bytes(b"x" * size)
    with pytest.raises(StoreError, match=r"the uploaded object differs from the file.*Another object exists"):
        upload(file, bucket / "a", replace=False)
    assert (bucket / "a").read_bytes() == bytes(size)
    assert not unfinished(bucket)


@pytest.mark.parametrize("replace", [False, True])
def test_an_upload_in_parts_is_complete_though_the_answer_was_lost(
    bucket: UPath, tmp_path: Path, object_store: ObjectStore, replace: bool
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(17 << 20))
    object_store.fail(Fault("POST", "uploadId=", status=500, lose=True))
    upload(file, bucket / "a", replace=replace)
    assert object_store.all_met()
    assert (bucket / "a").read_bytes() == file.read_bytes()


def test_an_upload_that_another_process_has_aborted(
    bucket: UPath, tmp_path: Path, object_store: ObjectStore
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(17 << 20))
    object_store.fail(Fault("POST", "uploadId=", status=404, code="NoSuchUpload"))
    with pytest.raises(StoreError, match="another process has removed this object or its unfinished upload"):
        upload(file, bucket / "a")


def test_parts_are_sent_again_after_a_conflict(
    bucket: UPath, tmp_path: Path, object_store: ObjectStore
) -> None:
    """S3 discards them."""
    file = tmp_path / "file"
    file.write_bytes(bytes(17 << 20))
    object_store.requests()
    object_store.fail(CONFLICT)
    upload(file, bucket / "a", replace=False)
    assert methods(object_store, bucket).count("PUT") == 2 * 3


CONFLICT = Fault(header="If-None-Match", path="/a", status=409, code="ConditionalRequestConflict")
NO_CONDITIONS = Fault(header="If-None-Match", path="/a", status=501, count=999)


@needs_conditions
@pytest.mark.parametrize("size", [1, 17 << 20])
@pytest.mark.parametrize("fault", [CONFLICT, NO_CONDITIONS], ids=["409", "501"])
def test_an_upload_continues_after_an_answer_to_its_condition(
    bucket: UPath, tmp_path: Path, object_store: ObjectStore, size: int, fault: Fault
) -> None:
    """A conflict with another request, and a store without conditional puts."""
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    object_store.fail(fault)
    upload(file, bucket / "a", replace=False)
    assert object_store.all_met()
    assert (bucket / "a").read_bytes() == bytes(size)
    file.write_bytes(b"x" * size)
    with pytest.raises(StoreError, match="Another object exists"):
        upload(file, bucket / "a", replace=False)
    assert not unfinished(bucket)


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
def test_a_put_in_conflict_with_another_request_is_repeated(
    bucket: UPath, object_store: ObjectStore, condition: str
) -> None:
    tag = storage_of(bucket / "a").put(b"1", None) if condition == "If-Match" else None
    object_store.fail(Fault("PUT", header=condition, status=409, code="ConditionalRequestConflict", count=2))
    storage_of(bucket / "a").put(b"2", tag)
    assert object_store.all_met()
    assert (bucket / "a").read_bytes() == b"2"


def test_a_put_in_a_store_without_conditions(bucket: UPath, object_store: ObjectStore) -> None:
    object_store.fail(
        Fault("PUT", header="If-None-Match", status=501, count=999),
        Fault("PUT", header="If-Match", status=501, count=999),
    )
    first = storage_of(bucket / "a").put(b"1", None)
    second = storage_of(bucket / "a").put(b"2", first)
    for tag in (None, first):
        with pytest.raises(Changed):
            storage_of(bucket / "a").put(b"3", tag)
    assert storage_of(bucket / "a").read_tagged(9) == (b"2", second)


def test_a_put_on_a_condition(probed_bucket: UPath) -> None:
    bucket = probed_bucket
    first = storage_of(bucket / "a").put(b"1", None)
    assert storage_of(bucket / "a").read_tagged(9) == (b"1", first)
    second = storage_of(bucket / "a").put(b"2", first)
    assert second != first
    for tag in (None, first):
        with pytest.raises(Changed):
            storage_of(bucket / "a").put(b"3", tag)
    assert (bucket / "a").read_bytes() == b"2"


def test_the_tag_of_a_put_is_its_own(probed_bucket: UPath, object_store: ObjectStore) -> None:
    """Not that of what another has put right after it: it would be overwritten by our next."""
    bucket = probed_bucket
    object_store.requests()
    tag = storage_of(bucket / "a").put(b"1", None)
    assert methods(object_store, bucket)[-1] == "PUT"
    (bucket / "a").write_bytes(b"another")
    with pytest.raises(Changed):
        storage_of(bucket / "a").put(b"2", tag)


def test_the_content_and_the_tag_of_an_object_are_read_with_one_request(
    bucket: UPath, object_store: ObjectStore
) -> None:
    """They are therefore of the same version. A broken answer is requested again."""
    tag = storage_of(bucket / "a").put(b"12345", None)
    object_store.requests()
    assert storage_of(bucket / "a").read_tagged(9) == (b"12345", tag)
    assert methods(object_store, bucket) == ["GET"]
    object_store.fail(Fault("GET", "/a", cut=2), Fault("GET", "/a", status=503))
    assert storage_of(bucket / "a").read_tagged(9) == (b"12345", tag)
    assert methods(object_store, bucket) == ["GET"] * 3
    for path in (bucket / "none", as_path("s3://test-no-such-bucket/a")):
        with pytest.raises(FileNotFoundError):
            storage_of(path).read_tagged(9)


def test_a_put_whose_answer_was_lost_is_ours(bucket: UPath, object_store: ObjectStore) -> None:
    object_store.fail(Fault("PUT", status=500, lose=True))
    tag = storage_of(bucket / "a").put(b"1", None)
    assert storage_of(bucket / "a").read_tagged(9) == (b"1", tag)


def test_uploads_that_nobody_will_finish_are_ended(bucket: UPath) -> None:
    name = bucket.path.strip("/")
    for key in ("store/a", "store/b", "storehouse/c"):
        bucket.fs.call_s3("create_multipart_upload", Bucket=name, Key=key)
    assert abort_uploads(bucket / "store") == 2
    assert abort_uploads(bucket / "store") == 0
    assert abort_uploads(bucket) == 1
    assert abort_uploads(bucket) == 0


def test_a_bucket_without_unfinished_uploads(bucket: UPath, object_store: ObjectStore) -> None:
    """Rclone answers 404 until the first upload in parts begins; a missing bucket is another error."""
    assert abort_uploads(bucket / "store") == 0
    object_store.fail(Fault("GET", r"\?.*uploads", status=404, code="NoSuchUpload"))
    assert abort_uploads(bucket / "store") == 0
    object_store.fail(Fault("GET", r"\?.*uploads", status=404, code="NoSuchBucket"))
    with pytest.raises(FileNotFoundError):
        abort_uploads(bucket / "store")


def test_a_part_of_an_object_is_read(bucket: UPath, object_store: ObjectStore) -> None:
    """Rclone sends the checksum of the whole object with it."""
    storage_of(bucket / "a").put(b"0123456789", None)
    assert storage_of(bucket / "a").read_range(2, 5) == b"234"
    object_store.requests()
    assert storage_of(bucket / "a").read_tail(3) == b"789"
    assert storage_of(bucket / "a").read_tail(11) == b"0123456789"
    assert methods(object_store, bucket) == ["GET"] * (2 if SERVER == "moto" else 3)
    (bucket / "empty").write_bytes(b"")
    assert storage_of(bucket / "empty").read_tail(3) == b""
    with pytest.raises(FileNotFoundError):
        storage_of(bucket / "none").read_tail(3)


@pytest.mark.parametrize("size", [0, 1, 8 << 20, (16 << 20) + 1])
def test_the_blocks_of_an_object_take_one_request_each(
    bucket: UPath, object_store: ObjectStore, size: int
) -> None:
    data = os.urandom(size)
    (bucket / "a").write_bytes(data)
    object_store.requests()
    assert b"".join(storage_of(bucket / "a").blocks()) == data
    assert methods(object_store, bucket) == ["GET"] * max(-(-size // (8 << 20)), 1)
    object_store.fail(Fault("GET", "/a", status=503), Fault("GET", "/a", cut=size // 2, skip=1))
    assert b"".join(storage_of(bucket / "a").blocks()) == data
    with pytest.raises(FileNotFoundError):
        list(storage_of(bucket / "none").blocks())


@needs_conditions
def test_the_blocks_of_an_object_are_of_one_version(bucket: UPath) -> None:
    (bucket / "a").write_bytes(bytes(9 << 20))
    blocks = storage_of(bucket / "a").blocks()
    next(blocks)
    (bucket / "a").write_bytes(bytes([1]) * (9 << 20))
    with pytest.raises(OSError, match=str(bucket / "a")):
        next(blocks)


def test_a_line_is_appended_with_three_requests(bucket: UPath, object_store: ObjectStore) -> None:
    """Rclone refuses to read more bytes than an object has, which takes another one."""
    for content in (b"1\n", b"1\n1\n", b"1\n1\n1\n", b"1\n1\n1\n"):
        object_store.requests()
        storage_of(bucket / "log").append(b"1\n", max_bytes=4)
        asked = methods(object_store, bucket)
        assert asked == ["GET", "PUT", "HEAD"] or (
            SERVER != "moto" and asked == ["GET", "GET", "PUT", "HEAD"]
        )
        assert (bucket / "log").read_bytes() == content


def test_a_missing_object_takes_one_request(bucket: UPath, object_store: ObjectStore) -> None:
    """Not a second one that looks for a folder."""
    (bucket / "folder" / "a").write_bytes(b"1")
    object_store.requests()
    for name in ("none", "folder"):
        assert storage_of(bucket / name).size() is None
        assert storage_of(bucket / name).version() == ""
        assert methods(object_store, bucket) == ["HEAD", "HEAD"]
    storage_of(bucket / "none").remove_tree()
    assert storage_of(bucket / "none").unreplaceable() == []
    assert methods(object_store, bucket) == ["GET", "GET"]
    assert storage_of(bucket / "none").files() == {}
    assert methods(object_store, bucket) == ["GET", "HEAD"]
    (bucket / "none").write_bytes(b"1")
    assert storage_of(bucket / "none").files() == {"": 1}


def test_the_listed_tag_is_that_of_the_object(bucket: UPath) -> None:
    """Rclone lists tags without quotes."""
    (bucket / "a").write_bytes(b"1")
    (listed,) = list_objects(bucket.fs, bucket.path, recursive=True).values()
    assert listed["ETag"] == tag_of(object_info(bucket.fs, (bucket / "a").path))
    assert listed["ETag"].strip('"')


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (Fault("GET", r"\?.*uploads", status=403, count=9), "AccessDenied: as asked"),
        (Fault("GET", r"\?.*uploads", status=405, count=9), "MethodNotAllowed: as asked"),
        (Fault("GET", r"\?.*uploads", status=501, count=9), "NotImplemented: as asked"),
        (Fault("DELETE", "uploadId", status=403, count=9), "AccessDenied: as asked"),
    ],
)
def test_a_store_that_does_not_list_uploads_is_used_with_a_warning(
    bucket: UPath, object_store: ObjectStore, fault: Fault, found: str
) -> None:
    bucket.fs.call_s3("create_multipart_upload", Bucket=bucket.path.strip("/"), Key="store/a")
    object_store.fail(fault)
    with pytest.warns(UserWarning, match=f"{bucket}store: the object store refuses .*; found {found}"):
        assert abort_uploads(bucket / "store") == 0
    assert object_store.all_met()


def test_other_failures_to_list_uploads_are_errors(bucket: UPath, object_store: ObjectStore) -> None:
    object_store.fail(Fault("GET", r"\?.*uploads", status=403, code="ExpiredToken", count=9))
    with pytest.raises(PermissionError):
        abort_uploads(bucket / "store")


@pytest.mark.parametrize("is_s3", [True, False])
def test_known_objects_are_removed_even_if_they_are_not_listed(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch, is_s3: bool
) -> None:
    """A listing may lack new objects. Unknown ones stay, and a known one may be missing already."""
    for name in ("a", "b/c", "other"):
        (bucket / "folder" / name).write_bytes(b"1")
    with monkeypatch.context() as patched:
        patched.setattr(objects, "list_objects", lambda *_, **_options: {})
        patched.setattr(objects, "speaks_s3", lambda _: is_s3)
        storage_of(bucket / "folder").remove_tree(known=["a", "b/c", "missing"])
    assert storage_of(bucket / "folder").files() == {"other": 1}
