"""Libraries that are not always installed: those that only an extra of hexdata installs, and pandas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder

from hexdata.errors import ConfigError

__all__ = ["hide_pandas", "installed_by"]


@contextmanager
def installed_by(extra: str, purpose: str) -> Iterator[None]:
    """Name the extra if a library that is imported inside the ``with`` block is not installed.

    Args:
        extra: The extra that installs the library.
        purpose: What needs the library; begins the message.

    Raises:
        ConfigError: A library is not installed, or cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs a library that is not installed",
            found=str(error),
            hint=f"Install it with: pip install 'hexdata[{extra}]'.",
        ) from error


class _NoPandas(MetaPathFinder):
    """Reports that pandas is not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this process does not use pandas", name=name)


def hide_pandas() -> None:
    """Make pandas appear not installed, in a process that runs only hexdata.

    Arrow would import it where it is installed, which takes a third of the time of a worker's start.
    """
    sys.meta_path.insert(0, _NoPandas())
