"""The shard cache: each shard is fetched once, incomplete copies are never read, and the size is bounded."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import BudgetError, StoreError
from hexdata.loader.stream import Prefetcher
from hexdata.shards.cache import CachedSource, CacheFullError, ShardCache
from hexdata.shards.command import CommandSource
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.sources import WHOLE_FILE, ByteRange, ByteStream, FileStream, FolderSource

FETCHER = Path(__file__).parent / "fetcher.py"
SIZE = 5_000_000
"""Size of a shard that several processes need: several chunks."""
TIMEOUT = 120.0
"""Seconds after which a test fails."""


def make_entry(folder: Path, name: str, data: bytes) -> ShardEntry:
    """Write a file and return its entry. The cache does not read its content."""
    (folder / name).write_bytes(data)
    return ShardEntry(name, 1, 1, len(data), hashlib.sha256(data).hexdigest(), {})


def make_entries(folder: Path, *sizes: int) -> list[ShardEntry]:
    folder.mkdir()
    random = np.random.default_rng(1)
    return [make_entry(folder, f"{n}.tar", random.bytes(size)) for n, size in enumerate(sizes)]


def copies(cache: ShardCache) -> set[str]:
    """Return the names of all files in the folder, except the permanent lock."""
    return {path.name for path in cache.folder.iterdir()} - {".lock"}


def read(cache: ShardCache, entry: ShardEntry, source: FolderSource, **options: bool) -> bytes:
    with cache.open(entry, source, **options) as file:
        return file.read()


class CountingSource(FolderSource):
    """A folder that counts how often each file is opened, and may pause in the middle of a file.

    Attributes:
        opened: Names of the opened files, in order.
        half, go_on: With ``waits``, ``half`` is set after the first bytes, and reading waits for ``go_on``.
    """

    def __init__(self, folder: Path, *, waits: bool = False) -> None:
        super().__init__(folder)
        self.__dict__.update(opened=[], waits=waits, half=threading.Event(), go_on=threading.Event())

    opened: list[str]
    waits: bool
    half: threading.Event
    go_on: threading.Event

    @contextmanager
    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> Iterator[FileStream]:
        self.opened.append(name)
        with (self.folder / name).open("rb") as file:
            yield PausingStream(file, name, self) if self.waits else FileStream(file, name)


class PausingStream(FileStream):
    """A stream that waits after its first bytes."""

    def __init__(self, file: object, name: str, source: CountingSource) -> None:
        super().__init__(file, name)  # type: ignore[arg-type]
        self._source = source

    def read(self, size: int, /) -> bytes:
        if not self._source.half.is_set():
            self._source.half.set()
            return super().read(100)
        assert self._source.go_on.wait(TIMEOUT)
        return super().read(size)


def test_a_shard_is_fetched_once_and_named_by_its_digest(tmp_path: Path) -> None:
    (entry,) = make_entries(tmp_path / "a", 3_000_000)
    data = (tmp_path / "a" / "0.tar").read_bytes()
    source, cache = CountingSource(tmp_path / "a"), ShardCache(tmp_path / "cache" / "below", SIZE)
    assert read(cache, entry, source) == data
    assert read(cache, entry, source, digest=True) == data
    assert source.opened == ["0.tar"]
    assert copies(cache) == {f"{entry.sha256}.tar"}


def test_copies_are_named_by_digest_not_by_the_name_of_the_shard(tmp_path: Path) -> None:
    (entry,) = make_entries(tmp_path / "a", 1000)
    (tmp_path / "b").mkdir()
    same = make_entry(tmp_path / "b", "other.tar", (tmp_path / "a" / "0.tar").read_bytes())
    new = make_entry(tmp_path / "b", "0.tar", b"exported again")
    cache, source = ShardCache(tmp_path / "cache", SIZE), CountingSource(tmp_path / "b")
    assert read(cache, entry, CountingSource(tmp_path / "a")) == read(cache, same, source)
    assert read(cache, new, source) == b"exported again"
    assert source.opened == ["0.tar"]


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    uses=st.lists(st.integers(0, 5), max_size=15),
    extra=st.integers(0, 60),
)
def test_the_least_recently_used_shard_is_evicted_first(
    sizes: list[int], uses: list[int], extra: int
) -> None:
    """Compared with a list in the order of use."""
    with tempfile.TemporaryDirectory() as folder:
        entries = make_entries(Path(folder, "a"), *sizes)
        source, limit = FolderSource(Path(folder, "a")), max(sizes) + extra
        cache, model = ShardCache(Path(folder, "cache"), limit), OrderedDict[str, int]()
        for use in uses:
            entry = entries[use % len(entries)]
            assert read(cache, entry, source) == (source.folder / entry.name).read_bytes()
            model[f"{entry.sha256}.tar"] = entry.bytes
            model.move_to_end(f"{entry.sha256}.tar")
            while sum(model.values()) > limit:
                model.popitem(last=False)
            assert copies(cache) == model.keys()


def test_a_cache_that_is_too_small_raises_an_error_with_both_sizes(tmp_path: Path) -> None:
    entries = make_entries(tmp_path / "a", 1000, 2000)
    cache = ShardCache(tmp_path / "cache", 1999)
    with pytest.raises(
        BudgetError, match=r"smaller than a shard; found 1,999 bytes; expected at least 2,000"
    ):
        cache.require_size(entries, together=False)
    with pytest.raises(
        BudgetError, match="the shards of the split; found 1,999 bytes; expected at least 3,000"
    ):
        cache.require_size([*entries, *entries], together=True)
    ShardCache(tmp_path, 3000).require_size([*entries, *entries], together=True)


@pytest.mark.parametrize(
    ("data", "found"),
    [(b"12345678", "SHA-256 ef797c8"), (b"1234567", "7 bytes"), (b"123456789", "more bytes")],
    ids=["altered", "cut", "longer"],
)
def test_wrong_bytes_are_not_cached(tmp_path: Path, data: bytes, found: str) -> None:
    """The size of a command's output is unknown in advance."""
    (tmp_path / "a").mkdir()
    entry = make_entry(tmp_path / "a", "x.tar", b"87654321")
    (tmp_path / "a" / "x.tar").write_bytes(data)
    cache = ShardCache(tmp_path / "cache", SIZE)
    source = CommandSource(f"pipe:cat {tmp_path}/a/{{name}}")
    with pytest.raises(StoreError, match=rf"cat .*x\.tar: the shard is truncated or altered; found {found}"):
        cache.open(entry, source)
    assert copies(cache) == set()


