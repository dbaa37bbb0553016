"""Decompression within limits: all ways of reading return the same bytes, in pieces of bounded size."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from functools import partial

import pytest

from hexdata.errors import FormatError
from hexdata.formats import open_source
from hexdata.formats.gunzip import GunzipFile, GunzipLimits

LIMITS = GunzipLimits(decompressed_bytes=1 << 25, ratio=100, ratio_floor=1 << 16)
CONTENT = b"".join(b"%d\n" % (n * n) for n in range(20_000))


@pytest.fixture(params=["plain", "packed", "salvaged"])
def opened(request, tmp_path):
    """Open the same content as a plain file, as a gzipped file, and for salvage."""

    def opened(content, limits=LIMITS):
        path = tmp_path / "file"
        path.write_bytes(content if request.param == "plain" else gzip.compress(content, mtime=0))
        return GunzipFile(path.open("rb"), limits, salvage=request.param == "salvaged")

    return opened


def test_all_ways_of_reading_return_the_same_bytes(opened):
    with opened(CONTENT) as file:
        assert file.read() == CONTENT
        assert file.offset == len(CONTENT)
    with opened(CONTENT) as file, io.BufferedReader(file, 100) as lines:
        assert list(lines) == CONTENT.splitlines(keepends=True)
    with opened(CONTENT) as file:
        assert (file.read(0), file.read(1), file.offset) == (b"", CONTENT[:1], 1)


def test_close_closes_the_raw_file(opened, tmp_path):
    file = opened(b"")
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


@pytest.mark.parametrize("salvage", [False, True])
@pytest.mark.parametrize("size", [-1, 1 << 16])
def test_a_gzip_bomb_is_stopped_early(tmp_path, salvage, size):
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(bytes(32 << 20), mtime=0))
    tracemalloc.start()
    with GunzipFile(path.open("rb"), LIMITS, salvage=salvage) as file, pytest.raises(FormatError) as caught:
        list(iter(partial(file.read, size), b""))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.code == "limit-ratio"
    assert peak < 8 << 20


def test_an_empty_gzip_stream_is_truncated(tmp_path):
    path = tmp_path / "a.trmph.gz"
    path.write_bytes(gzip.compress(b"#3,a1 b\n")[:6])
    with pytest.raises(FormatError) as caught:
        open_source(path)
    assert (caught.value.code, caught.value.path) == ("truncated", str(path))


@pytest.mark.parametrize("bound", ["decompressed_bytes", "ratio", "ratio_floor"])
def test_limits_are_positive(bound):
    with pytest.raises(ValueError, match=f"{bound} must be positive"):
        GunzipLimits(**{"decompressed_bytes": 1, "ratio": 1, "ratio_floor": 1} | {bound: 0})
