"""Shuffles in an object store: the same bytes as on a disk, also after failures and kills."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.errors import ConfigError, StoreError, StoreLockedError
from hexdata.export import ExportOptions, export_shards
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store
from hexdata.store import Store
from tests.conftest import DERIVED
from tests.object_store import Fault
from tests.pairs import FULL

if TYPE_CHECKING:
    from upath import UPath

    from tests.conftest import StoreBytes
    from tests.object_store import ObjectStore

SHUFFLE = ShuffleOptions(seed=5, buckets=3, threads=2)
EXPORT = ExportOptions(shard_size=512, block_size=128, workers=1)


def put_store(local: Path, remote: UPath) -> None:
    for path in local.rglob("*"):
        if path.is_file() and path.relative_to(local).as_posix() not in DERIVED:
            (remote / path.relative_to(local).as_posix()).write_bytes(path.read_bytes())


def bytes_of(store: UPath) -> dict[str, str]:
    """Return the SHA-256 of each object of a dataset, by its path below the store."""
    found = {path[len(store.path) + 1 :]: path for path in store.fs.find(store.path)}
    return {
        name: hashlib.sha256(store.fs.cat_file(path)).hexdigest()
        for name, path in found.items()
        if not name.startswith((".", "logs/"))
    }


@pytest.fixture
def remote(bucket: UPath, trmph_store: Path) -> UPath:
    """Return a converted store in a bucket."""
    put_store(trmph_store, bucket / "store")
    return bucket / "store"


@pytest.fixture(scope="module")
def expected(
    trmph_store: Path, tmp_path_factory: pytest.TempPathFactory, store_bytes: StoreBytes
) -> dict[str, str]:
    """Return the bytes of the store, shuffled and exported on a disk."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("expected") / "store")
    shuffle_store(store, SHUFFLE)
    export_shards(store, EXPORT)
    return {name: digest for name, digest in store_bytes(store).items() if name not in DERIVED}


def test_the_bytes_are_the_same_as_on_a_disk(remote: UPath, expected: dict[str, str], tmp_path: Path) -> None:
    plan = plan_shuffle(remote, SHUFFLE)
    result = shuffle_store(remote, SHUFFLE)
    assert plan.store == str(remote)
    assert result.positions == plan.positions
    export_shards(remote, EXPORT)
    assert bytes_of(remote) == expected
    assert shuffle_store(remote, SHUFFLE).already_done
    assert export_shards(remote, EXPORT).already_done
    log = (remote / "logs" / "shuffle.log").read_text()
    assert log.count("rows in") == result.buckets["train"] + result.buckets["val"] + result.buckets["test"]
    left = [path for path in (tmp_path / "hexdata-cache").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} == {"locks"}


def test_another_shuffle_replaces_the_first(remote: UPath, expected: dict[str, str]) -> None:
    shuffle_store(remote, ShuffleOptions(seed=6, buckets=4))
    export_shards(remote, EXPORT)
    before = (remote / "manifest.json").read_bytes()
    with pytest.raises(ConfigError, match="--replace"):
        shuffle_store(remote, SHUFFLE)
    assert (remote / "manifest.json").read_bytes() == before
    shuffle_store(remote, replace(SHUFFLE, replace=True))
    assert "export" not in Store.open(remote).manifest.stages
    assert not (remote / "shards").exists()
    export_shards(remote, EXPORT)
    assert bytes_of(remote) == expected


def test_temporary_failures_of_the_server(
    remote: UPath, expected: dict[str, str], object_store: ObjectStore
) -> None:
    object_store.fail(
        Fault("GET", r"/positions/", status=500, count=3),
        Fault("GET", r"/positions/", cut=1000, count=2),
        Fault("PUT", r"/shuffled/", status=503, count=2),
        Fault("PUT", r"/shuffled/", status=500, lose=True),
        Fault("GET", r"/shuffled/", cut=100, skip=3),
        Fault("PUT", r"/shards/", delay=1),
        Fault("PUT", r"/manifest.json", status=500, lose=True, count=2),
    )
    shuffle_store(remote, SHUFFLE)
    export_shards(remote, EXPORT)
    assert object_store.all_met()
    assert bytes_of(remote) == expected


def test_a_permanent_failure_of_the_server_publishes_nothing(
    remote: UPath, expected: dict[str, str], object_store: ObjectStore
) -> None:
    before = (remote / "manifest.json").read_bytes()
    object_store.fail(Fault("PUT", r"/shuffled/val/", status=403, count=1000))
    with pytest.raises(OSError, match="as asked"):
        shuffle_store(remote, SHUFFLE)
    assert (remote / "manifest.json").read_bytes() == before
    object_store.fail()
    assert shuffle_store(remote, SHUFFLE).resumed > 0
    export_shards(remote, EXPORT)
    assert bytes_of(remote) == expected


