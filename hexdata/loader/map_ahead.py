"""Ordered application of a function in threads, some items ahead of the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["map_ahead"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], pool: ThreadPoolExecutor | None, ahead: int
) -> Iterator[Result]:
    """Yield ``function(item)`` for each item, in order.

    Args:
        function: Called in the threads of the pool.
        items: The items. The caller's thread iterates over them.
        pool: The threads; None to call the function when its result is needed.
        ahead: Number of results that are computed or kept beyond the one that is needed.
    """
    if pool is None:
        yield from map(function, items)
        return
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
