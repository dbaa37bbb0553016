"""Tests of ``hexdata.loader.map_ahead``: results in order, from threads that work ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hexdata.loader.map_ahead import map_ahead


def test_without_a_pool_nothing_is_computed_ahead() -> None:
    seen: list[int] = []
    results = map_ahead(seen.append, [1, 2, 3], None, 5)
    next(results)
    assert seen == [1]


@pytest.mark.parametrize("ahead", [0, 1, 7, 100])
@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_in_the_order_of_the_items(threads: int, ahead: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        assert list(map_ahead(lambda x: -x, range(50), pool, ahead)) == [-x for x in range(50)]
        assert list(map_ahead(lambda x: -x, [], pool, ahead)) == []


def test_items_are_taken_as_far_ahead_as_asked() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(50):
            taken.append(item)
            yield item

    with ThreadPoolExecutor(2) as pool:
        results = map_ahead(abs, items(), pool, 4)
        assert next(results) == 0
        assert taken == [0, 1, 2, 3, 4]
        assert next(results) == 1
        assert taken == [0, 1, 2, 3, 4, 5]


def test_an_error_is_raised_in_its_place() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = map_ahead(lambda x: 1 // x, [1, 1, 0, 1], pool, 3)
        assert [next(results), next(results)] == [1, 1]
        with pytest.raises(ZeroDivisionError):
            next(results)


def test_work_that_has_not_begun_is_dropped_when_the_consumer_stops() -> None:
    begun: list[int] = []
    release = threading.Event()

    def work(item: int) -> int:
        begun.append(item)
        if item:
            release.wait(60)
        return item

    with ThreadPoolExecutor(1) as pool:
        results = map_ahead(work, range(20), pool, 10)
        assert next(results) == 0
        results.close()
        release.set()
    assert len(begun) <= 2
