"""The Ray engine: repeated tasks, memory of the driver, checks of nodes, and errors.

The tasks are expressions for ``eval``, because workers cannot import this module.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import hexdata
from hexdata.engine import Engine, open_engine
from hexdata.engine.ray import require_attempts_left
from hexdata.errors import BudgetError, ConfigError, EngineError, StoreError
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store.manifest import Manifest

if TYPE_CHECKING:
    from tests.conftest import CopyStore, StoreBytes

MEMORY = 200 << 20
PID = "__import__('os').getpid()"
NODE_ID = "__import__('ray').get_runtime_context().get_node_id()"
WAIT = "__import__('signal').pause()"


def test_each_result_comes_with_its_task(ray_engine: Engine) -> None:
    tasks = [(7, 2), (9, 4), (1, 3), (8, 5)]
    results = dict(ray_engine.run(divmod, iter(tasks), workers=1, memory=MEMORY))
    assert results == {index: divmod(*task) for index, task in enumerate(tasks)}
    assert dict(ray_engine.run_light(divmod, tasks, workers=2)) == results
    assert list(ray_engine.run(divmod, [], workers=1, memory=MEMORY)) == []


def test_every_node_runs_tasks(ray_engine: Engine, tmp_path: Path) -> None:
    """Two tasks that can end only while both run, on nodes with one CPU each."""
    met = tmp_path / "met"
    os.mkfifo(met)
    tasks = [(f"(open({str(met)!r}, {mode!r}).close(), {NODE_ID})[-1]",) for mode in "rw"]
    nodes = dict(ray_engine.run(eval, tasks, workers=1, memory=MEMORY)).values()
    assert len(set(nodes)) == ray_engine.machines.count == 2


def test_tasks_are_taken_when_workers_are_free(ray_engine: Engine) -> None:
    """Neither tasks nor results accumulate."""
    taken = []

    def tasks() -> Iterator[tuple[str]]:
        for number in range(60):
            taken.append(number)
            yield ("1",)

    for done, _ in enumerate(ray_engine.run(eval, tasks(), workers=1, memory=MEMORY)):
        assert len(taken) <= done + 1 + 2
    assert len(taken) == 60


def test_exceptions_are_raised_unchanged(ray_engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        list(ray_engine.run(Manifest.load, [(tmp_path,)], workers=1, memory=MEMORY))
    assert type(caught.value) is StoreError
    assert caught.value.path == str(tmp_path)


@pytest.mark.parametrize(
    "odd",
    [
        "ValueError('odd', __import__('threading').Lock())",  # cannot be pickled
        "type('Odd', (Exception,), {'__init__': lambda self, a, *, b: None})('odd', b=1)",  # or unpickled
    ],
)
def test_an_exception_that_cannot_be_pickled_is_reported_without_repeats(
    ray_engine: Engine, tmp_path: Path, odd: str
) -> None:
    log = tmp_path / "log"
    task = logged(log, 0, f"(_ for _ in ()).throw({odd})")
    with pytest.raises(EngineError, match=r"a task failed; found .*odd"):
        list(ray_engine.run(eval, [(task,)], workers=1, memory=MEMORY))
    assert log.read_text().split() == ["0"]


def logged(log: Path, number: int, then: str) -> str:
    """Return an expression that appends its number to a file and evaluates ``then``."""
    return f"(open({str(log)!r}, 'a').write('{number}\\n'), {then})[-1]"


def test_only_the_task_of_a_dead_worker_is_repeated(ray_engine: Engine, tmp_path: Path) -> None:
    log, mark = tmp_path / "log", tmp_path / "mark"
    die_once = f"7 if __import__('os').path.exists({str(mark)!r}) else "
    die_once += f"(open({str(mark)!r}, 'w').close(), __import__('os')._exit(9))"
    tasks = [(logged(log, number, die_once if number == 3 else "7"),) for number in range(8)]
    assert set(dict(ray_engine.run(eval, tasks, workers=1, memory=MEMORY)).values()) == {7}
    runs = Counter(int(line) for line in log.read_text().split())
    assert runs == {number: 1 + (number == 3) for number in range(8)}


def test_a_task_that_always_dies_fails_after_five_attempts(ray_engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"a task died 5 times; found worker crashed\. If memory ran out"):
        list(ray_engine.run(eval, [("__import__('os')._exit(9)",)], workers=1, memory=MEMORY))


def test_only_the_tasks_of_a_removed_node_are_repeated(
    cluster: Any, ray_engine: Engine, third_node: Callable[..., Any], tmp_path: Path
) -> None:
    """A task waits forever on the third node, which is removed after the task has started."""
    log, begun, removed = tmp_path / "log", tmp_path / "begun", threading.Event()
    os.mkfifo(begun)
    with third_node() as node:
        wait_there = f"{NODE_ID} if {NODE_ID} != {node.node_id!r} else "
        wait_there += f"(open({str(begun)!r}, 'w').close(), {WAIT})"

        def tasks() -> Iterator[tuple[str]]:
            for number in count():
                yield (logged(log, number, wait_there),)
                if removed.is_set():
                    return

        def remove() -> None:
            begun.read_bytes()  # until a task there opens it
            cluster.remove_node(node, allow_graceful=False)
            removed.set()

        remover = threading.Thread(target=remove, daemon=True)
        remover.start()
        nodes = dict(ray_engine.run(eval, tasks(), workers=1, memory=MEMORY))
        remover.join()
    assert node.node_id not in nodes.values()
    runs = Counter(int(line) for line in log.read_text().split())
    assert set(runs) == set(nodes) == set(range(len(nodes)))
    assert Counter(runs.values()) == {1: len(nodes) - 1, 2: 1}


def test_an_exception_between_results_ends_the_tasks(
    ray_engine: Engine, tmp_path: Path, outlive: Callable[..., list[Any]]
) -> None:
    """A worker that would wait forever is ended."""
    begun = tmp_path / "pid"
    os.mkfifo(begun)
    waiting = f"(open({str(begun)!r}, 'w').write(str({PID})), {WAIT})"
    results = ray_engine.run(eval, [("1",), (waiting,)], workers=1, memory=MEMORY)
    assert next(results) == (0, 1)
    worker = psutil.Process(int(begun.read_text()))
    results.close()  # type: ignore[attr-defined]
    assert not outlive([worker])


def test_without_the_node_of_this_machine_nothing_is_repeated() -> None:
    """Without a cluster, because Ray's processes take a minute to end after such a death."""
    exceptions = pytest.importorskip("ray.exceptions", reason="the extra ray is not installed")
    with pytest.raises(EngineError, match=r"the Ray node of this machine has died\. .*run the command again"):
        require_attempts_left(1, exceptions.LocalRayletDiedError())
    require_attempts_left(1, exceptions.NodeDiedError("it is gone"))


