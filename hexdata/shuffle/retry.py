"""Retries after temporary disk errors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from hexdata.errors import ConfigError

__all__ = ["RetryPolicy", "is_transient"]

_TRANSIENT: Final = (
    *("EIO", "EAGAIN", "EBUSY", "EINTR", "ENOLCK", "EREMOTEIO", "ESTALE", "ETIMEDOUT"),
    *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "ENOTCONN"),
    *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH"),
)
"""Errors that a loose cable, a busy server or a network failure causes. Not all systems define each name."""


def is_transient(error: BaseException) -> bool:
    """Return whether an error may disappear on the next attempt."""
    return isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in _TRANSIENT


@dataclass(frozen=True)
class RetryPolicy:
    """Settings for retries after temporary disk errors. The wait doubles after each attempt.

    Attributes:
        attempts: Maximum number of attempts, including the first (default: 6).
        first_wait: Seconds before the second attempt (default: 0.5).
        longest_wait: Maximum seconds before any attempt (default: 30).

    Raises:
        ConfigError: A value is out of range.
    """

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError("attempts must be at least 1", found=self.attempts)
        if self.first_wait < 0 or self.longest_wait < 0:
            raise ConfigError("a wait must not be negative", found=min(self.first_wait, self.longest_wait))

    def call(
        self, function: Callable[[], None], *, sleep: Callable[[float], None], log: Callable[[str], object]
    ) -> None:
        """Call ``function`` until it succeeds.

        Any error that is not temporary, or the error of the last attempt, is raised.

        Args:
            function: Function to call; it must allow another call after it has failed.
            sleep: Function that waits for the given seconds.
            log: Called with a message about each failed attempt before the wait.
        """

        def log_failure(state: RetryCallState) -> None:
            error = state.outcome and state.outcome.exception()
            log(f"attempt {state.attempt_number} failed: {error}; waiting {state.upcoming_sleep:.1f} s")

        retrying = Retrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait_exponential(multiplier=self.first_wait, max=self.longest_wait),
            retry=retry_if_exception(is_transient),
            sleep=sleep,
            before_sleep=log_failure,
            reraise=True,
        )
        retrying(function)
