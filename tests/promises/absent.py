"""Uses hexdata in a process that lacks modules: ``absent.py MODULES BROKEN COMMANDS IMPORTS``, each as JSON.

Modules are names that cannot be imported; broken ones exist and raise ``FAULT``. A command is a list of
arguments of ``hexdata``, or one text, which is run as Python code. IMPORTS is whether to import every module
of hexdata as well. Prints the outcome of each step as JSON:
None, or the names of the classes of the error and its message.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import io
import json
import pkgutil
import pydoc
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

FAULT = "libfault.so: cannot open shared object file"
Outcome = tuple[list[str], str] | None


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the broken modules, whose code raises ``FAULT``."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in self.names else None

    def exec_module(self, module: object) -> None:
        raise ImportError(FAULT)


def outcome_of(action: Callable[[], object]) -> Outcome:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - any error is an outcome
        return [kind.__name__ for kind in type(error).__mro__], " ".join(str(error).split())
    return None


def import_everything() -> dict[str, Outcome]:
    """Import hexdata in every way that tools use, and each of its modules."""
    import hexdata

    found: list[pkgutil.ModuleInfo] = []
    outcomes = {
        "import *": outcome_of(lambda: exec("from hexdata import *", {})),
        "help": outcome_of(lambda: pydoc.render_doc(hexdata)),
        "walk": outcome_of(lambda: found.extend(pkgutil.walk_packages(hexdata.__path__, "hexdata."))),
    }
    for name in hexdata.__all__:
        outcomes[f"name {name}"] = outcome_of(lambda name=name: getattr(hexdata, name))  # type: ignore[misc]
    for each in found:
        if each.name != "hexdata.__main__":
            kind = "package" if each.ispkg else "module"
            outcomes[f"{kind} {each.name}"] = outcome_of(lambda name=each.name: star_import(name))  # type: ignore[misc]
    return outcomes


def star_import(name: str) -> None:
    exec(f"from {name} import *", {})


def run(command: list[str] | str) -> tuple[int, str]:
    """Run a command or code in this process; return its status and what it printed as errors."""
    from hexdata.cli import main

    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        if isinstance(command, str):
            failed = outcome_of(lambda: exec(command, {}))
            return (0, "") if failed is None else (1, f"{failed[0][0]}: {failed[1]}")
        sys.argv = ["hexdata", *command]
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), " ".join(errors.getvalue().split())
    return 0, " ".join(errors.getvalue().split())


def main() -> None:
    missing, broken, commands, imports = map(json.loads, sys.argv[1:])
    sys.modules.update(dict.fromkeys(missing))  # None makes an import raise ModuleNotFoundError
    sys.meta_path.insert(0, Broken(broken))
    from hexdata.extras import hide_pandas

    hide_pandas()  # as ``hexdata`` does
    results: dict[str, Any] = {"commands": [run(command) for command in commands]}
    if imports:  # each module takes a moment
        results["imports"] = import_everything()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
