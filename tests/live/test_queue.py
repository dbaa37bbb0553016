"""Tests of the queues between stages, against plain lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.live.coordinator import Coordinator, Stopped
from hexdata.live.pipeline import Pipeline
from hexdata.live.queue import Overflow, Queue
from tests.live.number_stages import Numbers, Pass, in_thread, rest

pytestmark = pytest.mark.usefixtures("no_thread_survives")


@given(st.integers(1, 4), st.sampled_from(["block", "drop-new", "keep-newest"]), st.lists(st.booleans()))
def test_a_queue_behaves_like_a_bounded_list(capacity: int, overflow: Overflow, puts: list[bool]) -> None:
    queue: Queue[int] = Queue(Coordinator(), capacity, overflow)
    model: list[int] = []
    accepted = dropped = taken = 0
    for number, put in enumerate(puts):
        if not put:
            expected = model.pop(0) if model else None
            taken += expected is not None
            assert queue.take(0) == expected
            continue
        full = len(model) == capacity
        if full and overflow == "block":
            assert queue.coordinator.change(lambda n=number: queue.accept(n)) is None
            continue
        queue.put(number)
        dropped += full
        if full and overflow == "drop-new":
            continue
        model = [*model, number][-capacity:]
        accepted += 1
    assert (queue.contents(), len(queue)) == (model, len(model))
    assert (queue.accepted, queue.dropped, queue.taken) == (accepted, dropped, taken)
    queue.close()
    for expected in model:
        assert queue.take() == expected
    with pytest.raises(Stopped):
        queue.take()


class Mark:
    is_marker = True


@given(
    st.integers(1, 3),
    st.sampled_from(["drop-new", "keep-newest"]),
    st.lists(st.sampled_from(["item", "mark", "take", "resume"])),
)
def test_a_marker_needs_no_capacity_and_is_never_dropped(
    capacity: int, overflow: Overflow, actions: list[str]
) -> None:
    queue: Queue[Any] = Queue(Coordinator(), capacity, overflow)
    model: list[Any] = []
    for number, action in enumerate(actions):
        items = [item for item in model if not isinstance(item, Mark)]
        if action == "take":
            expected = model.pop(0) if model else None
            assert queue.take(0) is expected
        elif action == "resume":
            queue, contents = Queue(Coordinator(), capacity, overflow), queue.contents()
            queue.restore(contents)
        elif action == "mark":
            model.append(Mark())
            queue.put(model[-1])
        else:
            queue.put(number)
            if len(items) < capacity:
                model.append(number)
            elif overflow == "keep-newest":
                model.remove(items[0])
                model.append(number)
    assert queue.contents() == model


def test_a_full_queue_makes_its_producer_wait() -> None:
    queue: Queue[int] = Queue(Coordinator(), 1)
    queue.put(1)
    waiting = in_thread(lambda: queue.put(2))
    assert queue.take() == 1
    waiting()
    assert queue.take() == 2


@pytest.mark.parametrize("overflow", ["drop-new", "keep-newest"])
def test_a_pipeline_that_drops_never_waits(overflow: Overflow) -> None:
    with Pipeline([Numbers(100), Pass()], [(4, "block"), (3, overflow)]) as pipeline:
        pipeline.start()
        assert [stage.join() for stage in pipeline.stages] == [[], []]
        assert rest(pipeline) == ([0, 1, 2] if overflow == "drop-new" else [97, 98, 99])
        assert pipeline.metrics()["Pass"]["dropped"] == 97
