"""The thread pool: calls run in order on the calling thread, and any error stops all workers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hexdata.shuffle.thread_pool import ThreadPool

from hexdata.store.session import duckdb_session
from tests.ctrl_c import ctrl_c_after

ENDLESS = "SELECT count(*) FROM range(1_000_000_000_000) t(i) WHERE i % 7 = 3"


@pytest.mark.parametrize("threads", [1, 3, 20])
def test_each_task_runs_once_and_its_calls_run_on_the_calling_thread(threads: int) -> None:
    pool, received, callers = ThreadPool(threads), [], set()
    before = set(threading.enumerate())

    def receive(task: int, number: int) -> None:
        received.append((task, number))
        callers.add(threading.current_thread())

    def work(task: int) -> None:
        for number in range(3):
            pool.call_in_caller(receive, task, number)

    pool.run(range(7), work)
    assert sorted(received) == [(task, number) for task in range(7) for number in range(3)]
    assert all([w for t, w in received if t == task] == [0, 1, 2] for task in range(7))
    assert callers == {threading.current_thread()}
    assert set(threading.enumerate()) <= before


def test_without_tasks_nothing_runs() -> None:
    ThreadPool(2).run([], lambda _: pytest.fail("there is no task"))


def test_an_error_in_one_thread_stops_the_others() -> None:
    pool, started = ThreadPool(2), []

    def work(task: int) -> None:
        started.append(task)
        if task:
            while True:
                pool.sleep(0.01)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        pool.run(range(50), work)
    assert len(started) <= 3


def test_an_error_in_the_calling_thread_stops_the_others() -> None:
    pool = ThreadPool(3)

    def refuse() -> None:
        raise ValueError("no more")

    def work(_: int) -> None:
        while True:
            pool.call_in_caller(refuse)

    with pytest.raises(ValueError, match="no more"):
        pool.run(range(3), work)


def test_ctrl_c_ends_the_queries_of_all_threads(tmp_path: Path) -> None:
    """They would otherwise run for hours."""
    pool = ThreadPool(2)

    def work(_: int) -> None:
        with duckdb_session(memory=64 << 20, threads=1, spill=tmp_path, interrupts=pool.interrupts) as con:
            con.sql(ENDLESS).fetchall()

    with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.5):
        pool.run(range(2), work)
    assert list(tmp_path.iterdir()) == []
