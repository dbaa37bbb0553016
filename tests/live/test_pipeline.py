"""The framework of a live pipeline: delivery, states, errors, shutdown and metrics.

Threads switch as often as possible, so that rare interleavings occur.
"""

from __future__ import annotations

import datetime
import gc
import operator
import os
import signal
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import ConfigError, HexdataError
from hexdata.live import Transform
from hexdata.live.chunk import SCANNED, ChunkSource
from hexdata.live.pipeline import Pipeline
from tests.live.made import TIMEOUT, Given, Pass, block_chunk, move_chunks, piped, rest, until
from tests.pairs import FULL

pytestmark = pytest.mark.usefixtures("no_thread_survives")


@pytest.fixture(autouse=True, scope="module")
def change_threads_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Hold(Transform):
    """Emits items in groups of two, holds up to two back, and emits them at the end."""

    kept: ClassVar = {"held": list[Any]}

    def __init__(self, name: str = "Hold", *, threads: int = 1) -> None:
        super().__init__(threads=threads)
        self.name, self.held = name, list[Any]()

    def process(self, item: Any) -> Iterable[Any]:
        with self._lock:
            self.held = [*self.held, item]
            released = self.held[:2] if len(self.held) > 2 else []
            self.held = self.held[len(released) :]
        return released

    def finish(self) -> Iterable[Any]:
        released, self.held = self.held, []
        return released


def holding(stop: int, threads: Iterable[int] = (1, 1, 1), capacity: int = 2) -> Pipeline:
    first, *others = threads
    holds = [Hold(f"Hold{index}", threads=count) for index, count in enumerate(others)]
    return piped(Given(range(stop), threads=first), *holds, capacity=capacity)


@settings(max_examples=100 if FULL else 12)
@given(st.data())
def test_states_at_any_moment_lose_and_repeat_nothing(data: st.DataObject) -> None:
    """The pipeline goes on after each state, or another one continues from it, with other threads.

    With one thread per stage, the order is kept.
    """
    most = data.draw(st.integers(1, 3))
    threads = data.draw(st.lists(st.integers(1, most), min_size=1, max_size=4))
    capacity, stop = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 40))
    taken: list[int] = []
    state = None
    for pause in [*data.draw(st.lists(st.integers(0, 20), max_size=3)), None]:
        later = [threads[0], *(data.draw(st.integers(1, most)) for _ in threads[1:])]
        with holding(stop, later, capacity) as pipeline:
            if state is not None:
                pipeline.load_state(state)
            pipeline.start()
            if pause is None:
                taken += rest(pipeline)
                break
            for _ in range(pause):
                try:
                    taken.append(pipeline.take(TIMEOUT))
                except StopIteration:
                    break
                if data.draw(st.booleans()):
                    pipeline.state()
            state = pipeline.state()
    assert Counter(taken) == Counter(range(stop))
    if most == 1:
        assert taken == list(range(stop))


def passing(produces: str | None) -> Pass:
    stage: Any = Pass()
    stage.produces = produces
    return stage


def at_the_end(items: Sequence[Any], produces: str | None = None) -> Pipeline:
    """Return a running pipeline whose last queue has these items."""
    pipeline = piped(Given(items), passing(produces), capacity=len(items))
    pipeline.start()
    until(lambda: len(pipeline.stages[-1].sink.items) == len(items))
    return pipeline


def test_items_of_a_state_keep_their_types_or_are_refused() -> None:
    """The types are those that a stage declares; without a declaration, only plain values are stored."""
    games = move_chunks(4)
    for produces, items in {
        "games": [(games[0], games[1]), (games[2],)],
        "sources": [SCANNED, ChunkSource("a", games)],
        "blocks": [{**(block_chunk(0, 3).block or {}), "weight": np.ones(3, np.float32)}],
        None: [1, [b"", {"b": 1.5}]],
    }.items():
        with at_the_end(items, produces) as pipeline:
            state = pipeline.state()
            assert repr(rest(pipeline)) == repr(items)
        with piped(Given(items), passing(produces)) as other:
            other.load_state(state)
            other.start()
            assert repr(rest(other)) == repr(items)
    for value in ({1, 2}, games[0], datetime.date(2020, 1, 1), 1 << 70, "\udcff"):
        with at_the_end([value]) as pipeline:
            with pytest.raises(ConfigError, match="a state cannot store"):
                pipeline.state()
            assert rest(pipeline) == [value]  # it goes on
    with (
        at_the_end([{"a": [1]}], "batches") as pipeline,
        pytest.raises(ConfigError, match="could not be loaded"),
    ):
        pipeline.state()
    for attributes in ({"state": lambda: {"n": 1}}, {"kept": {"held": int}}):
        stage = Hold()
        vars(stage).update(attributes)
        with piped(Given([]), stage) as pipeline, pytest.raises(ConfigError, match="could not be loaded"):
            pipeline.state()
    with pytest.raises(ConfigError, match="kept"):
        type("Former", (Pass,), {"kept": ("held",)})()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(), SystemExit(3), KeyboardInterrupt()])
