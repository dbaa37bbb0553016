"""The engine for Ray clusters. Tasks are repeated when their worker or node dies.

Tasks receive file names and return small results; no data is sent between machines. All machines must see the
same files under the same paths.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from hexdata.engine.node_check import NodeCheck, installed_versions, open_node_check, version_differences
from hexdata.engine.protocol import DIGEST_MEMORY, Machines, function_name
from hexdata.errors import BudgetError, ConfigError, EngineError
from hexdata.extras import installed_by
from hexdata.progress import SILENT
from hexdata.storage import AnyPath
from hexdata.text import count_of

__all__ = ["RayEngine", "connect_engine", "require_attempts_left"]

Result = TypeVar("Result")
Task = tuple[Any, ...]
Note = Callable[[str], None]

CONNECT_TIMEOUT: Final = 10.0
"""Timeout for connecting to a cluster; Ray itself would wait for minutes."""
_SKIPPED_MESSAGES: Final = (
    "A worker died or was killed|Raylet is terminated|has been marked dead|killed due to memory pressure"
)
"""Messages that Ray prints, some with 20 lines of logs, for deaths of which a note of one line informs."""
NODE_CHECK_TIMEOUT: Final = 60.0
"""Timeout for the checks on a node, including the start of a worker."""
CANCEL_TIMEOUT: Final = 30.0
"""Timeout for workers to end."""
NODE_POLL_SECONDS: Final = 5.0
"""Interval at which Ray is asked for the nodes."""
ATTEMPTS: Final = 5
"""Maximum number of attempts of a task whose worker or node dies."""
WORKER_EXTRA: Final = 128 << 20
"""Additional memory of a Ray worker in bytes, compared with a worker of the local engine.

Measured: 62 MB of libraries and threads, and some 65 MB more at the peak of a conversion.
"""
OBJECT_STORE: Final = 80 << 20
"""Shared memory of a temporary cluster in bytes. Results are small."""


@contextmanager
def connect_engine(address: str | None = None, note: Note = SILENT.note) -> Iterator[RayEngine]:
    """Connect to a cluster or start a temporary one; disconnect or stop it when the context ends.

    The workers of an existing cluster run the code of this process, which is sent to them. If this process is
    connected already, its connection is used and kept, and the workers run the hexdata that they find.
    ``note`` is called for each repeated task.

    Raises:
        ConfigError: The address is of an unsupported kind, or Ray is not installed.
        EngineError: The cluster does not answer.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _set_defaults(address)
    with installed_by("ray", "an engine of Ray"):
        import ray
    if ray.is_initialized():
        yield RayEngine(note)
        return
    _require_server(address)
    arguments: dict[str, Any] = {"object_store_memory": OBJECT_STORE, "include_dashboard": False}
    if address != "local":
        code = {"py_modules": [str(Path(__file__).parents[1])], "excludes": ["__pycache__"]}
        arguments = {"runtime_env": code}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **arguments)
    except Exception as error:  # Ray raises a plain one if its processes do not start within 30 s
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
        yield RayEngine(note)
    finally:
        ray.shutdown()


def _set_defaults(address: str) -> None:
    """Set environment variables that Ray reads when it is imported, unless the user has set them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports from a temporary cluster
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # the future default, about which Ray warns
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _SKIPPED_MESSAGES)
    if address != "local":
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # attempts to connect, 40 s each; not 20


def _require_server(address: str) -> None:
    """Check that a server accepts connections at an address, because Ray would wait for many minutes.

    Raises:
        ConfigError: It is not an address, or that of a Ray Client.
        EngineError: No server answers.
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
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise EngineError(
            "the Ray cluster does not answer",
            found=f"{error.strerror or error} at {address}, within {CONNECT_TIMEOUT:.0f} s",
            hint="Check that it runs (`ray status` on the head node) and that this machine can reach it.",
        ) from error


class _Shared(NamedTuple):
    """What all tasks of one run have in common, which is sent to each machine once."""

    working_directory: str
    versions: dict[str, str]
    checked: frozenset[str]
    """Ids of the nodes whose versions and files have been checked."""
    function: Callable[..., Any]


class _Answer(NamedTuple):
    """What a worker returns."""

    node: str
    """Id of its node."""
    ran: bool
    """Whether it ran the task; false on a node that has not been checked yet."""
    result: Any


