"""Fixtures for a Ray cluster of several nodes on this machine, and a time limit per test.

Ray changes the process that starts a cluster: it handles SIGTERM, runs threads, and ends its processes only
when Python exits. A cluster is therefore used for one module, and signal handlers are restored after it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from hexdata.engine import LOCAL, Engine, open_engine

MAX_SECONDS = 180
NODE = {"num_cpus": 1, "memory": 2 << 30, "object_store_memory": 80 << 20}

END_SECONDS = 30

Outlive = Callable[[Collection[psutil.Process]], list[psutil.Process]]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer, for example because a cluster hangs."""

    def expire(number: int, frame: object) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Limit the time of each test. Fixtures of a wider scope have their own limits."""
    with within(MAX_SECONDS):
        yield


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces in this process."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie whose parent has died may never be removed."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _outlive(processes: Collection[psutil.Process]) -> list[psutil.Process]:
    deadline = time.monotonic() + END_SECONDS
    while (alive := [p for p in processes if _is_alive(p)]) and time.monotonic() < deadline:
        psutil.wait_procs(alive, timeout=0.2)
    return alive


def _processes(node: Any) -> list[psutil.Process]:
    """Return the processes of a node and their descendants."""
    found = []
    for _, started in node.live_processes():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(started.pid)
            found += [process, *process.children(recursive=True)]
    return found


@pytest.fixture
def outlive() -> Outlive:
    """Return ``outlive(processes)``, which waits for processes to end and returns those that do not."""
    return _outlive


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes with one CPU each. All processes are ended afterwards."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, restored_signals():
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(
            "RAY_memory_monitor_refresh_ms", "0"
        )  # it kills workers if other programs fill the memory
        with within(MAX_SECONDS):
            started = Cluster(
                initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False}
            )
        try:
            with within(MAX_SECONDS):
                for _ in range(2):
                    started.add_node(**NODE)
                started.wait_for_nodes()
            yield started
        finally:
            own = [process for node in started.list_all_nodes() for process in _processes(node)]
            started.shutdown()
            alive = _outlive(own)
            for process in alive:
                process.kill()
    assert not alive


@pytest.fixture(scope="module")
def shared_ray(cluster: Any) -> Iterator[Engine]:
    """This process, connected to the cluster."""
    with within(MAX_SECONDS):
        connection = open_engine("ray", cluster.address)
        engine = connection.__enter__()
    try:
        yield engine
    finally:
        connection.__exit__(None, None, None)


@pytest.fixture
def ray_engine(shared_ray: Engine) -> Engine:
    """The engine of the cluster."""
    return shared_ray


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    if request.param == "local":
        return LOCAL
    found: Engine = request.getfixturevalue("ray_engine")
    return found


@pytest.fixture
def third_node(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Return ``add(**arguments)``, a context with one more node; the test may remove it before the end."""

    @contextmanager
    def add(**arguments: Any) -> Iterator[Any]:
        node = cluster.add_node(**{**NODE, **arguments})
        cluster.wait_for_nodes()
        try:
            yield node
        finally:
            if node in cluster.list_all_nodes():
                cluster.remove_node(node, allow_graceful=False)

    return add
