"""The engine for Ray clusters: each task is a remote function, which Ray schedules and repeats.

Tasks receive file names and return small results; no data is sent between machines. All machines must see the
same files under the same paths, and run the same code, which each task checks before it starts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa

from hexdata import __version__
from hexdata.engine.local import Engine, Tasks
from hexdata.errors import BudgetError, EngineError
from hexdata.extras import installed_by
from hexdata.storage import AnyPath, storage_of
from hexdata.units import format_bytes

Result = TypeVar("Result")
Token = tuple[AnyPath, bytes]
"""A file in the shared folder, and its content."""

_LIBRARIES: Final = ("duckdb", "numpy", "pyarrow", "zlib-ng")
"""Libraries whose versions may change the bytes written, through encodings, compression or footers."""
_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage reports from a temporary cluster
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # 900 characters beside a line on the retry
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # attempts to connect, 40 s each; not 20
}
"""Environment variables that Ray reads when it is imported, unless the user has set them."""
_WORKER_MEMORY: Final = 128 << 20
"""Additional memory of a Ray worker in bytes, compared with a worker of the local engine.

Measured: 62 MB of libraries and threads, and some 65 MB more at the peak of a conversion.
"""


@contextmanager
def connect_engine(address: str | None = None) -> Iterator[RayEngine]:
    """Connect to a cluster or start a temporary one; disconnect or stop it when the context ends.

    The workers of an existing cluster run the code of this process, which is sent to them. If this process is
    connected already, its connection is used and kept, and the workers run the hexdata that they find.

    Raises:
        ConfigError: Ray is not installed.
        EngineError: The cluster does not answer.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with installed_by("ray", "an engine of Ray"):
        import ray
    # A connection that the caller has opened is not closed here, since the caller may still use it.
    if ray.is_initialized():
        yield RayEngine()
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    # Results are small, so a temporary cluster needs little shared memory.
    arguments: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
    if address != "local":
        code = {"py_modules": [str(Path(__file__).parents[1])], "excludes": ["__pycache__"]}
        arguments = {"runtime_env": code}
    try:
        if address not in ("auto", "local"):  # Ray would wait for minutes for a server that does not answer
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **arguments)
    except Exception as error:  # Ray raises plain ones, for example if its processes do not start in 30 s
        raise EngineError(
            "cannot use the Ray cluster",
            path=address,
            found=" ".join(str(error).split()),
            hint="Start one (`ray start --head`) with the same versions of Ray and Python, or set --address.",
        ) from error
    try:
        yield RayEngine()
    finally:
        ray.shutdown()


