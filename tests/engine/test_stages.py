"""Every stage gives the same bytes on every engine, also after deaths of workers and nodes.

Also tests the limits of tasks: their memory, the number held by the driver, and the checks of nodes.
"""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.engine import LOCAL, Engine, EngineOptions, open_engine
from hexdata.engine.local import LocalEngine
from hexdata.engine.node_check import open_node_check
from hexdata.engine.protocol import Machines, function_name
from hexdata.errors import BudgetError, EngineError, StoreError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.pipeline import Config, run_config
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.storage import as_path
from hexdata.store import Store
from hexdata.verify import verify_store

if TYPE_CHECKING:
    from upath import UPath

    from tests.conftest import CopyStore, StoreBytes

SHUFFLE = ShuffleOptions(seed=7, buckets=5, threads=1)


@pytest.fixture(scope="module")
def whole(
    odd_store: Path, tmp_path_factory: pytest.TempPathFactory, store_bytes: StoreBytes
) -> dict[str, str]:
    """The bytes of all stages of the odd store from this process."""
    import shutil

    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("whole") / "store")
    run_stages(store, LOCAL)
    return store_bytes(store)


def run_stages(store: Path, engine: Engine) -> None:
    shuffle_store(store, SHUFFLE, engine=engine)
    export_shards(store, ExportOptions(workers=1, shard_size=128, block_size=64), engine=engine)
    export_pickles(store, PicklesOptions(workers=1), engine=engine)


def hidden_files(store: Path) -> list[str]:
    return [path.name for path in store.rglob(".*") if path.name not in (".lock", ".work")]


def test_convert(
    engine: Engine, trmph_store: Path, tmp_path: Path, store_bytes: StoreBytes, monkeypatch: Any
) -> None:
    """With paths relative to the working directory of the caller."""
    monkeypatch.chdir(tmp_path)
    options = ConvertOptions(workers=2, val=0.15, test=0.1)
    Path("games").symlink_to(trmph_store.parent / "games")
    result = convert_sources("games", "store", options, engine=engine)
    assert result.rejected == 1
    assert store_bytes(Path("store")) == store_bytes(trmph_store)
    assert not hidden_files(Path("store"))


def test_shuffle_and_export(
    engine: Engine,
    odd_store: Path,
    copy_store: CopyStore,
    whole: dict[str, str],
    store_bytes: StoreBytes,
) -> None:
    store = copy_store(odd_store)
    run_stages(store, engine)
    assert store_bytes(store) == whole
    assert not hidden_files(store)
    log = (store / "logs" / "shuffle.log").read_text()
    assert all(f"bucket-{number:06d}.parquet: " in log for number in range(5))


def test_a_config_names_the_engine(
    cluster: Any,
    ray_engine: Engine,
    odd_store: Path,
    copy_store: CopyStore,
    whole: dict[str, str],
    store_bytes: StoreBytes,
) -> None:
    store = copy_store(odd_store)
    config = Config(
        store=str(store),
        engine=EngineOptions("ray", cluster.address),
        shuffle=SHUFFLE,
        export=ExportOptions(workers=1, shard_size=128, block_size=64),
        pickles=PicklesOptions(workers=1),
    )
    assert [stage.stage for stage in run_config(config).stages] == ["shuffle", "export", "pickles"]
    assert store_bytes(store) == whole


def test_verify(engine: Engine, odd_store: Path, copy_store: CopyStore) -> None:
    """The odd store has no real games, so only the check of its files is tested."""
    store = copy_store(odd_store)
    assert verify_store(store, engine=engine).checks[0].ok
    part = store / "positions" / "part-000001.parquet"
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    (check,) = verify_store(store, engine=engine).checks
    assert "part-000001.parquet: the file was altered" in check.detail


