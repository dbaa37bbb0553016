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

pytest.importorskip("hatchling", reason="hatchling, which builds the packages, is not installed")
pytest.importorskip("pip", reason="pip, which installs the wheel, is not installed")
pytestmark = pytest.mark.skipif(not (ROOT / "LICENSE").is_file(), reason="these tests need a checkout")


def run(*command: object, folder: Path) -> str:
    """Run a command in a folder without the checkout on its path, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(source: Path, folder: Path, target: str) -> Path:
    """Build a wheel or sdist of a source tree with the declared backend, which downloads nothing."""
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder, folder=source)
    (made,) = folder.iterdir()
    return made


def files_of(wheel: Path) -> dict[str, bytes]:
    """Return the content of each file of a wheel, except the list of digests."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def test_the_wheel_has_the_package_the_command_and_the_extras(wheel: Path) -> None:
    files = files_of(wheel)
    sources = {path for path in (ROOT / "hexdata").rglob("*") if path.is_file()}
    expected = {path.relative_to(ROOT).as_posix() for path in sources if "__pycache__" not in path.parts}
    assert {name for name in files if not name.startswith(f"{NAME}.dist-info/")} == expected
    templates = ("report/templates/report.html", "browse/static/index.html", "py.typed")
    assert {f"hexdata/{name}" for name in templates} <= expected
    assert b"hexdata = hexdata.__main__:run" in files[f"{NAME}.dist-info/entry_points.txt"]
    assert f"{NAME}.dist-info/licenses/LICENSE" in files
    metadata = files[f"{NAME}.dist-info/METADATA"].decode().split("\n")
    extras = {f"Provides-Extra: {extra}" for extra in ("report", "live", "browse", "torch")}
    assert {f"Version: {hexdata.__version__}", *extras} <= set(metadata)


def test_the_sdist_has_the_tests_and_documents_and_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build(ROOT, tmp_path / "sdist", "sdist")) as packed:
        packed.extractall(tmp_path, filter="data")
    names = ("tests/conftest.py", "tests/store/frozen/README.md", "docs/conf.py", "CHANGELOG.md", "LICENSE")
    assert [name for name in names if not (tmp_path / NAME / name).is_file()] == []
    assert files_of(build(tmp_path / NAME, tmp_path / "again", "wheel")) == files_of(wheel)


def test_the_installed_command_converts(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment with the wheel, to which the other packages of this environment are added."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    names = {"base": str(folder), "platbase": str(folder)}
    commands, packages = (Path(sysconfig.get_path(kind, "venv", names)) for kind in ("scripts", "purelib"))
    pip = (sys.executable, "-m", "pip", "--python", folder, "install", "--no-deps", "--no-index", "-q")
    run(*pip, wheel, folder=tmp_path)
    # Its own packages precede the others on the path, which may lie in further folders that .pth files name.
    others = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "others.pth").write_text(others)
    where = run(commands / "python", "-c", "import hexdata; print(hexdata.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(folder)
    assert hexdata.__version__ in run(commands / "hexdata", "--version", folder=tmp_path)
    (tmp_path / "games.trmph").write_text("#5,a1b2c3 b\n")
    run(commands / "hexdata", "convert", "games.trmph", "store", folder=tmp_path)
    assert (tmp_path / "store" / "README.md").is_file()
