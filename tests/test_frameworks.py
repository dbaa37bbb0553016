"""The scripts of ``docs/howto/frameworks.md``, each in a process of its own."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.test_documents import Block, blocks_of

ROOT = Path(__file__).parents[1]
SCRIPTS = [block for block in blocks_of(ROOT / "docs/howto/frameworks.md") if block.language == "python"]
TIMEOUT = 300
"""Seconds after which a script is considered to hang."""


def libraries_of(script: Block) -> list[str]:
    """Return the top-level names of the libraries that a script imports."""
    nodes = list(ast.walk(ast.parse(script.text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return sorted({name.partition(".")[0] for name in names} - {"hexdata"})


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "hexdata", "demo", "--games", "64"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: "-".join(libraries_of(script)))
def test_the_script_runs(script: Block, demo: Path, tmp_path: Path) -> None:
    if missing := [name for name in libraries_of(script) if not find_spec(name)]:
        pytest.skip(f"needs {', '.join(missing)}")
    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    (tmp_path / "script.py").write_text(script.text, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "script.py"],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
