"""Memory limits of queries: lower for an object store, because its client needs memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hexdata.errors import BudgetError
from hexdata.sql import SqlLimits
from hexdata.storage import as_path
from hexdata.store.limits import QueryLimits
from hexdata.verify import VerifyOptions

CLIENT = 48 << 20
MEMORY = 1_000_000_000
FAR = "memory://bucket/store"


@pytest.mark.parametrize("limits", [SqlLimits, VerifyOptions])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_of_the_object_store_client_is_subtracted(limits: type[QueryLimits], threads: int) -> None:
    given = limits(MEMORY, threads)
    here, there = given.session(Path("/games/store")), given.session(as_path(FAR))
    assert here.threads == there.threads == threads
    assert here.memory - there.memory == CLIENT
    assert there.memory + CLIENT + limits.BASE + threads * limits.THREAD == MEMORY


@pytest.mark.parametrize("limits", [SqlLimits, VerifyOptions])
def test_an_object_store_needs_more_memory_than_a_disk(limits: type[QueryLimits]) -> None:
    least = limits.BASE + limits.BUFFERS + 2 * (limits.THREAD + limits.THREAD_BUFFERS)
    given = limits(least, threads=2)
    assert given.session(Path()).memory == limits.BUFFERS + 2 * limits.THREAD_BUFFERS
    expected = f"{-(-(least + CLIENT) // 10**6):,} MB"
    with pytest.raises(BudgetError, match=f"with 2 threads; found .* MB; expected at least {expected}"):
        given.session(as_path(FAR))
    assert limits(least + CLIENT, threads=2).session(as_path(FAR)) == given.session(Path())


@pytest.mark.parametrize("limits", [SqlLimits, VerifyOptions])
def test_the_number_of_threads_depends_on_the_remaining_memory(limits: type[QueryLimits]) -> None:
    """The memory suffices for one thread in both cases, for two only on a disk."""
    each = limits.THREAD + limits.THREAD_BUFFERS
    given = limits(limits.BASE + limits.BUFFERS + 2 * each + CLIENT - 1)
    assert given.session(Path()).threads <= 2
    assert given.session(as_path(FAR)).threads == 1
