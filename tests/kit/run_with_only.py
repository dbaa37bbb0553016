"""Runs a script with hexdata and some packages only: ``run_with_only.py SCRIPT PACKAGE...``.

All other installed packages appear missing, except those that hexdata or the given ones require.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from types import ModuleType
from typing import Any

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<extras>\[[^]]*\])?(?P<condition>.*)")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(packages: list[str]) -> set[str]:
    """Return the names of packages such as ``ray[default]``, and of all that they require."""
    found: set[str] = set()
    left, seen = list(packages), set()
    while left:
        text = left.pop()
        match = _REQUIREMENT.match(text)
        if match is None or text in seen:
            continue
        seen.add(text)
        found.add(_canonical(match["name"]))
        try:
            required = distribution(match["name"]).requires or []
        except PackageNotFoundError:
            continue
        extras = re.findall(r"[\w.-]+", match["extras"] or "")
        for each in required:
            name, _, condition = each.partition(";")
            extra = re.search(r"extra == ['\"]([\w.-]+)['\"]", condition)
            if extra is None or extra[1] in extras:
                left.append(name.strip())
    return found


class _Only(MetaPathFinder):
    """Finds modules and packages as the present finders do, except packages that are not allowed."""

    def __init__(self, allowed: set[str]) -> None:
        self._allowed = allowed
        owners = packages_distributions().items()
        self._hidden = {module for module, names in owners if not allowed & {*map(_canonical, names)}}
        self._finders = list(sys.meta_path)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self._hidden:
            return None
        found = (finder.find_spec(name, path, target) for finder in self._finders)
        return next((spec for spec in found if spec), None)

    def find_distributions(self, context: Any) -> Iterator[Distribution]:
        found = PathFinder.find_distributions(context)
        return (each for each in found if _canonical(each.name) in self._allowed)


def main() -> None:
    script, *packages = sys.argv[1:]
    sys.meta_path[:] = [_Only(closure(["hexdata", *packages]))]
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