class RayEngine(Engine):
    """Runs tasks on the cluster that this process is connected to."""

    remote = True

    _token: Token | None = None
    """What each task must find in the shared folder."""

    @property
    def machines(self) -> int:
        """Number of running machines with a CPU."""
        return len(_nodes())

    @property
    def cores(self) -> int:
        """Number of CPUs of the largest machine."""
        return max((int(node["CPU"]) for node in _nodes()), default=1)

    @contextmanager
    def sharing(self, folder: AnyPath) -> Iterator[None]:
        """Write a random token into the folder, which tasks must find there. See :meth:`Engine.sharing`.

        The file has always the same name, so a killed process leaves at most one.
        """
        path, token = folder / "engine", os.urandom(16)
        with storage_of(path).publish() as file:
            file.write(token)
        self._token = path, token
        try:
            yield
        finally:
            self._token = None
            storage_of(path).remove()

    def run(
        self, function: Callable[..., Result], tasks: Tasks, *, workers: int, memory: int, cores: int = 1
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks on the machines of the cluster. See :meth:`Engine.run` for the arguments.

        Each task is declared with its CPUs and its memory, so that Ray does not overload a machine. Ray runs
        the task of a dead worker or machine again, up to three times.

        Raises:
            BudgetError: No machine has enough memory or cores for a task.
            EngineError: A machine has other versions or another folder, or a task died repeatedly.
        """
        import ray

        memory += _WORKER_MEMORY
        _require_machine(cores, memory)
        call = ray.remote(_run_task).options(
            # By default Ray fills a machine to half before it uses the next one.
            num_cpus=cores,
            memory=memory,
            scheduling_strategy="SPREAD",
            name="hexdata task",
        )
        common = (_versions(), self._token, str(Path.cwd()), function)
        limit, todo = workers * self.machines, enumerate(tasks)
        running: dict[Any, int] = {}
        try:
            while True:
                for index, task in islice(todo, limit - len(running)):
                    running[call.remote(*common, task)] = index
                if not running:
                    return
                (ref,), _ = ray.wait(list(running), num_returns=1)
                yield running.pop(ref), ray.get(ref)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # the exception that a task raised
            # The error of the task itself, as the local engine raises it. The machine causes an ImportError.
            if isinstance(cause, Exception) and not isinstance(cause, (ray.exceptions.RayError, ImportError)):
                raise cause from None
            raise EngineError(
                "a task failed on the Ray cluster",
                found=f"{type(error).__name__}: " + str(error).strip().rpartition("\n")[2].strip(" ."),
                hint="If memory ran out, use fewer workers. Run the command again to resume.",
            ) from None
        finally:
            # No task may write after the store is unlocked. Finished tasks are skipped, because cancelling a
            # task that is ending may abort this process (Ray 2.60, "complete task that was not pending").
            left = [ref for ref in running if not ray.wait([ref], timeout=0, fetch_local=False)[0]]
            for ref in left:
                ray.cancel(ref, force=True)
            if left:
                ray.wait(left, num_returns=len(left), fetch_local=False)


def _run_task(
    versions: str, token: Token | None, folder: str, function: Callable[..., Result], task: tuple[Any, ...]
) -> Result:
    """Run one task in a worker, in the driver's working directory so that relative paths are the same.

    Raises:
        EngineError: The worker has other versions than the driver, or does not find its token.
    """
    # Only relative paths need this folder. The token shows whether the machine sees the files.
    if Path(folder).is_dir():
        os.chdir(folder)
    found, machine = _versions(), socket.gethostname()
    # Before the task writes anything.
    if found != versions:
        raise EngineError(
            f"machine {machine} has other versions than this process",
            found=found,
            expected=versions,
            hint="Install the same versions on every machine, because they determine the bytes written.",
        )
    if token is not None:
        path, content = token
        if not (storage_of(path).exists() and storage_of(path).read_range(0, len(content)) == content):
            raise EngineError(
                f"machine {machine} does not see the same files under this path",
                path=path.parent,
                hint="Mount the folder at this path on every machine, or use an object store for the store.",
            )
    pa.set_memory_pool(pa.system_memory_pool())  # it releases memory, unlike the default
    return function(*task)


@cache
def _versions() -> str:
    """Return what determines the bytes written: versions of Python and libraries, and a digest of hexdata."""
    files = sorted(path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".py", ".sql"))
    # The code, too: machines with different checkouts of one version would write different bytes.
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    libraries = [f"{name} {version(name)}" for name in _LIBRARIES]
    return ", ".join([python, f"hexdata {__version__} (code {digest[:12]})", *libraries])


def _nodes() -> list[dict[str, float]]:
    """Return the CPUs and the memory in bytes of each running machine with at least one CPU."""
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [{"memory": 0.0, **own} for own in resources if own.get("CPU", 0) >= 1]


def _require_machine(cores: int, memory: int) -> None:
    """Check that a machine is large enough for a task, because Ray would wait forever."""
    nodes = _nodes()
    if not any(node["CPU"] >= cores and node["memory"] >= memory for node in nodes):
        sizes = sorted({f"{node['CPU']:,.0f} CPUs and {format_bytes(int(node['memory']))}" for node in nodes})
        raise BudgetError(
            "no machine of the Ray cluster is large enough for a task",
            found="; ".join(sizes) or "no machine with a CPU",
            expected=f"{cores:,} CPUs and {format_bytes(memory)}",
            hint="Start larger nodes (`ray start --memory`), or lower --memory, --threads or --workers.",
        )
