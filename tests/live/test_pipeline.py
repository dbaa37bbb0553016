"""Tests of the framework of a live pipeline: delivery, states, errors, shutdown and deadlocks.

No test sleeps. Threads switch as often as possible, so that rare interleavings occur.
"""

from __future__ import annotations

import gc
import linecache
import operator
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import ConfigError, HexdataError
from hexdata.live import coordinator as coordinator_module
from hexdata.live.coordinator import Coordinator, Stopped
from hexdata.live.pipeline import Pipeline
from hexdata.live.queue import Overflow, Queue
from hexdata.live.stage import Stage, Worker
from tests.live.number_stages import TIMEOUT, Hold, Numbers, Pass, in_thread, make, rest, until


@pytest.fixture(autouse=True, scope="module")
def change_threads_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


pytestmark = pytest.mark.usefixtures("no_thread_survives")


BLOCK: tuple[int, Overflow] = (2, "block")


# --- delivery -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [(1,), (1, 1, 1), (2, 3), (3, 1, 4, 2)])
@pytest.mark.parametrize("capacity", [1, 5])
def test_every_item_is_delivered_once(threads: tuple[int, ...], capacity: int) -> None:
    with make(200, threads, capacity) as pipeline:
        pipeline.start()
        taken = rest(pipeline)
        with pytest.raises(StopIteration):
            pipeline.take(TIMEOUT)
    assert Counter(taken) == Counter(range(200))
    if set(threads) == {1}:
        assert taken == list(range(200))


@given(st.data())
def test_states_at_any_moment_lose_and_repeat_nothing(data: st.DataObject) -> None:
    threads = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    capacity, stop = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 40))
    pauses = data.draw(st.lists(st.integers(0, 20), max_size=3))
    taken: list[int] = []
    state = None
    for pause in [*pauses, None]:
        with make(stop, threads, capacity) as pipeline:
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
            state = pipeline.state()
    assert Counter(taken) == Counter(range(stop))
    if set(threads) == {1}:
        assert taken == list(range(stop))


def test_states_read_by_two_threads_change_nothing() -> None:
    with make(400, (1, 2, 2)) as pipeline:
        pipeline.start()
        over = threading.Event()
        states = [0, 0]

        def watch(number: int) -> None:
            while not over.is_set():
                pipeline.state()
                states[number] += 1

        watchers = [in_thread(partial(watch, number)) for number in range(2)]
        taken = [pipeline.take(TIMEOUT) for _ in range(200)]
        until(lambda: min(states) > 0)  # half of the items are not taken yet
        taken += rest(pipeline)
        over.set()
        assert [watcher() for watcher in watchers] == [None, None]
    assert Counter(taken) == Counter(range(400))


def test_a_state_is_consistent_and_continues_in_another_pipeline() -> None:
    with make(300, (2, 2, 2)) as pipeline:
        pipeline.start()
        before = [pipeline.take(TIMEOUT) for _ in range(50)]
        state = pipeline.state()
        after = rest(pipeline)
    with make(300, (2, 2, 2)) as other:
        other.load_state(state)
        other.start()
        assert Counter(rest(other)) == Counter(after)
    assert Counter(before + after) == Counter(range(300))


def test_a_state_can_be_read_before_the_start_and_after_the_end() -> None:
    with make(20) as pipeline:
        state = pipeline.state()
        pipeline.start()
        assert rest(pipeline) == list(range(20))
        end = pipeline.state()
    for kept, expected in ((state, list(range(20))), (end, [])):
        with make(20) as other:
            other.load_state(kept)
            other.start()
            assert rest(other) == expected


def test_a_state_of_more_threads_can_be_loaded_with_fewer() -> None:
    with make(100, (1, 4), capacity=1) as pipeline:
        pipeline.start()
        before = [pipeline.take(TIMEOUT) for _ in range(10)]
        state = pipeline.state()
    with make(100, (1, 1), capacity=1) as other:
        other.load_state(state)
        other.start()
        assert Counter(before + rest(other)) == Counter(range(100))


# --- pauses -------------------------------------------------------------------------------------------


class Ticking(Stage):
    """Waits in short timeouts for an event that never happens, and counts its wake-ups."""

    first = True

    def __init__(self) -> None:
        super().__init__()
        self.wakeups = 0

    def work(self, worker: Worker) -> None:
        while True:
            self.wait_for(worker, lambda: None, 1e-4)
            self.wakeups += 1


def test_a_wait_that_times_out_during_a_pause_stays_idle() -> None:
    with Pipeline([ticking := Ticking()], [BLOCK]) as pipeline:
        pipeline.start()
        until(lambda: ticking.wakeups > 10)
        wakeups = threading.Event()
        with pipeline.coordinator.paused():
            before = ticking.wakeups
            wakeups.wait(0.02)  # two hundred timeouts
            assert ticking.wakeups == before
        until(lambda: ticking.wakeups > before)


