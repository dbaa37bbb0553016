"""A pipeline of stages joined by queues, which start, pause and stop together; and its state."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, Self

from hexdata.errors import ConfigError, FormatError, HexdataError, StoreError
from hexdata.live import state as states
from hexdata.live.stage import Coordinator, Queue, Stage, Stopped
from hexdata.text import shortened

MetricsByStage = Mapping[str, Mapping[str, float]]
"""Result of ``Pipeline.metrics``: metrics by stage name and metric name."""

_JOIN_SECONDS: Final = 30.0
"""Seconds for which ``close`` waits for each thread. A slow disk may delay a thread that has to end."""


class Pipeline:
    """A sequence of stages, the first without input; :meth:`take` returns the outputs of the last.

    Close a pipeline after use. A pipeline without references stops by itself, but nothing waits for its
    threads.

    Args:
        stages: Stages in order, which belong to this pipeline alone.
        capacities: Capacity of the queue behind each stage, in items.
    """

    def __init__(self, stages: Sequence[Stage], capacities: Sequence[int]) -> None:
        self.coordinator = Coordinator()
        self.stages = list(stages)
        source = None
        for stage, capacity in zip(self.stages, capacities, strict=True):
            stage.coordinator, stage.stages = self.coordinator, self.stages
            stage.source, stage.sink = source, Queue(self.coordinator, capacity)
            source = stage.sink
        self._started = False
        self._lifecycle_lock = threading.RLock()
        """Held while threads start, so that none starts after ``close``. Reentrant, so that a signal handler
        may close."""
        # Threads refer to their stage and the coordinator only, so an unused pipeline can be collected.
        weakref.finalize(self, self.coordinator.stop)

    def start(self) -> None:
        """Start all stages. Further calls do nothing.

        If another thread or a signal handler closes the pipeline meanwhile, the remaining stages are not
        started.
        """
        self._check_process()
        with self._lifecycle_lock:
            if not self._started:
                self._started = True
                self._start_threads()

    def _start_threads(self) -> None:
        # The last stage first, so that each stage finds its consumer running.
        for stage in reversed(self.stages):
            for worker in stage.workers:
                if worker.has_ended or self.coordinator.stopping.is_set():
                    continue
                name = f"{stage.name}-{worker.number}"
                # Daemons, so that a program that never closes its loader can end.
                worker.thread = threading.Thread(target=stage.run, args=(worker,), name=name, daemon=True)
                worker.thread.start()

    def _join(self, seconds: float | None) -> list[str]:
        """Wait for all threads, each for up to this long; return the names of those that have not ended."""
        threads = [worker.thread for stage in self.stages for worker in stage.workers]
        # A signal handler may find one between its creation and its start, which cannot be joined.
        started = [thread for thread in threads if thread is not None and thread.ident]
        for thread in started:
            thread.join(seconds)
        return [thread.name for thread in started if thread.is_alive()]

    def take(self, timeout: float | None = None) -> Any:
        """Return the next item of the last stage; None after ``timeout`` seconds without one.

        Warnings of stages since the last call are issued as Python warnings.

        Raises:
            StopIteration: The input has ended, or the pipeline is closed.
            HexdataError: This process is a fork of the one that created the pipeline.
            Exception: A stage raised it.
        """
        self._check_process()
        while self.coordinator.warnings:
            # The level of the code that iterates over a ``LiveLoader``.
            warnings.warn(self.coordinator.warnings.popleft(), stacklevel=3)
        with suppress(Stopped):
            return self.coordinator.wait_for(self.stages[-1].sink.pop, timeout, is_stage=False)
        if self.coordinator.error is not None:
            raise self.coordinator.error
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """Return the state of all stages and queues: bytes, numbers and lists in a dict.

        All threads end before it is read, each after its current item, and are started again.

        Raises:
            ConfigError: A stage of the user has a value that a state cannot store, or not the state that it
                declares, so that it could not be loaded.
            HexdataError: The pipeline has stopped, or this process is a fork.
        """
        self._check_process()
        with self._lifecycle_lock:
            self.coordinator.suspended = True
            self.coordinator.wake()
            try:
                # Without a limit: a state that is read while a thread works would lose or repeat its item.
                self._join(None)
                if self.coordinator.stopping.is_set():
                    raise HexdataError("the state of a stopped pipeline cannot be read")
                stages = {}
                for stage, kind in self._items():
                    # In the order in which the next stage takes them.
                    items = [*chain(stage.sink.items, *(worker.pending for worker in stage.workers))]
                    if kind is None:
                        states.require_plain(items)
                    stages[stage.name] = {"state": stage.state(), "items": items}
                shared = {"files": self.coordinator.files, "board_size": self.coordinator.board_size}
                saved = states.encode_state({**shared, "stages": stages})
            finally:
                self._join(None)  # Ctrl-C may have ended the first one
                self.coordinator.suspended = False
                if self._started:
                    self._start_threads()
        try:  # now, rather than when training has to be resumed
            self._read(states.decode_state(saved, copy=False))
        except ValueError as error:
            hint = "A stage declares its state in `kept`."
            raise ConfigError("this state could not be loaded", found=str(error), hint=hint) from error
        return saved

    def load_state(self, state: object) -> None:
        """Restore a state of a pipeline with the same stages. The pipeline must not be started yet.

        Raises:
            StoreError: It is not such a state, or damaged.
        """
        assert not self._started
        content = states.decode_state(state)
        try:
            saved = self._read(content)
            self.coordinator.files.update(saved.files)
            self.coordinator.board_size = saved.board_size
            for stage in self.stages:
                own = saved.stages[stage.name]
                stage.load_state(own.state)
                # More than the capacity, if some were pending.
                stage.sink.items.extend(own.items)
        except (FormatError, ValueError) as error:
            raise StoreError(f"{states.NAME} is damaged", found=shortened(str(error))) from error

    def _read(self, content: object) -> states.PipelineState:
        """Return a decoded state whose values have the types that the stages declare.

        Raises:
            ValueError: A value is not of its type, or not valid.
        """
        saved = states.as_type(content, states.PipelineState)
        if saved.stages.keys() != {stage.name for stage in self.stages}:
            raise ValueError(f"the stages {', '.join(saved.stages)}")
        stages, sizes = {}, {saved.board_size} - {None}
        for stage, kind in self._items():
            try:
                stages[stage.name], found = states.read_stage(saved.stages[stage.name], stage.kept, kind)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{stage.name}: {error}") from error
            sizes |= found
        if len(sizes) > 1:
            raise ValueError(f"boards of the sizes {sizes}")
        return states.PipelineState(saved.files, sizes.pop() if sizes else None, stages)

    def _items(self) -> Iterator[tuple[Stage, str | None]]:
        """Yield each stage, and what the queue behind it contains; None if neither end declares it."""
        consumed = [stage.consumes for stage in self.stages]
        for stage, after in zip(self.stages, [*consumed[1:], None], strict=True):
            yield stage, stage.produces or after

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each stage, with the queue behind it, by stage name."""
        self._check_process()
        return {stage.name: stage.metrics() for stage in self.stages}

    def notes(self) -> dict[str, dict[str, Any]]:
        """Return the notes of each stage by stage name, without stages that have none."""
        return {stage.name: notes for stage in self.stages if (notes := stage.notes())}

    def wait_reason(self) -> str | None:
        """Return why no item is delivered and what changes it, as text; None if no stage shows a reason."""
        return "; ".join(reason for stage in self.stages if (reason := stage.wait_reason())) or None

    def close(self) -> None:
        """Stop all stages and wait for their threads. Errors of stages are not raised again.

        Does nothing in a fork of the process, which has no such threads.

        Raises:
            HexdataError: A thread has not ended.
        """
        if self.coordinator.in_fork:
            return
        self.coordinator.stop()
        with self._lifecycle_lock:
            running = self._join(_JOIN_SECONDS)
        if running:
            raise HexdataError("threads of the pipeline have not ended", found=", ".join(running))

    def _check_process(self) -> None:
        if self.coordinator.in_fork:
            hint = "Create the loader in the process that uses it."
            raise HexdataError(f"the threads of the pipeline do not run in its fork {os.getpid()}", hint=hint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
