"""Runs the notebooks from the first cell to the last, and checks their committed outputs.

nbmake runs each of them as ``pytest --nbmake`` does, but in a temporary folder and a separate process. The
clone is unchanged, no flag is needed, and warnings of Jupyter do not fail the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.pairs import FULL

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FEWER = {"DemoOptions(games=200)": "DemoOptions(games=100)", "stop_after=60": "stop_after=30"}
"""To save time, the demo has fewer games, so that a training that is resumed stops earlier too."""
LONGEST_CELL = 600
"""Seconds after which a cell is considered to hang."""
MACHINE = re.compile(r"(?<![\w.])/(?:home|mnt|opt|private|root|srv|tmp|Users|usr|var|work)/|[A-Z]:\\Users")
"""The beginning of a path that other machines do not have."""

by_name = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def read(notebook: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    return content


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in read(notebook)["cells"] if cell["cell_type"] == "code"]


# They run


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the folder, in which a notebook finds the demo of another one, as in a clone."""
    folder = tmp_path_factory.mktemp("notebooks") / "notebooks"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("hexdata-demo", ".*", "__pycache__"))
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    changed = 0
    for notebook in folder.glob("*.ipynb"):
        text = notebook.read_text(encoding="utf-8")
        for whole, less in FEWER.items():
            changed += text.count(whole)
            text = text if FULL else text.replace(whole, less)
        notebook.write_text(text, encoding="utf-8")
    assert changed == 4
    return folder


