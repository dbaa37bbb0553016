"""The scripts of the documents for training frameworks, alone and on two ranks.

Alone, each runs in a process that has only the packages that its page names.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

from hexdata import Loader
from hexdata.loader import combine_digests
from tests.test_documents import Block, blocks_of

ROOT = Path(__file__).parents[2]
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


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
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
def test_the_script_runs(page: Path, script: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if missing := [name for name in libraries_of(script) if not find_spec(name)]:
        pytest.skip(f"needs {', '.join(missing)}")
    demo = request.getfixturevalue("demo")  # made only if a script runs
    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    provided = packages_distributions()  # tensorflow-cpu also provides tensorflow
    packages = [name for each in packages_for(page, script) for name in provided.get(each, [each])]
    (tmp_path / "script.py").write_text(script.text, encoding="utf-8")
    done = run_python(tmp_path, str(RUN_WITH_ONLY), "script.py", *packages)
    assert done.returncode == 0, done.stderr[-3000:]
    if "grain" in packages:  # shows what its iterators raise when they end late
        assert "Traceback" not in done.stderr


def test_each_section_names_what_its_script_imports() -> None:
    named = {script.line: packages_for(page, script) for page, script in SCRIPTS if page.stem == "frameworks"}
    assert all(named.values())
    assert packages_for(*SCRIPTS[-1]) == ["hexdata[torch]", "torchdata"]


RANKED = {"lightning": "pytorch_lightning", "accelerate": "accelerate", "ddp": "torch"}
"""Frameworks whose scripts run on ranks, with the package of each."""


@pytest.fixture(scope="module")
def ranked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each framework delivers on each of two ranks, from ``two_ranks.py``."""
    pytest.importorskip("torch")
    folder = shutil.copytree(request.getfixturevalue("demo"), tmp_path_factory.mktemp("ranks") / "run")
    blocks = [*(script for _, script in SCRIPTS), *blocks_of(ROOT / "docs/torch.md")]
    for name, sign in zip(RANKED, ("lightning.Trainer", "Accelerator(", "DistributedData"), strict=True):
        text = next(block.text for block in blocks if sign in block.text)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    chosen = [f"{name}={package}" for name, package in RANKED.items() if find_spec(package)]
    done = run_python(folder, str(Path(__file__).with_name("two_ranks.py")), *chosen)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("framework", RANKED)
def test_two_ranks_deliver_every_position_once_and_resume(framework: str, ranked: Path) -> None:
    pytest.importorskip(RANKED[framework])
    found = [json.loads((ranked / f"{framework}.{rank}.json").read_text()) for rank in range(2)]
    alone = Loader(ranked / "hexdata-demo/store", batch_size=256, fields=("position_id",))
    for epoch in range(2):
        ids = sorted(position for batch in alone for position in batch["position_id"].tolist())
        if framework == "ddp":
            assert combine_digests(rank[epoch] for rank in found) == alone.epoch_digest
        else:  # the positions of the demo fill all batches of both ranks
            half = len(ids) // 2
            own = [position for rank in found for position in rank[epoch * half : (epoch + 1) * half]]
            assert sorted(own) == ids
