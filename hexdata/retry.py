"""The one list of temporary errors, the one of full disks, and the one way to repeat an operation.

Requests to object stores are repeated by their client libraries, not here.
"""

from __future__ import annotations

import errno
import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the quota is used up, or the file has its largest size."""
_TRANSIENT_NAMES: Final = (
    *("EIO", "EAGAIN", "EBUSY", "EINTR", "EMFILE", "ENFILE", "ENODEV", "ENOLCK", "EREMOTEIO", "ESTALE"),
    *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "ENOTCONN", "ETIMEDOUT"),
    *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH"),
)
TRANSIENT: Final = tuple(getattr(errno, name) for name in _TRANSIENT_NAMES if hasattr(errno, name))
"""Errors that a loose cable, a busy server, too many open files or a network failure causes.

They say nothing about the file itself. Not all systems define each name.
"""
_ARROW_NUMBER: Final = re.compile(r"\[errno ([0-9]+)\]")
"""Error number in a message of Arrow, whose exception often has no ``errno``."""

P = ParamSpec("P")
T = TypeVar("T")


def error_number(error: OSError) -> int | None:
    """Return the number of a system error, even if only its text has it, as with Arrow; None without one."""
    if error.errno is not None:
        return error.errno
    found = _ARROW_NUMBER.search(str(error))
    return None if found is None else int(found[1])


def is_transient(error: BaseException) -> bool:
    """Return whether a disk error may disappear on the next attempt."""
    return isinstance(error, OSError) and error_number(error) in TRANSIENT


def _is_repeated(error: BaseException) -> bool:
    """Return whether an error is transient and no policy has given up with it.

    An error of hexdata is so if it was raised from such an error: a session translates those of its disks.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if cause is None or any(getattr(each, "gave_up", False) for each in (error, cause)):
        return False
    return is_transient(cause)


@dataclass(frozen=True)
class RetryPolicy:
    """Settings for retries after temporary errors. The wait doubles after each attempt.

    Attributes:
        attempts: Maximum number of attempts, including the first (default: 6).
        first_wait: Seconds before the second attempt (default: 0.5).
        longest_wait: Maximum seconds before any attempt (default: 30).

    Example:
        >>> RetryPolicy(attempts=3).call(lambda: 1)
        1
    """

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 30.0

    def call(
        self, function: Callable[[], T], is_temporary: Callable[[BaseException], bool] = _is_repeated
    ) -> T:
        """Return the result of ``function``, which is called until it succeeds.

        Any error that is not temporary, or the error of the last attempt, is raised.

        Args:
            function: Function to call; it must allow another call after it has failed.
            is_temporary: Whether an error may disappear on the next attempt (default: errors of disks and
                networks with which no policy has given up).
        """
        attempt = 1
        while True:
            try:
                return function()
            except Exception as error:
                if attempt == self.attempts:
                    # An operation around this one must not repeat all attempts as often again.
                    error.gave_up = True  # type: ignore[attr-defined]
                if attempt == self.attempts or not is_temporary(error):
                    raise
            time.sleep(min(self.first_wait * 2 ** (attempt - 1), self.longest_wait))
            attempt += 1


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