def test_an_error_reaches_the_trainer_and_stops_all_threads(stage: int, error: BaseException) -> None:
    pipeline = holding(10**9, (2, 2, 2))
    failing: Any = pipeline.stages[stage]

    def fail(*_: Any) -> Any:
        raise error

    failing.process = failing.work = fail
    pipeline.start()
    expected = HexdataError if isinstance(error, StopIteration) else type(error)
    for _ in range(2):
        with pytest.raises(expected):
            rest(pipeline)
    with pytest.raises(HexdataError, match="stopped"):
        pipeline.state()
    pipeline.close()


@pytest.mark.parametrize("taken", [None, 0, 1, 30])
def test_closing_at_any_time_ends_all_threads(taken: int | None) -> None:
    """Also before the start: a signal handler may close a pipeline that a trainer is about to start."""
    pipeline = holding(10**9, (1, 3, 1), capacity=1)
    if taken is not None:
        pipeline.start()
    for _ in range(taken or 0):
        assert pipeline.take(TIMEOUT) is not None
    pipeline.close()
    pipeline.close()
    pipeline.start()
    assert rest(pipeline) == []


def test_an_unreferenced_pipeline_stops() -> None:
    pipeline = holding(10**9)
    pipeline.start()
    workers = [worker for stage in pipeline.stages for worker in stage.workers]
    del pipeline
    gc.collect()
    until(lambda: not any(worker.thread and worker.thread.is_alive() for worker in workers))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("name", ["start", "take", "state", "metrics", "close", "coordinator.stop"])
def test_a_fork_of_the_process_never_waits_for_missing_threads(name: str) -> None:
    """Even if one of the threads held the lock at that moment."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> bool:
        entered.set()
        return leave.wait(TIMEOUT)

    with holding(10**9) as pipeline, ThreadPoolExecutor() as pool:
        if name != "start":
            pipeline.start()
        pool.submit(pipeline.coordinator.wait_for, hold)
        assert entered.wait(TIMEOUT)
        child = os.fork()
        if not child:
            signal.alarm(int(TIMEOUT))
            try:
                operator.attrgetter(name)(pipeline)()
            except HexdataError as error:
                os._exit(1 if "fork" in str(error) else 3)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        leave.set()
    assert status == (0 if name in ("close", "coordinator.stop") else 1)


class Small(Transform):
    """Passes on numbers below 6 and counts the others."""

    def process(self, item: Any) -> Iterable[Any]:
        self.count("small" if item < 6 else "large")
        return [item] if item < 6 else []

    def notes(self) -> dict[str, Any]:
        return {"last": "x"}


def test_metrics_notes_and_prometheus_show_every_stage() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    from hexdata.live.prometheus import serve_metrics

    stages = [Given(range(10)), Small(threads=2)]
    with Pipeline(stages, [4, 7]) as pipeline:
        pipeline.start()
        until(lambda: all(worker.has_ended for stage in stages for worker in stage.workers))
        assert pipeline.notes() == {"Small": {"last": "x"}}
        metrics = pipeline.metrics()["Small"]
        seconds = metrics.pop("busy_seconds")
        assert seconds > 0
        queue = {"out": 6, "queued": 6, "capacity": 7, "threads": 2, "busy": 0}
        assert metrics == queue | {"small": 6, "large": 4}

        with serve_metrics(pipeline.metrics, 0) as port:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT) as answer:
                (family,) = text_string_to_metric_families(answer.read().decode())
            samples = [each for each in family.samples if each.labels["stage"] == "Small"]
            found = {each.labels["figure"]: each.value for each in samples}
            assert found == metrics | {"busy_seconds": seconds}
            for host, taken in (("127.0.0.1", port), ("0.0.0.0", 70_000), ("192.0.2.1", 0)):
                message = "found 70000" if taken == 70_000 else f"{host}:{taken}"
                with pytest.raises(ConfigError, match=message), serve_metrics(dict, taken, host):
                    pass
    with pytest.raises(ConfigError):
        Pass(threads=0)
