"""Number of workers of a stage, from cores and memory."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from hexdata import system
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.engine import Engine, local
from hexdata.errors import BudgetError, ConfigError
from hexdata.export import ExportOptions, PicklesOptions, export_shards
from hexdata.pool import LEADER_MEMORY
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.system import resident_bytes


@pytest.mark.parametrize("options", [ConvertOptions, ExportOptions, PicklesOptions])
def test_a_budget_that_cannot_be_kept_is_refused(options):
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


@pytest.mark.parametrize(("little", "workers"), [(2.0, 1), (0.0, 4)])
def test_stages_start_workers_for_much_work_only(little, workers, tmp_path, demo_trmph, monkeypatch):
    started = []

    class Recorder(Engine):
        cores = 4

        def run(self, function, tasks, *, workers, **limits):
            started.append(workers)
            return super().run(function, tasks, **limits, workers=1)

    monkeypatch.setattr(local, "_LITTLE_WORK", little)
    engine, memory = Recorder(), 4_000_000_000
    inputs, store = demo_trmph(tmp_path, games=12, files=6), tmp_path / "store"
    convert_sources(inputs, store, ConvertOptions(memory=memory), engine=engine)
    shuffle_store(store, ShuffleOptions(threads=1))
    export_shards(store, ExportOptions(memory=memory), engine=engine)
    assert started == [workers] * 4, "read, write, add columns and export"


@pytest.mark.parametrize(
    ("limit", "expected"), [("5000000", 3_999_000), ("max", None), (None, None), ("500", 0), ("1" * 18, None)]
)
def test_the_limit_of_a_container_bounds_the_available_memory(tmp_path, monkeypatch, limit, expected):
    monkeypatch.setattr(system, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**10))
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n", encoding="ascii")
    (tmp_path / "memory.stat").write_text("anon 1001000\nfile 7000000\n", encoding="ascii")
    assert system.available_memory() == (10**10 if expected is None else expected)


SLEEP = "import time; print(flush=True); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"


def test_resident_memory_includes_children_and_theirs():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        assert len(family) >= 3
        least = sum(process.memory_info().rss for process in family[1:])
        assert resident_bytes() > least + 1_000_000 * len(family)
        for process in (*psutil.Process(child.pid).children(), psutil.Process(child.pid)):
            process.kill()
