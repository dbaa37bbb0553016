"""Passes that one task sorts on all cores of a machine, with Ray and an object store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from hexdata.engine.protocol import Machines
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.conftest import DERIVED
from tests.object_store import Fault
from tests.shuffle.test_objects import bytes_of, put_store

if TYPE_CHECKING:
    from upath import UPath

    from tests.conftest import CopyStore, StoreBytes
    from tests.object_store import ObjectStore

SHUFFLE = ShuffleOptions(seed=5, buckets=6, threads=2)
SCRIPT = """
import sys
import ray
from hexdata.engine import open_engine
from hexdata.shuffle import ShuffleOptions, shuffle_store
ray.init(
    address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20
)
with open_engine("ray", note=print) as engine:
    print(engine.machines.cores_per_task(2, 500_000_000), "cores per task", flush=True)
    shuffle_store(sys.argv[1], ShuffleOptions(seed=5, buckets=6, threads=2), engine=engine)
ray.shutdown()
"""


def test_a_task_takes_all_cores_of_a_machine() -> None:
    def cores(*sizes: tuple[int, float], most: int = 16, memory: int = 10) -> int:
        return Machines(len(sizes), 64, separate=True, sizes=sizes).cores_per_task(most, memory)

    assert cores((16, 160), (16, 160)) == 16
    assert cores((16, 160), (16, 160), most=4) == 4
    assert cores((16, 80), (16, 160)) == 8  # the memory of the first machine suffices for 8 cores
    assert cores((2, 500), (16, 500)) == 16  # the small machine has less than a fifth of the cores
    assert cores((8, 500), (16, 500)) == 8
    assert cores((1, 500), (1, 500)) == 1
    assert cores((16, 5), (16, 5)) == 1  # too little memory for any task
    assert Machines(3, 4, separate=True).cores_per_task(4, 10) == 4


def test_a_pass_is_sorted_again_after_its_worker_was_killed(
    trmph_store: Path,
    bucket: UPath,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    object_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    local = copy_store(trmph_store)
    shuffle_store(local, SHUFFLE)
    expected = {name: digest for name, digest in store_bytes(local).items() if name not in DERIVED}
    store = bucket / "store"
    put_store(trmph_store, store)
    object_store.requests()
    object_store.fail(Fault("PUT", r"/shuffled/", delay=600, count=2, skip=2))
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(store)], stdout=subprocess.PIPE) as process:
        assert object_store.wait_until_met(process, 150)
        assert store.fs.find((store / "shuffled").path)
        (worker,) = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if child.cmdline()[:1] and child.cmdline()[0].startswith("ray::hexdata write_part")
        ]
        worker.kill()
        object_store.fail()
        output = process.communicate(timeout=150)[0].decode()
    assert process.returncode == 0, output
    assert output.startswith("2 cores per task")
    assert "write_part is repeated, attempt 2 of 5" in output
    assert bytes_of(store) == expected
