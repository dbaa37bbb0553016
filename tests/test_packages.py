"""The wheel and the sdist: their files, and hexdata installed from the wheel in a fresh environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import hexdata

ROOT = Path(__file__).parents[1]
NAME = f"hexdata-{hexdata.__version__}"
SOURCES = {
    path for path in (ROOT / "hexdata").rglob("*") if path.is_file() and "__pycache__" not in path.parts
}

pytest.importorskip("hatchling", reason="hatchling, which builds the packages, is not installed")
pytest.importorskip("pip", reason="pip, which installs the wheel, is not installed")
pytestmark = pytest.mark.skipif(not (ROOT / "LICENSE").is_file(), reason="these tests need a checkout")


def build(source: Path, folder: Path, *, target: str) -> Path:
    """Build a wheel or sdist of a source tree with the declared backend, which downloads nothing."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (made,) = folder.iterdir()
    return made


def files_of(wheel: Path) -> dict[str, bytes]:
    """Return the content of each file of a wheel, except the list of digests."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), target="wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    archive = build(ROOT, tmp_path_factory.mktemp("sdist"), target="sdist")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / NAME


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a fresh environment with the wheel; other packages are those of this one."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    names = {"base": str(folder), "platbase": str(folder)}
    commands, packages = (Path(sysconfig.get_path(kind, "venv", names)) for kind in ("scripts", "purelib"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder),
        "install",
        "--no-deps",
        "--no-index",
        "-q",
    ]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True, text=True)
    # Its own packages precede those of this file on the path.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return commands


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder without the checkout on its path, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_all_files_of_the_package_and_no_others(wheel: Path) -> None:
    names = {name for name in files_of(wheel) if not name.startswith(f"{NAME}.dist-info/")}
    assert names == {path.relative_to(ROOT).as_posix() for path in SOURCES}
    assert {
        "hexdata/py.typed",
        "hexdata/report/templates/report.html",
        "hexdata/browse/static/index.html",
    } <= names


def test_the_metadata_names_the_command_the_licence_and_the_extras(wheel: Path) -> None:
    files = files_of(wheel)
    assert b"hexdata = hexdata.__main__:run" in files[f"{NAME}.dist-info/entry_points.txt"]
    assert f"{NAME}.dist-info/licenses/LICENSE" in files
    metadata = files[f"{NAME}.dist-info/METADATA"].decode()
    assert f"Version: {hexdata.__version__}\n" in metadata
    assert {f"Provides-Extra: {extra}" for extra in ("report", "live", "browse", "torch")} <= set(
        metadata.split("\n")
    )


def test_the_sdist_has_the_tests_and_documents_and_gives_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    for name in (
        "tests/conftest.py",
        "tests/store/frozen/README.md",
        "docs/conf.py",
        "CHANGELOG.md",
        "LICENSE",
    ):
        assert (sdist / name).is_file(), name
    assert files_of(build(sdist, tmp_path / "again", target="wheel")) == files_of(wheel)


def test_the_installed_command_makes_a_demo(installed: Path, tmp_path: Path) -> None:
    where = run(
        [str(installed / "python"), "-c", "import hexdata; print(hexdata.__file__)"], tmp_path
    ).strip()
    assert Path(where).is_relative_to(installed.parent)
    assert hexdata.__version__ in run([str(installed / "hexdata"), "--version"], tmp_path)
    run([str(installed / "hexdata"), "demo", "--games", "20"], tmp_path)
    assert (tmp_path / "hexdata-demo" / "store" / "shards" / "manifest.json").is_file()
