"""Stages that pass on numbers, and pipelines of them, for tests of the framework."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from hexdata.live.pipeline import Pipeline
from hexdata.live.stage import Stage, Transform, Worker

TIMEOUT = 120.0
"""Seconds after which something that is waited for is taken to hang; never reached by a test that passes."""


class Numbers(Stage):
    """Emits the numbers below ``stop``; several threads divide them."""

    first = True

    def __init__(self, stop: int, *, threads: int = 1) -> None:
        super().__init__(threads=threads)
        self._next = list(range(threads))
        self._stop = stop

    def work(self, worker: Worker) -> None:
        while self._next[worker.number] < self._stop:
            number = self._next[worker.number]
            self._next[worker.number] += len(self.workers)
            self.put(worker, [number])

    def state(self) -> dict[str, Any]:
        return {"next": list(self._next)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Hold(Transform):
    """Emits numbers in groups of two, holds up to two back, and emits them at the end."""

    def __init__(self, *, threads: int = 1) -> None:
        super().__init__(threads=threads)
        self._held: list[Any] = []

    def process(self, item: Any) -> Iterable[Any]:
        with self._lock:
            self._held.append(item)
            if len(self._held) < 3:
                return []
            released, self._held = self._held[:2], self._held[2:]
        return released

    def finish(self) -> Iterable[Any]:
        released, self._held = self._held, []
        return released

    def state(self) -> dict[str, Any]:
        return {"held": list(self._held)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._held = state["held"]


class Pass(Transform):
    def process(self, item: Any) -> Iterable[Any]:
        return (item,)


def named(stage: Stage, name: str) -> Stage:
    stage.name = name
    return stage


def make(stop: int, threads: Iterable[int] = (1, 1, 1), capacity: int = 2) -> Pipeline:
    first, *others = threads
    stages: list[Stage] = [Numbers(stop, threads=first)]
    stages += [named(Hold(threads=count), f"Hold{index}") for index, count in enumerate(others)]
    return Pipeline(stages, [(capacity, "block")] * len(stages))


def rest(pipeline: Pipeline) -> list[Any]:
    """Return all remaining items."""
    taken = []
    while True:
        try:
            item = pipeline.take(TIMEOUT)
        except StopIteration:
            return taken
        assert item is not None, "the pipeline hangs"
        taken.append(item)


def in_thread(action: Callable[[], Any]) -> Callable[[], Any]:
    """Run an action in a new thread; return a function that waits for it and returns its result."""
    found: list[Any] = []

    def act() -> None:
        try:
            found.append(action())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=act)
    thread.start()

    def result() -> Any:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "it hangs"
        return found[0]

    return result


def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition is true."""
    pause = threading.Event()
    for _ in range(int(TIMEOUT * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never comes to that")
