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

from hexdata.engine.node_check import NodeCheck, installed_versions, open_node_check, version_differences
from hexdata.engine.protocol import DIGEST_MEMORY, Machines
from hexdata.errors import BudgetError, ConfigError, EngineError
from hexdata.progress import SILENT
from hexdata.storage import AnyPath

__all__ = ["RayEngine", "connect_engine", "require_attempts_left"]

Result = TypeVar("Result")
Task = tuple[Any, ...]
Note = Callable[[str], None]
_Attempt = tuple[int, Task, int]
"""Index of a task, its arguments, and the number of the attempt."""

_REPEAT: Final = object()
"""Marks a task that must be submitted again."""

CONNECT_TIMEOUT: Final = 10.0
"""Timeout for connecting to a cluster; Ray itself would wait for minutes."""
_SETTINGS: Final = 4
"""Type of the frame with which each side of an HTTP/2 connection begins. It is the frame's fourth byte."""
_FRAME_HEADER: Final = 9
"""Bytes of the header of a frame."""
_HTTP2_START: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 client, with empty settings."""
NODE_CHECK_TIMEOUT: Final = 60.0
"""Timeout for the checks on a node, including the start of a worker."""
CANCEL_TIMEOUT: Final = 30.0
"""Timeout for workers to end."""
NODE_POLL_SECONDS: Final = 5.0
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
def connect_engine(address: str | None = None, note: Note = SILENT.note) -> Iterator[RayEngine]:
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
        yield RayEngine(note)
        return
    _require_server(address)
    arguments: dict[str, Any] = {"object_store_memory": OBJECT_STORE, "include_dashboard": False}
    arguments = arguments if address == "local" else {}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports from a temporary cluster
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # the future default, about which Ray warns
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **arguments)
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
        yield RayEngine(note)
    finally:
        ray.shutdown()


def _require_server(address: str) -> None:
    """Check that a server at an address may be Ray, because Ray would wait for many minutes.

    Raises:
        ConfigError: it is not an address, or that of a Ray Client.
        EngineError: no server answers, or another kind of server.
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
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT) as connection:
            found = None if _uses_tls() else _http2_fault(connection)
    except OSError as error:
        raise EngineError(
            "the Ray cluster does not answer",
            found=f"{error.strerror or error} at {address}, within {CONNECT_TIMEOUT:.0f} s",
            hint="Check that it runs (`ray status` on the head node) and that this machine can reach it.",
        ) from error
    if found is not None:
        raise EngineError(
            "the server at this address is not a Ray cluster",
            found=f"{found} at {address}",
            expected="the address that `ray start --head` prints",
        )


def _uses_tls() -> bool:
    """Return whether Ray encrypts its connections, so that the first bytes of a server say nothing."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _http2_fault(connection: socket.socket) -> str | None:
    """Return what a server answered if it was not HTTP/2, which Ray's servers use, or None.

    Raises:
        TimeoutError: The server sent nothing.
        OSError: The connection failed.
    """
    connection.sendall(_HTTP2_START)
    frame = b""
    while len(frame) < _FRAME_HEADER:
        data = connection.recv(_FRAME_HEADER - len(frame))
        if not data:
            return "a connection that was closed"
        frame += data
    return None if frame[3] == _SETTINGS else f"an answer that begins with {frame!r}"


class _UncheckedNode(NamedTuple):
    """Returned instead of a result by a node that has not been checked yet."""

    node_id: str


class RayEngine:
    """Runs tasks on the cluster that this process is connected to."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._paths: tuple[AnyPath, ...] = ()
        self._folder: AnyPath | None = None
        self._checked: set[str] = set()
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
        self._paths, self._folder, self._checked = tuple(paths), folder, set()
        self._check_nodes(_working_nodes())
        if not self._checked:
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
                            hint="Install the same hexdata on every machine, in Ray's environment.",
                        ) from error
                    _require_same(name, installed_versions(), found)
                    check.require(name, faults, node["NodeID"])
                    self._checked.add(node["NodeID"])
            finally:
                _cancel(refs)

    def _admit(self, node_id: str) -> None:
        """Check a node that joined after the others and was assigned a task."""
        if node_id not in self._checked:
            self._check_nodes([node for node in _working_nodes(or_none=True) if node["NodeID"] == node_id])

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
        working_directory, versions = str(Path.cwd()), installed_versions()
        todo = ((index, task, 1) for index, task in enumerate(tasks))
        repeats: list[_Attempt] = []
        running: dict[Any, _Attempt] = {}
        try:
            while True:
                most = workers * max(len(_working_nodes(or_none=True)), 1)
                for attempt in islice(chain(_pop_all(repeats), todo), max(most - len(running), 0)):
                    ref = remote.remote(
                        working_directory, versions, frozenset(self._checked), function, attempt[1]
                    )
                    running[ref] = attempt
                if not running:
                    return
                ready, _ = ray.wait(list(running), num_returns=1, timeout=NODE_POLL_SECONDS)
                if not ready:
                    _require_memory(memory)
                for ref in ready:
                    index, task, number = running[ref]
                    try:
                        result = _result(ref)
                    except ray.exceptions.RayError as error:
                        require_attempts_left(number, error)
                        number += 1
                        self._note(
                            f"{name} is repeated, attempt {number} of {ATTEMPTS}: {_error_kind(error)}"
                        )
                        result = _REPEAT
                    del running[ref]
                    if isinstance(result, _UncheckedNode):
                        self._admit(result.node_id)
                        result = _REPEAT
                    if result is _REPEAT:
                        repeats.append((index, task, number))
                    else:
                        yield index, result
        finally:
            _cancel(list(running))


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


def _pop_all(attempts: list[_Attempt]) -> Iterator[_Attempt]:
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


def require_attempts_left(number: int, error: Exception) -> None:
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
            found=_error_kind(error),  # Ray's own message gives advice that does not apply here
            hint="If memory ran out, use fewer workers. Run the command again to resume.",
        ) from error


def _cancel(refs: list[Any]) -> None:
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
        ray.wait(refs, num_returns=len(refs), timeout=CANCEL_TIMEOUT, fetch_local=False)


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
        EngineError: a version differs.
    """
    if differing := version_differences(ours, found):
        raise EngineError(
            f"node {name} has other versions than this process",
            found=", ".join(f"{what} {theirs}" for what, _, theirs in differing),
            expected=", ".join(f"{what} {ours}" for what, ours, _ in differing),
            hint="Install the same versions on every machine, because they determine the bytes written.",
        )


def _call(
    working_directory: str,
    versions: dict[str, str],
    checked: frozenset[str],
    function: Callable[..., Any],
    task: Task,
) -> Any:
    """Run one task in a worker, in the driver's working directory so that relative paths are the same.

    On a node that has not been checked yet, return ``_UncheckedNode`` instead.
    """
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    if node_id not in checked:
        return _UncheckedNode(node_id)
    _prepare_worker(working_directory)
    # The versions may have changed since the node was checked.
    _require_same(socket.gethostname(), versions, installed_versions())
    return function(*task)


def _check_node(working_directory: str, check: NodeCheck, node: str) -> tuple[dict[str, str], dict[str, str]]:
    """Run the checks in a worker: return its versions and the faults of the paths."""
    _prepare_worker(working_directory)
    return installed_versions(), check.run(node)


def _prepare_worker(working_directory: str) -> None:
    """Prepare a worker: use the driver's working directory, and an Arrow pool that releases memory."""
    if Path(working_directory).is_dir():
        os.chdir(working_directory)
    pa.set_memory_pool(pa.system_memory_pool())
