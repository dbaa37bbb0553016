"""Workers that share an array agree on the epoch of each iteration, in whatever order they come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.torch.epoch_counter import MOST_WORKERS, TURNS_SIZE, Turns, mark_of


def new_turns(epoch: int = 0, step: int = 0) -> Turns:
    turns = Turns(np.zeros(TURNS_SIZE, np.int64))
    turns.set(epoch, step)
    return turns


orders = st.lists(st.integers(1, 5).flatmap(lambda workers: st.permutations(range(workers))), min_size=1)


@given(orders, st.integers(0, 9), st.booleans())
def test_whole_iterations_run_the_epochs_in_turn(orders, epoch, same_seed):
    """Also where the user seeds PyTorch before each, so that only the number of workers tells them apart."""
    turns = new_turns(epoch, 7)
    assert turns.latest == -1
    for number, order in enumerate(orders):
        mark = mark_of(1 if same_seed else number, len(order))
        step = 0 if number else 7
        assert {turns.take(worker, mark) for worker in order} == {(epoch + number, step)}
        assert turns.latest == epoch + number


@given(orders, st.data())
def test_an_iteration_that_was_left_is_passed_over(orders, data):
    """However many of its workers had begun it: the next one has an epoch of its own, and one alone."""
    turns, last = new_turns(), -1
    for number, order in enumerate(orders):
        came = order[: data.draw(st.integers(0, len(order)))]
        epochs = {turns.take(worker, mark_of(number))[0] for worker in came}
        if came:
            assert epochs == {last + 1}
            last += 1


@given(st.integers(2, 5), st.integers(0, 3))
def test_workers_that_come_at_the_same_time_agree(workers, epoch):
    """Each looks before any other has written, and writes its own word alone."""
    words = np.zeros(TURNS_SIZE, np.int64)
    Turns(words).set(epoch, 0)
    for number in range(3):
        before = words.copy()
        looks = [before.copy() for _ in range(workers)]
        found = {Turns(look).take(worker, mark_of(number)) for worker, look in enumerate(looks)}
        assert found == {(epoch + number, 0)}
        for worker, look in enumerate(looks):
            assert np.flatnonzero(look != before).tolist() == [2 + worker]
            words[2 + worker] = look[2 + worker]


def test_a_set_epoch_is_the_next_one_wherever_the_workers_were():
    turns = new_turns()
    for number in range(5):
        turns.take(0, mark_of(number))
    turns.set(2, 11)
    assert [turns.take(worker, mark_of(9)) for worker in (1, 0)] == [(2, 11), (2, 11)]
    assert [turns.take(worker, mark_of(10)) for worker in (0, 1)] == [(3, 0), (3, 0)]


def test_a_worker_that_knows_its_epoch_leaves_the_next_one_to_the_others():
    turns = new_turns()
    for worker in (0, 1):
        turns.note(worker, mark_of(0), 4)
    assert {turns.take(worker, mark_of(1)) for worker in (1, 0)} == {(5, 0)}


def test_marks_have_31_bits_and_tell_iterations_apart():
    marks = [mark_of(seed, workers, number) for seed in range(9) for workers in (1, 2) for number in (0, 1)]
    assert len(set(marks)) == len(marks)
    assert all(0 <= mark < 1 << 31 for mark in marks)


def test_too_many_workers_are_refused():
    with pytest.raises(ConfigError, match="too many workers; found 1025; expected up to 1024"):
        new_turns().take(MOST_WORKERS, 0)
