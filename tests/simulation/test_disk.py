"""A sample of the cases of ``disk.py``, the cases that once failed, and the replay itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.disk import build_shim, half_published
from tests.simulation.replay import Disk, Operation, Tree, digest

SCRIPT = Path(__file__).with_name("disk.py")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_shim(tmp_path_factory.mktemp("shim"))
    if built is None:
        pytest.skip("the simulated disk needs Linux and a C compiler")
    return built


@pytest.mark.slow
@pytest.mark.parametrize(("command", "every"), [("convert", 60), ("shuffle", 60), ("run", 300)])
def test_a_sample_of_all_cases(command: str, every: int, tmp_path: Path) -> None:
    assert f"{command} small: 0 failed" in run_script(tmp_path, command, "--every", str(every))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("eio", {"errors returned": 1, "then error": 1}),
        ("eio-lasting", {"errors returned": 1, "then error": 1}),
        ("torn", {"disks after crashes": 1}),
    ],
)
def test_the_fault_of_one_case_reaches_the_command(
    fault: str, expected: dict[str, int], tmp_path: Path
) -> None:
    """Without this, the other tests could pass because the shim does nothing."""
    printed = run_script(tmp_path, "export", "--at", "90", "--fault", fault, "--seed", "0")
    for name, number in expected.items():
        assert f"'{name}': {number}" in printed


def test_faults_that_a_run_does_not_notice_are_tried_in_groups(tmp_path: Path) -> None:
    printed = run_script(tmp_path, "pickles", "--fault", "short")
    groups = re.search(r"'cases': ([0-9]+), 'cases in groups': ([0-9]+)", printed)
    assert groups is not None, printed
    assert 0.8 * int(groups[1]) < int(groups[2]) <= int(groups[1])


def test_a_command_that_leaves_a_half_published_file_fails(tmp_path: Path) -> None:
    """The check itself: a run that publishes before it syncs is found."""
    manifest = b'{"files": {"games/a": {"sha256": "%s"}}}' % digest(b"a").encode()
    tree: Tree = {"store": None, "store/games": None, "store/games/a": b"a", "store/manifest.json": manifest}
    assert not half_published(tree)
    assert "is another file" in half_published(tree | {"store/games/a": b""})
    del tree["store/games/a"]
    assert "is missing" in half_published(tree)


def test_a_matrix_continues_where_it_stopped(tmp_path: Path) -> None:
    if build_shim(tmp_path) is None:
        pytest.skip("the simulated disk needs Linux and a C compiler")
    command = [sys.executable, str(SCRIPT.with_name("matrix.py")), "--parts", "small", "--only", "show"]
    command += ["--jobs", "1", "--out", str(tmp_path / "out")]
    results = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append((tmp_path / "out/results.jsonl").read_text())
    assert results[0] == results[1], "chunks were tried again"
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    counts = summary["parts"]["small"]["show"]["counts"]
    assert counts["cases"] == summary["parts"]["small"]["show"]["all cases"] > 50


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
