"""The scripts of ``docs/howto``, each in a process that has only the packages that its page names."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.test_documents import Block, blocks_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs/howto" / name for name in ("frameworks.md", "webdataset.md")]
"""Pages of which each Python block is a script."""
SCRIPTS = [(page, block) for page in PAGES for block in blocks_of(page) if block.language == "python"]
RUN_WITH_ONLY = ROOT / "tests/kit/run_with_only.py"
TIMEOUT = 300
"""Seconds after which a script is considered to hang."""


def libraries_of(script: Block) -> list[str]:
    """Return the top-level names of the libraries that a script imports, itself or by a module of hexdata."""
    nodes = list(ast.walk(ast.parse(script.text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += ["torch" for name in names if name in ("hexdata.torch", "hexdata.webdataset")]
    return sorted({name.partition(".")[0] for name in names} - {"hexdata"})


def packages_for(page: Path, script: Block) -> list[str]:
    """Return the packages that a page names in its introduction, and above a script in the same section."""
    above = "\n".join(page.read_text(encoding="utf-8").splitlines()[: script.line - 1])
    introduction, *sections = above.split("\n## ")
    named = re.findall(r"pip install ([^`\n]+)", "\n".join([introduction, *sections[-1:]]))
    words = " ".join(named).replace("'", "").split()
    return [re.sub(r"^\.", "hexdata", word) for word in words if word != "."]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "hexdata", "demo", "--games", "64"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def run_script(text: str, packages: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(RUN_WITH_ONLY), "script.py", *packages],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "script"), SCRIPTS, ids=lambda each: each.stem if isinstance(each, Path) else str(each.line)
)
def test_the_script_runs(page: Path, script: Block, demo: Path, tmp_path: Path) -> None:
    if missing := [name for name in libraries_of(script) if not find_spec(name)]:
        pytest.skip(f"needs {', '.join(missing)}")
    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    done = run_script(script.text, packages_for(page, script), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_each_section_names_what_its_script_imports() -> None:
    named = {script.line: packages_for(page, script) for page, script in SCRIPTS if page.stem == "frameworks"}
    assert all(named.values())
    assert packages_for(*SCRIPTS[-1]) == ["hexdata[torch]", "torchdata"]