def test_a_missing_shard_raises_an_error_with_its_address(tmp_path: Path) -> None:
    (entry,) = make_entries(tmp_path / "a", 10)
    (tmp_path / "a" / "0.tar").unlink()
    cache = ShardCache(tmp_path / "cache", SIZE)
    with pytest.raises(StoreError, match=r"a/0\.tar: the shard is missing"):
        cache.open(entry, FolderSource(tmp_path / "a"))
    assert copies(cache) == set()


def test_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    """A copy of another size always; a copy with other bytes if digests are checked."""
    (entry,) = make_entries(tmp_path / "a", 1000)
    cache, source = ShardCache(tmp_path / "cache", SIZE), CountingSource(tmp_path / "a")
    data = read(cache, entry, source)
    copy = cache.folder / f"{entry.sha256}.tar"
    copy.write_bytes(data[:-1])
    assert read(cache, entry, source) == data
    copy.write_bytes(bytes(1000))
    assert read(cache, entry, source) == bytes(1000)
    assert read(cache, entry, source, digest=True) == data
    assert copy.read_bytes() == data
    assert source.opened == ["0.tar"] * 3


def test_other_files_in_the_folder_are_not_changed(tmp_path: Path) -> None:
    entries = make_entries(tmp_path / "a", 1000, 1000)
    cache = ShardCache(tmp_path / "cache", 1000)
    cache.folder.mkdir()
    for name in ("notes.part", "a.tar", f"{'0' * 64}.tar.gz"):
        (cache.folder / name).write_bytes(bytes(5000))
    for entry in entries:
        read(cache, entry, FolderSource(tmp_path / "a"))
    assert copies(cache) == {"notes.part", "a.tar", f"{'0' * 64}.tar.gz", f"{entries[1].sha256}.tar"}


def test_an_invalid_digest_raises_an_error(tmp_path: Path) -> None:
    entry = ShardEntry("x.tar", 1, 1, 1, "../../x", {})
    with pytest.raises(StoreError, match="64 hexadecimal digits"):
        ShardCache(tmp_path, SIZE).open(entry, FolderSource(tmp_path))


# --- in use ---------------------------------------------------------------------------------------------


