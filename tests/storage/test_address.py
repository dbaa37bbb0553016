"""Parsing of paths and addresses given by users."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from hexdata.errors import ConfigError
from hexdata.storage import as_path, prefix_of

pytestmark = pytest.mark.skipif(find_spec("s3fs") is None, reason="the extra s3 is not installed")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("games", "games"),
        ("/games/a b", "/games/a b"),
        ("C:/games", "C:/games"),
        ("file:///games/a%20b", "/games/a b"),
        ("file://localhost/games", "/games"),
        ("file:/games", "/games"),
    ],
)
def test_paths_of_this_machine(text: str, path: str) -> None:
    assert as_path(text) == Path(path)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("S3://bucket/a/b", "s3://bucket/a/b"),
        ("s3:/bucket/a/b", "s3://bucket/a/b"),
        ("s3a://bucket/a/b", "s3://bucket/a/b"),
        ("s3://bucket/a b [x]*?#%20", "s3://bucket/a b [x]*?#%20"),
        ("s3://bucket", "s3://bucket/"),
    ],
)
def test_an_object_has_one_address(text: str, address: str) -> None:
    """By which its lock and the work that is kept for it are found."""
    path = as_path(text)
    assert not isinstance(path, Path)
    assert str(path) == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/a", "found ftp://; expected s3://"),
        ("s3://", "needs a bucket"),
        ("file://host/a", "cannot name another machine; found file://host/a; expected file:///PATH"),
        ("file://a", "cannot name another machine"),
        ("s3://me:geheim@bucket/a", "^credentials do not belong in an address"),
        ("s3://me:ge/heim@bucket/a", "^credentials do not belong in an address"),
        (
            "file://me:geheim@host/a",
            "cannot name another machine; found file://host/a; expected file:///PATH",
        ),
        ("abfss://games@account.dfs.core.windows.net/a", "^an account does not belong in an address"),
    ],
)
def test_what_is_no_address(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        as_path(text)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("folder", "name"),
    [("s3://bucket", "s3://bucket/a"), ("s3://bucket/b", "s3://bucket/b/a"), ("/", "/a"), ("b", "b/a")],
)
def test_what_stands_before_a_name(folder: str, name: str) -> None:
    path = as_path(folder)
    assert prefix_of(path) + "a" == str(path / "a") == name
