"""Retries after temporary errors, with growing waits, and the lists of errors of disks."""

from __future__ import annotations

import errno
import functools
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, ParamSpec, TypeVar

from hexdata.errors import ConfigError

__all__ = [
    "DISK_FULL",
    "TRANSIENT",
    "Attempts",
    "RetryPolicy",
    "attempts_of",
    "copy_attempts",
    "error_number",
    "is_disk_full",
    "is_transient",
    "on_disk",
    "repeats_on_disk",
    "with_attempts",
]

DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the quota is used up, or the file has its largest size."""
_TRANSIENT_NAMES: Final = (
    *("EIO", "EAGAIN", "EBUSY", "EINTR", "ENOLCK", "EREMOTEIO", "ESTALE", "ETIMEDOUT"),
    *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "ENOTCONN"),
    *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH"),
)
TRANSIENT: Final = tuple(getattr(errno, name) for name in _TRANSIENT_NAMES if hasattr(errno, name))
"""Errors that a loose cable, a busy server or a network failure causes. Not all systems define each name."""
_ARROW_NUMBER: Final = re.compile(r"\[errno ([0-9]+)\]")
"""Error number in a message of Arrow, whose exception often has no ``errno``."""

_ATTEMPTS: Final = "attempts_before_giving_up"
"""Attribute of an error that a policy raises, which another process receives with the error."""

P = ParamSpec("P")
T = TypeVar("T")


def error_number(error: OSError) -> int | None:
    """Return the number of a system error, even if only its text has it, as with Arrow; None without one."""
    if error.errno is not None:
        return error.errno
    found = _ARROW_NUMBER.search(str(error))
    return None if found is None else int(found[1])


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that the disk is full, the quota is used up or the file is too large."""
    return error.errno in DISK_FULL


def is_transient(error: BaseException) -> bool:
    """Return whether a disk error may disappear on the next attempt."""
    return isinstance(error, OSError) and error_number(error) in TRANSIENT


class Attempts(NamedTuple):
    """The attempts after which a policy gave up.

    Attributes:
        number: Number of attempts.
        seconds: Seconds from the first attempt to the end of the last one.
    """

    number: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.number} attempt{'s' * (self.number > 1)} in {self.seconds:.0f} s"


def attempts_of(error: BaseException) -> Attempts | None:
    """Return the attempts after which a policy gave up with this error or one of its causes, or None."""
    one: BaseException | None = error
    while one is not None:
        if found := vars(one).get(_ATTEMPTS):
            return Attempts(*found)
        one = one.__cause__
    return None


def copy_attempts(error: BaseException, cause: BaseException) -> None:
    """Record the attempts of ``cause`` in ``error``, because another process receives an error alone."""
    if attempts := attempts_of(cause):
        vars(error)[_ATTEMPTS] = tuple(attempts)


def with_attempts(text: str, error: BaseException) -> str:
    """Return a text about an error, with the number of attempts if there were several or they took long."""
    attempts = attempts_of(error)
    is_short = attempts is None or (attempts.number == 1 and attempts.seconds < 1)
    return text if is_short else f"{text}, after {attempts}"


def _ignore(_: str) -> None:
    """Log nothing."""


@dataclass(frozen=True)
class RetryPolicy:
    """Settings for retries after temporary errors. The wait doubles after each attempt.

    If a policy has given up with an error, no policy around it retries that error.

    Attributes:
        attempts: Maximum number of attempts, including the first (default: 6).
        first_wait: Seconds before the second attempt (default: 0.5).
        longest_wait: Maximum seconds before any attempt, without the random addition (default: 30).
        jitter: Maximum of the random number of seconds added to each wait (default: 0).
        deadline: Seconds from the first attempt to the end of the last one. No attempt is made that would
            end later if it took as long as the one before it, except the second. Default None: no limit.

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
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError("attempts must be at least 1", found=self.attempts)
        shortest = min(self.first_wait, self.longest_wait, self.jitter, self.deadline or 0)
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
        begun: list[float] = []
        wait = self.first_wait
        while True:
            begun.append(time.monotonic())
            try:
                return function()
            except Exception as error:
                if attempts_of(error) is not None or not is_temporary(error):
                    raise
                pause = min(wait, self.longest_wait) + random.uniform(0, self.jitter)  # noqa: S311
                if self._is_last(begun, pause):
                    vars(error)[_ATTEMPTS] = (len(begun), time.monotonic() - begun[0])
                    raise
                log(f"attempt {len(begun)} failed: {error}; trying again in {pause:.1f} s")
            sleep(pause)
            wait *= 2

    def _is_last(self, begun: list[float], pause: float) -> bool:
        """Return whether no attempt follows those that begun at the given times, after a pause."""
        if len(begun) >= self.attempts:
            return True
        now = time.monotonic()
        next_end = now - begun[0] + pause + now - begun[-1]
        return self.deadline is not None and len(begun) > 1 and next_end > self.deadline


_DISK = RetryPolicy(attempts=6, first_wait=0.1)
"""Retries of one operation on a local disk, for 3 seconds in total. Stages resume after longer failures."""


def on_disk(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Call a function that opens, reads or writes local files, and call it again after temporary errors.

    Args:
        function: Function to call; it must allow another call after it has failed.
        arguments: Its positional arguments.
        keywords: Its keyword arguments.
    """
    return _DISK.call(functools.partial(function, *arguments, **keywords))


def repeats_on_disk(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that reads files through a library, so that it is called as by ``on_disk``."""

    @functools.wraps(function)
    def repeated(*arguments: P.args, **keywords: P.kwargs) -> T:
        return on_disk(function, *arguments, **keywords)

    return repeated
