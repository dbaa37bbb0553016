"""The workflows, the issue templates and the other files of a release agree with the package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import hexdata

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="these tests need a checkout")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = {
    p.stem: p.read_text(encoding="utf-8") for p in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
JOBS = {
    (name, job): facts for name, text in TEXTS.items() for job, facts in yaml.safe_load(text)["jobs"].items()
}
URL, REF = "https://example.org/owner/hexdata", "v1.2.3"


def test_each_step_is_pinned_exists_and_ends_with_its_status() -> None:
    """The default shell ignores the status of a command before a pipe. Scripts have no texts of others."""
    for text in TEXTS.values():
        for line in text.splitlines():
            if "uses:" in line:
                assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line
    for name, facts in JOBS.items():
        for step in (step for step in facts["steps"] if "run" in step):
            for extras in re.findall(r"\.\[([\w,-]+)\]", step["run"]):
                assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys(), name
            for path in re.findall(r"(?:^|[\s\"])((?:tests|\.ci)/[\w./-]+)", step["run"]):
                assert (ROOT / path).exists(), f"{name}: {path}"
            assert " | " not in step["run"] or step.get("shell") == "bash", name
            assert {*re.findall(r"\$\{\{ (.+?) \}\}", step["run"])} <= {"matrix.target"}, name


def test_the_tests_run_with_each_supported_python_and_the_commands_of_the_readme() -> None:
    """In the workflow, and in ``.ci/run``, which prints the commands with a function of its own."""
    job = JOBS["test", "test"]
    supported = re.findall(r"Python :: (3\.\d+)\n", "\n".join(PROJECT["classifiers"]) + "\n")
    assert job["strategy"]["matrix"]["python"] == supported
    assert PROJECT["requires-python"] == f">={supported[0]}"
    systems = [system.partition("-")[0] for system in job["strategy"]["matrix"]["system"]]
    assert systems == ["ubuntu", "macos", "windows"]
    program = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    function = re.search(r"^readme_commands\(\) \{.*?^\}", program, re.MULTILINE | re.DOTALL)
    assert function
    script = ["bash", "-c", f"{function[0]}\nreadme_commands"]
    done = subprocess.run(script, cwd=ROOT, check=True, capture_output=True, text=True)
    runs = [step["run"].removesuffix(" -ra") for step in job["steps"] if "run" in step]
    assert runs == done.stdout.splitlines()
    assert len(runs) == 2


def test_each_proof_and_each_fuzzed_parser_exists() -> None:
    for command in JOBS["proofs", "run"]["strategy"]["matrix"]["command"]:
        assert (ROOT / "tests" / "simulation" / command.split()[0]).is_file(), command
    program = (ROOT / "tests" / "fuzz" / "fuzz_parsers.py").read_text(encoding="utf-8")
    listed = re.search(r"^TARGETS.*? = \{\n(.*?)^\}", program, re.MULTILINE | re.DOTALL)
    assert listed
    targets = JOBS["fuzz", "parsers"]["strategy"]["matrix"]["target"]
    assert sorted(targets) == sorted(re.findall(r'^    "([\w-]+)":', listed[1], re.MULTILINE))


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["version"] == citation["version"] == hexdata.__version__
    assert (citation["license"], citation["cff-version"]) == (PROJECT["license"], "1.2.0")


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
    text = metadata["readme"].get("text") or (tmp_path / "README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert f"{URL}/raw/{REF}/docs/images/shuffle.png" in links
    for link in links:
        assert link.startswith(("https://", "#")), link
        path = re.sub(rf"{re.escape(URL)}/(blob|raw)/{REF}/|#.*", "", link)
        assert not link.startswith(URL) or (ROOT / path).exists(), link
    changed = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    subprocess.run(program, check=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == changed
