"""The extras that users install, and the modules of their libraries, as ``pyproject.toml`` declares them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEVELOPMENT = re.compile(r"test.*|lint|docs|bench|notebook")
"""Extras for work on hexdata itself, which no code of the package imports."""


def module_of(requirement: str) -> str:
    """Return the module of a requirement such as ``prometheus-client>=0.20``."""
    name = re.match(r"[\w.-]+", requirement)
    assert name
    return name[0].replace("-", "_")


_DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, tuple[str, ...]] = {
    extra: tuple(map(module_of, requirements))
    for extra, requirements in _DECLARED["optional-dependencies"].items()
    if not DEVELOPMENT.fullmatch(extra)
}
"""Modules that each extra installs."""
EXTRA_OF: dict[str, str] = {module: extra for extra, modules in EXTRAS.items() for module in modules}
"""The extra that installs each module."""
REQUIRED = frozenset(map(module_of, _DECLARED["dependencies"]))
"""Modules that every installation has."""
