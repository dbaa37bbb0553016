"""A pipeline of stages joined by queues, which start, pause and stop together; and its state.

A state has a checksum, and loading it runs no code of it.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import warnings
import weakref
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, Self

import msgspec
import numpy as np

from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.json_models import Model, as_model
from hexdata.live.chunk import Chunk, ChunkSource, GameBatch, KnownFile
from hexdata.live.stage import Coordinator, Overflow, Queue, Stage, Stopped

MetricsByStage = Mapping[str, Mapping[str, float]]
"""Result of ``Pipeline.metrics``: metrics by stage name and metric name."""

_TRAINER: Final = 3
"""Stack level of warnings in ``Pipeline.take``: the code that iterates over a ``LiveLoader``."""
_JOIN_SECONDS: Final = 30.0
"""Seconds for which ``close`` waits for each thread. A slow disk may delay a thread that has to end."""


class Pipeline:
    """A sequence of stages, the first without input; :meth:`take` returns the outputs of the last.

    Close a pipeline after use. A pipeline without references stops by itself, but nothing waits for its
    threads.

    Args:
        stages: Stages in order, which belong to this pipeline alone.
        queues: Capacity and overflow behaviour of the queue behind each stage.
    """

    def __init__(self, stages: Sequence[Stage], queues: Sequence[tuple[int, Overflow]]) -> None:
        self.coordinator = Coordinator()
        self.stages = list(stages)
        source = None
        for stage, (capacity, overflow) in zip(self.stages, queues, strict=True):
            stage.coordinator, stage.stages = self.coordinator, self.stages
            stage.source, stage.sink = source, Queue(self.coordinator, capacity, overflow)
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
            warnings.warn(self.coordinator.warnings.popleft(), stacklevel=_TRAINER)
        last = self.stages[-1].sink
        try:
            return self.coordinator.wait_for(last.pop, timeout, last.changed, is_stage=False)
        except Stopped:
            pass
        if self.coordinator.error is not None:
            raise self.coordinator.error  # raised outside the except block, to keep its own cause
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """Return the state of all stages and queues: bytes, numbers and lists in a dict.

        All threads end before it is read, each after its current item, and are started again.

        Raises:
            ConfigError: A stage of the user has a value that a state cannot store.
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
                for stage in self.stages:
                    # In the order in which the next stage takes them.
                    items = [*chain(stage.sink.items, *(worker.pending for worker in stage.workers))]
                    own, kind = stage.state(), _kind_of(items)
                    _require_plain([own, items if kind == "plain" else ()])
                    stages[stage.name] = {"state": own, "kind": kind, "items": items}
                return encode_state({"files": self.coordinator.files, "stages": stages})
            finally:
                self._join(None)  # Ctrl-C may have ended the first one
                self.coordinator.suspended = False
                if self._started:
                    self._start_threads()

    def load_state(self, state: object) -> None:
        """Restore a state of a pipeline with the same stages. The pipeline must not be started yet.

        Raises:
            StoreError: It is not such a state, or damaged.
        """
        assert not self._started
        found = decode_state(state)
        try:
            self.coordinator.files.update(msgspec.convert(found["files"], dict[str, KnownFile]))
            for stage in self.stages:
                saved = found["stages"][stage.name]
                stage.load_state(saved["state"])
                # More than the capacity, if some were pending.
                stage.sink.items.extend(msgspec.convert(saved["items"], _ITEMS[saved["kind"]]))
        except _DAMAGE as error:
            raise StoreError(f"{_NAME} is damaged", found=f"{error!r:.80}") from error

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


# --- states -------------------------------------------------------------------------------------------

_NAME: Final = "the state of a live pipeline"
_NOT_STORED: Final = "a live pipeline contains a value that a state cannot store"
_DAMAGE: Final = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    msgspec.MsgspecError,
)
"""Errors of reading a state that hexdata did not write, although its checksum is right."""
_ITEMS: Final[dict[str, Any]] = {
    "sources": list[ChunkSource | str],
    "games": list[GameBatch],
    "plain": list[Any],
}
"""Types of the items of a queue, by their kind in a state."""
_PLAIN: Final = (type(None), bool, int, float, str, bytes, np.bool_, np.number, np.ndarray)


class EncodedState(Model, frozen=True):
    """A state as MessagePack, with its arrays beside it: MessagePack limits the size of one to 4 GB."""

    content: bytes
    arrays: list[bytes]
    checksum: int
    """CRC-32 of the content and the arrays, one after the other."""


def _kind_of(items: Sequence[Any]) -> str:
    """Return the kind of the items of a queue, to restore their types."""
    types = {type(item) for item in items}
    if ChunkSource in types and types <= {ChunkSource, str}:
        return "sources"
    is_games = types == {tuple} and all(isinstance(chunk, Chunk) for item in items for chunk in item)
    return "games" if is_games else "plain"


def _require_plain(value: object) -> None:
    """Raise ConfigError for a value that msgspec would store as another, such as a set as a list."""
    if isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _require_plain(part)
    elif not isinstance(value, _PLAIN):
        raise ConfigError(_NOT_STORED, found=repr(value)[:80])


def encode_state(value: object) -> dict[str, Any]:
    """Return the fields of an ``EncodedState``, which pickle and ``torch.save`` preserve.

    Raises:
        ConfigError: The value contains others than plain values, arrays and items of queues.
    """
    arrays: list[bytes] = []

    def encode(value: object) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
            raise ConfigError(_NOT_STORED, found=repr(value)[:80])
        # b"" is the only bytes value that torch.load with weights_only=True refuses.
        arrays.append(value.tobytes() or b"\0")
        return msgspec.msgpack.Ext(0, msgspec.msgpack.encode((value.dtype.str, value.shape, len(arrays) - 1)))

    try:
        content = msgspec.msgpack.encode(value, enc_hook=encode)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(_NOT_STORED, found=str(error)) from error
    return {"content": content, "arrays": arrays, "checksum": _checksum(content, arrays)}


def decode_state(state: object) -> Any:
    """Return the value that :func:`encode_state` encoded. Tuples are lists, and items of queues are dicts.

    Raises:
        StoreError: It is not such a state, or damaged.
    """
    saved = as_model(EncodedState, state, what=_NAME)

    def decode(_: int, data: memoryview) -> Any:
        dtype, shape, index = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], int])
        # ``frombuffer`` refuses arrays of objects, which would be pickles. A copy, to be writable.
        return np.frombuffer(saved.arrays[index], dtype, math.prod(shape)).reshape(shape).copy()

    if _checksum(saved.content, saved.arrays) != saved.checksum:
        raise StoreError(f"{_NAME} is damaged: its checksum differs")
    try:
        return msgspec.msgpack.decode(saved.content, ext_hook=decode)
    except _DAMAGE as error:
        raise StoreError(f"{_NAME} is damaged", found=f"{error!r:.80}") from error


def _checksum(content: bytes, arrays: Sequence[bytes]) -> int:
    return functools.reduce(lambda checksum, part: zlib.crc32(part, checksum), (content, *arrays), 0)
