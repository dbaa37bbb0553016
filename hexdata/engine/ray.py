"""The engine of a Ray cluster: every task is one of Ray's, repeated when its worker or node dies.

The one place that imports ray. It moves no data: tasks get names of files and give back small facts, so all
machines must see the same files under the same paths.
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
from hexdata.remote import AnyPath

__all__ = ["Ray", "connected", "require_another"]

Result = TypeVar("Result")
Task = tuple[Any, ...]
Note = Callable[[str], None]
_Attempt = tuple[int, Task, int]
"""A task: its index, its arguments, and which attempt this is."""

_UNDONE: Final = object()
"""In place of the result of a task that is to be handed over once more."""

CONNECT_SECONDS: Final = 10.0
"""That a cluster has to answer; Ray itself would wait for minutes."""
EXAMINE_SECONDS: Final = 60.0
"""That a node has to start a worker and look at some paths."""
CANCEL_SECONDS: Final = 30.0
"""That workers have to end."""
LOOK_SECONDS: Final = 5.0
"""Between two looks at whether there is still a node that could do what waits."""
ATTEMPTS: Final = 5
"""Of a task whose worker or node dies each time."""
WORKER_EXTRA: Final = 128 << 20
"""Bytes that a worker of Ray holds above one of the local engine, for which stages state their memory.

