"""Libraries that are not always installed: those that only an extra of hexdata installs, and pandas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder

from hexdata.errors import MissingExtraError


@contextmanager
def installed_by(extra: str, purpose: str) -> Iterator[None]:
    """Name the extra if a library that is imported inside the ``with`` block is not installed.

    Other errors pass unchanged, such as an ``ImportError`` of a library that is installed.

    Args:
        extra: The extra that installs the library.
        purpose: What needs the library; begins the message.

    Raises:
        MissingExtraError: A library is not installed. This is a ``ConfigError`` and an ``ImportError``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "hexdata"):
            raise
        reason = f"{purpose} needs a library that is not installed"
        hint = f"Install it in the clone of hexdata: python -m pip install '.[{extra}]'."
        missing = MissingExtraError(reason, found=str(error), hint=hint)
        missing.name = error.name
        raise missing from error


class _NoPandas(MetaPathFinder):
    """Reports that pandas is not installed. ``sys.modules["pandas"] = None`` would make Arrow fail."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this process does not use pandas", name=name)


def hide_pandas() -> None:
    """Make pandas appear not installed, in a process that runs only hexdata.

    Arrow would import it where it is installed, which takes a third of the time of a worker's start.
    """
    sys.meta_path.insert(0, _NoPandas())
