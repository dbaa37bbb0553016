"""Framework of the stages of a live pipeline: queues, threads, waiting, counts and an orderly end.

A new stage is a subclass of ``Transform`` with ``process``; or of ``Stage`` with ``work``, if it does more
than turn each item into others. All queues of a pipeline share one lock. Each item contains many games or
positions, so the lock is taken only a few thousand times per second.
"""

from __future__ import annotations

import os
import pkgutil
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from hexdata.checks import check_count
from hexdata.errors import ConfigError, FormatError, HexdataError, Reason
from hexdata.live.chunk import NAMED_FILES, KnownFile
from hexdata.text import printable

Result = TypeVar("Result")


class Stopped(Exception):  # noqa: N818 - ends a thread, reports no error
    """Raised in a waiting thread when the pipeline has stopped or a queue is closed; the thread then ends."""


class InputEnded(Stopped):
    """Raised when a queue is closed and empty."""


class Coordinator:
    """What the threads of a pipeline share: lock, stop signal, warnings, and the known files."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        """Set when the pipeline stops for any reason. Long work checks it."""
        self.suspended = False
        """True while the stages end their threads to be started again."""
        self.error: BaseException | None = None
        """First error that a stage raised, for the trainer."""
        self.warnings: deque[str] = deque()
        """Warnings of stages; the trainer's thread issues them when it takes the next item."""
        self.files: dict[str, KnownFile] = {}
        """Known files by name, in the order in which they were found. Part of the state of the pipeline."""
        self.board_size: int | None = None
        """Board size of all games: that of the first one. Part of the state of the pipeline."""
        # Acquired directly: Ctrl-C in the Python code of a condition could leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified after each change of a queue. All threads wait for it: they are few."""
        self._process_id = os.getpid()

    def require_size(self, size: int) -> None:
        """Check that a game has the board size of the earlier ones.

        Raises:
            FormatError: It has not.
        """
        with self._lock:  # only one file can be the first
            self.board_size = self.board_size or size
        if size != self.board_size:
            reason = f"the boards are not of size {self.board_size}, as those of earlier files"
            raise FormatError(reason, code=Reason.BOARD_SIZE, found=size)

    @property
    def in_fork(self) -> bool:
        """True in a fork of the process, which has no such threads and may find the lock held forever."""
        return os.getpid() != self._process_id

    def wake(self) -> None:
        """Wake all waiting threads, so that they try again."""
        with self._lock:
            self._changed.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the pipeline: threads that wait, now or later, get :class:`Stopped`."""
        if self.in_fork:
            return
        with self._lock:
            # Only the first error is kept, since later ones are often its consequences.
            if not self.stopping.is_set():
                self.error = error
            self.stopping.set()
            self.wake()

    def wait_for(
        self,
        attempt: Callable[[], Result | None],
        timeout: float | None = None,
        *,
        is_stage: bool = True,
    ) -> Result | None:
        """Wait until ``attempt()`` returns something other than None, and return that.

        Args:
            attempt: Function that takes or puts an item if it can. It runs under the lock and must not wait.
                It is called again after each :meth:`wake`, and each change of a queue.
            timeout: Seconds after which None is returned. None (default) for no limit.
            is_stage: False for the thread of the trainer, which is never suspended. Default True.

        Raises:
            Stopped: The pipeline has stopped or is suspended, or ``attempt`` raised it.
        """
        result: Result | None = None

        def is_ready() -> bool:
            nonlocal result
            if self.stopping.is_set() or (self.suspended and is_stage):
                raise Stopped
            result = attempt()
            return result is not None

        with self._lock:
            self._changed.wait_for(is_ready, timeout)
        return result


class Queue:
    """Queue of at most ``capacity`` items, for any number of producers, which wait while it is full, and
    consumers. ``accepted`` counts the items since the start.
    """

    def __init__(self, coordinator: Coordinator, capacity: int) -> None:
        self.capacity = capacity
        self.accepted = 0
        self.items: deque[Any] = deque()
        """Items in the queue, oldest first. Only the methods change it, except before the start."""
        self._coordinator = coordinator
        self._is_closed = False

    def close(self) -> None:
        """Close the queue: its producers have ended. Consumers can still take the remaining items."""
        self._is_closed = True
        self._coordinator.wake()

    def accept(self, item: Any) -> bool | None:
        """Append an item without waiting; return None if the producer has to wait. Needs the lock."""
        if len(self.items) >= self.capacity:
            return None
        self.items.append(item)
        self.accepted += 1
        self._coordinator.wake()
        return True

    def pop(self) -> Any:
        """Remove and return the oldest item without waiting; None if the consumer has to wait.

        The caller holds the lock.

        Raises:
            InputEnded: The queue is closed and empty.
        """
        if self.items:
            self._coordinator.wake()
            return self.items.popleft()
        if self._is_closed:
            raise InputEnded
        return None


@dataclass
class Worker:
    """A thread of a stage, with the outputs that its full output queue has not accepted yet."""

    number: int
    pending: deque[Any] = field(default_factory=deque)
    busy_since: float | None = None
    """Time of ``time.monotonic`` at which the current work began; None while the thread is idle."""
    busy_seconds: float = 0.0
    thread: threading.Thread | None = None
    has_ended: bool = False
    """True once the input is processed, so that the thread is not started again."""


class Stage(ABC):
    """One step of a pipeline, which runs on its own threads.

    A stage is created from its options and started by the pipeline. It ends when its input is closed and
    processed (then it closes its output), when the pipeline stops, or with an error, which stops the pipeline
    and is raised in the trainer.

    Args:
        threads: Number of worker threads, at least 1. Default 1.

    Raises:
        ConfigError: There are no threads, or ``kept`` is no mapping.
    """

    first: ClassVar[bool] = False
    """True for a stage that begins a pipeline and has no input."""
    consumes: ClassVar[str | None] = None
    produces: ClassVar[str | None] = None
    """Types of the items that the stage takes and puts: "files", "sources", "games", "blocks" or "batches".
    None is not checked."""
    kept: ClassVar[Mapping[str, Any]] = {}
    """Types of the values that are the state of the stage, by name: of its attributes, or of all values that
    its own :meth:`state` returns. A state with other names or types is refused, also when it is saved."""

    source: Queue | None = None
    """Queue before the stage; None for the first one. The pipeline sets it, as it does ``sink``."""
    stages: Sequence[Stage] = ()
    """All stages of the pipeline, in order."""

    def __init__(self, *, threads: int = 1) -> None:
        self.name = type(self).__name__
        if not isinstance(self.kept, Mapping):
            raise ConfigError(f"{self.name}.kept must be types by name", found=repr(self.kept))
        self.workers = [Worker(number) for number in range(check_count("threads", threads, 1))]
        self.counts: dict[str, int] = {}
        """Counts of the stage for monitoring, besides those of its queues: bad files, rejected games …"""
        self.named_files: dict[str, deque[tuple[str, str]]] = {}
        """Last bad or missing files, by the note that names them: (name, reason) of each."""
        self.coordinator = Coordinator()  # replaced by that of the pipeline
        self.sink = Queue(self.coordinator, 1)
        self._lock = threading.Lock()
        """Held while threads change the counts or other attributes of the stage, never during a wait."""

    @abstractmethod
    def work(self, worker: Worker) -> None:
        """Do the work of one thread: take, process and put items until the input ends.

        To read the state of a pipeline, its threads are suspended: they get ``Stopped`` at the next wait, and
        ``work`` is called again afterwards. Between two waits, everything that is needed to continue has to
        be in attributes.

        Raises:
            Stopped: A queue raised it; the thread ends.
        """

    def finish(self) -> Iterable[Any]:
        """Return the items that the stage still holds. The last thread calls this once the input is
        processed. Items that were returned, or yielded by an iterator, must not be in :meth:`state`.
        """
        return ()

    def state(self) -> dict[str, Any]:
        """Return the state that the stage needs to continue: plain values, ``bytes`` and NumPy arrays,
        with the names and types of ``kept``.

        No thread of the pipeline runs. The pipeline saves the pending outputs of the workers itself.
        """
        return {name: getattr(self, name) for name in self.kept}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state, whose values have the types of ``kept``, before the stage is started.

        Raises:
            ValueError: The values do not fit the stage.
        """
        for name in self.kept:  # no other attribute, whatever is in a state
            setattr(self, name, state[name])

    def metrics(self) -> dict[str, float]:
        """Return the metrics: of the queue behind the stage, the threads and their work, and ``counts``.

        This may be called while the stage is working.
        """
        now = time.monotonic()
        starts = [worker.busy_since for worker in self.workers]
        busy = [now - start for start in starts if start is not None]
        seconds = sum(worker.busy_seconds for worker in self.workers) + sum(busy)
        queue = {"out": self.sink.accepted, "queued": len(self.sink.items), "capacity": self.sink.capacity}
        return {**queue, "threads": len(starts), "busy": len(busy), "busy_seconds": seconds, **self.counts}

    def notes(self) -> dict[str, Any]:
        """Return text for people, such as names of bad files and reasons; it can be stored as JSON."""
        # Copies, since another thread may name a file meanwhile.
        return {note: list(files) for note, files in self.named_files.copy().items() if files}

    def wait_reason(self) -> str | None:
        """Return why the stage emits nothing and what changes it, as text; None if nothing shows a reason.

        By default, the counts of a stage that has emitted nothing yet.
        """
        counted = ", ".join(f"{name} {amount:,}" for name, amount in sorted(self.counts.items()))
        return f"{self.name} has emitted nothing: {counted}" if counted and not self.sink.accepted else None

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of the ``counts``. Any thread may call this."""
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + amount

    def name_file(self, note: str, name: str, reason: str) -> None:
        """Keep the name of a bad or missing file for the notes, with the reason."""
        named = self.named_files.setdefault(note, deque(maxlen=NAMED_FILES))
        named.append((printable(name), printable(reason)))

    def take(self, worker: Worker, timeout: float | None = None) -> Any:
        """Return the next item of the input, waiting until one exists; None after ``timeout`` seconds.

        Raises:
            Stopped: The input has ended, or the pipeline has stopped.
        """
        assert self.source is not None
        return self.wait_for(worker, self.source.pop, timeout)

    def wait_for(
        self, worker: Worker, attempt: Callable[[], Result | None], timeout: float | None = None
    ) -> Result | None:
        """Wait until ``attempt()`` returns something other than None, and return that.

        The arguments are those of ``Coordinator.wait_for``.

        Raises:
            Stopped: The pipeline has stopped, or ``attempt`` raised it.
        """
        if worker.busy_since is not None:
            worker.busy_seconds += time.monotonic() - worker.busy_since
            worker.busy_since = None
        result = self.coordinator.wait_for(attempt, timeout)
        worker.busy_since = time.monotonic()
        return result

    def put(self, worker: Worker, items: Iterable[Any]) -> None:
        """Put outputs, waiting while the queue is full. Outputs not put yet stay in ``worker.pending``.

        Raises:
            Stopped: The pipeline has stopped.
        """

        def put_first() -> bool | None:  # the item is always in exactly one of the two
            accepted = self.sink.accept(worker.pending[0])
            if accepted:
                worker.pending.popleft()
            return accepted

        worker.pending.extend(items)
        while worker.pending:
            self.wait_for(worker, put_first)

    def run(self, worker: Worker) -> None:
        """Run one thread: the work, and in the last thread the end of the stage."""
        try:
            with suppress(InputEnded):
                self.put(worker, ())  # outputs from before the suspension, or of a loaded state
                self.work(worker)
            with self._lock:
                worker.has_ended = True
                is_last = all(each.has_ended for each in self.workers)
            # After all threads have put their outputs: to consumers, a closed queue is the end of the input.
            if is_last:
                items = self.finish()
                if isinstance(items, Iterator):  # those not returned yet are in the state of the stage
                    for item in items:
                        self.put(worker, (item,))
                self.put(worker, items)
                self.sink.close()
        except Stopped:
            worker.has_ended = False  # if it was suspended in the last put
        except StopIteration:  # in the trainer's thread it would end the batches
            self.coordinator.stop(HexdataError(f"{self.name} raised StopIteration"))
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.coordinator.stop(error)
        finally:
            worker.busy_since = None


class Transform(Stage):
    """A stage that turns each item into zero or more others."""

    @abstractmethod
    def process(self, item: Any) -> Iterable[Any]:
        """Return the outputs for an item. With several threads, calls run concurrently."""

    def work(self, worker: Worker) -> None:
        """Take, process and put items until the input ends."""
        while True:
            item = self.take(worker)
            self.put(worker, self.process(item))


def find_object(name: str) -> Any:
    """Import the object of a name such as ``"package.module:name"``.

    Raises:
        ConfigError: It does not exist.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}") from error