def test_a_pause_waits_for_working_threads() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(Pass):
        def process(self, item: Any) -> Iterable[Any]:
            entered.set()
            assert leave.wait(TIMEOUT)
            return (item,)

    with Pipeline([Numbers(1), Slow()], [BLOCK] * 2) as pipeline:
        pipeline.start()
        assert entered.wait(TIMEOUT)
        state = in_thread(pipeline.state)
        until(lambda: pipeline.coordinator._pauses)
        leave.set()
        kept = state()["Slow"]
        assert kept["queue"] + [item for game_batch in kept["hands"] for item in game_batch] == [0]


def test_a_pause_ends_when_the_pipeline_stops() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Stuck(Pass):
        def process(self, item: Any) -> Iterable[Any]:
            entered.set()
            assert leave.wait(TIMEOUT)
            return (item,)

    with Pipeline([Numbers(1), Stuck()], [BLOCK] * 2) as pipeline:
        pipeline.start()
        assert entered.wait(TIMEOUT)
        state = in_thread(pipeline.state)
        until(lambda: pipeline.coordinator._pauses)
        pipeline.coordinator.stop()
        assert isinstance(state(), HexdataError)
        leave.set()


def test_a_stop_during_a_pause_is_raised_in_the_pausing_thread() -> None:
    coordinator = Coordinator()
    with pytest.raises(Stopped), coordinator.paused():
        coordinator.stop()


def test_items_can_be_taken_during_a_pause() -> None:
    with make(20, capacity=3) as pipeline:
        pipeline.start()
        until(lambda: len(pipeline.queues[-1]) == 3)
        with pipeline.coordinator.paused():
            assert [pipeline.take(TIMEOUT) for _ in range(3)] == [0, 1, 2]
            assert pipeline.take(0.001) is None
        assert rest(pipeline) == list(range(3, 20))


# --- shutdown -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(), SystemExit(3), KeyboardInterrupt()])
def test_an_error_reaches_the_trainer_and_stops_all_threads(stage: int, error: BaseException) -> None:
    pipeline = make(10**9, (2, 2, 2))
    failing = pipeline.stages[stage]

    def fail(*_: Any) -> Any:
        raise error

    if isinstance(failing, Hold):
        failing.process = fail  # type: ignore[method-assign]
    else:
        failing.work = fail  # type: ignore[method-assign]
    pipeline.start()
    expected = HexdataError if isinstance(error, StopIteration) else type(error)
    for _ in range(2):
        with pytest.raises(expected):
            rest(pipeline)
    with pytest.raises(HexdataError, match="stopped"):
        pipeline.state()
    pipeline.close()


def test_an_error_in_finish_reaches_the_trainer() -> None:
    class BadEnd(Pass):
        def finish(self) -> Iterable[Any]:
            raise ValueError("at the end")

    with Pipeline([Numbers(3), BadEnd()], [(9, "block")] * 2) as pipeline:
        pipeline.start()
        with pytest.raises(ValueError, match="at the end"):
            rest(pipeline)


@pytest.mark.parametrize("taken", [0, 1, 5, 30])
@pytest.mark.parametrize("capacity", [1, 4])
def test_closing_in_the_middle_ends_all_threads(taken: int, capacity: int) -> None:
    pipeline = make(10**9, (1, 3, 1), capacity)
    pipeline.start()
    for _ in range(taken):
        assert pipeline.take(TIMEOUT) is not None
    pipeline.close()
    pipeline.close()
    with pytest.raises(StopIteration):
        pipeline.take(TIMEOUT)


def test_a_pipeline_can_be_closed_before_the_start_and_during_a_wait() -> None:
    make(3).close()
    with Pipeline([Ticking()], [BLOCK]) as pipeline:
        pipeline.start()
        waiting = in_thread(pipeline.take)
        until(lambda: pipeline.coordinator._working_count == 0)
        pipeline.close()
        assert isinstance(waiting(), StopIteration)


def test_a_closed_pipeline_starts_no_thread() -> None:
    """A trainer may check for closing just before another thread closes the pipeline, and then start it."""
    before = set(threading.enumerate())
    pipeline = make(9)
    pipeline.close()
    pipeline.start()
    assert not any(stage._threads for stage in pipeline.stages)
    with pytest.raises(StopIteration):
        pipeline.take(TIMEOUT)
    assert set(threading.enumerate()) == before


def test_closing_during_the_start_starts_no_further_thread() -> None:
    """For example by a signal handler, which runs in the same thread."""

    class Closing(Pass):
        def start(self) -> None:
            super().start()
            pipeline.close()

    pipeline = Pipeline([Numbers(9), Closing(), Hold()], [(1, "block")] * 3)
    pipeline.start()
    assert [len(stage._threads) for stage in pipeline.stages] == [0, 1, 1]
    pipeline.close()


def test_two_threads_can_close_a_pipeline() -> None:
    """In some versions of Python, a thread that two threads join at once makes one of them fail."""
    second = threading.Event()

    class Joining(Pass):
        def join(self) -> list[str]:
            if threading.current_thread() is threading.main_thread():
                others.append(in_thread(pipeline.close))
                assert not second.wait(0.1)
            else:
                second.set()
            return super().join()

    others: list[Any] = []
    pipeline = Pipeline([Numbers(9), Joining()], [BLOCK] * 2)
    pipeline.start()
    pipeline.close()
    assert others[0]() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("name", ["start", "take", "state", "metrics", "close", "coordinator.stop"])
