"""Tests of ``hexdata.torch.epoch_counter``: workers agree on the epoch of each iteration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import ConfigError

pytest.importorskip("torch")

from hexdata.torch.epoch_counter import (
    COUNTER_SIZE,
    MAX_WORKERS,
    SharedEpochCounter,
    iteration_id,
)


def new_counter(epoch: int = 0, step: int = 0) -> SharedEpochCounter:
    counter = SharedEpochCounter(np.zeros(COUNTER_SIZE, np.int64))
    counter.set(epoch, step)
    return counter


orders = st.lists(st.integers(1, 5).flatmap(lambda workers: st.permutations(range(workers))), min_size=1)
"""For each iteration the order in which its workers begin it."""


@given(orders, st.integers(0, 9), st.booleans())
def test_complete_iterations_run_consecutive_epochs(orders, epoch, same_seed):
    """With the same PyTorch seed, the iteration ids differ only by the number of workers."""
    counter = new_counter(epoch, 7)
    assert counter.latest_epoch == -1
    for number, order in enumerate(orders):
        iteration = iteration_id(1 if same_seed else number, len(order))
        step = 0 if number else 7
        assert {counter.begin(worker, iteration) for worker in order} == {(epoch + number, step)}
        assert counter.latest_epoch == epoch + number


@given(orders, st.data())
def test_an_incomplete_iteration_takes_one_epoch(orders, data):
    """Any number of its workers may have begun it; the next iteration has another epoch."""
    counter, latest = new_counter(), -1
    for number, order in enumerate(orders):
        begun = order[: data.draw(st.integers(0, len(order)))]
        epochs = {counter.begin(worker, iteration_id(number))[0] for worker in begun}
        if begun:
            assert epochs == {latest + 1}
            latest += 1


@given(st.integers(2, 5), st.integers(0, 3))
def test_workers_that_begin_at_the_same_time_agree(workers, epoch):
    """Each worker reads before any other writes, and writes only its own entry."""
    shared = np.zeros(COUNTER_SIZE, np.int64)
    SharedEpochCounter(shared).set(epoch, 0)
    for number in range(3):
        before = shared.copy()
        copies = [before.copy() for _ in range(workers)]
        found = {
            SharedEpochCounter(copy).begin(worker, iteration_id(number)) for worker, copy in enumerate(copies)
        }
        assert found == {(epoch + number, 0)}
        for worker, copy in enumerate(copies):
            assert np.flatnonzero(copy != before).tolist() == [2 + worker]
            shared[2 + worker] = copy[2 + worker]


def test_set_determines_the_next_epoch():
    counter = new_counter()
    for number in range(5):
        counter.begin(0, iteration_id(number))
    counter.set(2, 11)
    assert [counter.begin(worker, iteration_id(9)) for worker in (1, 0)] == [(2, 11), (2, 11)]
    assert [counter.begin(worker, iteration_id(10)) for worker in (0, 1)] == [(3, 0), (3, 0)]


def test_a_recorded_epoch_counts_as_begun():
    counter = new_counter()
    for worker in (0, 1):
        counter.record(worker, iteration_id(0), 4)
    assert {counter.begin(worker, iteration_id(1)) for worker in (1, 0)} == {(5, 0)}


def test_iteration_ids_have_31_bits_and_differ():
    ids = [
        iteration_id(seed, workers, number) for seed in range(9) for workers in (1, 2) for number in (0, 1)
    ]
    assert len(set(ids)) == len(ids)
    assert all(0 <= each < 1 << 31 for each in ids)


def test_too_many_workers_are_refused():
    with pytest.raises(ConfigError, match="too many workers; found 1025; expected up to 1024"):
        new_counter().begin(MAX_WORKERS, 0)
