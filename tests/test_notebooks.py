"""Runs the notebooks from the first cell to the last, and checks their committed outputs.

nbmake runs each of them as ``pytest --nbmake`` does, but in a temporary folder and a separate process. The
clone is unchanged, no flag is needed, and warnings of Jupyter do not fail the test.
"""

from __future__ import annotations

import dataclasses
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
DEMO = "DemoOptions(games=200)"
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


def test_there_are_notebooks_and_the_readme_names_each():
    named = re.findall(r"\]\(([^)]+\.ipynb)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert named == [notebook.name for notebook in NOTEBOOKS]
    assert len(named) == 4


# They run


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the folder, in which a notebook finds the demo of another one, as in a clone.

    To save time, the demo has fewer games, unless ``HEXDATA_TESTS=full``.
    """
    folder = tmp_path_factory.mktemp("notebooks") / "notebooks"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("hexdata-demo", ".*", "__pycache__"))
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    changed = 0
    for notebook in folder.glob("*.ipynb"):
        text = notebook.read_text(encoding="utf-8")
        changed += DEMO in text
        notebook.write_text(text if FULL else text.replace(DEMO, "DemoOptions(games=100)"), encoding="utf-8")
    assert changed == 3
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
    if "torch" in text or "import fingerprinting" in text:  # which imports it
        pytest.importorskip("torch")
    done = run_notebook(scratch / notebook.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cell_that_fails_fails_the_notebook(scratch):
    pytest.importorskip("nbmake")
    cells = [
        {"id": f"cell-{i}", "cell_type": "code", "metadata": {}, "source": source, "outputs": []}
        for i, source in enumerate(["kept = 1", "assert kept == 2, 'the second cell'"])
    ]
    for cell in cells:
        cell["execution_count"] = None
    broken = scratch / "broken.ipynb"
    head = {"metadata": read(NOTEBOOKS[0])["metadata"], "nbformat": 4, "nbformat_minor": 5}
    broken.write_text(json.dumps(head | {"cells": cells}), encoding="utf-8")
    done = run_notebook(broken)
    assert done.returncode == 1
    assert "the second cell" in done.stdout


# What is committed


def complaints(notebook: Path) -> list[str]:
    """Return the faults of a notebook's committed outputs."""
    found = []
    cells = code_cells(notebook)
    if [cell["execution_count"] for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("the cells were not run from top to bottom")
    for cell in cells:
        if set(cell["metadata"]) - {"tags"}:
            found.append(f"{cell['id']}: metadata of a run: {', '.join(cell['metadata'])}")
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                found.append(f"{cell['id']}: an error")
            if output.get("name") == "stderr":
                found.append(f"{cell['id']}: text on standard error")
    if not any(cell["outputs"] for cell in cells):
        found.append("no cell has outputs")
    return found


@by_name
def test_the_committed_outputs_are_whole_and_clean(notebook):
    assert complaints(notebook) == []


def test_an_unclean_notebook_is_found(tmp_path):
    content = read(NOTEBOOKS[0])
    first = next(cell for cell in content["cells"] if cell["cell_type"] == "code")
    first["execution_count"] = 7
    first["metadata"] = {"execution": {"iopub.status.busy": "2025-01-01T00:00:00Z"}}
    first["outputs"] = [{"output_type": "error"}, {"output_type": "stream", "name": "stderr", "text": "oh"}]
    unclean = tmp_path / "unclean.ipynb"
    unclean.write_text(json.dumps(content), encoding="utf-8")
    assert [found.partition(": ")[2] or found for found in complaints(unclean)] == [
        "the cells were not run from top to bottom",
        "metadata of a run: execution",
        "an error",
        "text on standard error",
    ]


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


def test_paths_of_machines_are_recognised():
    found = ["File /tmp/x/a.py", "'/home/me/store'", "C:\\Users\\me", "(/root/hexdata)"]
    passed = ["hexdata-demo/store", "a/tmp/b", "https://x.org/home/", "1/2"]
    assert [text for text in found + passed if MACHINE.search(text)] == found


# The experiment: its code does what the notebook says of it, and the figures are those of the code.


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    pytest.importorskip("torch")
    spec = util.spec_from_file_location("fingerprinting", FOLDER / "fingerprinting.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules["fingerprinting"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(experiment: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = experiment.make_store(tmp_path_factory.mktemp("experiment"), experiment.SMALL)
    return experiment.read_data(store, experiment.SMALL)


def figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "fingerprinting.json").read_text(encoding="utf-8"))
    return found


def test_the_split_by_file_leaks_and_the_split_by_game_does_not(data):
    trained = set(data.game[data.train])
    by_file, by_game = data.sets["by file"], data.sets["by game"]
    assert set(data.game[by_file]) <= trained
    assert not set(data.game[by_game]) & trained
    assert not set(by_file) & set(data.train)
    assert set(data.sets["seen"]) <= set(data.train)


def test_a_repeated_game_has_one_name(data):
    """Two games have equal boards from the first to the last only if they are the same game."""
    boards: dict[int, list[bytes]] = {}
    for place, game in enumerate(data.game.tolist()):
        boards.setdefault(game, []).append(data.board[place].numpy().tobytes())
    final = [max(group, key=lambda board: board.count(1)) for group in boards.values()]
    assert len(set(final)) == len(final)
    assert sum(len(group) > len(set(group)) for group in boards.values()) > 5


@pytest.mark.parametrize("order", ["ordered", "buffer", "global"])
def test_every_order_sees_every_position_once_a_pass(order, data, experiment):
    settings = experiment.SMALL
    steps = list(experiment.batches(order, data.train, 1, settings))
    assert len(steps) == settings.steps
    passes = np.concatenate(steps).reshape(settings.passes, -1)
    for one in passes:
        assert sorted(one) == data.train.tolist()
    again = np.concatenate(list(experiment.batches(order, data.train, 1, settings)))
    assert (again == passes.ravel()).all()
    other = np.concatenate(list(experiment.batches(order, data.train, 2, settings)))
    assert (other == passes.ravel()).all() == (order == "ordered")


def test_the_buffer_moves_nothing_further_ahead_than_it_is_long(data, experiment):
    places = experiment.order_of("buffer", data.train, 0, 1, buffer=100)
    was = np.searchsorted(data.train, places)
    ahead = was - np.arange(len(was))
    assert 50 < ahead.max() <= 2 * 100  # it takes two in for one that it gives, while it fills
    assert np.abs(np.diff(was)).mean() < len(was) / 4  # and it is no global shuffle


def test_the_loss_is_the_mean_cross_entropy(data, experiment):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    network, places = experiment.Network(experiment.SMALL), data.sets["seen"][:7]
    with torch.no_grad():
        chance = 1 / (1 + np.exp(-network(data.board[places])[1].numpy().astype(float)))
    value = data.value[places].numpy()
    plain = -(value * np.log(chance) + (1 - value) * np.log(1 - chance)).mean()
    assert abs(experiment.value_loss(network, data, places) - plain) < 1e-6


def test_the_committed_figures_are_of_the_code_as_it_is(experiment):
    for name, settings in experiment.PARTS.items():
        part = figures()["parts"][name]
        assert part["settings"] == dataclasses.asdict(settings)
        assert part["data"]["positions"] * settings.passes == settings.steps * settings.batch
        expected = {(order, seed) for order in experiment.ORDERS for seed in range(settings.seeds)}
        assert {(run["order"], run["seed"]) for run in part["runs"]} == expected
        assert len(part["runs"]) == len(expected)
        for run in part["runs"]:
            assert run["steps"][-1] == settings.steps
            lengths = {name: len(losses) for name, losses in run["loss"].items()}
            assert lengths == dict.fromkeys(("running", *experiment.SETS), settings.measurements)


def test_the_guide_quotes_the_committed_figures():
    """Each row of the table in docs/notebooks.md is the mean of the final losses of the committed runs."""
    text = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    row = r"^\| (often|once) \| (ordered|buffer|global) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert len(rows) == 6
    for part, order, *quoted in rows:
        runs = [run for run in figures()["parts"][part]["runs"] if run["order"] == order]
        for name, number in zip(("running", "by file", "by game"), quoted, strict=True):
            assert float(number) == pytest.approx(np.mean([run["loss"][name][-1] for run in runs]), abs=6e-4)


def test_what_is_said_of_the_figures_holds():
    """The findings of the notebook and the guide follow from the committed curves."""
    parts = figures()["parts"]

    def curves(part, order, name):  # (seeds, measurements)
        return np.array([run["loss"][name] for run in parts[part]["runs"] if run["order"] == order])

    ends = {
        (part, order, name): curves(part, order, name)[:, -1]
        for part in ("often", "once")
        for order in ("ordered", "buffer", "global")
        for name in ("by file", "by game")
    }
    often = [ends["often", order, "by game"] for order in ("ordered", "buffer", "global")]
    assert (often[0] < often[1]).all()
    assert (often[1] < often[2]).all()
    leaky = [ends["often", order, "by file"] for order in ("ordered", "buffer", "global")]
    assert (leaky[0] > leaky[1]).all()
    assert (leaky[1] > leaky[2]).all()
    stopped = [
        curves("often", order, "by game").min(axis=1).mean() for order in ("ordered", "buffer", "global")
    ]
    assert np.round(stopped, 3).tolist() == [0.659, 0.667, 0.662]
    once = [ends["once", order, "by game"] for order in ("ordered", "buffer", "global")]
    assert np.round([min(once[0] - once[1]), max(once[0] - once[1])], 3).tolist() == [0.021, 0.026]
    assert sum(once[1] > once[2]) == 4
    slow = [end.mean() for end in once]
    for part in ("once, 0.003", "once, 0.01"):
        faster = [curves(part, order, "by game")[:, -1].mean() for order in ("ordered", "buffer", "global")]
        assert max(faster) < min(slow)
        assert max(faster) - min(faster) < 0.0075
    for part in parts:
        logs = {order: curves(part, order, "running") for order in ("ordered", "buffer", "global")}
        first = len(logs["global"][0]) // parts[part]["settings"]["passes"]
        assert min(log[:, :first].min() for log in logs.values()) > 0.5
        highest = logs["ordered"] > np.maximum(logs["buffer"], logs["global"])
        assert highest.all() if part in ("often", "once") else highest.mean() > 0.9
