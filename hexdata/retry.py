"""Retries after temporary errors, with growing waits."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from hexdata.errors import ConfigError

__all__ = ["RetryPolicy", "is_transient"]

_TRANSIENT: Final = (
    *("EIO", "EAGAIN", "EBUSY", "EINTR", "ENOLCK", "EREMOTEIO", "ESTALE", "ETIMEDOUT"),
    *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "ENOTCONN"),
    *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH"),
)
"""Errors that a loose cable, a busy server or a network failure causes. Not all systems define each name."""

T = TypeVar("T")


def is_transient(error: BaseException) -> bool:
    """Return whether a disk error may disappear on the next attempt."""
    return isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in _TRANSIENT


def _ignore(_: str) -> None:
    """Log nothing."""


@dataclass(frozen=True)
class RetryPolicy:
    """Settings for retries after temporary errors. The wait doubles after each attempt.

    Attributes:
        attempts: Maximum number of attempts, including the first (default: 6).
        first_wait: Seconds before the second attempt (default: 0.5).
        longest_wait: Maximum seconds before any attempt, without the random addition (default: 30).
        jitter: Maximum of the random number of seconds added to each wait (default: 0).

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> RetryPolicy(attempts=3).call(lambda: 1)
        1
    """

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 30.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError("attempts must be at least 1", found=self.attempts)
        shortest = min(self.first_wait, self.longest_wait, self.jitter)
        if shortest < 0:
            raise ConfigError("a wait must not be negative", found=shortest)

    def call(
        self,
        function: Callable[[], T],
        *,
        is_temporary: Callable[[BaseException], bool] = is_transient,
        sleep: Callable[[float], None] = time.sleep,
        log: Callable[[str], object] = _ignore,
    ) -> T:
        """Return the result of ``function``, which is called until it succeeds.

        Any error that is not temporary, or the error of the last attempt, is raised.

        Args:
            function: Function to call; it must allow another call after it has failed.
            is_temporary: Whether an error may disappear on the next attempt (default: errors of disks and
                networks).
            sleep: Function that waits for the given seconds.
            log: Called with a message about each failed attempt before the wait (default: none).
        """

        def log_failure(state: RetryCallState) -> None:
            error = state.outcome and state.outcome.exception()
            log(f"attempt {state.attempt_number} failed: {error}; waiting {state.upcoming_sleep:.1f} s")

        states: list[RetryCallState] = []
        retrying = Retrying(
            before=states.append,
            stop=stop_after_attempt(self.attempts),
            wait=wait_exponential(multiplier=self.first_wait, max=self.longest_wait)
            + wait_random(0, self.jitter),
            retry=retry_if_exception(is_temporary),
            sleep=sleep,
            before_sleep=log_failure,
            reraise=True,
        )
        try:
            return retrying(function)
        finally:  # otherwise the error refers to itself through its traceback, and keeps connections open
            for state in states:
                state.outcome = None
