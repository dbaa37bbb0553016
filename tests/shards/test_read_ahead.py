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

from hexdata.errors import StoreError
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
    """The file of a shard, with zeros instead of an end, on a slow disk."""

    def __init__(self, shard: LocalShard) -> None:
        self.file = Path(shard.address).open("rb")  # noqa: SIM115 - closed by close()

    def close(self) -> None:
        self.file.close()
        super().close()

    def fileno(self) -> int:
        return self.file.fileno()

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def readinto(self, buffer: Any) -> int:
        time.sleep(0.01)
        return 1


@pytest.fixture
def folder(make_shards: MakeShards) -> ShardFolder:
    return make_shards(train=134)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the shards that are opened to be read, in this process."""
    names: list[str] = []
    open_file = LocalShard.open_file

    def record(shard: LocalShard) -> Any:
        names.append(shard.entry.name)
        return open_file(shard)

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


def test_every_byte_is_read_once(folder: ShardFolder, opened: list[str]) -> None:
    shards, reports = shards_of(folder), Reports()
    opened.clear()
    ahead = ReadAhead(shards, reports)
    for _ in range(3):
        ahead.start()
        ahead.wait()
    assert sorted(opened) == [shard.entry.name for shard in shards]
    size = sum(path.stat().st_size for path in folder.path.glob("train-*.tar"))
    assert ahead.bytes == size
    assert reports.stages == [("read ahead", size, "bytes")]
    assert reports.done == size


def test_positions_wait_for_the_end(folder: ShardFolder) -> None:
    shards, reports = (
        MappedShards(FolderSource(folder.path), ShardManifest.load(folder.path), "train"),
        Reports(),
    )
    ahead = shards.read_ahead(reports)
    rows = np.arange(134)
    shards.wait_until_ready()
    block = shards.take(rows, ("move",))
    assert reports.done == ahead.bytes
    np.testing.assert_array_equal(block["move"], folder.splits["train"]["move"])


def test_a_loader_reports_and_delivers_the_same(folder: ShardFolder) -> None:
    expected = [batch["value"].tolist() for batch in Loader(folder.path, batch_size=16)]
    reports = Reports()
    loader = Loader(folder.path, batch_size=16, progress=reports)
    assert [batch["value"].tolist() for batch in loader] == expected
    assert [stage for stage, _, _ in reports.stages] == ["read ahead"]
    assert [batch["value"].tolist() for batch in loader.for_rank(0, 1)] != expected  # the next epoch
    assert len(reports.stages) == 1


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


def test_copies_read_for_themselves_without_the_receiver(folder: ShardFolder, opened: list[str]) -> None:
    reports = Reports()
    loader = Loader(folder.path, progress=reports)
    early = pickle.loads(pickle.dumps(loader))
    wait_for_readers()
    opened.clear()
    next(iter(early))
    assert len(opened) >= len(folder.shards["train"])  # mapped, and read ahead unless they were checked
    assert reports.stages == []
    next(iter(loader))
    assert len(reports.stages) == 1
    late = pickle.loads(pickle.dumps(loader))
    opened.clear()
    next(iter(late))
    assert len(opened) == len(folder.shards["train"])  # only mapped


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_threads_of_its_parent(
    folder: ShardFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = LocalShard.open_file
    parent = os.getpid()

    def endless_in_parent(shard: LocalShard) -> Any:
        return Endless(shard) if os.getpid() == parent else open_file(shard)

    loader = Loader(folder.path)
    wait_for_readers()
    assert loader._selected is not None
    shards = loader._selected.source
    assert isinstance(shards, MappedShards)
    for shard in shards._shards:
        shard.checked = False
    monkeypatch.setattr(LocalShard, "open_file", endless_in_parent)
    ahead = shards.read_ahead(Reports())
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


def test_threads_end_with_the_loader(folder: ShardFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of(folder)
    monkeypatch.setattr(LocalShard, "open_file", lambda shard: Endless(shard))
    ahead = ReadAhead(shards)
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


def flip(path: Path) -> None:
    """Change the last byte of the numbers of a shard in place."""
    data = bytearray(path.read_bytes())
    data[data.index(b"000006.game_id.npy") + 640] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", [Loader, PositionDataset])
def test_a_changed_shard_is_refused_until_it_is_restored(folder: ShardFolder, kind: Any) -> None:
    path = folder.path / "train-000003.tar"
    before = path.read_bytes()
    flip(path)
    loader = kind(folder.path, fields=("value",))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"train-000003\.tar: the shard is truncated or altered"):
            next(iter(loader))
    path.write_bytes(before)
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))
    flip(path)
    with pytest.raises(StoreError, match=r"train-000003\.tar: the shard is truncated or altered"):
        next(iter(copy))
    path.write_bytes(before)


def test_copies_check_what_does_not_fit_into_the_memory(
    folder: ShardFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "available_memory", lambda: 1_000)
    with pytest.warns(UserWarning, match="exact mode will be slow"):
        loader = Loader(folder.path)
    copy = pickle.loads(pickle.dumps(loader))
    flip(folder.path / "train-000003.tar")
    with pytest.raises(StoreError, match=r"train-000003\.tar: the shard is truncated or altered"):
        next(iter(copy))
