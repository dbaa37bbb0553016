"""Number of worker processes or threads, from cores and memory; and reading ahead in a thread."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from hexdata.errors import BudgetError
from hexdata.text import count_of

_T = TypeVar("_T")

LEADER_MEMORY: Final = 128 << 20
"""Memory in bytes of a process while its workers do the work."""


def read_ahead(items: Generator[_T, None, None]) -> Generator[_T, None, None]:
    """Yield items. While the caller uses one of them, the next one is made in a thread.

    The items are made one after the other. Their generator is closed with this one.
    """
    with ThreadPoolExecutor(1, "hexdata-ahead") as executor:
        try:
            coming = executor.submit(next, items, None)
            while (item := coming.result()) is not None:
                coming = executor.submit(next, items, None)
                yield item
        finally:
            # In the thread, which may still make an item if a second Ctrl-C ends the wait for it.
            executor.submit(items.close)


def fitting(memory: int, requested: int | None, most: int, each: int, base: int, noun: str) -> int:
    """Return a number of workers: the requested one, or as many as fit into the memory.

    Args:
        memory: Memory limit in bytes.
        requested: Number that the user requests; None for no request.
        most: Maximum number if none is requested.
        each: Bytes that each needs.
        base: Bytes that all need together; of "worker", only if there are several.
        noun: "worker" or "thread".

    Raises:
        BudgetError: The requested number, or even one, does not fit into the memory.
    """
    count = requested or max(1, min(most, (memory - base) // each))
    # A single worker is this process itself, so no leader takes memory beside it.
    least = count * each + (base if count > 1 or noun == "thread" else 0)
    if least > memory:
        reason = f"too little memory for {count_of(count, noun)}"
        hint = f"Raise --memory, or lower --{noun}s." if count > 1 else "Raise --memory."
        raise BudgetError.of_memory(reason, found=memory, expected=least, hint=hint)
    return count
