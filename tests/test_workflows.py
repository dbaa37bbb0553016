"""The workflows, the issue templates and the other files of a release agree with the package."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import hexdata

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="these tests need a checkout")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
URL, REF = "https://example.org/owner/hexdata", "v1.2.3"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each step of the workflows, with a name for messages."""
    for name, path in WORKFLOWS.items():
        for job, facts in read(path)["jobs"].items():
            yield from ((f"{name}: {job}", step) for step in facts["steps"])


RUNS = [(name, step) for name, step in steps() if "run" in step]


def test_each_action_has_a_fixed_commit_and_names_its_version() -> None:
    for path in WORKFLOWS.values():
        for line in path.read_text(encoding="utf-8").splitlines():
            if "uses:" in line:
                assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), (
                    f"{path.name}: {line}"
                )


def test_the_tests_run_with_each_supported_python() -> None:
    supported = re.findall(r"Python :: (3\.\d+)\n", "\n".join(PROJECT["classifiers"]) + "\n")
    matrix = read(WORKFLOWS["test"])["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == supported
    assert PROJECT["requires-python"] == f">={supported[0]}"
    assert [system.partition("-")[0] for system in matrix["system"]] == ["ubuntu", "macos", "windows"]


def test_the_tests_run_with_the_commands_of_the_readme() -> None:
    """In the workflow, and in ``.ci/run``, which prints the commands with a function of its own."""
    program = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    function = re.search(r"^readme_commands\(\) \{.*?^\}", program, re.MULTILINE | re.DOTALL)
    assert function
    script = f"{function[0]}\nreadme_commands"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    commands = done.stdout.splitlines()
    assert len(commands) == 2
    runs = [step["run"] for step in read(WORKFLOWS["test"])["jobs"]["test"]["steps"] if "run" in step]
    assert [run.removesuffix(" -ra") for run in runs] == commands


def test_a_step_names_files_and_extras_that_exist() -> None:
    for name, step in RUNS:
        for extras in re.findall(r"\.\[([\w,-]+)\]", step["run"]):
            assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys(), name
        for path in re.findall(r"(?:^|[\s\"])((?:tests|\.ci)/[\w./-]+)", step["run"]):
            assert (ROOT / path).exists(), f"{name}: {path}"


def test_a_step_ends_with_the_status_of_its_commands() -> None:
    """The default shell ignores the status of a command before a pipe."""
    for name, step in RUNS:
        assert " | " not in step["run"] or step.get("shell") == "bash", name


def test_no_text_of_others_is_part_of_a_script() -> None:
    for name, step in RUNS:
        assert {*re.findall(r"\$\{\{ (.+?) \}\}", step["run"])} <= {"github.run_number", "matrix.target"}, (
            name
        )


def test_each_program_of_the_long_runs_exists() -> None:
    for command in read(WORKFLOWS["long_runs"])["jobs"]["run"]["strategy"]["matrix"]["command"]:
        assert (ROOT / "tests" / "simulation" / command.split()[0]).is_file(), command


def test_each_parser_is_fuzzed() -> None:
    program = (ROOT / "tests" / "fuzz" / "fuzz_parsers.py").read_text(encoding="utf-8")
    targets = read(WORKFLOWS["fuzz"])["jobs"]["parsers"]["strategy"]["matrix"]["target"]
    listed = re.search(r"^TARGETS.*? = \{\n(.*?)^\}", program, re.MULTILINE | re.DOTALL)
    assert listed
    assert sorted(targets) == sorted(re.findall(r'^    "([\w-]+)":', listed[1], re.MULTILINE))


@pytest.mark.parametrize("template", ["bug", "format"])
def test_an_issue_template_has_fields(template: str) -> None:
    facts = read(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{template}.yml")
    assert facts["name"]
    assert facts["description"]
    assert all(field["attributes"]["label"] for field in facts["body"] if field["type"] != "markdown")


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == hexdata.__version__
    citation = read(ROOT / "CITATION.cff")
    assert (citation["version"], citation["license"]) == (hexdata.__version__, PROJECT["license"])
    assert citation["cff-version"] == "1.2.0"


def test_a_release_has_addresses_and_no_relative_links(tmp_path: Path) -> None:
    """A package index shows the README without the files to which it refers."""
    pytest.importorskip("hatchling", reason="hatchling, which reads the metadata, is not installed")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    program = [sys.executable, str(ROOT / ".ci" / "add_addresses.py"), URL, REF, str(tmp_path)]
    subprocess.run(program, check=True)
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    metadata = json.loads(done.stdout)
    assert metadata["urls"]["Repository"] == URL
    assert metadata["urls"]["Changelog"] == f"{URL}/blob/{REF}/CHANGELOG.md"
    text = (
        metadata["readme"]["text"]
        if "text" in metadata["readme"]
        else (tmp_path / "README.md").read_text("utf-8")
    )
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert f"{URL}/raw/{REF}/docs/images/shuffle.png" in links
    for link in links:
        assert link.startswith(("https://", "#")), link
        path = re.sub(rf"{re.escape(URL)}/(blob|raw)/{REF}/|#.*", "", link)
        assert not link.startswith(URL) or (ROOT / path).exists(), link
    changed = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    subprocess.run(program, check=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == changed


def test_links_in_code_stay() -> None:
    spec = importlib.util.spec_from_file_location("add_addresses", ROOT / ".ci" / "add_addresses.py")
    assert spec
    assert spec.loader
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    text = "[a [b](x)](docs/a.md#b) and [c](#d)\n```python\nf[a](b)\n```\n![e](docs/e.png)\n[g](https://h)\n"
    made = program.absolute_links(text, URL, REF)
    assert "```python\nf[a](b)\n```" in made
    assert f"({URL}/blob/{REF}/docs/a.md#b)" in made
    assert f"![e]({URL}/raw/{REF}/docs/e.png)" in made
    assert "[c](#d)" in made
    assert "[g](https://h)" in made
