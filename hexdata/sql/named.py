"""The named queries: one ``.sql`` file each in ``queries/``."""

from __future__ import annotations

import difflib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from hexdata.errors import ConfigError

__all__ = ["named_queries", "named_query"]

_SUFFIX: Final = ".sql"


def named_query(name: str) -> str:
    """Return the SQL text of a named query.

    Raises:
        ConfigError: There is no query of this name; the message lists the existing ones.
    """
    files = _files()
    if name in files:
        return files[name].read_text(encoding="utf-8")
    similar = difflib.get_close_matches(name, files, n=1)
    raise ConfigError(
        "unknown named query",
        found=f"@{name}",
        expected="one of " + ", ".join(f"@{known}" for known in sorted(files)),
        hint=f"Did you mean @{similar[0]}?" if similar else None,
    )


def named_queries() -> dict[str, str]:
    """Return the description of each named query, from the comment at its start, sorted by name."""
    return {name: _head(file.read_text(encoding="utf-8")) for name, file in sorted(_files().items())}


def _files() -> dict[str, Traversable]:
    folder = resources.files("hexdata.sql") / "queries"
    return {file.name.removesuffix(_SUFFIX): file for file in folder.iterdir() if file.name.endswith(_SUFFIX)}


def _head(text: str) -> str:
    """Return the comment at the start of a query as one line."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)
