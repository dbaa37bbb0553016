"""Fixtures for a Ray cluster of several nodes on this machine, and a time limit per test.

Ray changes the process that starts a cluster: it handles SIGTERM, runs threads, and ends its processes only
when Python exits. A cluster is therefore used for one module, and signal handlers are restored after it.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager

import pytest

from hexdata.engine import LOCAL, open_engine

MAX_SECONDS = 180
NODE = {"num_cpus": 1, "memory": 2 << 30, "object_store_memory": 80 << 20}


@contextmanager
def within(seconds):
    """Raise TimeoutError if the block takes longer, for example because a cluster hangs."""

    def expire(number, frame):
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def bounded():
    """Limit the time of each test. Fixtures of a wider scope have their own limits."""
    with within(MAX_SECONDS):
        yield


@contextmanager
def restored_signals():
    """Restore the signal handlers that Ray replaces in this process."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs and two nodes with one CPU each."""
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
            started.shutdown()


@pytest.fixture(scope="module")
def shared_ray(cluster):
    """This process, connected to the cluster."""
    with within(MAX_SECONDS):
        connection = open_engine("ray", cluster.address)
        engine = connection.__enter__()
    try:
        yield engine
    finally:
        connection.__exit__(None, None, None)


@pytest.fixture
def ray_engine(shared_ray):
    """The engine of the cluster."""
    return shared_ray


@pytest.fixture(params=["local", "ray"])
def engine(request):
    """Each engine in turn."""
    if request.param == "local":
        return LOCAL
    return request.getfixturevalue("ray_engine")


@pytest.fixture
def third_node(cluster):
    """Return ``add(**arguments)``, a context with one more node; the test may remove it before the end."""

    @contextmanager
    def add(**arguments):
        node = cluster.add_node(**{**NODE, **arguments})
        cluster.wait_for_nodes()
        try:
            yield node
        finally:
            if node in cluster.list_all_nodes():
                cluster.remove_node(node, allow_graceful=False)

    return add
