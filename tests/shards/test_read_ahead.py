"""Reading shards ahead: every byte once, only where it helps, and without harm when it fails."""

from __future__ import annotations

import gc
import io
import os
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.loader import Loader, PositionDataset
from hexdata.shards import read_ahead
from hexdata.shards.files import LocalShard, open_shards
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.mapped import MappedShards
from hexdata.shards.read_ahead import ReadAhead
from hexdata.shards.sources import FolderSource

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

SECONDS = 60
MEMBERS = ("move", "position_id")


class Reports:
    """Receiver of progress that cannot be pickled."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None, str]] = []
        self.done = 0
        self.lock = threading.Lock()

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        self.stages.append((stage, total, unit))
        self.done = 0

    def advance(self, amount: int) -> None:
        self.done += amount

    def note(self, message: str) -> None:
        raise AssertionError(message)


class Endless(io.RawIOBase):
    """A file of zeros without an end, on a slow disk."""

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def readinto(self, buffer: Any) -> int:
        time.sleep(0.01)
        return 1


@pytest.fixture
def folder(make_shards: MakeShards) -> ShardFolder:
    return make_shards(train=134)


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if no shard were in the page cache."""
    monkeypatch.setattr(read_ahead, "_are_cached", lambda needed: False)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the shards that are opened to be read, in this process."""
    names: list[str] = []
    open_file = LocalShard.open_file

    def record(shard: LocalShard, *, digest: bool = False) -> Any:
        names.append(shard.entry.name)
        return open_file(shard, digest=digest)

    monkeypatch.setattr(LocalShard, "open_file", record)
    return names


def shards_of(folder: ShardFolder) -> list[LocalShard]:
    manifest = ShardManifest.load(folder.path)
    shards, _ = open_shards(FolderSource(folder.path), manifest, "train", on_error="raise", check="sizes")
    return shards


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hexdata-read-ahead"]


def wait_for_readers() -> None:
    for thread in readers():
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    yield
    if readers():
        gc.collect()  # takes a second where many libraries are imported
        wait_for_readers()


@pytest.mark.usefixtures("uncached")
def test_every_byte_is_read_once(folder: ShardFolder, opened: list[str]) -> None:
    shards, reports = shards_of(folder), Reports()
    opened.clear()
    ahead = ReadAhead(shards, MEMBERS, reports)
    for _ in range(3):
        ahead.start()
        ahead.wait()
    assert sorted(opened) == [shard.entry.name for shard in shards]
    size = sum(path.stat().st_size for path in folder.path.glob("train-*.tar"))
    assert ahead.bytes == size
    assert reports.stages == [("read ahead", size, "bytes")]
    assert reports.done == size


@pytest.mark.usefixtures("uncached")
def test_dense_policies_are_left_out_unless_they_are_needed(make_shards: MakeShards) -> None:
    """Every other byte of a shard is read, including the headers of all members."""
    shards = shards_of(make_shards(train=134, dense=True))
    whole = ReadAhead(shards, ("move", "policy", "policy_row"))
    assert whole.bytes == sum(shard.entry.bytes for shard in shards)
    partial = ReadAhead(shards, MEMBERS)
    partial.wait()
    assert partial._run is not None
    assert sum(partial._run.done) == partial.bytes
    policies = 0
    for shard, parts in partial._parts:
        data = Path(shard.address).read_bytes()
        unread = set(range(len(data))) - {byte for start, stop in parts for byte in range(start, stop)}
        for name, width in (("policy_cell", 2), ("policy_probability", 4)):
            for block, start in enumerate(shard.entry.offsets[name]):
                size = shard.stored_rows(name, block) * width
                padded = set(range(start, start + size + -(start + size) % 512))
                assert padded <= unread
                unread -= padded
                policies += len(padded)
        assert unread == set()
    assert whole.bytes - partial.bytes == policies > 0


@pytest.mark.usefixtures("uncached")
def test_positions_wait_for_the_end(folder: ShardFolder) -> None:
    shards, reports = (
        MappedShards(FolderSource(folder.path), ShardManifest.load(folder.path), "train"),
        Reports(),
    )
    ahead = shards.read_ahead(MEMBERS, reports)
    rows = np.arange(134)
    shards.wait_until_ready()
    block = shards.take(rows, ("move",))
    assert reports.done == ahead.bytes
    np.testing.assert_array_equal(block["move"], folder.splits["train"]["move"])


def test_a_loader_reports_and_delivers_the_same(folder: ShardFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [batch["value"].tolist() for batch in Loader(folder.path, batch_size=16)]
    monkeypatch.setattr(read_ahead, "_are_cached", lambda needed: False)
    reports = Reports()
    loader = Loader(folder.path, batch_size=16, progress=reports)
    assert [batch["value"].tolist() for batch in loader] == expected
    assert [stage for stage, _, _ in reports.stages] == ["read ahead"]
    assert [batch["value"].tolist() for batch in loader.for_rank(0, 1)] != expected  # the next epoch
    assert len(reports.stages) == 1


@pytest.mark.parametrize(
    ("answer", "cached"),
    [(1, True), (0, False), (BlockingIOError(), False), (OSError(95, "not supported"), False)],
)
def test_nothing_is_read_if_samples_are_cached(
    folder: ShardFolder, monkeypatch: pytest.MonkeyPatch, answer: int | OSError, cached: bool
) -> None:
    sampled: list[int] = []

    def preadv(file: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        assert flags == 8
        sampled.append(offset)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(os, "preadv", preadv, raising=False)
    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    reports = Reports()
    ReadAhead(shards_of(folder), MEMBERS, reports).wait()
    assert bool(reports.stages) is not cached
    assert len(sampled) == (len(folder.shards["train"]) if cached else 1)


def test_everything_is_read_if_the_system_cannot_tell(
    folder: ShardFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    reports = Reports()
    ahead = ReadAhead(shards_of(folder), MEMBERS, reports)
    ahead.wait()
    assert reports.done == ahead.bytes


def test_shards_are_in_the_page_cache_afterwards(folder: ShardFolder) -> None:
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("the system does not list its page cache")
    manifest, source = ShardManifest.load(folder.path), FolderSource(folder.path)
    shards = [
        LocalShard(source, entry, 0, manifest.block_size, manifest.board_size, manifest.fields)
        for entry in manifest.splits["train"]
    ]
    for shard in shards:
        with shard.open_file() as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    needed = [(shard, [(0, shard.entry.bytes)]) for shard in shards]
    if read_ahead._are_cached(needed):
        pytest.skip("the file system keeps the shards in memory")
    ReadAhead(shards, MEMBERS).wait()
    if not read_ahead._are_cached(needed):
        pytest.skip("the file system cannot tell, or the memory is full")
    reports = Reports()
    ReadAhead(shards, MEMBERS, reports).wait()
    assert reports.stages == []


@pytest.mark.usefixtures("uncached")
def test_shards_larger_than_the_memory_give_one_warning(
    folder: ShardFolder, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "available_memory", lambda: 1_000)
    with pytest.warns(UserWarning, match="exact mode will be slow") as caught:
        loader = Loader(folder.path)
    (warning,) = caught
    size = sum(path.stat().st_size for path in folder.path.glob("train-*.tar"))
    assert f"found {size // 1000} kB of shards and 1 kB of memory" in str(warning.message)
    assert "mode='stream'" in str(warning.message)
    opened.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(len(batch["value"]) for batch in loader) == 134
        assert sum(len(batch["value"]) for batch in pickle.loads(pickle.dumps(loader))) == 134
    assert len(opened) == len(folder.shards["train"])  # the copy maps them
    assert readers() == []


@pytest.mark.usefixtures("uncached")
def test_copies_read_for_themselves_without_the_receiver(folder: ShardFolder, opened: list[str]) -> None:
    reports = Reports()
    loader = Loader(folder.path, progress=reports)
    copy = pickle.loads(pickle.dumps(loader))
    wait_for_readers()
    opened.clear()
    next(iter(copy))
    assert len(opened) == 2 * len(folder.shards["train"])  # mapped, and read ahead
    assert reports.stages == []
    next(iter(loader))
    assert len(reports.stages) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("uncached")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent(
    folder: ShardFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = LocalShard.open_file
    parent = os.getpid()

    def endless_in_parent(shard: LocalShard, *, digest: bool = False) -> Any:
        return Endless() if os.getpid() == parent else open_file(shard, digest=digest)

    loader = Loader(folder.path)
    wait_for_readers()
    assert loader._selected is not None
    shards = loader._selected.source
    assert isinstance(shards, MappedShards)
    monkeypatch.setattr(LocalShard, "open_file", endless_in_parent)
    ahead = shards.read_ahead(MEMBERS, Reports())
    assert len(readers()) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks among threads
        child = os.fork()
    if not child:
        status = 1
        try:
            total = sum(len(batch["value"]) for batch in loader)
            status = 0 if total == 134 and sum(ahead._run.done) == ahead.bytes else 2  # type: ignore[union-attr]
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("uncached")
def test_threads_end_with_the_loader(folder: ShardFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of(folder)
    monkeypatch.setattr(LocalShard, "open_file", lambda shard, digest=False: Endless())
    ahead = ReadAhead(shards, MEMBERS)
    ahead.start()
    found = readers()
    assert len(found) == 2
    assert all(thread.daemon for thread in found)
    del ahead
    gc.collect()
    wait_for_readers()


def replace_shard(folder: Path, data: bytes | None) -> Path:
    """Replace a shard without changing the map of the old file; None deletes it."""
    path = folder / "train-000003.tar"
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    return path


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("data", [None, b"short"])
def test_a_failed_read_gives_a_warning_and_ends_the_wait(
    folder: ShardFolder, monkeypatch: pytest.MonkeyPatch, data: bytes | None
) -> None:
    shards = MappedShards(FolderSource(folder.path), ShardManifest.load(folder.path), "train")
    path = replace_shard(folder.path, data)
    shards.read_ahead(MEMBERS)
    with pytest.warns(UserWarning, match="reading shards ahead stopped") as caught:
        shards.wait_until_ready()
    block = shards.take(np.arange(134), ("move",))
    assert str(path) in str(caught[0].message)
    assert data is None or "5 bytes" in str(caught[0].message)
    np.testing.assert_array_equal(block["move"], folder.splits["train"]["move"])  # from the old file
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shards.wait_until_ready()


@pytest.mark.usefixtures("uncached")
def test_a_dataset_of_single_positions_does_not_read_ahead(folder: ShardFolder, opened: list[str]) -> None:
    dataset = PositionDataset(folder.path, fields=("value",))
    opened.clear()
    assert dataset[5]["value"] == folder.splits["train"]["value"][5]
    assert opened == []