def test_mapped_copies_are_not_evicted_and_open_ones_stay_readable(tmp_path: Path) -> None:
    entries = make_entries(tmp_path / "a", *[1000] * 5)
    source, cache = FolderSource(tmp_path / "a"), ShardCache(tmp_path / "cache", 2000)
    datas = [(source.folder / entry.name).read_bytes() for entry in entries]
    with cache.open(entries[0], source, mapped=True) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with cache.open(entries[1], source) as opened:
        for entry, data in zip(entries[2:], datas[2:], strict=True):
            assert read(cache, entry, source) == data  # the mapped one is older, but stays
        assert opened.read() == datas[1]
    assert copies(cache) == {f"{entries[0].sha256}.tar", f"{entries[4].sha256}.tar"}
    with (
        cache.open(entries[4], source, mapped=True),
        pytest.raises(CacheFullError, match="1 kB too little of 2 kB"),
    ):
        cache.open(entries[1], source)
    assert mapped[:] == datas[0]
    mapped.close()
    assert read(cache, entries[1], source) == datas[1]
    assert copies(cache) == {f"{entries[1].sha256}.tar", f"{entries[4].sha256}.tar"}


def test_shards_are_read_without_the_cache_if_mapped_shards_fill_it(tmp_path: Path) -> None:
    entries = make_entries(tmp_path / "a", 1000, 1000)
    source, cache = FolderSource(tmp_path / "a"), ShardCache(tmp_path / "cache", 1000)
    cached = CachedSource(source, cache, {entry.name: entry for entry in entries})
    with cached.open_to_map(entries[0]):
        with (
            pytest.warns(UserWarning, match="read without the cache"),
            cached.open("1.tar", ByteRange(10)) as stream,
        ):
            assert read_all(stream) == (source.folder / "1.tar").read_bytes()[10:]
        assert copies(cache) == {f"{entries[0].sha256}.tar"}
    with cached.open("1.tar", ByteRange(10)) as stream:
        assert read_all(stream) == (source.folder / "1.tar").read_bytes()[10:]


def read_all(stream: ByteStream) -> bytes:
    return b"".join(iter(lambda: stream.read(300), b""))


# --- several at once ------------------------------------------------------------------------------------


def test_threads_fetch_a_shard_once(tmp_path: Path) -> None:
    (entry,) = make_entries(tmp_path / "a", 100_000)
    cache, source = ShardCache(tmp_path / "cache", SIZE), CountingSource(tmp_path / "a")
    data = (tmp_path / "a" / "0.tar").read_bytes()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: read(cache, entry, source, mapped=True), range(16)))
    assert found == [data] * 16
    assert source.opened == ["0.tar"]


def test_threads_share_a_cache_with_space_for_one_shard(tmp_path: Path) -> None:
    """Threads that find no space wait for the others, and every thread gets its shard."""
    entries = make_entries(tmp_path / "a", *[100_000] * 4)
    cache, source = ShardCache(tmp_path / "cache", 100_000), FolderSource(tmp_path / "a")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: read(cache, entries[n % 4], source), range(24)))
    assert found == [(source.folder / entries[n % 4].name).read_bytes() for n in range(24)]
    assert len(copies(cache)) == 1


