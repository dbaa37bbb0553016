"""The functions that work without the libraries of the extras, and the messages of those that do not."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

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
import sys
from hexdata.cli import main

for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of hexdata in a process in which no library of an extra can be imported."""
    command = [sys.executable, "-c", RUN, ",".join(MISSING), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("light") / "store"
    done = run("demo", str(path), "--games", "20")
    assert done.returncode == 0, done.stderr
    assert "no report is written: the report needs a library" in " ".join(done.stderr.split())
    return path / "store"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["verify", "load", "show", "sql"])
def test_the_core_needs_no_extra(store: Path, command: str) -> None:
    arguments = {"show": ("0",), "sql": ("SELECT 1",), "load": ("--mode", "exact")}.get(command, ())
    done = run(command, str(store), *arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "purpose", "extra"),
    [
        (("report",), "the report", "report"),
        (("live",), "live loading", "live"),
        (("browse", "--no-open"), "the page of a store", "browse"),
        (("show", "0", "--png", "a.png"), "a drawing as PNG", "png"),
        (("verify", "--engine", "ray"), "an engine of Ray", "ray"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(
    store: Path, command: tuple[str, ...], purpose: str, extra: str
) -> None:
    done = run(command[0], str(store), *command[1:])
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert f"{purpose} needs a library that is not installed" in message
    assert f"pip install 'hexdata[{extra}]'" in message
    assert "Traceback" not in done.stderr


def test_each_named_extra_exists() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"browse", "report", "live", "png", "ray", "s3", "gcs", "azure"} <= extras.keys()
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
