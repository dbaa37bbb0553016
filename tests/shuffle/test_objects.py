"""Shuffles and exports in an object store: the same bytes as on a disk, also after failures and kills."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from hexdata.errors import ConfigError, StoreError
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store
from hexdata.store import Store
from tests.conftest import DERIVED
from tests.kit.whole import SHUFFLE, STAGES
from tests.object_store import Fault
from tests.pairs import FULL


def bytes_of(store):
    """Return the SHA-256 of each object of a dataset, by its path below the store."""
    found = {path[len(store.path) + 1 :]: path for path in store.fs.find(store.path)}
    return {
        name: hashlib.sha256(store.fs.cat_file(path)).hexdigest()
        for name, path in found.items()
        if not name.startswith((".", "logs/"))
    }


@pytest.fixture
def remote(bucket, trmph_store):
    """A converted store in a bucket."""
    for path in trmph_store.rglob("*"):
        name = path.relative_to(trmph_store).as_posix()
        if path.is_file() and name not in DERIVED:
            (bucket / "store" / name).write_bytes(path.read_bytes())
    return bucket / "store"


@pytest.fixture(scope="module")
def expected(shuffled_store, tmp_path_factory, store_bytes):
    """The bytes of the store, shuffled and exported on a disk."""
    store = shutil.copytree(shuffled_store, tmp_path_factory.mktemp("expected") / "store")
    STAGES["shards"](store)
    return {name: digest for name, digest in store_bytes(store).items() if name not in DERIVED}


def run_both(store):
    return [STAGES[stage](store) for stage in ("shuffle", "shards")]


def test_another_shuffle_replaces_the_first_if_it_may_remove_it(remote, expected):
    shuffle_store(remote, ShuffleOptions(seed=6, buckets=4))
    STAGES["shards"](remote)
    before = (remote / "manifest.json").read_bytes()
    with pytest.raises(ConfigError, match="--replace"):
        STAGES["shuffle"](remote)
    assert (remote / "manifest.json").read_bytes() == before
    shuffle_store(remote, replace(SHUFFLE, replace=True))
    assert "export" not in Store.open(remote).manifest.stages
    assert not (remote / "shards").exists()
    STAGES["shards"](remote)
    assert bytes_of(remote) == expected


def test_the_bytes_are_the_same_as_on_a_disk_whatever_fails(remote, expected, object_store, tmp_path):
    object_store.fail(
        Fault("GET", r"/positions/", status=500, count=3),
        Fault("GET", r"/positions/", cut=1000, count=2),
        Fault("PUT", r"/shuffled/", status=503, count=2),
        Fault("PUT", r"/shuffled/", status=500, lose=True),
        Fault("GET", r"/shuffled/", cut=100, skip=3),
        Fault("PUT", r"/shards/", delay=1),
        Fault("PUT", r"/manifest.json", status=500, lose=True, count=2),
    )
    plan = plan_shuffle(remote, SHUFFLE)
    results = run_both(remote)
    assert object_store.all_met()
    assert (plan.store, plan.positions) == (str(remote), results[0].positions)
    assert bytes_of(remote) == expected
    assert all(result.already_done for result in run_both(remote))
    assert not [path for path in (tmp_path / "hexdata-cache").rglob("*") if path.is_file()]


class IntrudingProgress(Silent):
    """Writes an object under a name that a stage is about to use, after the stage has checked the name."""

    def __init__(self, step, path):
        self.step, self.path, self.is_active = step, path, False

    def begin(self, step, total, unit):
        self.is_active = step == self.step

    def advance(self, amount):
        if self.is_active:
            self.path.write_bytes(b"another's")
            self.is_active = False


def test_objects_of_another_process_are_not_overwritten(remote, expected):
    """A process may have lost its lock without noticing. The next run removes the foreign object."""
    for stage, step, name in (
        ("shuffle", "sort", "shuffled/test/bucket-000000.parquet"),
        ("shards", "export", "shards/train-000002.tar"),
    ):
        with pytest.raises(StoreError, match=f"{name}: the object differs"):
            STAGES[stage](remote, IntrudingProgress(step, remote / name))
        assert (remote / name).read_bytes() == b"another's"
        STAGES[stage](remote)
    assert bytes_of(remote) == expected


RUN = (
    "import sys; from tests.kit.whole import STAGES; [STAGES[s](sys.argv[1]) for s in ('shuffle', 'shards')]"
)


def test_killed_at_any_request(remote, expected, object_store):
    """The same command resumes and gives the same bytes, and readers never see an incomplete result."""
    for request in (1, 4, 9, 14) if FULL else (4, 9):
        object_store.fail(Fault("PUT", r"/store/", delay=600, count=1, skip=request))
        with subprocess.Popen([sys.executable, "-c", RUN, str(remote)], stderr=subprocess.PIPE) as process:
            assert object_store.wait_until_met(process, 300), process.stderr and process.stderr.read()
            process.send_signal(signal.SIGKILL)
        object_store.fail()
        for name, facts in Store.open(remote).manifest.files.items():
            assert (remote / name).stat().st_size == facts.bytes
    run_both(remote)
    assert bytes_of(remote) == expected


def test_resuming_after_another_machine_has_shuffled(remote, object_store, monkeypatch, tmp_path):
    """The first machine must not resume its old shuffle under the other machine's manifest."""

    def fail(options):
        object_store.fail(Fault("PUT", r"/shuffled/", status=403, count=1000, skip=4))
        with pytest.raises(StoreError, match="as asked"):
            shuffle_store(remote, options)
        object_store.fail()

    def check():
        for name, facts in Store.open(remote).manifest.files.items():
            assert hashlib.sha256((remote / name).read_bytes()).hexdigest() == facts.sha256, name

    fail(SHUFFLE)
    with monkeypatch.context() as another:
        another.setenv("HEXDATA_CACHE", str(tmp_path / "another"))
        shuffle_store(remote, ShuffleOptions(seed=6, buckets=6))
    check()
    fail(replace(SHUFFLE, replace=True))
    check()
