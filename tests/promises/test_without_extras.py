"""A plain installation, and one without each library of an extra: what works, and what names the extra."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from hexdata.cli import app
from hexdata.errors import ConfigError
from hexdata.extras import installed_by
from tests.kit.extras import EXTRA_OF, EXTRAS, REQUIRED
from tests.promises.absent import FAULT

pytestmark = pytest.mark.slow
ABSENT = Path(__file__).with_name("absent.py")
COMMANDS = [command.name for command in typer.main.get_command(app).commands.values()]  # type: ignore[attr-defined]

ASK_FOR_TORCH = """
try:
    import hexdata.torch
except ModuleNotFoundError as error:  # as pytest.importorskip asks
    assert error.name == "torch"
    raise
"""
USES: dict[str, list[str] | str] = {
    "adlfs": ["info", "az://bucket/store"],
    "aiobotocore": ["info", "s3://bucket/store"],
    "gcsfs": ["info", "gs://bucket/store"],
    "jinja2": ["report", "demo/store"],
    "prometheus_client": ["live", "games", "--seconds", "0.1", "--prometheus", "0"],
    "ray": ["shuffle", "demo/store", "--engine", "ray"],
    "resvg_py": ["show", "demo/store", "0", "--png", "a.png"],
    "s3fs": "from hexdata import Loader; Loader('s3://bucket/store')",
    "starlette": ["browse", "demo/store", "--no-open"],
    "torch": ASK_FOR_TORCH,
    "uvicorn": "from hexdata.browse import browse_store; browse_store('demo/store')",
}
"""One use of each library: a command, or code."""

PLAIN: dict[str, list[str]] = {
    "demo": ["demo", "other", "--games", "20"],
    "run": ["run", "run.toml"],
    "convert": ["convert", "demo/legacy", "converted"],
    "info": ["info", "demo/store"],
    "shuffle": ["shuffle", "converted"],
    "export": ["export", "converted"],
    "verify": ["verify", "demo/store"],
    "sql": ["sql", "demo/store", "SELECT 1"],
    "show": ["show", "demo/store", "0"],
    "load": ["load", "demo/store"],
    "live": ["live", "games", "--seconds", "0.1"],
}
"""One use of each command that needs no extra."""
NEEDS: dict[str, list[str]] = {
    "browse": ["browse", "demo/store", "--no-open"],
    "report": ["report", "demo/store"],
}
"""One use of each command that needs the extra of its name."""
RUN_CONFIG = """
store = "ran"
[convert]
inputs = ["demo/legacy"]
[load]
"""


def use(
    folder: Path,
    commands: Sequence[list[str] | str],
    *,
    missing: Sequence[str] = (),
    broken: Sequence[str] = (),
    imports: bool = False,
) -> Any:
    """Return what ``absent.py`` prints."""
    arguments = [json.dumps(each) for each in (list(missing), list(broken), list(commands), imports)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ABSENT), *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a demo, made without any extra, and the outcome of ``--help`` and of each command."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "games").mkdir()
    (folder / "run.toml").write_text(RUN_CONFIG, encoding="utf-8")
    helps = [[name, "--help"] for name in COMMANDS]
    commands = [["demo", "demo", "--games", "20"], *helps, *PLAIN.values(), *NEEDS.values()]
    return folder, use(folder, commands, missing=sorted(EXTRA_OF), imports=True)


def names_extra(message: str, extra: str) -> bool:
    command = f"python -m pip install '.[{extra}]'"
    return "needs a library that is not installed" in message and command in message


def check_imports(imports: dict[str, Any], missing: Sequence[str]) -> None:
    """Only modules that need a missing library fail, as an ``ImportError`` that names its extra."""
    assert len(imports) > 200
    extras = {EXTRA_OF[module] for module in missing}
    for what, failed in imports.items():
        if failed is not None:
            kinds, message = failed
            assert what.startswith(("module ", "package hexdata.torch")), (what, failed)
            assert {"ConfigError", "ModuleNotFoundError"} <= {*kinds}, (what, failed)
            assert any(names_extra(message, extra) for extra in extras), (what, failed)


def test_the_tables_name_every_library_and_command() -> None:
    assert sorted(USES) == sorted(EXTRA_OF)
    assert sorted([*PLAIN, *NEEDS]) == sorted(COMMANDS)
    assert not REQUIRED & EXTRA_OF.keys()


def test_a_plain_installation_can_be_imported_and_explored(plain: tuple[Path, Any]) -> None:
    check_imports(plain[1]["imports"], sorted(EXTRA_OF))


def test_the_commands_of_a_plain_installation(plain: tuple[Path, Any]) -> None:
    outcomes = iter(plain[1]["commands"])
    status, errors = next(outcomes)
    assert status == 0
    assert "no report is written" in errors
    for name, (status, errors) in zip((*COMMANDS, *PLAIN), outcomes, strict=False):
        assert status == 0, (name, errors)
    for extra, (status, errors) in zip(NEEDS, outcomes, strict=True):
        assert status == 2, errors
        assert names_extra(errors, extra), errors
        assert "Traceback" not in errors


@pytest.mark.parametrize("number", range(max(map(len, EXTRAS.values()))))
def test_without_one_library_of_each_extra(number: int, plain: tuple[Path, Any]) -> None:
    """PyTorch, which takes seconds to import, is always missing as well."""
    libraries = [modules[number] for modules in EXTRAS.values() if number < len(modules)]
    uses = [USES[library] for library in libraries]
    outcomes = use(plain[0], uses, missing=sorted({*libraries, "torch"}))["commands"]
    for library, (status, errors) in zip(libraries, outcomes, strict=True):
        assert status != 0
        assert names_extra(errors, EXTRA_OF[library]), errors


def test_a_fault_of_an_installed_library_is_shown_as_it_is(plain: tuple[Path, Any]) -> None:
    libraries = sorted(USES)
    outcomes = use(plain[0], [USES[library] for library in libraries], broken=libraries)["commands"]
    for library, (status, errors) in zip(libraries, outcomes, strict=True):
        assert status != 0
        assert f"ImportError: {FAULT}" in errors, (library, errors)
        assert "pip install" not in errors


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), installed_by("live", "live loading"):
        _ = 1 / 0
    with pytest.raises(ModuleNotFoundError, match="nothing_like_it") as raised, installed_by("live", "live"):
        import hexdata.nothing_like_it  # noqa: F401
    assert not isinstance(raised.value, ConfigError)
