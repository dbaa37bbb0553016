"""A cluster of several nodes, all real processes of this machine, and a bound on how long a test may take."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from hexdata.engine import LOCAL, Engine, open_engine

MOST_SECONDS = 180
NODE = {"num_cpus": 1, "memory": 2 << 30, "object_store_memory": 80 << 20}

AddNode = Callable[..., Any]


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Fail rather than hang, should a cluster not do what it is asked."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"the test took more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(MOST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head that does no work, and two nodes with a processor each. Nothing of it is left at the end."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    started = Cluster(
        initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(2):
            started.add_node(**NODE)
        yield started
    finally:
        own = set(psutil.Process().children(recursive=True)) - before
        started.shutdown()
        _, alive = psutil.wait_procs(own, timeout=30)
        for process in alive:
            process.kill()
    assert not alive


@pytest.fixture(scope="session")
def shared_ray(cluster: Any) -> Iterator[Engine]:
    """This process, connected to the cluster."""
    with open_engine("ray", cluster.address) as engine:
        yield engine


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
