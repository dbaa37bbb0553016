"""Which errors of a disk pass by themselves, and how long to wait for that. Touches no disk."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from hexdata.errors import ConfigError

__all__ = ["Patience", "is_transient"]

_TRANSIENT: Final = (
    *("EIO", "EAGAIN", "EBUSY", "EINTR", "ENOLCK", "EREMOTEIO", "ESTALE", "ETIMEDOUT"),
    *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "ENOTCONN"),
    *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH"),
)
"""What a loose cable, a busy server or a network that comes back gives; systems lack some of the names."""


def is_transient(error: BaseException) -> bool:
    """Say whether an error may be gone at the next attempt."""
    return isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in _TRANSIENT


@dataclass(frozen=True)
class Patience:
    """How often work is tried that a disk fails in passing, with waits that double.

    Attributes:
        attempts: the first one counts.
        first_wait: seconds before the second attempt.
        longest_wait: seconds that no wait exceeds.

    Raises:
        ConfigError: on a value out of range.
    """

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError("attempts must be at least 1", found=self.attempts)
        if self.first_wait < 0 or self.longest_wait < 0:
            raise ConfigError("a wait is not negative", found=min(self.first_wait, self.longest_wait))

    def go_on(
        self, work: Callable[[], None], *, sleep: Callable[[float], None], say: Callable[[str], object]
    ) -> None:
        """Call ``work`` until it succeeds; the last error comes out, and at once any that is no passing one.

        Args:
            work: may be called again after it failed.
            sleep: waits so many seconds.
            say: is told of each failure that is waited out.
        """

        def tell(state: RetryCallState) -> None:
            error = state.outcome and state.outcome.exception()
            say(f"attempt {state.attempt_number} failed: {error}; waiting {state.upcoming_sleep:.1f} s")

        retrying = Retrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait_exponential(multiplier=self.first_wait, max=self.longest_wait),
            retry=retry_if_exception(is_transient),
            sleep=sleep,
            before_sleep=tell,
            reraise=True,
        )
        retrying(work)
