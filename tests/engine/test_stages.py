"""Every stage over every engine: the same bytes, whoever did the work, and whatever died meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.engine import LOCAL, Engine
from hexdata.errors import StoreError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, plan, plan_shuffle, shuffle_store
from hexdata.store import Store
from hexdata.verify import verify_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore, StoreBytes

MOST_ROWS = 120
"""What makes eight slices of the odd store."""
SHUFFLE = ShuffleOptions(seed=7, buckets=5, threads=1)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_ROWS", MOST_ROWS)


@pytest.fixture(scope="module")
def whole(
    odd_store: Path, tmp_path_factory: pytest.TempPathFactory, store_bytes: StoreBytes
) -> dict[str, str]:
    """The bytes of all stages of the odd store, by one worker of this process, in units of another size."""
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
    """Inputs and store are given relative to where the caller stands."""
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
    assert plan_shuffle(store, SHUFFLE, engine=engine).slices == 8
    run_stages(store, engine)
    assert store_bytes(store) == whole
    assert not hidden_files(store)
    log = (store / "logs" / "shuffle.log").read_text()
    assert all(f"bucket-{number:06d}.parquet: " in log for number in range(5))


def test_verify(engine: Engine, odd_store: Path, copy_store: CopyStore) -> None:
    """The made-up store has no real games, so only what is said of its files counts here."""
    store = copy_store(odd_store)
    assert verify_store(store, engine=engine).checks[0].ok
    part = store / "positions" / "part-000001.parquet"
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    (check,) = verify_store(store, engine=engine).checks
    assert "part-000001.parquet: the file was altered" in check.detail


def test_an_error_of_a_task_comes_out_whole(engine: Engine, odd_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(odd_store)
    shuffle_store(store, SHUFFLE)
    bucket = store / "shuffled" / "train" / "bucket-000002.parquet"
    bucket.write_bytes(b"PAR1" + bytes(bucket.stat().st_size - 8) + b"PAR1")
    with pytest.raises(StoreError, match=r"bucket-000002\.parquet"):
        export_pickles(store, PicklesOptions(workers=2), engine=engine)
    assert not hidden_files(store)


class At(Silent):
    """Does something at each step of a stage until it says that it has."""

    def __init__(self, stage: str, act: Callable[[], bool]) -> None:
        self.wanted = stage
        self.act = act
        self.stage = ""
        self.done = False

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        self.stage = stage

    def advance(self, amount: int) -> None:
        if amount and self.stage == self.wanted and not self.done:
            self.done = self.act()


def interrupt() -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stage", ["scatter", "sort"])
def test_interrupted_and_gone_on_with_by_the_other_engine(
    engine: Engine,
    ray_engine: Engine,
    stage: str,
    odd_store: Path,
    copy_store: CopyStore,
    whole: dict[str, str],
    store_bytes: StoreBytes,
) -> None:
    store = copy_store(odd_store)
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(store, SHUFFLE, At(stage, interrupt), engine=engine)
    assert "shuffle" not in Store.open(store).manifest.stages
    assert not hidden_files(store)
    other = ray_engine if engine is LOCAL else LOCAL
    assert shuffle_store(store, SHUFFLE, engine=other).resumed > 0
    shuffled = {name: digest for name, digest in whole.items() if name.startswith("shuffled")}
    assert {k: v for k, v in store_bytes(store).items() if k.startswith("shuffled")} == shuffled


def kill_a_worker() -> bool:
    """Kill one process that is at a task of ours."""
    for process in psutil.Process().children(recursive=True):
        try:
            if any(part.startswith("ray::hexdata") for part in process.cmdline()):
                process.send_signal(signal.SIGKILL)
                return True
        except psutil.NoSuchProcess:  # it ended between the two calls
            continue
    return False


@pytest.mark.parametrize("stage", ["scatter", "sort"])
def test_a_killed_worker_changes_nothing(
    ray_engine: Engine,
    stage: str,
    odd_store: Path,
    copy_store: CopyStore,
    whole: dict[str, str],
    store_bytes: StoreBytes,
) -> None:
    store = copy_store(odd_store)
    watcher = At(stage, kill_a_worker)
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

        watcher = At("scatter", remove)
        shuffle_store(store, SHUFFLE, watcher, engine=ray_engine)
    run_stages(store, ray_engine)
    assert watcher.done
    assert store_bytes(store) == whole
    assert not hidden_files(store)