@dataclass(eq=False)
class _Task:
    """A task that is not finished."""

    index: int
    arguments: Task
    attempt: int = 1


class RayEngine:
    """Runs tasks on the cluster that this process is connected to."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self._paths: tuple[AnyPath, ...] = ()
        self._folder: AnyPath | None = None
        self.checked: set[str] = set()
        """Ids of the nodes whose versions and files have been checked."""

    @property
    def machines(self) -> Machines:
        """The running nodes with at least one CPU."""
        resources = [node["Resources"] for node in _working_nodes()]
        sizes = tuple((int(own["CPU"]), own.get("memory", 0.0) - WORKER_EXTRA) for own in resources)
        return Machines(len(sizes), max(cores for cores, _ in sizes), separate=True, sizes=sizes)

    def require(self, paths: Sequence[AnyPath], folder: AnyPath | None = None) -> None:
        """Check versions and files on every node. See :meth:`hexdata.engine.protocol.Engine.require`.

        Nodes that join later are checked before their first task.
        """
        self._paths, self._folder, self.checked = tuple(paths), folder, set()
        self._check_nodes(_working_nodes())
        if not self.checked:
            raise _no_machine()

    def _check_nodes(self, nodes: list[dict[str, Any]]) -> None:
        """Check these nodes in parallel; nodes that die in the meantime are ignored."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not nodes:
            return
        check_node, pending = ray.remote(_check_node), []
        with open_node_check(self._paths, self._folder) as check:
            for node in nodes:
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                remote = check_node.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
                ref = remote.remote(str(Path.cwd()), check, node["NodeID"])
                pending.append((f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})", node, ref))
            refs = [ref for *_, ref in pending]
            try:
                ready, _ = ray.wait(refs, num_returns=len(refs), timeout=NODE_CHECK_TIMEOUT)
                for name, node, ref in pending:
                    if ref not in ready:
                        raise EngineError(
                            f"node {name} does not answer",
                            found=f"no answer within {NODE_CHECK_TIMEOUT:.0f} s",
                        )
                    try:
                        found, faults = ray.get(ref)
                    except _node_death_errors():
                        continue  # the node died; Ray does not assign tasks to it
                    except ray.exceptions.RayError as error:
                        raise EngineError(
                            f"node {name} cannot run hexdata",
                            found=_last_line(error),
                            hint="Install the libraries that hexdata needs on every machine, in Ray's "
                            "environment.",
                        ) from error
                    _require_same(name, installed_versions(), found)
                    check.require(name, faults, node["NodeID"])
                    self.checked.add(node["NodeID"])
            finally:
                _cancel(refs)

    def admit(self, node_id: str) -> None:
        """Check a node that joined after the others and was assigned a task."""
        if node_id not in self.checked:
            self._check_nodes([node for node in _working_nodes(or_none=True) if node["NodeID"] == node_id])

    def run(
        self,
        function: Callable[..., Result],
        tasks: Iterable[Task],
        *,
        workers: int,
        memory: int,
        cores: int = 1,
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks, and repeat those of dead workers. See :meth:`hexdata.engine.protocol.Engine.run`.

        Each task is declared with its CPUs and its memory, so that Ray does not overload a machine.

        Raises:
            BudgetError: No node has enough memory or cores for a task.
            EngineError: A task died repeatedly, no node is left, or a new node failed the checks.
        """
        return _Run(self, function, tasks, workers, memory + WORKER_EXTRA, cores).results()

    def run_light(
        self, function: Callable[..., Result], tasks: Iterable[Task], *, workers: int
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks that only read files."""
        return _Run(self, function, tasks, workers, DIGEST_MEMORY).results()


class _Run:
    """One call of :meth:`RayEngine.run`."""

    def __init__(
        self,
        engine: RayEngine,
        function: Callable[..., Any],
        tasks: Iterable[Task],
        workers: int,
        memory: int,
        cores: int = 1,
    ) -> None:
        import ray

        self._engine = engine
        self._function = function
        self._name = function_name(function)
        self._workers = workers
        self._memory = memory
        self._cores = cores
        self._todo = (_Task(index, task) for index, task in enumerate(tasks))
        self._repeats: list[_Task] = []
        self._running: dict[Any, _Task] = {}
        self._nodes = 0
        self._nodes_counted = -math.inf
        self._shared: Any = None
        self._shared_checked: frozenset[str] | None = None
        self._remote = ray.remote(_call).options(
            num_cpus=cores,
            memory=memory,
            max_retries=0,  # repeated below, where all attempts are counted
            scheduling_strategy="SPREAD",
            name=f"hexdata {self._name}",
        )

    def results(self) -> Iterator[tuple[int, Any]]:
        """Yield the index and the result of each task in order of completion."""
        _require_machine(self._memory, self._cores)
        try:
            while True:
                self._fill()
                if not self._running:
                    return
                for ref in self._ended():
                    task = self._running.pop(ref)
                    answer = self._answer(task, ref)
                    if answer is not None:
                        self._fill()  # its worker is free while the caller uses the result
                        yield task.index, answer.result
        finally:
            self._end()

    def _fill(self) -> None:
        """Submit tasks to the free workers: repeated ones, then new ones."""
        free = self._workers * self._count_nodes() - len(self._running)
        for task in islice(chain(_pop_all(self._repeats), self._todo), max(free, 0)):
            self._submit(task)

    def _count_nodes(self) -> int:
        """Return the number of nodes, at least 1; asked every few seconds, since Ray takes 0.4 ms or more."""
        if time.monotonic() - self._nodes_counted > NODE_POLL_SECONDS:
            self._nodes = max(len(_working_nodes(or_none=True)), 1)
            self._nodes_counted = time.monotonic()
        return self._nodes

    def _submit(self, task: _Task) -> None:
        import ray

        try:
            ref = self._remote.remote(self._share(), task.arguments)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise EngineError(
                "Ray cannot store the arguments of a task",
                found=_error_kind(error),
                hint="End other programs that use this cluster, or start the node of this machine with more "
                "memory for objects (`ray start --object-store-memory`). Run the command again to resume.",
            ) from error
        self._running[ref] = task

    def _share(self) -> Any:
        """Return the reference of what the tasks have in common."""
        import ray

        checked = frozenset(self._engine.checked)
        if checked != self._shared_checked:
            shared = _Shared(str(Path.cwd()), installed_versions(), checked, self._function)
            self._shared, self._shared_checked = ray.put(shared), checked
        return self._shared

    def _ended(self) -> list[Any]:
        """Wait for a while, and return all submissions that have ended."""
        import ray

        refs = list(self._running)
        ready, _ = ray.wait(refs, num_returns=1, timeout=NODE_POLL_SECONDS)
        if not ready:
            _require_machine(self._memory, self._cores)
        elif len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        return list(ready)

    def _answer(self, task: _Task, ref: Any) -> _Answer | None:
        """Return the answer of a submission that has ended; None if its task must be repeated."""
        import ray

        try:
            answer: _Answer = _result(ref)
        except ray.exceptions.RayError as error:
            require_attempts_left(task.attempt, error)
            task.attempt += 1
            self._engine.note(
                f"{self._name} is repeated, attempt {task.attempt} of {ATTEMPTS}: {_error_kind(error)}"
            )
            self._repeats.append(task)
            return None
        if not answer.ran:
            self._engine.admit(answer.node)
            self._repeats.append(task)
            return None
        return answer

    def _end(self) -> None:
        """End the submissions that have not ended, after an error or if the caller takes no more results."""
        unended = _cancel(list(self._running))
        if unended:
            self._engine.note(
                f"{count_of(unended, 'cancelled task')} did not end within {CANCEL_TIMEOUT:.0f} s; "
                "check the machines of the cluster before the next command"
            )


def _working_nodes(*, or_none: bool = False) -> list[dict[str, Any]]:
    """Return the running nodes with at least one CPU.

    Raises:
        EngineError: There is none, unless ``or_none`` is true.
    """
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    nodes = [n for n in nodes if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]
    if not (nodes or or_none):
        raise _no_machine()
    return nodes


def _node_death_errors() -> tuple[type[Exception], ...]:
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


def _require_machine(memory: int, cores: int) -> None:
    """Check that a node has enough memory and cores for a task, because Ray would wait forever."""
    resources = [node["Resources"] for node in _working_nodes()]
    most = max(own.get("memory", 0) for own in resources)
    if memory > most:
        raise BudgetError(
            "no machine of the cluster has enough memory for a task",
            found=f"{most / 1e6:,.0f} MB",
            expected=f"{memory / 1e6:,.0f} MB",
            hint="Start nodes with more memory (`ray start --memory`), or, for a shuffle, lower --memory or "
            "raise --threads.",
        )
    if not any(own["CPU"] >= cores and own.get("memory", 0) >= memory for own in resources):
        raise BudgetError(
            "no machine of the cluster is large enough for a task",
            found=", ".join(sorted({f"{own['CPU']:,.0f} CPUs" for own in resources})),
            expected=f"{cores:,} CPUs and {memory / 1e6:,.0f} MB on one machine",
            hint="Run the command again to resume with tasks for the machines of the cluster as it is now.",
        )


def _pop_all(tasks: list[_Task]) -> Iterator[_Task]:
    """Yield the elements of a list and remove them."""
    while tasks:
        yield tasks.pop()


def _result(ref: Any) -> Any:
    """Return the result of a task or raise its exception; a ``RayError`` if its worker or node died.

    Raises:
        EngineError: The exception of the task cannot be unpickled; the message contains its text.
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


def require_attempts_left(number: int, error: Exception) -> None:
    """Check that a task may be repeated.

    Raises:
        EngineError: It died too often, or the Ray node of this machine died.
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
            found=_error_kind(error),  # Ray's own message gives advice that does not apply here
            hint="If memory ran out, use fewer workers. Run the command again to resume.",
        ) from error


