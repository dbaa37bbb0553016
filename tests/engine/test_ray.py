"""The Ray engine: deaths, refusals of machines and tasks, and errors.

The tasks are expressions for ``eval``, because workers cannot import this module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

import hexdata
from hexdata.engine import open_engine
from hexdata.errors import BudgetError, ConfigError, EngineError

MEMORY = 200 << 20
PID = "__import__('os').getpid()"
WAIT = "__import__('signal').pause()"


def logged(log, number, then):
    """Return an expression that appends its number to a file and evaluates ``then``."""
    return f"(open({str(log)!r}, 'a').write('{number}\\n'), {then})[-1]"


def test_only_the_task_of_a_dead_worker_is_repeated(ray_engine, tmp_path):
    log, mark = tmp_path / "log", tmp_path / "mark"
    die_once = f"7 if __import__('os').path.exists({str(mark)!r}) else "
    die_once += f"(open({str(mark)!r}, 'w').close(), __import__('os')._exit(9))"
    tasks = [(logged(log, number, die_once if number == 3 else "7"),) for number in range(8)]
    assert set(dict(ray_engine.run(eval, tasks, workers=1, memory=MEMORY)).values()) == {7}
    runs = Counter(int(line) for line in log.read_text().split())
    assert runs == {number: 1 + (number == 3) for number in range(8)}


def test_an_exception_between_results_ends_the_tasks(ray_engine, tmp_path):
    """A worker that would wait forever is ended."""
    begun = tmp_path / "pid"
    os.mkfifo(begun)
    waiting = f"(open({str(begun)!r}, 'w').write(str({PID})), {WAIT})"
    results = ray_engine.run(eval, [("1",), (waiting,)], workers=1, memory=MEMORY)
    assert next(results) == (0, 1)
    worker = psutil.Process(int(begun.read_text()))
    results.close()  # type: ignore[attr-defined]
    assert psutil.wait_procs([worker], timeout=30)[1] == []


def test_a_task_that_no_machine_can_run_is_refused(ray_engine):
    """Ray would wait until a larger machine joins."""
    for limits in ({"memory": 1 << 45}, {"memory": MEMORY, "cores": 2}):
        with pytest.raises(BudgetError, match="no machine of the Ray cluster is large enough"):
            list(ray_engine.run(eval, [("1",)], workers=1, **limits))


# --- other machines -----------------------------------------------------------


@pytest.fixture
def private_path(tmp_path):
    """A path that exists in this process only."""
    (tmp_path / "folder").mkdir()
    descriptor = os.open(tmp_path / "folder", os.O_RDONLY)
    os.dup2(descriptor, 900)
    yield Path("/proc/self/fd/900")
    os.close(900)
    os.close(descriptor)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_machine_that_sees_another_folder_is_refused(ray_engine, private_path, tmp_path):
    ran = tmp_path / "ran"
    task = f"open({str(ran)!r}, 'w').close()"
    with (
        pytest.raises(EngineError, match="does not see the same files under this path") as caught,
        ray_engine.sharing(private_path),
    ):
        list(ray_engine.run(eval, [(task,)], workers=1, memory=MEMORY))
    assert caught.value.path == str(private_path)
    assert not ran.exists()
    with ray_engine.sharing(tmp_path):
        list(ray_engine.run(eval, [(task,)], workers=1, memory=MEMORY))
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "ran"}


OTHERS = """
import sys
from itertools import repeat
import ray
import hexdata.order
from hexdata.engine import open_engine
from hexdata.errors import EngineError

with open_engine("ray", sys.argv[1]) as engine:
    code = "__import__('hexdata.order').order.__file__"
    for _, path in engine.run(eval, [(code,)] * 6, workers=2, memory=1 << 20):
        print(path != hexdata.order.__file__ and open(path).read() == open(hexdata.order.__file__).read())

ray.init(sys.argv[1], log_to_driver=False)  # without the code of this process
with open_engine("ray") as engine:
    try:
        for _ in engine.run(eval, repeat(("1",)), workers=1, memory=1 << 20):
            pass  # until that node receives a task
    except EngineError as error:
        print(error)
"""


def test_other_versions(cluster, ray_engine, third_node, tmp_path):
    """A node whose hexdata differs by one line runs the code of the command, and is refused without it.

    In a separate process, because workers search modules in their driver's working directory first.
    """
    package = Path(hexdata.__file__).parent
    shutil.copytree(package, tmp_path / "other" / "hexdata", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / "hexdata" / "order.py").open("a") as file:
        file.write("# changed\n")
    with third_node(env_vars={"PYTHONPATH": str(tmp_path / "other")}):
        command = [sys.executable, "-c", OTHERS, cluster.address]
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    *same, message = run.stdout.splitlines()
    assert same == ["True"] * 6
    assert "has other versions than this process; found Python" in message
    assert "Install the same versions on every machine" in message


# --- connecting -----------------------------------------------------------------------------------------


def test_only_ray_accepts_an_address():
    with pytest.raises(ConfigError, match="address auto needs the engine ray"), open_engine("local", "auto"):
        pass
    with pytest.raises(ConfigError, match="unknown engine; found 'spark'"), open_engine("spark"):
        pass