def test_more_memory_than_any_node_has_is_refused(ray_engine: Engine) -> None:
    with pytest.raises(BudgetError, match="no machine of the cluster has enough memory for a task"):
        list(ray_engine.run(eval, [("1",)], workers=1, memory=1 << 45))


def test_a_full_object_store_is_reported(ray_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises this when the disk is full, to which it moves objects."""
    ray = pytest.importorskip("ray")

    def put(value: object) -> None:
        raise ray.exceptions.OutOfDiskError("Local disk is full")

    monkeypatch.setattr(ray, "put", put)
    with pytest.raises(EngineError, match="Ray cannot store the arguments of a task; found out of disk"):
        list(ray_engine.run(eval, [("1",)], workers=1, memory=MEMORY))


# --- checks of nodes ----------------------------------------------------------


@pytest.fixture
def private_path(tmp_path: Path) -> Iterator[Path]:
    """A path that exists in this process only."""
    (tmp_path / "folder").mkdir()
    descriptor = os.open(tmp_path / "folder", os.O_RDONLY)
    os.dup2(descriptor, 900)
    yield Path("/proc/self/fd/900")
    os.close(900)
    os.close(descriptor)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_paths_that_workers_cannot_see_are_refused(
    ray_engine: Engine, private_path: Path, tmp_path: Path
) -> None:
    ray_engine.require([tmp_path], tmp_path)
    for arguments in (([private_path], tmp_path), ([], private_path)):
        with pytest.raises(EngineError, match="does not see the same files under this path") as caught:
            ray_engine.require(*arguments)
        assert caught.value.path == str(private_path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


OTHERS = """
import sys
from itertools import repeat
import ray
import hexdata.order
from hexdata.engine import open_engine
from hexdata.errors import EngineError

def work(engine):
    for _ in engine.run(eval, repeat(("1",)), workers=1, memory=1 << 20):  # until that node receives a task
        pass

with open_engine("ray", sys.argv[1]) as engine:
    engine.require([])
    code = "__import__('hexdata.order').order.__file__"
    for _, path in engine.run(eval, [(code,)] * 6, workers=2, memory=1 << 20):
        print(path != hexdata.order.__file__ and open(path).read() == open(hexdata.order.__file__).read())

ray.init(sys.argv[1], log_to_driver=False)  # without the code of this process
with open_engine("ray") as engine:
    for call in (lambda: engine.require([]), lambda: work(engine)):
        try:
            call()
        except EngineError as error:
            print(error)
"""


def test_other_versions(
    cluster: Any, ray_engine: Engine, third_node: Callable[..., Any], tmp_path: Path
) -> None:
    """A node whose hexdata differs by one line runs the code of the command, and is refused without it.

    It is refused at the start, and when it joins later. In a separate process, because workers search modules
    in their driver's working directory first.
    """
    package = Path(hexdata.__file__).parent
    shutil.copytree(package, tmp_path / "other" / "hexdata", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / "hexdata" / "order.py").open("a") as file:
        file.write("# changed\n")
    ray_engine.require([])
    with third_node(env_vars={"PYTHONPATH": str(tmp_path / "other")}) as node:
        command = [sys.executable, "-c", OTHERS, cluster.address]
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    *same, before, later = run.stdout.splitlines()
    assert same == ["True"] * 6
    assert f"({node.node_id[:8]}) has other versions" in before
    for message in (before, later):
        assert "has other versions than this process; found hexdata" in message
        assert "Install the same versions on every machine" in message


DEATHS = """
import os, sys
from hexdata.cli.app import using_engine

def tasks():
    yield (sys.argv[2],)
    while not os.path.exists(sys.argv[4]):
        yield (sys.argv[3],)

with using_engine("ray", sys.argv[1]) as engine:
    for _ in engine.run(eval, tasks(), workers=1, memory=1 << 20):
        pass
"""


def test_each_death_prints_one_line(
    cluster: Any, ray_engine: Engine, third_node: Callable[..., Any], tmp_path: Path
) -> None:
    """A worker dies, then a node. Ray itself would print 900 characters, then 22 lines."""
    died, begun, removed = (tmp_path / name for name in ("died", "begun", "removed"))
    os.mkfifo(begun)
    die_once = f"__import__('os').path.exists({str(died)!r}) or "
    die_once += f"(open({str(died)!r}, 'w').close(), __import__('os')._exit(9))"
    with third_node() as node:
        wait_there = f"{NODE_ID} != {node.node_id!r} or (open({str(begun)!r}, 'w').close(), {WAIT})"
        command = [sys.executable, "-c", DEATHS, cluster.address, die_once, wait_there, str(removed)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as run:
            begun.read_bytes()
            cluster.remove_node(node, allow_graceful=False)
            removed.touch()
            _, printed = run.communicate()
    worker, other = printed.splitlines()
    assert worker == "note: eval is repeated, attempt 2 of 5: worker crashed"
    assert other.startswith("note: eval is repeated, attempt ")


# --- connecting -----------------------------------------------------------------------------------------


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ConfigError, match=r"an engine of Ray needs a library.*pip install 'hexdata\[ray\]'"),
        open_engine("ray"),
    ):
        pass


def test_a_cluster_that_does_not_answer() -> None:
    pytest.importorskip("ray")
    with socket.socket() as bound:  # bound, but not listening
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        code = (
            "import sys; from hexdata.engine import open_engine\nwith open_engine('ray', sys.argv[1]): pass"
        )
        run = subprocess.run(
            [sys.executable, "-c", code, address], capture_output=True, text=True, check=False
        )
    assert "EngineError: the Ray cluster does not answer" in run.stderr
    assert address in run.stderr
    assert "within 10 s" in run.stderr


def test_invalid_addresses_are_refused() -> None:
    """In a new process, because Ray connects once per process."""
    pytest.importorskip("ray")
    addresses = ["ray://127.0.0.1:10001", "here", "host:port", ":1", "host:99999"]
    code = """if True:
        import sys
        from hexdata.engine import open_engine
        from hexdata.errors import ConfigError

        for address in sys.argv[1:]:
            try:
                with open_engine("ray", address):
                    pass
            except ConfigError:
                print(address)
    """
    command = [sys.executable, "-c", code, *addresses]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.split() == addresses, run.stderr


def test_only_ray_accepts_an_address() -> None:
    with pytest.raises(ConfigError, match="local engine accepts no address"), open_engine("local", "auto"):
        pass
    with pytest.raises(ConfigError, match="unknown engine; found spark"), open_engine("spark"):
        pass


def test_interrupted_on_the_command_line(
    odd_store: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    outlive: Callable[..., list[Any]],
) -> None:
    """With a temporary cluster, which is ended. Ctrl-C is sent to the process group, as in a shell."""
    pytest.importorskip("ray")
    store, undisturbed = copy_store(odd_store), copy_store(odd_store, "undisturbed")
    shuffle_store(undisturbed, ShuffleOptions(seed=7, buckets=40, threads=1))
    command = [sys.executable, "-m", "hexdata", "shuffle", str(store), "--engine", "ray", "--seed", "7"]
    command += ["--buckets", "40", "--threads", "1"]
    environment = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    log = store / "logs" / "shuffle.log"
    while not (log.exists() and "plan: " in log.read_text()):
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            break
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130, message
    assert "run the same command again to resume" in message
    assert started
    assert not outlive(started)
    shuffle_store(store, ShuffleOptions(seed=7, buckets=40, threads=1))
    assert store_bytes(store) == store_bytes(undisturbed)
