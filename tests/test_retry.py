"""Retries after temporary errors."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from hexdata import retry
from hexdata.retry import RetryPolicy


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each wait, which take no time."""
    waited: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", waited.append)
    return waited


def failing(*numbers: int) -> Callable[[], str]:
    """Return a function that raises these errors in turn and then succeeds."""
    coming = iter(numbers)

    def call() -> str:
        if number := next(coming, 0):
            raise OSError(number, "no")
        return "done"

    return call


def test_waits_double_up_to_the_maximum(waits: list[float]) -> None:
    policy = RetryPolicy(attempts=7, first_wait=0.5, longest_wait=3.0)
    assert policy.call(failing(*[errno.EIO] * 5)) == "done"
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    waits.clear()
    with pytest.raises(OSError, match="no"):
        policy.call(failing(*[errno.EIO] * 9))
    assert len(waits) == 6


def test_policies_within_policies_do_not_multiply(waits: list[float]) -> None:
    inner, outer = RetryPolicy(attempts=3), RetryPolicy(attempts=5)
    with pytest.raises(OSError, match="no"):
        outer.call(lambda: inner.call(failing(*[errno.EIO] * 99)))
    assert len(waits) == 2
