"""Descriptions of files that have no known format."""

from __future__ import annotations

import io
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.formats.content import describe_content


def _parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), file)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("games.trmph"))
    return file.getvalue()


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", b"")
        archive.writestr("b", b"")
    return file.getvalue()


def _npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (_parquet(), "a Parquet file"),
        (_tar(), "a tar archive"),
        (_zip(), "a zip archive"),
        (_npy(), "a NumPy array"),
        (b"hello\nworld", r"a text that begins with 'hello\nworld'"),
        (b"game,moves\n" * 20_000, r"a text that begins with 'game,moves\ngame,'"),
        ("é".encode() * 1024, "a text that begins with 'éééééééééééééééé'"),
        (b"a" + "é".encode() * 1024, "a text that begins with 'aééééééééééééééé'"),
        (b"\0\1\2", r"a file that begins with the bytes b'\x00\x01\x02'"),
        (b"\xff\xfeh\0", r"a file that begins with the bytes b'\xff\xfeh\x00'"),
        (b"text\x1b[31m", r"a file that begins with the bytes b'text\x1b[31m'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_is_described_by_its_first_bytes(content: bytes, expected: str) -> None:
    assert describe_content(content) == expected
