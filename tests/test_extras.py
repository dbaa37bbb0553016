"""The functions that work without the libraries of the extras, and the messages of those that do not."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from hexdata.errors import ConfigError
from hexdata.extras import installed_by

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MISSING = (
    "jinja2",
    "matplotlib",
    "prometheus_client",
    "ray",
    "resvg_py",
    "s3fs",
    "starlette",
    "torch",
    "uvicorn",
    "watchfiles",
)
RUN = """
import contextlib, io, json, sys
from hexdata.cli import main

missing, *commands = map(json.loads, sys.argv[1:])
for name in missing:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
for command in commands:
    sys.argv, errors, status = ["hexdata", *command], io.StringIO(), 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    print(json.dumps([status, errors.getvalue()]))
"""
CORE = {"verify": (), "load": ("--mode", "exact"), "show": ("0",), "sql": ("SELECT 1",)}
"""Commands that need no extra, and their arguments after the store."""
NEEDS = {
    ("report",): ("the report", "report"),
    ("live",): ("live loading", "live"),
    ("browse", "--no-open"): ("the page of a store", "browse"),
    ("show", "0", "--png", "a.png"): ("a drawing as PNG", "png"),
    ("verify", "--engine", "ray"): ("an engine of Ray", "ray"),
}
"""Commands that need an extra: its purpose and its name."""


class Ran(NamedTuple):
    """Exit status and errors of a command."""

    status: int
    errors: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Ran]:
    """The results of all commands, run in one process that cannot import the library of any extra."""
    folder = tmp_path_factory.mktemp("light")
    store = str(folder / "demo" / "store")
    commands = {
        ("demo",): ("demo", str(folder / "demo"), "--games", "20"),
        **{(name,): (name, store, *rest) for name, rest in CORE.items()},
        **{command: (command[0], store, *command[1:]) for command in NEEDS},
    }
    arguments = [json.dumps(each) for each in (MISSING, *commands.values())]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return {name: Ran(*json.loads(line)) for name, line in zip(commands, lines, strict=True)}


@pytest.mark.slow
def test_the_core_needs_no_extra(ran: dict[tuple[str, ...], Ran]) -> None:
    assert "no report is written: the report needs a library" in " ".join(ran["demo",].errors.split())
    for name in ("demo", *CORE):
        assert ran[name,].status == 0, ran[name,].errors


@pytest.mark.slow
@pytest.mark.parametrize("command", NEEDS)
def test_a_command_names_the_extra_that_it_needs(
    ran: dict[tuple[str, ...], Ran], command: tuple[str, ...]
) -> None:
    purpose, extra = NEEDS[command]
    assert ran[command].status != 0
    message = " ".join(ran[command].errors.split())
    assert f"{purpose} needs a library that is not installed" in message
    assert f"pip install 'hexdata[{extra}]'" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("module", ["hexdata.torch", "hexdata.webdataset"])
def test_a_module_names_the_extra_that_it_needs(module: str) -> None:
    script = f"import sys\nsys.modules['torch'] = None\nimport {module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ConfigError: hexdata.torch needs a library that is not installed" in done.stderr
    assert "pip install 'hexdata[torch]'" in done.stderr


def test_each_named_extra_exists() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"browse", "report", "live", "png", "torch", "ray", "s3", "gcs", "azure"} <= extras.keys()
    base = " ".join(PROJECT["dependencies"])
    assert not [
        name
        for name in ("matplotlib", "watchfiles", "jinja2", "torch", "ray", "starlette", "uvicorn")
        if name in base
    ]


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), installed_by("live", "live loading"):
        _ = 1 / 0
    message = r"live loading needs a library .*No module named 'nothing_like_it'.*hexdata\[live\]"
    with pytest.raises(ConfigError, match=message), installed_by("live", "live loading"):
        import nothing_like_it  # noqa: F401
