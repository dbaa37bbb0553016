"""The engine for Ray clusters. Tasks are repeated when their worker or node dies.

Tasks receive file names and return small results; no data is sent between machines. All machines must see the
same files under the same paths.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from hexdata.engine.examine import describe, differences, examine
from hexdata.engine.protocol import DIGEST_MEMORY, Machines
from hexdata.errors import BudgetError, ConfigError, EngineError
from hexdata.progress import SILENT
from hexdata.storage import AnyPath

__all__ = ["Ray", "connected", "require_another"]

Result = TypeVar("Result")
Task = tuple[Any, ...]
Note = Callable[[str], None]
_Attempt = tuple[int, Task, int]
"""Index of a task, its arguments, and the number of the attempt."""

_UNDONE: Final = object()
"""Marks a task that must be submitted again."""

CONNECT_SECONDS: Final = 10.0
"""Timeout for connecting to a cluster; Ray itself would wait for minutes."""
EXAMINE_SECONDS: Final = 60.0
"""Timeout for the checks on a node, including the start of a worker."""
CANCEL_SECONDS: Final = 30.0
"""Timeout for workers to end."""
NODE_CHECK_SECONDS: Final = 5.0
"""Interval of the check that a node exists for the waiting tasks."""
ATTEMPTS: Final = 5
"""Maximum number of attempts of a task whose worker or node dies."""
WORKER_EXTRA: Final = 128 << 20
"""Additional memory of a Ray worker in bytes, compared with a worker of the local engine.