def _cancel(refs: list[Any]) -> int:
    """Cancel tasks and wait until their workers have ended, so that none writes after the store is unlocked.

    Ray kills a worker that does not respond, such as a stopped process, after 5 seconds. Finished tasks are
    skipped, because cancelling a task that is ending may kill this process (Ray 2.60, "Tried to complete task
    that was not pending").

    Returns:
        The number of tasks that have not ended within ``CANCEL_TIMEOUT``.
    """
    import ray

    if refs:
        _, refs = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    for ref in refs:
        ray.cancel(ref, force=True)
    if refs:
        _, refs = ray.wait(refs, num_returns=len(refs), timeout=CANCEL_TIMEOUT, fetch_local=False)
    return len(refs)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__


def _error_kind(error: Exception) -> str:
    """Return the kind of a Ray error in words, such as "worker crashed" or "out of memory"."""
    words = re.findall("[A-Z][a-z]+", type(error).__name__.removesuffix("Error"))
    return " ".join(words).lower()


def _require_same(name: str, ours: dict[str, str], found: dict[str, str]) -> None:
    """Check that a worker has the versions of the driver.

    Raises:
        EngineError: A version differs.
    """
    if differing := version_differences(ours, found):
        raise EngineError(
            f"node {name} has other versions than this process",
            found=", ".join(f"{what} {theirs}" for what, _, theirs in differing),
            expected=", ".join(f"{what} {ours}" for what, ours, _ in differing),
            hint="Install the same versions on every machine, because they determine the bytes written.",
        )


def _call(shared: _Shared, task: Task) -> _Answer:
    """Run one task in a worker, in the driver's working directory so that relative paths are the same.

    On a node that has not been checked yet, nothing is run.
    """
    import ray

    node = ray.get_runtime_context().get_node_id()
    if node not in shared.checked:
        return _Answer(node, False, None)
    _prepare_worker(shared.working_directory)
    # The versions may have changed since the node was checked.
    _require_same(socket.gethostname(), shared.versions, installed_versions())
    return _Answer(node, True, shared.function(*task))


def _check_node(working_directory: str, check: NodeCheck, node: str) -> tuple[dict[str, str], dict[str, str]]:
    """Run the checks in a worker: return its versions and the faults of the paths."""
    _prepare_worker(working_directory)
    return installed_versions(), check.run(node)


def _prepare_worker(working_directory: str) -> None:
    """Prepare a worker: use the driver's working directory, and an Arrow pool that releases memory."""
    if Path(working_directory).is_dir():
        os.chdir(working_directory)
    pa.set_memory_pool(pa.system_memory_pool())
