"""The local engine: results with their tasks, errors, killed workers, and no processes left.

The tasks are expressions for ``eval``, because workers cannot import this module.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hexdata.engine import LOCAL
from hexdata.errors import HexdataError

PID = "__import__('os').getpid()"
WAIT = "__import__('signal').pause()"
MEMORY = 200 << 20
DIE = "__import__('os')._exit(9)"


def worker_processes(parent=None):
    """Return the running workers of a process, by default this one, without loky's tracker processes."""
    workers = []
    for child in psutil.Process(parent).children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:  # it ended between the two calls
            continue
        if "loky" in command and "resource_tracker" not in command:
            workers.append(child)
    return workers


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_each_result_comes_with_its_task(workers):
    tasks = [(7, 2), (9, 4), (1, 3), (8, 5)]
    results = dict(LOCAL.run(divmod, iter(tasks), workers=workers, memory=MEMORY))
    assert results == {index: divmod(*task) for index, task in enumerate(tasks)}


def test_the_death_of_a_worker_is_reported():
    tasks = [(WAIT,), (DIE,), ("1",)]
    with pytest.raises(HexdataError, match=r"worker process died; found exit codes .*EXIT\(9\)"):
        list(LOCAL.run(eval, tasks, workers=2, memory=MEMORY))
    assert worker_processes() == []


def fail_between(results, error):
    for _ in results:
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_between_results_ends_the_workers(error):
    tasks = [("1",), (WAIT,), (WAIT,)]
    with pytest.raises(error):
        fail_between(LOCAL.run(eval, tasks, workers=2, memory=MEMORY), error)
    assert worker_processes() == []


def test_workers_end_with_a_killed_parent(tmp_path):
    """The script has no main guard, like a notebook, so the test also shows that workers do not run it."""
    script = tmp_path / "script.py"
    script.write_text(
        "from hexdata.engine import LOCAL\n"
        f"for _, pid in LOCAL.run(eval, [({PID!r},), ({WAIT!r},), ({WAIT!r},)], workers=2, memory=0):\n"
        "    print(pid, flush=True)\n"
    )
    command, pipe = [sys.executable, str(script)], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) in [worker.pid for worker in worker_processes(parent.pid)]
        parent.kill()
        parent.communicate(timeout=300)  # ends when no worker has the pipes open