Measured: 62 MB of libraries and threads, and some 65 MB more at the peak of a conversion.
"""
OBJECT_STORE: Final = 80 << 20
"""Shared memory of a temporary cluster in bytes. Results are small."""


@contextmanager
def connected(address: str | None = None, note: Note = SILENT.note) -> Iterator[Ray]:
    """Connect to a cluster or start a temporary one; disconnect or stop it when the context ends.

    An existing connection of this process is used and kept. ``note`` is called for each repeated task.

    Raises:
        ConfigError: the address is of an unsupported kind.
        EngineError: Ray is not installed, or the cluster does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            "Ray is not installed", found=str(error), hint="Install it with: pip install 'hexdata[ray]'."
        ) from error
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if ray.is_initialized():
        yield Ray(note)
        return
    _require_answer(address)
    own: dict[str, Any] = {"object_store_memory": OBJECT_STORE, "include_dashboard": False}
    own = own if address == "local" else {}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports from a temporary cluster
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # the future default, about which Ray warns
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        other = "Version mismatch" in str(error)
        raise EngineError(
            "cannot use the Ray cluster",
            found=" ".join(str(error).split()),
            expected=f"a cluster of Ray {ray.__version__} at {address}",
            hint="Install the versions of Ray and Python that the cluster uses."
            if other
            else "Start a cluster (`ray start --head`), or set --address.",
        ) from error
    try:
        yield Ray(note)
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Check that a server listens at an address, because Ray would wait for minutes.

    Raises:
        ConfigError: it is not an address, or that of a Ray Client.
        EngineError: no server answers.
    """
    if address in ("auto", "local"):
        return
    if "://" in address:
        raise ConfigError(
            "this kind of address is not supported",
            found=address,
            expected="HOST:PORT, or auto",
            hint="Run the command on a machine of the cluster, with --address auto.",
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError("not the address of a Ray cluster", found=address, expected="HOST:PORT, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise EngineError(
            "the Ray cluster does not answer",
            found=f"{error.strerror or error} at {address}, within {CONNECT_SECONDS:.0f} s",
            hint="Check that it runs (`ray status` on the head node) and that this machine can reach it.",
        ) from error


class _UncheckedNode(NamedTuple):
    """Returned instead of a result by a node that has not been checked yet."""

    node_id: str


class Ray:
    """Runs tasks on the cluster that this process is connected to."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._paths: tuple[AnyPath, ...] = ()
        self._folder: AnyPath | None = None
        self._examined: set[str] = set()
        """Ids of the nodes whose versions and files have been checked."""

    @property
    def machines(self) -> Machines:
        """The running nodes with at least one CPU."""
        cores = [int(node["Resources"]["CPU"]) for node in _working_nodes()]
        return Machines(len(cores), max(cores), separate=True)

    def require(self, paths: Sequence[AnyPath], folder: AnyPath | None = None) -> None:
        """Check versions and files on every node. See :meth:`hexdata.engine.protocol.Engine.require`.

        Nodes that join later are checked before their first task.
        """
        self._paths, self._folder, self._examined = tuple(paths), folder, set()
        self._examine(_working_nodes())
        if not self._examined:
            raise _no_machine()

    def _examine(self, nodes: list[dict[str, Any]]) -> None:
        """Check these nodes in parallel; nodes that die in the meantime are ignored."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not nodes:
            return
        look, asked = ray.remote(_look), []
        with examine(self._paths, self._folder) as examined:
            for node in nodes:
                here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                placed = look.options(num_cpus=0, max_retries=0, scheduling_strategy=here)
                ref = placed.remote(str(Path.cwd()), examined, node["NodeID"])
                asked.append((f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})", node, ref))
            refs = [ref for *_, ref in asked]
            try:
                ready, _ = ray.wait(refs, num_returns=len(refs), timeout=EXAMINE_SECONDS)
                for name, node, ref in asked:
                    if ref not in ready:
                        raise EngineError(f"node {name} does not answer", found=f"{EXAMINE_SECONDS:.0f} s")
                    try:
                        found, saw = ray.get(ref)
                    except _gone():
                        continue  # the node died; Ray does not assign tasks to it
                    except ray.exceptions.RayError as error:
                        raise EngineError(
                            f"node {name} cannot run hexdata",
                            found=_last_line(error),
                            hint="Install the same hexdata on every machine, in Ray's environment.",
                        ) from error
                    _require_same(name, describe(), found)
                    examined.require(name, saw, node["NodeID"])
                    self._examined.add(node["NodeID"])
            finally:
                _end(refs)

    def _admit(self, node_id: str) -> None:
        """Check a node that joined after the others and was assigned a task."""
        if node_id not in self._examined:
            self._examine([node for node in _working_nodes(or_none=True) if node["NodeID"] == node_id])

    def run(
        self, function: Callable[..., Result], tasks: Iterable[Task], *, workers: int, memory: int
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks, and repeat those of dead workers. See :meth:`hexdata.engine.protocol.Engine.run`.

        Each task is declared with one CPU and its memory, so that Ray does not overload a machine.

        Raises:
            BudgetError: no node has enough memory for a task.
            EngineError: a task died repeatedly, no node is left, or a new node failed the checks.
        """
        return self._run(function, tasks, workers, memory + WORKER_EXTRA)

    def run_light(
        self, function: Callable[..., Result], tasks: Iterable[Task], *, workers: int
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks that only read files."""
        return self._run(function, tasks, workers, DIGEST_MEMORY)

    def _run(
        self, function: Callable[..., Result], tasks: Iterable[Task], workers: int, memory: int
    ) -> Iterator[tuple[int, Result]]:
        import ray

        _require_memory(memory)
        name = function.__name__.lstrip("_")
        remote = ray.remote(_call).options(
            num_cpus=1,
            memory=memory,
            max_retries=0,  # repeated below, where all attempts are counted
            scheduling_strategy="SPREAD",
            name=f"hexdata {name}",
        )
        here, versions = str(Path.cwd()), describe()
        todo = ((index, task, 1) for index, task in enumerate(tasks))
        again: list[_Attempt] = []
        under_way: dict[Any, _Attempt] = {}
        try:
            while True:
                most = workers * max(len(_working_nodes(or_none=True)), 1)
                for attempt in islice(chain(_drained(again), todo), max(most - len(under_way), 0)):
                    ref = remote.remote(here, versions, frozenset(self._examined), function, attempt[1])
                    under_way[ref] = attempt
                if not under_way:
                    return
                ready, _ = ray.wait(list(under_way), num_returns=1, timeout=NODE_CHECK_SECONDS)
                if not ready:
                    _require_memory(memory)
                for ref in ready:
                    index, task, number = under_way[ref]
                    try:
                        result = _result(ref)
                    except ray.exceptions.RayError as error:
                        require_another(number, error)
                        number += 1
                        self._note(f"{name} is repeated, attempt {number} of {ATTEMPTS}: {_why(error)}")
                        result = _UNDONE
                    del under_way[ref]
                    if isinstance(result, _UncheckedNode):
                        self._admit(result.node_id)
                        result = _UNDONE
                    if result is _UNDONE:
                        again.append((index, task, number))
                    else:
                        yield index, result
        finally:
            _end(list(under_way))


def _working_nodes(*, or_none: bool = False) -> list[dict[str, Any]]:
    """Return the running nodes with at least one CPU.

    Raises:
        EngineError: there is none, unless ``or_none`` is true.
    """
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    nodes = [n for n in nodes if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]
    if not (nodes or or_none):
        raise _no_machine()
    return nodes


def _gone() -> tuple[type[Exception], ...]:
    """Return the exceptions of tasks assigned to a node that has died."""
    import ray

    errors = ray.exceptions
    return errors.TaskUnschedulableError, errors.NodeDiedError, errors.WorkerCrashedError


def _no_machine() -> EngineError:
    return EngineError(
        "the Ray cluster has no machine for tasks",
        found="no running node with a CPU",
        hint="Start one (`ray start --address`) and run the command again to resume.",
    )


def _require_memory(memory: int) -> None:
    """Check that a node has enough memory for a task, because Ray would wait forever."""
    most = max(node["Resources"].get("memory", 0) for node in _working_nodes())
    if memory > most:
        raise BudgetError(
            "no machine of the cluster has enough memory for a task",
            found=f"{most / 1e6:,.0f} MB",
            expected=f"{memory / 1e6:,.0f} MB",
            hint="Start nodes with more memory (`ray start --memory`), or, for a shuffle, lower --memory or "
            "raise --threads.",
        )


def _drained(attempts: list[_Attempt]) -> Iterator[_Attempt]:
    """Yield the elements of a list and remove them."""
    while attempts:
        yield attempts.pop()


def _result(ref: Any) -> Any:
    """Return the result of a task or raise its exception; a ``RayError`` if its worker or node died.

    Raises:
        EngineError: the exception of the task cannot be unpickled; the message contains its text.
    """
    import ray

    errors = ray.exceptions
    try:
        return ray.get(ref)
    except (errors.RayTaskError, errors.UnserializableException) as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException) and not isinstance(cause, errors.RayError):
            raise cause from None
        raise EngineError("a task failed", found=_last_line(error)) from error


def require_another(number: int, error: Exception) -> None:
    """Check that a task may be repeated.

    Raises:
        EngineError: it died too often, or the Ray node of this machine died.
    """
    import ray

    if isinstance(error, ray.exceptions.LocalRayletDiedError):
        raise EngineError(
            "the Ray node of this machine has died",
            hint="Start it (`ray start`) and run the command again to resume.",
        ) from error
    if number >= ATTEMPTS:
        raise EngineError(
            f"a task died {number} times",
            found=_why(error),  # Ray's own message gives advice that does not apply here
            hint="If memory ran out, use fewer workers. Run the command again to resume.",
        ) from error


def _end(refs: list[Any]) -> None:
    """Cancel tasks and wait until their workers have ended, so that none writes after the store is unlocked.

    Finished tasks are skipped, because cancelling a task that is ending may kill this process (Ray 2.60,
    "Tried to complete task that was not pending").
    """
    import ray

    if refs:
        _, refs = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    for ref in refs:
        ray.cancel(ref, force=True)
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=CANCEL_SECONDS, fetch_local=False)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__


def _why(error: Exception) -> str:
    """Return the kind of a Ray error in words, such as "worker crashed" or "out of memory"."""
    words = re.findall("[A-Z][a-z]+", type(error).__name__.removesuffix("Error"))
    return " ".join(words).lower()


def _require_same(name: str, ours: dict[str, str], found: dict[str, str]) -> None:
    """Check that a worker has the versions of the driver.

    Raises:
        EngineError: a version differs.
    """
    if differing := differences(ours, found):
        raise EngineError(
            f"node {name} has other versions than this process",
            found=", ".join(f"{what} {theirs}" for what, _, theirs in differing),
            expected=", ".join(f"{what} {ours}" for what, ours, _ in differing),
            hint="Install the same versions on every machine, because they determine the bytes written.",
        )


def _call(
    here: str, versions: dict[str, str], examined: frozenset[str], function: Callable[..., Any], task: Task
) -> Any:
    """Run one task in a worker, in the driver's working directory so that relative paths are the same.

    On a node that has not been checked yet, return ``_UncheckedNode`` instead.
    """
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    if node_id not in examined:
        return _UncheckedNode(node_id)
    _begin(here)
    _require_same(socket.gethostname(), versions, describe())  # it may have changed since the check
    return function(*task)


def _look(here: str, examined: Any, node: str) -> tuple[dict[str, str], dict[str, str]]:
    """Run the checks in a worker: return its versions and the faults of the paths."""
    _begin(here)
    return describe(), examined.look(node)


def _begin(here: str) -> None:
    """Prepare a worker: use the driver's working directory, and an Arrow pool that releases memory."""
    if Path(here).is_dir():
        os.chdir(here)
    pa.set_memory_pool(pa.system_memory_pool())
