"""The local engine: results with their tasks, errors, killed workers, and no processes left.

The tasks are expressions for ``eval``, because workers cannot import this module.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from hexdata.engine import LOCAL
from hexdata.errors import HexdataError, StoreError
from hexdata.store.manifest import Manifest

PID = "__import__('os').getpid()"
WAIT = "__import__('signal').pause()"
MEMORY = 200 << 20
DIE = "__import__('os')._exit(9)"


def worker_processes(parent: int | None = None) -> list[psutil.Process]:
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
def test_each_result_comes_with_its_task(workers: int) -> None:
    tasks = [(7, 2), (9, 4), (1, 3), (8, 5)]
    results = dict(LOCAL.run(divmod, iter(tasks), workers=workers, memory=MEMORY))
    assert results == {index: divmod(*task) for index, task in enumerate(tasks)}


def test_without_tasks_there_are_no_results() -> None:
    assert list(LOCAL.run(divmod, [], workers=2, memory=MEMORY)) == []


def test_a_single_worker_is_this_process() -> None:
    assert dict(LOCAL.run(eval, [(PID,), (PID,)], workers=1, memory=MEMORY)) == {
        0: os.getpid(),
        1: os.getpid(),
    }


def test_several_workers_are_other_processes() -> None:
    results = LOCAL.run(eval, [(PID,)] * 4, workers=2, memory=MEMORY)
    pids = [next(results)[1]]
    assert pids[0] in [worker.pid for worker in worker_processes()]
    pids += [pid for _, pid in results]
    assert os.getpid() not in pids
    assert len(set(pids)) <= 2
    assert worker_processes() == []


@pytest.mark.skipif(find_spec("pandas") is None, reason="pandas is not installed")
def test_workers_do_not_import_pandas() -> None:
    """Arrow would import it to convert a list."""
    loads = "[__import__('pyarrow').array([1]), 'pandas' in __import__('sys').modules][1]"
    assert [found for _, found in LOCAL.run(eval, [(loads,)] * 2, workers=2, memory=MEMORY)] == [False] * 2


def test_results_are_yielded_as_they_complete() -> None:
    """The first task never ends, so the other results are yielded before it."""
    results = LOCAL.run(eval, [(f"({PID}, {WAIT})",), (PID,), (PID,)], workers=2, memory=MEMORY)
    assert {next(results)[0], next(results)[0]} == {1, 2}
    results.close()  # type: ignore[attr-defined]
    assert worker_processes() == []


@pytest.mark.parametrize("workers", [1, 2])
def test_exceptions_are_raised_unchanged(tmp_path: Path, workers: int) -> None:
    with pytest.raises(StoreError) as caught:
        list(LOCAL.run(Manifest.load, [(tmp_path,), (tmp_path,)], workers=workers, memory=MEMORY))
    assert caught.value.path == str(tmp_path)
    assert "hexdata convert" in str(caught.value)
    assert worker_processes() == []


def test_the_death_of_a_worker_is_reported() -> None:
    tasks = [(WAIT,), (DIE,), ("1",)]
    with pytest.raises(HexdataError, match=r"worker process died; found exit codes .*EXIT\(9\)"):
        list(LOCAL.run(eval, tasks, workers=2, memory=MEMORY))
    assert worker_processes() == []


def fail_between(results: Iterable[object], error: type[BaseException]) -> None:
    for _ in results:
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_between_results_ends_the_workers(error: type[BaseException]) -> None:
    tasks = [("1",), (WAIT,), (WAIT,)]
    with pytest.raises(error):
        fail_between(LOCAL.run(eval, tasks, workers=2, memory=MEMORY), error)
    assert worker_processes() == []


def test_an_interrupt_ends_the_workers() -> None:
    """Ctrl-C is sent to the process group: workers ignore it, and the parent ends them."""
    interrupt = f"__import__('os').kill({PID}, {int(signal.SIGINT)}) or 7"
    results = LOCAL.run(eval, [(interrupt,), (WAIT,), (WAIT,)], workers=2, memory=MEMORY)
    assert next(results) == (0, 7)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(results)
    timer.join()
    assert worker_processes() == []


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """The script has no main guard, like a notebook, so the test also shows that workers do not run it."""
    script = tmp_path / "script.py"
    script.write_text(
        "from hexdata.engine import LOCAL\n"
        f"for _, pid in LOCAL.run(eval, [({PID!r},), ({WAIT!r},), ({WAIT!r},)], workers=2, memory=0):\n"
        "    print(pid, flush=True)\n"
    )
    command, pipe = [sys.executable, str(script)], subprocess.PIPE
    environment = _with_path(str(Path(__file__).parents[2]))
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) in [worker.pid for worker in worker_processes(parent.pid)]
        parent.kill()
        parent.communicate(timeout=10)  # ends when no worker has the pipes open


def _with_path(folder: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}


def test_tasks_are_taken_when_workers_are_free() -> None:
    taken = []

    def tasks() -> Iterator[tuple[str]]:
        for number in range(40):
            taken.append(number)
            yield ("1",)

    for done, _ in enumerate(LOCAL.run(eval, tasks(), workers=2, memory=MEMORY)):
        assert len(taken) <= done + 5  # four submitted, and the current one
    assert len(taken) == 40