def test_a_fork_of_the_process_never_waits_for_missing_threads(name: str) -> None:
    """Even if one of the threads held the lock at that moment."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert leave.wait(TIMEOUT)

    with make(10**9) as pipeline:
        if name != "start":
            pipeline.start()
        holding = in_thread(lambda: pipeline.coordinator.change(hold))
        assert entered.wait(TIMEOUT)
        child = os.fork()
        if not child:
            signal.alarm(int(TIMEOUT))
            try:
                operator.attrgetter(name)(pipeline)()
            except HexdataError as error:
                os._exit(1 if "another process" in str(error) else 3)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        leave.set()
        holding()
    assert status == (0 if name in ("close", "coordinator.stop") else 1)


def test_an_unreferenced_pipeline_stops() -> None:
    pipeline = make(10**9)
    pipeline.start()
    stages = pipeline.stages
    del pipeline
    gc.collect()
    assert [stage.join() for stage in stages] == [[]] * 3


def test_close_names_a_thread_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexdata.live.stage._JOIN_SECONDS", 0.01)
    entered, leave = threading.Event(), threading.Event()

    class Stuck(Pass):
        def process(self, item: Any) -> Iterable[Any]:
            entered.set()
            leave.wait(TIMEOUT)
            return (item,)

    pipeline = Pipeline([Numbers(1), Stuck()], [BLOCK] * 2)
    pipeline.start()
    assert entered.wait(TIMEOUT)
    with pytest.raises(HexdataError, match="Stuck-0"):
        pipeline.close()
    leave.set()
    until(lambda: [stage.join() for stage in pipeline.stages] == [[], []])


class Interrupted:
    """Raises KeyboardInterrupt at the k-th line that a thread runs in ``coordinator.py``, as Ctrl-C may.

    Only at lines where the interpreter checks for signals, which it does after calls: not at a ``try``, and
    not between the last call in a ``with self._lock`` block and the release of the lock.
    """

    def __init__(self, line: int) -> None:
        self.left = line
        self._entered: set[tuple[int, int]] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != coordinator_module.__file__:
            return None
        if event == "line" and not self._cannot_be(frame):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def _cannot_be(self, frame: Any) -> bool:
        """Return whether a line is a ``try``, or the second visit of a line that acquires the lock."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if line != "with self._lock:":
            return line == "try:"
        location = (id(frame), frame.f_lineno)
        visited = location in self._entered
        self._entered ^= {location}
        return visited


@pytest.mark.parametrize("action", ["take", "state"])
def test_after_ctrl_c_at_any_line_a_pipeline_can_be_closed(action: str) -> None:
    line = 0
    while True:
        line += 1
        pipeline = make(10**9)
        pipeline.start()
        before = sys.gettrace()
        sys.settrace(interrupted := Interrupted(line))
        try:
            getattr(pipeline, action)()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if interrupted.left > 0:
            pipeline.close()
            break
        assert in_thread(pipeline.state)() is not None, "another thread can still read it"
        assert pipeline.take(TIMEOUT) is not None, "the stages work on"
        pipeline.close()
    assert line > 10


# --- metrics and errors -------------------------------------------------------------------------------


def test_metrics_and_notes_are_grouped_by_stage() -> None:
    class Talking(Pass):
        def process(self, item: Any) -> Iterable[Any]:
            self.count("odd" if item % 2 else "even")
            self.count("sum", item)
            return (item,)

        def notes(self) -> dict[str, Any]:
            return {"last": "x"}

    with Pipeline([Numbers(5), Talking(threads=2)], [(9, "block")] * 2) as pipeline:
        pipeline.start()
        assert [stage.join() for stage in pipeline.stages] == [[], []]
        metrics = pipeline.metrics()["Talking"]
        assert (metrics["odd"], metrics["even"], metrics["sum"]) == (2, 3, 10)
        assert (metrics["out"], metrics["queued"], metrics["capacity"], metrics["dropped"]) == (5, 5, 9, 0)
        assert (metrics["threads"], metrics["busy"]) == (2, 0)
        assert metrics["busy_seconds"] > 0
        assert pipeline.notes() == {"Talking": {"last": "x"}}


def test_link_stages_receives_all_stages_in_order() -> None:
    met: list[list[Stage]] = []

    class Sociable(Pass):
        def link_stages(self, stages: Iterable[Stage]) -> None:
            met.append(list(stages))

    pipeline = Pipeline([Numbers(1), Sociable()], [BLOCK] * 2)
    assert met == [pipeline.stages]


def test_an_invalid_order_of_stages_is_refused() -> None:
    for stages in ([], [Pass()], [Numbers(1), Numbers(1)], [Numbers(1), Pass(), Pass()]):
        with pytest.raises(ConfigError):
            Pipeline(stages, [BLOCK] * len(stages))
    for capacity, overflow in ((0, "block"), (1, "spill")):
        with pytest.raises(ConfigError):
            Queue(Coordinator(), capacity, overflow)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Pass(threads=0)
