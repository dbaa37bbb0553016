"""A sample of the cases of ``disk.py``, the cases that once failed, and the replay itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pairs import FULL
from tests.simulation.disk import build_shim, environment
from tests.simulation.replay import Disk, Operation, Tree, digest

SCRIPT = Path(__file__).with_name("disk.py")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_shim(tmp_path_factory.mktemp("shim"))
    if built is None:
        pytest.skip("the simulated disk needs Linux and a C compiler")
    return built


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "every"), [("convert", 400), ("shuffle", 200), ("export", 100), ("verify", 200)]
)
def test_a_sample_of_all_cases(command: str, every: int, tmp_path: Path, shim: Path) -> None:
    """The sample is half as large unless ``HEXDATA_TESTS=full``."""
    script = [sys.executable, str(SCRIPT), command, "--every", str(every if FULL else 2 * every)]
    script += ["--jobs", "1", "--folder", str(tmp_path)]
    done = subprocess.run(
        script, env=environment(shim), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{command} small: 0 failed" in done.stdout
    assert re.search(r"'then error': [1-9]", done.stdout), "the shim does nothing"


def operation(
    number: int, kind: str, path: str, other: str = "", data: bytes = b"", inode: int = 1
) -> Operation:
    return Operation(number, kind, False, kind == "sync" and "." not in path, inode, 0, 0, path, other, data)


def replayed(*operations: Operation) -> Disk:
    disk = Disk({"a.txt": b"old"})
    for one in operations:
        disk.apply(one)
    return disk


CREATE = operation(0, "create", "b.tmp", inode=2)
WRITE = operation(1, "write", "b.tmp", data=b"new" * 400, inode=2)
SYNC = operation(2, "sync", "b.tmp", inode=2)
RENAME = operation(3, "rename", "b.tmp", "a.txt")
SYNC_FOLDER = operation(4, "sync", "")


def test_what_is_not_synced_may_be_lost() -> None:
    disk = replayed(CREATE, WRITE)
    assert disk.after_crash("killed", "") == {"a.txt": b"old", "b.tmp": b"new" * 400}
    assert disk.after_crash("lost", "") == {"a.txt": b"old"}
    assert disk.after_crash("nameless", "") == {"a.txt": b"old"}
    assert disk.after_crash("empty", "") == {"a.txt": b"old", "b.tmp": b""}
    assert disk.after_crash("zeros", "") == {"a.txt": b"old", "b.tmp": bytes(1200)}


def test_a_torn_write_keeps_any_sectors() -> None:
    disk, whole = replayed(CREATE, WRITE), b"new" * 400
    found = {disk.after_crash("torn", str(seed))["b.tmp"] for seed in range(100)}
    assert {b"", whole, whole[:512], whole[:1024], bytes(512) + whole[512:]} <= found


def test_what_is_synced_is_kept() -> None:
    """A renaming without a sync leaves the old or the new file, with the whole content."""
    disk = replayed(CREATE, WRITE, SYNC, RENAME)
    assert disk.after_crash("lost", "") == {"a.txt": b"old"}
    found = [disk.after_crash("disordered", str(seed)) for seed in range(50)]
    new = b"new" * 400
    expected: list[Tree] = [{"a.txt": b"old"}, {"a.txt": new}, {"a.txt": b"old", "b.tmp": new}]
    assert all(tree in [*expected, {"a.txt": new, "b.tmp": new}] for tree in found)
    assert all(tree in found for tree in expected[:2])
    disk.apply(SYNC_FOLDER)
    assert disk.after_crash("lost", "") == disk.after_crash("disordered", "1") == {"a.txt": new}
    assert disk.versions["a.txt"] == {digest(b"old"), digest(new)}
