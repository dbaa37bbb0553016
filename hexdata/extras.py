"""Libraries that are not always installed: those that only an extra of hexdata installs, and pandas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Final

from hexdata.errors import MissingExtraError

__all__ = ["LIBRARIES", "hide_pandas", "installed_by"]

LIBRARIES: Final = {
    "azure": ("adlfs",),
    "browse": ("starlette", "uvicorn"),
    "gcs": ("gcsfs",),
    "live": ("prometheus_client", "watchfiles"),
    "png": ("resvg_py",),
    "ray": ("ray",),
    "report": ("jinja2", "matplotlib"),
    "s3": ("aiobotocore", "s3fs"),
    "torch": ("torch",),
}
"""Modules that each extra installs, as ``pyproject.toml`` declares them."""


@contextmanager
def installed_by(extra: str, purpose: str) -> Iterator[None]:
    """Name the extra if one of its libraries, imported inside the ``with`` block, is not installed.

    Other errors pass unchanged, such as an ``ImportError`` from within an installed library.

    Args:
        extra: The extra that installs the library.
        purpose: What needs the library; begins the message.

    Raises:
        MissingExtraError: A library is not installed. This is a ``ConfigError`` and an ``ImportError``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES.get(extra, ()):
            raise
        missing = MissingExtraError(
            f"{purpose} needs a library that is not installed",
            found=str(error),
            hint=f"Install it with: pip install 'hexdata[{extra}]'.",
        )
        missing.name = error.name
        raise missing from error


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
