"""The named queries, one ``.sql`` file each in ``queries/``. Runs none of them."""

from __future__ import annotations

import difflib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from hexdata.errors import ConfigError

__all__ = ["named_queries", "named_query"]

_SUFFIX: Final = ".sql"


def named_query(name: str) -> str:
    """Return the text of a named query.

    Raises:
        ConfigError: there is none of that name; the message lists those there are.
    """
    files = _files()
    if name in files:
        return files[name].read_text(encoding="utf-8")
    near = difflib.get_close_matches(name, files, n=1)
    raise ConfigError(
        "no named query of that name",
        found=f"@{name}",
        expected="one of " + ", ".join(f"@{known}" for known in sorted(files)),
        hint=f"Did you mean @{near[0]}?" if near else None,
    )


def named_queries() -> dict[str, str]:
    """Return what each named query answers, as the comment at its head says, by name in order."""
    return {name: _head(file.read_text(encoding="utf-8")) for name, file in sorted(_files().items())}


def _files() -> dict[str, Traversable]:
    folder = resources.files("hexdata.sql") / "queries"
    return {file.name.removesuffix(_SUFFIX): file for file in folder.iterdir() if file.name.endswith(_SUFFIX)}


def _head(text: str) -> str:
    """Return the comment that a query opens with, as one line."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)