def test_errors_of_tasks_are_raised_unchanged(engine: Engine, odd_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(odd_store)
    shuffle_store(store, SHUFFLE)
    bucket = store / "shuffled" / "train" / "bucket-000002.parquet"
    bucket.write_bytes(b"PAR1" + bytes(bucket.stat().st_size - 8) + b"PAR1")
    with pytest.raises(StoreError, match=r"bucket-000002\.parquet"):
        export_pickles(store, PicklesOptions(workers=2), engine=engine)
    assert not hidden_files(store)


class ActingProgress(Silent):
    """Calls ``act`` at each step of a stage until it returns true."""

    def __init__(self, stage: str, act: Callable[[], bool]) -> None:
        self.target = stage
        self.act = act
        self.stage = ""
        self.done = False

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        self.stage = stage

    def advance(self, amount: int) -> None:
        if amount and self.stage == self.target and not self.done:
            self.done = self.act()


def interrupt() -> bool:
    raise KeyboardInterrupt


def test_an_interrupted_shuffle_is_resumed_by_the_other_engine(
    engine: Engine,
    ray_engine: Engine,
    odd_store: Path,
    copy_store: CopyStore,
    whole: dict[str, str],
    store_bytes: StoreBytes,
) -> None:
    store = copy_store(odd_store)
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(store, SHUFFLE, ActingProgress("sort", interrupt), engine=engine)
    assert "shuffle" not in Store.open(store).manifest.stages
    assert not hidden_files(store)
    other = ray_engine if engine is LOCAL else LOCAL
    assert shuffle_store(store, SHUFFLE, engine=other).resumed > 0
    shuffled = {name: digest for name, digest in whole.items() if name.startswith("shuffled")}
    assert {k: v for k, v in store_bytes(store).items() if k.startswith("shuffled")} == shuffled


def kill_a_worker() -> bool:
    """Kill one process that runs a task or has just finished one."""
    return bool(signal_a_worker(signal.SIGKILL, "ray::hexdata", "ray::IDLE"))


def signal_a_worker(number: signal.Signals, *titles: str) -> psutil.Process | None:
    """Send a signal to a worker with one of these titles, and return it."""
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(titles):
                process.send_signal(number)
                return process
        except psutil.NoSuchProcess:  # it ended between the two calls
            continue
    return None


def test_a_killed_worker_changes_nothing(
    ray_engine: Engine,
    odd_store: Path,
    copy_store: CopyStore,
    whole: dict[str, str],
    store_bytes: StoreBytes,
) -> None:
    store = copy_store(odd_store)
    watcher = ActingProgress("sort", kill_a_worker)
    shuffle_store(store, SHUFFLE, watcher, engine=ray_engine)
    run_stages(store, ray_engine)
    assert watcher.done
    assert store_bytes(store) == whole
    assert not hidden_files(store)


def test_a_removed_node_changes_nothing(
    cluster: Any,
    ray_engine: Engine,
    third_node: Callable[..., Any],
    odd_store: Path,
    copy_store: CopyStore,
    whole: dict[str, str],
    store_bytes: StoreBytes,
) -> None:
    store = copy_store(odd_store)
    with third_node() as node:

        def remove() -> bool:
            cluster.remove_node(node, allow_graceful=False)
            return True

        watcher = ActingProgress("sort", remove)
        shuffle_store(store, SHUFFLE, watcher, engine=ray_engine)
    run_stages(store, ray_engine)
    assert watcher.done
    assert store_bytes(store) == whole
    assert not hidden_files(store)


# --- limits of tasks and of the driver ---------------------------------------------------


class Recorder(LocalEngine):
    """The local engine with the interface of a remote one. Records workers and memory of each function."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[int, int]] = {}

    @property
    def machines(self) -> Machines:
        return Machines(2, 2, separate=True)

    def run(
        self,
        function: Callable[..., Any],
        tasks: Iterable[tuple[Any, ...]],
        *,
        workers: int,
        memory: int,
        cores: int = 1,
    ) -> Iterator[tuple[int, Any]]:
        self.calls[function_name(function)] = (workers, memory)
        return super().run(function, tasks, workers=1, memory=memory)


def test_the_tasks_of_a_machine_fit_into_its_budget(trmph_store: Path, tmp_path: Path) -> None:
    recorder, budget, store = Recorder(), 1_000_000_000, tmp_path / "store"
    options = ConvertOptions(memory=budget, val=0.15, test=0.1)
    convert_sources(trmph_store.parent / "games", store, options, engine=recorder)
    shuffle_store(store, ShuffleOptions(seed=7, buckets=5, memory=budget), engine=recorder)
    export_shards(store, ExportOptions(memory=budget), engine=recorder)
    export_pickles(store, PicklesOptions(memory=budget), engine=recorder)
    assert set(recorder.calls) == {
        "read_source",
        "publish_source",
        "write_part",
        "write_files",
    }
    assert recorder.calls["write_part"] == (1, budget), "a pass has all cores of a machine"
    for workers, memory in recorder.calls.values():
        assert 100_000_000 < memory <= budget // workers


MAX_HELD = 15
"""Tasks of four workers: running, waiting, and in the queues of the process pool."""


def test_the_driver_releases_tasks_and_results(engine: Engine) -> None:
    """It keeps neither finished tasks nor tasks that have not been submitted."""
    pending: weakref.WeakSet[frozenset[int]] = weakref.WeakSet()
    results: weakref.WeakSet[frozenset[int]] = weakref.WeakSet()

    def tasks() -> Iterator[tuple[frozenset[int]]]:
        for number in range(60):
            task = frozenset({number})
            pending.add(task)
            yield (task,)

    most = 0
    done = 0
    for _, result in engine.run(frozenset, tasks(), workers=2, memory=200 << 20):
        done += 1
        results.add(result)
        if max(len(pending), len(results)) > MAX_HELD:
            gc.collect()  # objects in cycles are released too
        most = max(most, len(pending), len(results))
    assert done == 60
    assert most <= MAX_HELD


RESOURCES = "__import__('ray').get_runtime_context().get_assigned_resources()"


def test_cpu_and_memory_of_tasks_are_declared_to_ray(ray_engine: Engine) -> None:
    memory = 300 << 20
    ((_, taken),) = ray_engine.run(eval, [(RESOURCES,)], workers=1, memory=memory)
    assert taken["CPU"] == 1
    assert taken["memory"] > memory  # plus the memory of a Ray worker
    with pytest.raises(BudgetError, match="no machine of the cluster is large enough for a task") as caught:
        list(ray_engine.run(eval, [("1",)], workers=1, memory=memory, cores=2))
    assert caught.value.found == "1 CPUs"
    ((_, taken),) = ray_engine.run_light(eval, [(RESOURCES,)], workers=1)
    assert taken["CPU"] == 1
    assert taken["memory"] > 150 << 20


def test_repeated_tasks_are_reported(cluster: Any, ray_engine: Engine, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    die_once = f"7 if __import__('os').path.exists({str(mark)!r}) else "
    die_once += f"(open({str(mark)!r}, 'w').close(), __import__('os')._exit(9))"
    notes: list[str] = []
    with open_engine("ray", cluster.address, notes.append) as engine:
        assert list(engine.run(eval, [(die_once,)], workers=1, memory=200 << 20)) == [(0, 7)]
    assert notes == ["eval is repeated, attempt 2 of 5: worker crashed"]


def test_checks_of_another_machine_work_in_an_object_store(bucket: UPath) -> None:
    """The machine must be able to read and write there; no object is left."""
    (bucket / "input").write_bytes(b"games")
    with open_node_check([bucket / "input"], bucket) as check:
        assert check.run("there") == {}
        check.require("there", {}, "there")
        with pytest.raises(EngineError, match="does not see the same files") as caught:
            check.require("elsewhere", {}, "elsewhere")  # its file does not exist
        assert caught.value.path == str(bucket)
        (bucket / "input").write_bytes(b"more games")
        assert check.run("there") == {str(bucket / "input"): "a file of another size"}
        (bucket / "input").unlink()
        assert check.run("there") == {str(bucket / "input"): "does not exist"}
    assert list(bucket.iterdir()) == []
    gone = as_path("s3://hexdata-no-such-bucket")
    with open_node_check([], bucket) as check:
        elsewhere = replace(check, folder=gone)
        assert list(elsewhere.run("there")) == [str(gone)]


def test_paths_are_checked_on_a_node_that_joins_later(
    ray_engine: Engine, third_node: Callable[..., Any], tmp_path: Path
) -> None:
    """The file is deleted before the third node joins, so only that node does not see it."""
    file = tmp_path / "input"
    file.write_text("games")
    ray_engine.require([file], tmp_path)
    file.unlink()
    assert len(list(ray_engine.run(eval, [("1",)] * 4, workers=1, memory=200 << 20))) == 4
    with third_node() as node:
        try:
            with pytest.raises(EngineError, match="does not see the same files under this path") as caught:
                for _ in ray_engine.run(eval, repeat(("1",)), workers=1, memory=200 << 20):
                    pass  # until a task is assigned to that node, which may take a second
        finally:
            ray_engine.require([])
    assert node.node_id[:8] in caught.value.reason
    assert caught.value.path == str(file)
    assert not hidden_files(tmp_path)