def run_notebook(notebook: Path) -> subprocess.CompletedProcess[str]:
    """Run a notebook in its folder; files that Jupyter writes go to a subfolder."""
    places = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")
    own = {place: str(notebook.parent / ".jupyter" / place.lower()) for place in places}
    command = [sys.executable, "-m", "pytest", "-q", "--nbmake", f"--nbmake-timeout={LONGEST_CELL}"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", notebook.name],
        cwd=notebook.parent,
        env=os.environ | own | {"PYTEST_ADDOPTS": "", "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@by_name
def test_a_notebook_runs(notebook, scratch):
    pytest.importorskip("nbmake")
    text = notebook.read_text(encoding="utf-8")
    if "torch" in text or "import order_of_data" in text:  # which imports it
        pytest.importorskip("torch")
    done = run_notebook(scratch / notebook.name)
    assert done.returncode == 0, done.stdout + done.stderr


# What is committed


@by_name
def test_the_committed_outputs_are_whole_and_clean(notebook):
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(set(cell["metadata"]) <= {"tags"} for cell in cells), "metadata of a run"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert "error" not in {output["output_type"] for output in outputs}
    assert "stderr" not in {output.get("name") for output in outputs}


def texts(part: Any) -> list[str]:
    """Return every text in a notebook's JSON except pictures."""
    if isinstance(part, dict):
        return [text for key, value in part.items() if key != "image/png" for text in texts(value)]
    if isinstance(part, list):
        return [text for value in part for text in texts(value)]
    return [part] if isinstance(part, str) else []


@by_name
def test_no_path_of_a_machine_is_committed(notebook):
    assert [text for text in texts(read(notebook)) if MACHINE.search(text)] == []


# The experiment: its arms are what it says, and the pages quote its figures.


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    pytest.importorskip("torch")
    spec = util.spec_from_file_location("order_of_data", FOLDER / "order_of_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules["order_of_data"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(experiment, tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("experiment")
    return experiment.read_data(experiment.make_store([], folder, experiment.SIZES["tiny"]), "cpu")


def test_each_arm_delivers_the_training_positions_the_stated_number_of_times(experiment, tiny):
    size, train = experiment.SIZES["tiny"], tiny.split["train"]
    passes = {}
    for arm in experiment.ARMS:
        rows = experiment.rows_of(arm, tiny, 0, size, 3, False).ravel()
        assert len(rows) == 3 * len(train) // size.batch * size.batch
        assert set(rows.tolist()) <= set(train.tolist())
        passes[arm] = np.unique(rows, return_counts=True)[1]
        turned = experiment.rows_of(arm, tiny, 0, size, 3, True).ravel()
        assert (turned % len(tiny.game) == rows).all()
        assert set((turned // len(tiny.game)).tolist()) == {0, 1, 2, 3}
    for arm in ("global", "buffer", "games"):  # but for the last batch, which is not full
        assert len(passes[arm]) == len(train)
        assert passes[arm].max() == 3
        assert (passes[arm] < 3).sum() < size.batch
    orders = {arm: next(experiment.epochs_of(arm, tiny, 0, size)).tolist() for arm in experiment.ARMS}
    assert orders["games"] == sorted(orders["global"]) == sorted(orders["buffer"]) == train.tolist()
    assert orders["global"] != orders["buffer"] != orders["games"]
    for arm in ("pool", "pool of 500"):  # each position at most once in a pass
        assert len(set(orders[arm])) == len(orders[arm]) < len(train)


def test_the_pool_drops_the_rest_of_a_file_when_it_is_full(experiment):
    """Five files fit into a pool of 51; later ones come below 39, two at a time, the second in part."""
    shards = [np.arange(10 * number, 10 * number + 10) for number in range(8)]
    delivered = experiment.pool_order(shards, np.random.default_rng(0))
    assert len(set(delivered.tolist())) == len(delivered)
    kept = np.bincount(delivered // 10, minlength=8)
    assert kept.tolist() == [10, 10, 10, 10, 10, 1, 10, 3]


def test_no_game_of_test_is_trained_on_and_all_runs_see_the_same_test(
    experiment, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(experiment, "RATES", experiment.RATES[:1])
    games = {name: set(tiny.game[chosen].tolist()) for name, chosen in tiny.split.items()}
    assert (
        games["train"] & games["test"]
        == games["train"] & games["val"]
        == games["val"] & games["test"]
        == set()
    )
    assert len(tiny.game) == sum(map(len, tiny.split.values()))
    results, settings = tmp_path / "results.jsonl", experiment.SETTINGS[:1]
    first, *runs = experiment.run(results, [], experiment.SIZES["tiny"], settings)
    assert len(runs) == len(experiment.ARMS) * len(experiment.RATES) * experiment.SIZES["tiny"].seeds
    assert {np.shape(run["test"]) for run in runs} == {np.shape(first["counts"])} == {(2, len(games["test"]))}
    assert len({run["steps"] for run in runs}) == 1
    assert np.isfinite([run["val"] for run in runs]).all()
    before = results.read_bytes()
    experiment.run(results, [], experiment.SIZES["tiny"], settings)  # nothing is left to do
    assert results.read_bytes() == before


# The figures of the full run.

QUOTED = re.compile(r"(\u2212?\d\.\d{3}) \((\u2212?\d\.\d{3})\s+to\s+(\u2212?\d\.\d{3})\)")
"""A difference with its interval, with the minus sign of prose."""


@pytest.mark.parametrize(
    "page", ["README.md", "docs/notebooks.md", "hexdata/report/templates/report.html", "notebooks"]
)
def test_the_pages_quote_the_committed_figures(page):
    summary = json.loads((FOLDER / "order_of_data.json").read_text(encoding="utf-8"))
    heads = [difference[head] for difference in summary["differences"] for head in ("policy", "value")]
    known = {tuple(f"{head[name]:.3f}" for name in ("mean", "low", "high")) for head in heads}
    if page == "notebooks":
        cells = read(FOLDER / "04-order-of-data.ipynb")["cells"]
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    else:
        text = (ROOT / page).read_text(encoding="utf-8")
    quoted = QUOTED.findall(text.replace("\n", " "))
    assert len(quoted) >= 2
    assert {tuple(number.replace("\u2212", "-") for number in numbers) for numbers in quoted} <= known
