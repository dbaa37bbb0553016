"""The shard cache: each shard is fetched once, incomplete copies are never read, and the size is bounded."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import BudgetError, ConfigError, StoreError
from hexdata.loader.stream import Prefetcher
from hexdata.shards.cache import CachedSource, CacheOptions, add_cache
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.sources import ShardSource
from hexdata.system import locked

SIZE = 5_000_000
"""Size of a shard that several processes need: several chunks."""


def make_entries(folder, *sizes):
    """Write files and return their entries. The cache does not read their content."""
    folder.mkdir()
    random, entries = np.random.default_rng(1), {}
    for number, size in enumerate(sizes):
        name, data = f"{number}.tar", random.bytes(size)
        (folder / name).write_bytes(data)
        entries[name] = ShardEntry(name, 1, size, hashlib.sha256(data).hexdigest(), [(0, "")])
    return entries


def copies(source):
    """Return the names of all files in the cache, except the locks."""
    return {path.name for path in source.folder.iterdir() if path.suffix != ".lock"} - {".lock"}


def read(source, name):
    with source.open(name) as stream:
        return stream.read(SIZE)


class CountingSource(ShardSource):
    """A folder that records the names of the opened files, in order."""

    def __init__(self, folder):
        super().__init__(folder)
        self.__dict__["opened"] = []

    def open(self, name, *arguments, **named):
        self.opened.append(name)
        return super().open(name, *arguments, **named)


def test_a_shard_is_fetched_once_and_named_by_its_digest(tmp_path):
    """A copy of another size is fetched again, and one with other bytes when a process first reads it."""
    entries, source = make_entries(tmp_path / "a", 3_000_000), CountingSource(tmp_path / "a")
    data, folder = (tmp_path / "a" / "0.tar").read_bytes(), tmp_path / "cache" / "below"
    for _ in range(2):  # the second one compares the digest of the copy
        cached = CachedSource(source, folder, SIZE, entries)
        assert read(cached, "0.tar") == read(cached, "0.tar") == data
        assert copies(cached) == {f"{entries['0.tar'].sha256}.tar"}
    assert source.opened == ["0.tar"]
    copy = folder / f"{entries['0.tar'].sha256}.tar"
    copy.write_bytes(data[:-1])
    assert read(cached, "0.tar") == data
    copy.write_bytes(bytes(len(data)))
    assert read(cached, "0.tar") == bytes(len(data))
    assert read(CachedSource(source, folder, SIZE, entries), "0.tar") == copy.read_bytes() == data
    assert source.opened == ["0.tar"] * 3


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    uses=st.lists(st.integers(0, 5), max_size=15),
    extra=st.integers(0, 60),
)
def test_the_least_recently_used_shard_is_evicted_first(sizes, uses, extra):
    """Compared with a list in the order of use."""
    with tempfile.TemporaryDirectory() as folder:
        entries = make_entries(Path(folder, "a"), *sizes)
        limit, model = max(sizes) + extra, OrderedDict()
        cached = CachedSource(ShardSource(Path(folder, "a")), Path(folder, "cache"), limit, entries)
        for use in uses:
            entry = entries[f"{use % len(sizes)}.tar"]
            assert read(cached, entry.name) == Path(folder, "a", entry.name).read_bytes()
            model[f"{entry.sha256}.tar"] = entry.bytes
            model.move_to_end(f"{entry.sha256}.tar")
            while sum(model.values()) > limit:
                model.popitem(last=False)
            assert copies(cached) == model.keys()


def test_a_cache_that_is_too_small_raises_an_error_with_both_sizes(tmp_path):
    entries = make_entries(tmp_path / "a", 1000, 2000)
    source = ShardSource(f"pipe:cat {tmp_path}/a/{{name}}")
    with pytest.raises(BudgetError, match=r"found 1,999 bytes; expected at least 2,000"):
        add_cache(source, [*entries.values()], CacheOptions(cache=tmp_path, cache_size=1999))


def test_a_cache_at_or_below_a_file_raises_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    source = ShardSource(f"pipe:cat {tmp_path}/{{name}}")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"{tmp_path}/file: the cache is not a folder"):
            add_cache(source, [], CacheOptions(cache=folder))


@pytest.mark.parametrize(
    "change", [lambda data: b"x" + data[1:], lambda data: data[1:], lambda data: data + b"x"]
)
def test_wrong_bytes_are_not_cached(tmp_path, change):
    """The size of a command's output is unknown in advance."""
    entries, path = make_entries(tmp_path / "a", 8), tmp_path / "a" / "0.tar"
    path.write_bytes(change(path.read_bytes()))
    source = ShardSource(f"pipe:cat {tmp_path}/a/{{name}}")
    cached = CachedSource(source, tmp_path / "cache", SIZE, entries)
    with pytest.raises(StoreError, match=r"cat .*0\.tar: the shard is truncated or altered; found"):
        read(cached, "0.tar")
    assert copies(cached) == set()


