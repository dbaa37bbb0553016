"""Retries after temporary errors, on a clock that the test sets."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hexdata import retry
from hexdata.errors import ConfigError
from hexdata.retry import RetryPolicy, attempts_of, with_attempts


class Clock:
    """Replaces the clock that policies read; waiting sets it forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def failing(self, seconds: float, begun: list[float]) -> Callable[[], None]:
        """Return a function that notes when it began and fails after ``seconds``."""

        def fail() -> None:
            begun.append(self.now - 1000)
            self.wait(seconds)
            raise TimeoutError("no answer")

        return fail


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (14, [0, 15]),  # a third attempt would end at 45
        (5, [0, 6, 13, 22]),  # a fifth would end at 40
        (0, [0, 1, 3, 7, 15]),
        (40, [0, 41]),  # the second attempt is always made
    ],
)
def test_no_attempt_would_end_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[float]
) -> None:
    clock, begun = Clock(monkeypatch), list[float]()
    policy = RetryPolicy(attempts=99, first_wait=1, deadline=30)
    with pytest.raises(TimeoutError) as caught:
        policy.call(clock.failing(seconds, begun), is_temporary=lambda _: True, sleep=clock.wait)
    assert begun == expected
    attempts = attempts_of(caught.value)
    assert attempts == (len(begun), begun[-1] + seconds)
    assert attempts_of(pickle.loads(pickle.dumps(caught.value))) == attempts


def test_policies_within_policies_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, begun = Clock(monkeypatch), list[float]()
    inner, outer = RetryPolicy(attempts=3, first_wait=1), RetryPolicy(attempts=5)

    def attempt() -> None:
        try:
            inner.call(clock.failing(0, begun), is_temporary=lambda _: True, sleep=clock.wait)
        except TimeoutError as error:
            raise OSError("converted") from error

    with pytest.raises(OSError, match="converted"):
        outer.call(attempt, is_temporary=lambda _: True, sleep=clock.wait)
    assert begun == [0, 1, 3]


def test_attempts_in_messages() -> None:
    with pytest.raises(OSError, match="no") as caught:
        RetryPolicy(attempts=1).call(lambda: fail(OSError("no")), is_temporary=lambda _: True)
    assert with_attempts("no", caught.value) == "no"
    with pytest.raises(OSError, match="no") as caught:
        RetryPolicy(attempts=3, first_wait=0).call(lambda: fail(OSError("no")), is_temporary=lambda _: True)
    assert with_attempts("no", caught.value) == "no, after 3 attempts in 0 s"
    with pytest.raises(ValueError, match="no") as final:
        RetryPolicy().call(lambda: fail(ValueError("no")))
    assert with_attempts("no", final.value) == "no"


def fail(error: Exception) -> None:
    raise error


def test_a_deadline_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        RetryPolicy(deadline=-1)
