"""Errors of object stores contain the address, the cause and a hint, and no secret."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.errors import ConfigError, StoreError
from hexdata.storage import as_path, is_fault, storage_of, translate_errors
from hexdata.storage.upload import upload
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore


def test_denied_access(bucket: UPath, object_store: ObjectStore) -> None:
    (bucket / "a").write_bytes(b"1")
    object_store.fail(Fault("GET", status=403, count=9))
    with pytest.raises(StoreError) as told, translate_errors(bucket), storage_of(bucket / "a").open() as file:
        file.read()
    assert told.value.reason == "the object store denies access"
    assert told.value.path == str(bucket / "a")
    assert told.value.hint is not None


def test_a_missing_bucket(bucket: UPath, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    target = as_path("s3://test-no-such-bucket/a")
    assert not isinstance(target, Path)
    with (
        pytest.raises(StoreError, match=r"^s3://test-no-such-bucket/a: there is no such bucket"),
        translate_errors(bucket),
    ):
        upload(tmp_path / "a", target)


def test_an_object_that_is_not_there_is_no_fault(bucket: UPath) -> None:
    with pytest.raises(FileNotFoundError, match="none") as told, translate_errors(bucket):
        storage_of(bucket / "none").open()
    assert not is_fault(told.value)
    assert told.value.filename == str(bucket / "none")


def test_an_endpoint_that_does_not_answer() -> None:
    session = pytest.importorskip("botocore.session").Session()
    config = pytest.importorskip("botocore.config").Config(retries={"max_attempts": 0})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        client = session.create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=f"http://127.0.0.1:{taken.getsockname()[1]}",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=config,
        )
        with (
            pytest.raises(StoreError, match=r"does not answer.*AWS_ENDPOINT_URL") as told,
            translate_errors("s3://b/c"),
        ):
            client.list_buckets()
        client.close()
    assert SECRET_KEY not in str(told.value)
    assert ACCESS_KEY not in str(told.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot open https://user:pass@host/a", "cannot open https://host/a"),
        ("cannot open https://host/a?X-Amz-Signature=0af&b=c now", "cannot open https://host/a now"),
    ],
)
def test_secrets_of_urls_are_left_out(text: str, shown: str) -> None:
    class EndpointError(Exception):
        __module__ = "botocore.exceptions"

    with pytest.raises(StoreError) as told, translate_errors("s3://bucket/store"):
        raise EndpointError(text)
    assert told.value.found == shown


def test_other_errors_and_other_places_stay_as_they_are(bucket: UPath, tmp_path: Path) -> None:
    for error in (ConfigError("no"), OSError(28, "No space left on device"), ValueError("no")):
        for places in ((), (tmp_path,), (bucket,), (None, "s3://bucket/store")):
            with pytest.raises(type(error)) as told, translate_errors(*places):
                raise error
            assert told.value is error