@contextmanager
def fetching(
    cache: ShardCache, source: Path, entry: ShardEntry, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that fetches a shard; see ``fetcher.py``."""
    arguments = [cache.folder, cache.size, source, entry.name, entry.bytes, entry.sha256, *options]
    with subprocess.Popen(
        [sys.executable, FETCHER, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_processes_fetch_a_shard_once(tmp_path: Path) -> None:
    """The second process waits for the first, which pauses in the middle until the second has started."""
    (entry,) = make_entries(tmp_path / "a", SIZE)
    cache = ShardCache(tmp_path / "cache", SIZE)
    with fetching(cache, tmp_path / "a", entry, "halt") as first:
        assert line_of(first) == "half"
        (tmp_path / "a" / "0.tar").rename(tmp_path / "a" / "moved")  # opening it now fails
        with fetching(cache, tmp_path / "a", entry) as second:
            assert line_of(second) == "begin"
            print("go on", file=first.stdin, flush=True)
            assert line_of(first) == line_of(second) == entry.sha256


def test_a_killed_process_leaves_no_copy_that_is_read(tmp_path: Path) -> None:
    """A process that waits for it fetches the shard instead."""
    entry, other = make_entries(tmp_path / "a", SIZE, 1000)
    cache = ShardCache(tmp_path / "cache", SIZE + 999)
    with fetching(cache, tmp_path / "a", entry, "halt") as first:
        assert line_of(first) == "half"
        assert copies(cache) == {f"{entry.sha256}.part", f"{entry.sha256}.lock"}
        with fetching(cache, tmp_path / "a", entry) as second:
            assert line_of(second) == "begin"
            first.send_signal(signal.SIGKILL)
            assert line_of(second) == entry.sha256
    with fetching(cache, tmp_path / "a", other, "halt") as third:
        assert line_of(third) == "half"
        third.send_signal(signal.SIGKILL)
        third.wait()
    assert len(copies(cache)) == 2
    assert read(cache, entry, FolderSource(tmp_path / "a")) == (tmp_path / "a" / "0.tar").read_bytes()
    assert copies(cache) == {f"{entry.sha256}.tar"}


def test_a_forked_child_does_not_keep_locks(tmp_path: Path) -> None:
    """It inherits the open files of a thread that does not exist in it."""
    (entry,) = make_entries(tmp_path / "a", 3000)
    cache, source = ShardCache(tmp_path / "cache", SIZE), CountingSource(tmp_path / "a", waits=True)
    inside, outside = os.pipe()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(read, cache, entry, source)
        assert source.half.wait(TIMEOUT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that is the case
            child = os.fork()
        if not child:
            os.close(outside)
            os.read(inside, 1)
            os._exit(0)
        second = threads.submit(read, cache, entry, source)
        source.go_on.set()
        assert first.result(TIMEOUT) == second.result(TIMEOUT)
        third = threads.submit(read, cache, entry, source)
        assert third.result(TIMEOUT) == (tmp_path / "a" / "0.tar").read_bytes()
    os.close(outside)
    os.close(inside)
    os.waitpid(child, 0)
    assert source.opened == ["0.tar"]


def test_a_full_disk_raises_a_budget_error(tmp_path: Path) -> None:
    """Simulated by a limit on the size of files, which fails at the same call."""
    (entry,) = make_entries(tmp_path / "a", SIZE)
    cache = ShardCache(tmp_path / "cache", SIZE)
    with fetching(cache, tmp_path / "a", entry, "full") as process:
        assert line_of(process) == "begin"
        assert "BudgetError" in (line := line_of(process))
        assert "cache: the disk of the shard cache is full" in line
        assert "Free space there" in line
    assert copies(cache) == set()


def test_an_unusable_folder_raises_an_error(tmp_path: Path) -> None:
    (entry,) = make_entries(tmp_path / "a", 10)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match=r"file.*: the shard cache cannot be used; .*--no-cache"):
        ShardCache(tmp_path / "file" / "cache", SIZE).open(entry, FolderSource(tmp_path / "a"))


# --- ahead ----------------------------------------------------------------------------------------------


def threads_ahead() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("hexdata-prefetch")]


def fetched_ahead(folder: Path, size: int, readings: list[ShardEntry], shards: int, done: int) -> list[str]:
    """Return the names of the shards fetched by the time ``done`` readings have begun."""
    source = CountingSource(folder / "a")
    cached = CachedSource(source, ShardCache(folder / f"{done} {size}", size), {})
    with Prefetcher(cached, iter(readings), shards) as ahead:
        for _ in range(done):
            ahead.advance()
        ahead._threads.shutdown()  # waits for all fetches
    assert sum(path.stat().st_size for path in cached.cache.folder.glob("*.tar")) <= size
    return source.opened


def test_shards_are_fetched_ahead_within_bounds(tmp_path: Path) -> None:
    """The number of shards and of bytes fetched ahead is limited, and each shard is fetched once."""
    entries = make_entries(tmp_path / "a", *[1000] * 8)
    readings = [entries[n] for n in (0, 1, 1, 0, 2, 3, 3, 4, 5, 6, 7, 7)]
    for done in range(1, len(readings) + 1):
        opened = fetched_ahead(tmp_path, 100_000, readings, 3, done)
        expected = itertools.chain.from_iterable(
            list(dict.fromkeys(one.name for one in readings[first:]))[:3] for first in range(1, done + 1)
        )
        assert sorted(opened) == sorted(set(expected))
    assert sorted(fetched_ahead(tmp_path, 4_999, readings, 5, 1)) == ["0.tar", "1.tar"]
    assert sorted(fetched_ahead(tmp_path, 6_000, readings, 5, 1)) == ["0.tar", "1.tar", "2.tar"]
    (tmp_path / "1 1999").mkdir()
    assert fetched_ahead(tmp_path, 1_999, readings, 5, 1) == []
    assert threads_ahead() == []


def test_fetching_ahead_stops_with_the_iteration(tmp_path: Path) -> None:
    """In the middle of a shard, whose part file is removed."""
    entries = make_entries(tmp_path / "a", 1000, 3000, 1000)
    source = CountingSource(tmp_path / "a", waits=True)
    cache = ShardCache(tmp_path / "cache", SIZE)
    with Prefetcher(CachedSource(source, cache, {}), iter(entries), 1) as ahead:
        ahead.advance()
        assert source.half.wait(TIMEOUT)
        ahead._stopped.set()
        source.go_on.set()
    assert threads_ahead() == []
    assert (source.opened, copies(cache)) == (["1.tar"], set())
