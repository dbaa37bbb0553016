"""Shards in an object store: a real S3 server that fails on request."""

from __future__ import annotations

import hashlib
import pickle
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hexdata.errors import ConfigError, StoreError
from hexdata.loader import Loader
from hexdata.shards.locate import make_source
from hexdata.shards.objects import ObjectSource
from hexdata.shards.sources import ByteRange
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore


@pytest.mark.parametrize(
    ("location", "folder"),
    [
        ("s3://bucket/a/shards/", "s3://bucket/a/shards"),
        ("S3://bucket/a b", "s3://bucket/a b"),
        ("memory://somewhere/a", "memory://somewhere/a"),
    ],
)
def test_an_address_gives_an_object_source(location: str, folder: str) -> None:
    pytest.importorskip("s3fs")
    source = make_source(location)
    assert source == ObjectSource(folder)
    assert source.address("x.tar") == f"{folder}/x.tar"
    assert pickle.loads(pickle.dumps(source)) == source


def test_an_invalid_address_raises_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot contain \{name\}; found s3://bucket/\{name\}\. Give the folder"
    ):
        make_source("s3://bucket/{name}")
    with pytest.raises(ConfigError, match="credentials do not belong in an address") as caught:
        make_source("s3://key:geheim@bucket/shards")
    assert "geheim" not in str(caught.value)


def test_a_source_returns_the_requested_bytes(bucket: UPath, object_store: ObjectStore) -> None:
    """In ranges of 8 MiB: two for the longest."""
    data = np.random.default_rng(3).bytes(9_000_000)
    (bucket / "a b.tar").write_bytes(data)
    source = make_source(str(bucket))
    object_store.fail(Fault("GET", "tar", cut=1_000_000, count=2), Fault("GET", "tar", status=503))
    for part in (
        ByteRange(file_size=len(data)),
        ByteRange(5, 9),
        ByteRange(8_500_000, len(data), len(data)),
        ByteRange(1 << 23),
    ):
        with source.open("a b.tar", part) as stream:
            stop = len(data) if part.stop is None else part.stop
            found = b""
            while len(found) < stop - part.start:
                found += stream.read(min(3_000_000, stop - part.start - len(found)))
            assert hashlib.sha256(found).digest() == hashlib.sha256(data[part.start : stop]).digest()
            if stop == len(data):
                stream.finish()
            else:
                assert stream.read(2) == data[stop : stop + 2]  # bytes after the part can be read


def test_missing_truncated_and_forbidden_objects_raise_errors(
    bucket: UPath, object_store: ObjectStore
) -> None:
    (bucket / "x.tar").write_bytes(b"12345")
    source = make_source(str(bucket))
    name = re.escape(source.address("x.tar"))
    with (
        pytest.raises(StoreError, match=rf"{name}: .* truncated or altered; found 5 bytes; expected 6"),
        source.open("x.tar", ByteRange(file_size=6)),
    ):
        pass
    with pytest.raises(StoreError, match=r"y\.tar: the shard is missing"), source.open("y.tar"):
        pass
    object_store.fail(Fault(status=403, count=9))
    with (
        pytest.raises(StoreError, match=rf"{name}: a file cannot be read; found") as caught,
        source.open("x.tar"),
    ):
        pass
    object_store.fail()
    for credential in (ACCESS_KEY, SECRET_KEY):
        assert credential not in f"{caught.value!r} {caught.value}"
    with pytest.raises(StoreError, match=r"manifest\.json: no shard manifest"):
        Loader(str(bucket))