def test_one_process_writes_at_a_time(remote: UPath) -> None:
    store = Store.open(remote)
    with store.writing("shuffle"), pytest.raises(StoreLockedError, match=f"process {os.getpid()}"):
        shuffle_store(remote, SHUFFLE)


def test_another_machine_that_holds_the_lock_is_named(
    remote: UPath, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another cache folder simulates another machine, which shares no kernel lock."""
    store = Store.open(remote)
    with store.writing("shuffle"):
        monkeypatch.setenv("HEXDATA_CACHE", str(tmp_path / "another"))
        with pytest.raises(StoreLockedError, match=rf"process {os.getpid()} on .* \(shuffle\)"):
            export_shards(remote, EXPORT)
    shuffle_store(remote, SHUFFLE)


def test_a_manifest_published_by_another_process_is_not_overwritten(remote: UPath) -> None:
    store = Store.open(remote)
    with store.writing("shuffle"):
        content = (remote / "manifest.json").read_bytes()
        (remote / "manifest.json").write_bytes(content + b"\n")
        with pytest.raises(StoreError, match="another process has changed this store"):
            store.manifest.save(store.path)
        assert (remote / "manifest.json").read_bytes() == content + b"\n"


def assert_complete(store: UPath) -> None:
    """Check that every object in the manifest exists and has its digest."""
    for name, facts in Store.open(store).manifest.files.items():
        assert hashlib.sha256((store / name).read_bytes()).hexdigest() == facts.sha256, name


def test_resuming_after_another_machine_has_shuffled(
    remote: UPath, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first machine must not resume its old shuffle under the other machine's manifest."""
    fails = Fault("PUT", r"/shuffled/", status=403, count=1000, skip=4)
    object_store.fail(fails)
    with pytest.raises(OSError, match="as asked"):
        shuffle_store(remote, SHUFFLE)
    object_store.fail()
    with monkeypatch.context() as another:
        another.setenv("HEXDATA_CACHE", str(tmp_path / "another"))
        shuffle_store(remote, ShuffleOptions(seed=6, buckets=6))
    assert_complete(remote)
    object_store.fail(fails)
    with pytest.raises(OSError, match="as asked"):
        shuffle_store(remote, replace(SHUFFLE, replace=True))
    object_store.fail()
    assert_complete(remote)


class IntrudingProgress(Silent):
    """Writes an object under a name that a stage is about to use, after the stage has checked the name."""

    def __init__(self, stage: str, path: UPath) -> None:
        self._stage, self._path = stage, path
        self._active = False

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        self._active = stage == self._stage

    def advance(self, amount: int) -> None:
        if self._active:
            self._path.write_bytes(b"another's")
            self._active = False


def test_objects_of_another_process_are_not_overwritten(remote: UPath, expected: dict[str, str]) -> None:
    """A process may have lost its lock without noticing. The next run removes the foreign object."""
    for stage, name, run in (
        (
            "sort",
            "shuffled/test/bucket-000000.parquet",
            partial(shuffle_store, remote, SHUFFLE),
        ),
        ("export", "shards/train-000002.tar", partial(export_shards, remote, EXPORT)),
    ):
        with pytest.raises(StoreError, match=f"{name}: the uploaded object differs from the file"):
            run(IntrudingProgress(stage, remote / name))
        assert (remote / name).read_bytes() == b"another's"
        run(Silent())
    assert bytes_of(remote) == expected


RUN = """
import sys
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
shuffle_store(sys.argv[1], ShuffleOptions(seed=5, buckets=3, threads=2))
export_shards(sys.argv[1], ExportOptions(shard_size=512, block_size=128))
"""


def test_killed_at_any_request(remote: UPath, expected: dict[str, str], object_store: ObjectStore) -> None:
    """The same command resumes and gives the same bytes, and readers never see an incomplete result."""
    for request in (1, 4, 9, 14) if FULL else (4, 9):
        object_store.fail(Fault("PUT", r"/store/", delay=600, count=1, skip=request))
        with subprocess.Popen([sys.executable, "-c", RUN, str(remote)], stderr=subprocess.PIPE) as process:
            assert object_store.wait_until_met(process, 300), process.stderr and process.stderr.read()
            process.send_signal(signal.SIGKILL)
        object_store.fail()
        manifest = Store.open(remote).manifest
        for name, facts in manifest.files.items():
            assert (remote / name).stat().st_size == facts.bytes
    shuffle_store(remote, SHUFFLE)
    export_shards(remote, EXPORT)
    assert bytes_of(remote) == expected