Measured: 62 MB of libraries and threads, and some 65 MB more at the peak of a conversion.
"""
OBJECT_STORE: Final = 80 << 20
"""Bytes of shared memory of a cluster that is started here: nothing large goes through it."""


@contextmanager
def connected(address: str | None = None, note: Note = SILENT.note) -> Iterator[Ray]:
    """Connect to a cluster, or start one of this machine; end the connection, or the cluster, at the end.

    Where this process is connected already, that connection is used and left. ``note`` is told which tasks
    are done again.

    Raises:
        ConfigError: the address is one that this engine cannot use.
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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here tells nobody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns that it will be so
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        other = "Version mismatch" in str(error)
        raise EngineError(
            "cannot use the Ray cluster",
            found=" ".join(str(error).split()),
            expected=f"one of Ray {ray.__version__} at {address}",
            hint="Install the Ray and the Python of the cluster here."
            if other
            else "Start one (`ray start --head`), or give its --address.",
        ) from error
    try:
        yield Ray(note)
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """See that something listens at an address, before Ray waits for it.

    Raises:
        ConfigError: it is the address of a Ray Client.
        EngineError: nothing does.
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
            hint="See that it runs (`ray status` on its head) and that this machine can reach it.",
        ) from error


class _Stranger(NamedTuple):
    """What comes back, in place of a result, from a node that has not been examined yet."""

    node_id: str


class Ray:
    """Runs tasks on the cluster that this process is connected to."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._paths: tuple[AnyPath, ...] = ()
        self._folder: AnyPath | None = None
        self._examined: set[str] = set()
        """Ids of the nodes that have shown their versions, and that they see these paths."""

    @property
    def machines(self) -> Machines:
        """The living nodes that have a processor to give."""
        cores = [int(node["Resources"]["CPU"]) for node in _working_nodes()]
        return Machines(len(cores), max(cores), separate=True)

    def require(self, paths: Sequence[AnyPath], folder: AnyPath | None = None) -> None:
        """Have every node look at paths and versions, as :class:`hexdata.engine.protocol.Engine` has it.

        Those that join later are asked the same, before they do their first task.
        """
        self._paths, self._folder, self._examined = tuple(paths), folder, set()
        self._examine(_working_nodes())
        if not self._examined:
            raise _no_machine()

    def _examine(self, nodes: list[dict[str, Any]]) -> None:
        """Have these nodes look, all at once; those that die meanwhile are left out."""
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
                        continue  # the node has just died, and Ray gives it no work either
                    except ray.exceptions.RayError as error:
                        raise EngineError(
                            f"node {name} cannot run hexdata",
                            found=_last_line(error),
                            hint="Install the same hexdata on every machine, for the Python of its Ray.",
                        ) from error
                    _require_same(name, describe(), found)
                    examined.require(name, saw, node["NodeID"])
                    self._examined.add(node["NodeID"])
            finally:
                _end(refs)

    def _admit(self, node_id: str) -> None:
        """Have a node look that has joined since the others did, and has been given a task already."""
        if node_id not in self._examined:
            self._examine([node for node in _working_nodes(or_none=True) if node["NodeID"] == node_id])

    def run(
        self, function: Callable[..., Result], tasks: Iterable[Task], *, workers: int, memory: int
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks, as :class:`hexdata.engine.protocol.Engine` has it, and again those of dead workers.

        Each is declared to Ray with one processor and its memory, so that Ray does not fill a machine.

        Raises:
            BudgetError: no node gives a task so much memory.
            EngineError: a task died again and again, or there is no node left, or a new one cannot do it.
        """
        return self._run(function, tasks, workers, memory + WORKER_EXTRA)

    def run_light(
        self, function: Callable[..., Result], tasks: Iterable[Task], *, workers: int
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks that only read files through."""
        return self._run(function, tasks, workers, DIGEST_MEMORY)

    def _run(
        self, function: Callable[..., Result], tasks: Iterable[Task], workers: int, memory: int
    ) -> Iterator[tuple[int, Result]]:
        import ray

        _require_room(memory)
        name = function.__name__.lstrip("_")
        remote = ray.remote(_call).options(
            num_cpus=1,
            memory=memory,
            max_retries=0,  # repeated below, where attempts of every kind are counted
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
                ready, _ = ray.wait(list(under_way), num_returns=1, timeout=LOOK_SECONDS)
                if not ready:
                    _require_room(memory)
                for ref in ready:
                    index, task, number = under_way[ref]
                    try:
                        result = _result(ref)
                    except ray.exceptions.RayError as error:
                        require_another(number, error)
                        number += 1
                        self._note(f"{name} is done again, attempt {number} of {ATTEMPTS}: {_why(error)}")
                        result = _UNDONE
                    del under_way[ref]
                    if isinstance(result, _Stranger):
                        self._admit(result.node_id)
                        result = _UNDONE
                    if result is _UNDONE:
                        again.append((index, task, number))
                    else:
                        yield index, result
        finally:
            _end(list(under_way))


def _working_nodes(*, or_none: bool = False) -> list[dict[str, Any]]:
    """Return the living nodes that have a processor to give.

    Raises:
        EngineError: there is none, unless ``or_none``.
    """
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    nodes = [n for n in nodes if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]
    if not (nodes or or_none):
        raise _no_machine()
    return nodes


def _gone() -> tuple[type[Exception], ...]:
    """Return what a task raises that was meant for a node that is no more."""
    import ray

    errors = ray.exceptions
    return errors.TaskUnschedulableError, errors.NodeDiedError, errors.WorkerCrashedError


def _no_machine() -> EngineError:
    return EngineError(
        "the Ray cluster has no machine that works",
        found="no living node with a CPU",
        hint="Start one (`ray start --address`), and run the command again: it goes on from there.",
    )


def _require_room(memory: int) -> None:
    """See that some node could hold such a task: Ray would wait for one for ever."""
    most = max(node["Resources"].get("memory", 0) for node in _working_nodes())
    if memory > most:
        raise BudgetError(
            "no machine of the cluster gives a task so much memory",
            found=f"{most / 1e6:,.0f} MB",
            expected=f"{memory / 1e6:,.0f} MB",
            hint="Start nodes with more (`ray start --memory`), or, for a shuffle, lower --memory or raise "
            "--threads.",
        )


def _drained(attempts: list[_Attempt]) -> Iterator[_Attempt]:
    """Give what is in a list, and take it out."""
    while attempts:
        yield attempts.pop()


def _result(ref: Any) -> Any:
    """Return what a task returned, or raise what it raised; a ``RayError`` where its worker or node died.

    Raises:
        EngineError: what it raised is of a kind that does not travel; here are its words.
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
    """See that a task may be done again: it has not died too often, and there is somebody to hand it to.

    Raises:
        EngineError: it may not.
    """
    import ray

    if isinstance(error, ray.exceptions.LocalRayletDiedError):
        raise EngineError(
            "the Ray node of this machine has died",
            hint="Start it (`ray start`), and run the command again: it goes on from there.",
        ) from error
    if number >= ATTEMPTS:
        raise EngineError(
            f"a task died {number} times",
            found=_why(error),  # Ray's own words advise what is not for the user to do
            hint="If memory ran out, use fewer workers; then run the command again: it goes on from there.",
        ) from error


def _end(refs: list[Any]) -> None:
    """End tasks and wait until their workers are gone: none may publish after the store is unlocked.

    Only those that are not done: Ray may end this process where it cancels one that is just ending (Ray 2.60,
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
    """Return the kind of an error of Ray, in words: "worker crashed", "out of memory"."""
    words = re.findall("[A-Z][a-z]+", type(error).__name__.removesuffix("Error"))
    return " ".join(words).lower()


def _require_same(name: str, ours: dict[str, str], found: dict[str, str]) -> None:
    """See that a worker has the driver's versions.

    Raises:
        EngineError: it has not.
    """
    if differing := differences(ours, found):
        raise EngineError(
            f"node {name} has other versions than the process that asks",
            found=", ".join(f"{what} {theirs}" for what, _, theirs in differing),
            expected=", ".join(f"{what} {ours}" for what, ours, _ in differing),
            hint="Install the same on every machine: they decide the bytes that are written.",
        )


def _call(
    here: str, versions: dict[str, str], examined: frozenset[str], function: Callable[..., Any], task: Task
) -> Any:
    """In a worker: run one task where the driver stands, so that relative paths mean the same.

    On a node that has joined since the others were examined, do nothing, and say so.
    """
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    if node_id not in examined:
        return _Stranger(node_id)
    _begin(here)
    _require_same(socket.gethostname(), versions, describe())  # it may have changed since
    return function(*task)


def _look(here: str, examined: Any, node: str) -> tuple[dict[str, str], dict[str, str]]:
    """In a worker: return its versions, and what it sees of the paths."""
    _begin(here)
    return describe(), examined.look(node)


def _begin(here: str) -> None:
    """In a worker: stand where the driver stands, and let Arrow give memory back, as locally."""
    if Path(here).is_dir():
        os.chdir(here)
    pa.set_memory_pool(pa.system_memory_pool())
