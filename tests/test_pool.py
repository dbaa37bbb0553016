"""Number of workers of a stage, from cores and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from hexdata import pool
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.engine import protocol
from hexdata.engine.local import LocalEngine
from hexdata.engine.protocol import Machines
from hexdata.errors import BudgetError, ConfigError
from hexdata.export import ExportOptions, PicklesOptions, export_shards
from hexdata.pool import LEADER_MEMORY, default_workers, resident_bytes
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.system import has_children

if TYPE_CHECKING:
    from tests.conftest import DemoTrmph


def test_there_is_a_worker_for_each_core_we_may_use() -> None:
    assert 1 <= default_workers() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("options", [ConvertOptions, ExportOptions, PicklesOptions])
def test_a_budget_that_cannot_be_kept_is_refused(options) -> None:
    each = options.WORKER_MEMORY
    with pytest.raises(BudgetError, match="too little memory for 1 worker"):
        options(memory=each - 1)
    of_three = LEADER_MEMORY + 3 * each
    with pytest.raises(BudgetError, match="too little memory for 3 workers"):
        options(memory=of_three - 1, workers=3)
    assert options(memory=of_three, workers=3).processes(cores=2) == 3
    assert options(memory=of_three).processes(cores=9) == 3
    assert options(memory=9 * each).processes(cores=2) == 2
    assert options(memory=2 * each).processes(cores=9) == 1, "the process that leads two workers counts too"
    with pytest.raises(ConfigError, match="workers"):
        options(workers=0)


def test_little_work_needs_no_workers_unless_they_are_requested() -> None:
    here, apart = Machines(1, 4, separate=False), Machines(2, 4, separate=True)
    assert [here.cores_for(work) for work in (0.5, 50.0)] == [1, 4]
    assert [apart.cores_for(work) for work in (0.5, 50.0)] == [4, 4], "their workers run already"
    assert ConvertOptions(memory=10**10).processes(here.cores_for(0.5)) == 1
    assert ConvertOptions(memory=10**10, workers=3).processes(here.cores_for(0.5)) == 3


@pytest.mark.parametrize(("little", "workers"), [(2.0, 1), (0.0, 4)])
def test_stages_start_workers_for_much_work_only(
    little: float, workers: int, tmp_path: Path, demo_trmph: DemoTrmph, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Recorder(LocalEngine):
        @property
        def machines(self) -> Machines:
            return Machines(1, 4, separate=False)

        def run(self, function: Any, tasks: Any, *, workers: int, **limits: Any) -> Any:
            started.append(workers)
            return super().run(function, tasks, **limits, workers=1)

    monkeypatch.setattr(protocol, "LITTLE_WORK", little)
    engine, memory = Recorder(), 4_000_000_000
    inputs, store = demo_trmph(tmp_path, games=12, files=6), tmp_path / "store"
    convert_sources(inputs, store, ConvertOptions(memory=memory), engine=engine)
    shuffle_store(store, ShuffleOptions(threads=1))
    export_shards(store, ExportOptions(memory=memory), engine=engine)
    assert started == [workers] * 3, "read, write and export"


@pytest.mark.parametrize(
    ("limit", "expected"), [("5000000", 3_999_000), ("max", None), (None, None), ("500", 0), ("1" * 18, None)]
)
def test_the_limit_of_a_container_bounds_the_available_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, expected: int | None
) -> None:
    monkeypatch.setattr(pool, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**10))
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n", encoding="ascii")
    (tmp_path / "memory.stat").write_text("anon 1001000\nfile 7000000\n", encoding="ascii")
    assert pool.available_memory() == (10**10 if expected is None else expected)


SLEEP = "import time; print(flush=True); time.sleep(600)"
GRANDCHILD = f"""
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", {SLEEP!r}]) as child:
    pass
"""


@pytest.mark.parametrize(("code", "processes"), [(SLEEP, 2), (GRANDCHILD, 3)])
def test_resident_memory_includes_children_and_theirs(code: str, processes: int) -> None:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert has_children()
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        assert len(family) >= processes
        least = sum(process.memory_info().rss for process in family[1:])
        assert resident_bytes() > least + 1_000_000 * len(family)
        for process in (*psutil.Process(child.pid).children(), psutil.Process(child.pid)):
            process.kill()


def test_a_process_without_children_measures_itself() -> None:
    code = """
import os, subprocess, sys
import psutil
from hexdata.pool import resident_bytes
from hexdata.system import has_children

psutil.Process.children = None
assert not has_children()
assert 0.5 < resident_bytes() / psutil.Process().memory_info().rss < 2
ended = subprocess.Popen([sys.executable, "-c", ""])
os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
assert has_children(), "a child that has ended until its exit status is read"
assert ended.wait() == 0
assert not has_children()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
