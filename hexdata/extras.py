"""Libraries that only some functions need, and that only an extra of hexdata installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hexdata.errors import ConfigError

__all__ = ["installed_by"]


@contextmanager
def installed_by(extra: str, purpose: str) -> Iterator[None]:
    """Name the extra if a library that is imported inside the ``with`` block is not installed.

    Args:
        extra: the extra that installs the library.
        purpose: what needs the library; begins the message.

    Raises:
        ConfigError: a library is not installed, or cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs a library that is not installed",
            found=str(error),
            hint=f"Install it with: pip install 'hexdata[{extra}]'.",
        ) from error