def test_what_a_killed_process_left_is_removed_though_its_lock_is_held_at_first(tmp_path):
    """Another thread may be fetching the same shard when the first one looks for such files."""
    entries = make_entries(tmp_path / "a", 1000, 2000)
    cached = CachedSource(ShardSource(tmp_path / "a"), tmp_path / "cache", SIZE, entries)
    digest = entries["1.tar"].sha256
    left = tmp_path / "cache" / f".{digest}.tar.1.tmp"
    left.parent.mkdir()
    left.touch()
    with locked(left.parent / f"{digest[:2]}.lock"):
        read(cached, "0.tar")
    assert left.exists()
    read(cached, "1.tar")
    assert not left.exists()


# --- several at once ------------------------------------------------------------------------------------


def test_threads_share_a_cache_with_space_for_one_shard(tmp_path):
    entries = make_entries(tmp_path / "a", *[100_000] * 4)
    cached = CachedSource(ShardSource(tmp_path / "a"), tmp_path / "cache", 100_000, entries)
    names = [f"{n % 4}.tar" for n in range(24)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda name: read(cached, name), names))
    assert found == [(tmp_path / "a" / name).read_bytes() for name in names]
    assert len(copies(cached)) == 1


def test_copies_never_exceed_the_size_together(tmp_path, monkeypatch):
    """Two threads make space for different shards at the same moment, unless one waits for the other."""
    entries = make_entries(tmp_path / "a", 1000, 1000)
    both, evict = threading.Barrier(2), CachedSource._evict

    def evict_together(cached, needed):
        evict(cached, needed)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)

    monkeypatch.setattr(CachedSource, "_evict", evict_together)
    cached = CachedSource(ShardSource(tmp_path / "a"), tmp_path / "cache", 1000, entries)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: read(cached, name), entries))
    assert len(copies(cached)) == 1


FETCH = """
import sys
from pathlib import Path
from hexdata.shards.cache import CachedSource
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.sources import make_source

location, folder, name, size, sha256 = sys.argv[1:]
entries = {name: ShardEntry(name, 1, int(size), sha256, [(0, "")])}
with CachedSource(make_source(location), Path(folder), int(size), entries).open(name):
    pass
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_process_waits_for_the_first(tmp_path, killed):
    """It reads the copy of the first, or fetches the shard itself if the first is killed.

    The first one pauses in the middle, in a command that reads the rest from a pipe.
    """
    entries = make_entries(tmp_path / "a", SIZE, 1000)
    data, (entry, other) = (tmp_path / "a" / "0.tar").read_bytes(), entries.values()
    folder, pipe, begun = tmp_path / "cache", tmp_path / "pipe", tmp_path / "begun"
    os.mkfifo(pipe)
    slow = f"pipe:touch {begun}; head -c 100 {tmp_path}/a/{{name}}; cat {pipe}"
    arguments = [slow, folder, entry.name, entry.bytes, entry.sha256]
    with (
        subprocess.Popen([sys.executable, "-c", FETCH, *map(str, arguments)]) as first,
        ThreadPoolExecutor(1) as threads,
    ):
        while not begun.exists():
            assert first.poll() is None
            time.sleep(0.01)
        cached = CachedSource(ShardSource(tmp_path / ("a" if killed else "none")), folder, SIZE, entries)
        second = threads.submit(read, cached, "0.tar")
        time.sleep(0.1)
        assert not second.done()
        if killed:
            first.kill()
        pipe.write_bytes(data[100:] if not killed else b"")  # ends the command
        assert second.result() == data
    # The part of a killed process is removed with the next fetch.
    (folder / f".{other.sha256}.tar.17.tmp").write_bytes(b"of a killed process")
    (folder / f"{entry.sha256}.tar").unlink()
    cached = CachedSource(ShardSource(tmp_path / "a"), folder, SIZE, entries)
    assert read(cached, "0.tar") == data
    assert copies(cached) == {f"{entry.sha256}.tar"}


def test_copies_on_a_disk_that_is_only_read_can_be_used(tmp_path, small_disk):
    entries = make_entries(tmp_path / "a", 1000)
    (small_disk / f"{entries['0.tar'].sha256}.tar").write_bytes((tmp_path / "a" / "0.tar").read_bytes())
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    cached = CachedSource(ShardSource(tmp_path / "none"), small_disk, SIZE, entries)
    assert read(cached, "0.tar") == (tmp_path / "a" / "0.tar").read_bytes()


def test_a_full_disk_raises_a_budget_error(tmp_path, small_disk):
    entries = make_entries(tmp_path / "a", shutil.disk_usage(small_disk).free + 1)
    size = entries["0.tar"].bytes
    cached = CachedSource(ShardSource(tmp_path / "a"), small_disk / "cache", size, entries)
    with pytest.raises(BudgetError, match="the disk is full"):
        read(cached, "0.tar")
    assert copies(cached) == set()


# --- ahead ----------------------------------------------------------------------------------------------


def test_a_fetch_that_is_stopped_does_not_wait_for_a_slow_source(tmp_path):
    entries, begun = make_entries(tmp_path / "a", SIZE), time.monotonic()
    source = ShardSource("pipe:head -c 200000 /dev/zero; sleep 600 # {name}")
    cached = CachedSource(source, tmp_path / "cache", SIZE, entries)
    cached.prefetch("0.tar", iter([False, True]).__next__)
    assert time.monotonic() - begun < 300
    assert copies(cached) == set()


def test_shards_are_fetched_ahead_within_bounds(tmp_path):
    """The number of shards and of bytes fetched ahead is limited, and each shard is fetched once."""
    entries = make_entries(tmp_path / "a", *[1000] * 8)
    reads = [entries[f"{n}.tar"] for n in (0, 1, 1, 0, 2, 3, 3, 4, 5, 6, 7, 7)]

    def fetched(size, shards, done):
        """Return the names of the shards fetched by the time ``done`` reads have begun."""
        source = CountingSource(tmp_path / "a")
        cached = CachedSource(source, tmp_path / f"{done} {size}", size, entries)
        cached.folder.mkdir()
        with Prefetcher(cached, iter(reads), shards) as ahead:
            for _ in range(done):
                ahead.advance()
            ahead._threads.shutdown()  # waits for all fetches
        assert sum(path.stat().st_size for path in cached.folder.glob("*.tar")) <= size
        return sorted(source.opened)

    for done in range(1, len(reads) + 1):
        next_three = (list(dict.fromkeys(one.name for one in reads[at:]))[:3] for at in range(1, done + 1))
        assert fetched(100_000, 3, done) == sorted(set(itertools.chain(*next_three)))
    assert fetched(4_999, 5, 1) == ["0.tar", "1.tar"]
    assert fetched(6_000, 5, 1) == ["0.tar", "1.tar", "2.tar"]
    assert fetched(1_999, 5, 1) == []
    assert not [each for each in threading.enumerate() if each.name.startswith("hexdata-prefetch")]
