"""A sample of the cases of ``disk.py``, the cases that once failed, and the replay itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pairs import FULL
from tests.simulation.disk import build_shim, environment, half_published
from tests.simulation.matrix import Results, summary_of
from tests.simulation.replay import Disk, Operation, Tree, digest

SCRIPT = Path(__file__).with_name("disk.py")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_shim(tmp_path_factory.mktemp("shim"))
    if built is None:
        pytest.skip("the simulated disk needs Linux and a C compiler")
    return built


@pytest.mark.slow
def test_a_sample_of_all_cases(tmp_path: Path, shim: Path) -> None:
    """The sample is a tenth as large unless ``HEXDATA_TESTS=full``. ``matrix.py`` tries all cases."""
    script = [sys.executable, str(SCRIPT), "convert", "demo", "shuffle", "run"]
    script += ["--every", "100" if FULL else "1000", "--jobs", "1", "--folder", str(tmp_path)]
    done = subprocess.run(
        script, env=environment(shim), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" small: 0 failed") == 4
    for what in ("then error", "then done", "disks after crashes", "disks after errors"):
        assert re.search(rf"'{what}': [1-9]", done.stdout), f"the shim does nothing: {done.stdout}"


@pytest.mark.slow
def test_a_power_failure_leaves_the_old_or_the_new_result_while_it_is_replaced(
    tmp_path: Path, shim: Path
) -> None:
    script = [sys.executable, str(SCRIPT), "reexport", "--fault", "lost", "--jobs", "1"]
    done = subprocess.run(
        [*script, "--folder", str(tmp_path)],
        env=environment(shim),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"'disks after crashes': [1-9]", done.stdout)


def test_a_replacement_that_is_not_finished_counts_as_new() -> None:
    manifest = b'{"files": {"shards/a": {"sha256": "%s"}}}'
    old, new = (manifest % digest(content).encode() for content in (b"old", b"new"))
    ready = "store/.work/ready"
    tree: Tree = {"store/manifest.json": old, "store/shards": None, "store/shards/a": b"old"}
    waiting: Tree = {f"{ready}/manifest.json": new, f"{ready}/shards": None, f"{ready}/shards/a": b"new"}
    moved: Tree = {"store/manifest.json": old, f"{ready}/manifest.json": new, "store/shards/a": b"new"}
    assert not half_published(tree | waiting)
    assert not half_published({"store/manifest.json": old} | waiting)
    assert not half_published(moved)
    assert "is another file" in half_published(moved | {"store/shards/a": b"old"})


def test_a_command_that_leaves_a_half_published_file_fails(tmp_path: Path) -> None:
    """The check itself: a run that publishes before it syncs is found."""
    manifest = b'{"files": {"games/a": {"sha256": "%s"}}}' % digest(b"a").encode()
    tree: Tree = {"store": None, "store/games": None, "store/games/a": b"a", "store/manifest.json": manifest}
    assert not half_published(tree)
    assert "is another file" in half_published(tree | {"store/games/a": b""})
    del tree["store/games/a"]
    assert "is missing" in half_published(tree)


def test_a_matrix_continues_where_it_stopped(tmp_path: Path) -> None:
    """A chunk without failures is not tried again, unless the code has changed."""
    results = Results(tmp_path)
    failure = {
        "case": {"command": "show", "size": "small", "at": 1, "fault": "eio", "seed": 0},
        "wrong": "bare",
    }
    results.add("small", "show", 0, counts={"cases": 96}, failures=[], cpu=2.0, seconds=3.0)
    results.add("small", "show", 1, counts={"cases": 4}, failures=[failure], cpu=1.0, seconds=1.0)
    again = Results(tmp_path)
    assert [again.is_done("small", "show", chunk) for chunk in range(3)] == [True, False, False]
    entry = summary_of(again, ["small"])["small"]["show"]
    assert (entry["counts"]["cases"], entry["failed"], entry["cpu"]) == (100, 1, 3.0)
    again.add("small", "show", 1, counts={"cases": 4}, failures=[], cpu=1.0, seconds=1.0)
    assert summary_of(Results(tmp_path), ["small"])["small"]["show"]["failed"] == 0
    changed = (tmp_path / "results.jsonl").read_text().replace(again.code, "0" * 16)
    (tmp_path / "results.jsonl").write_text(changed)
    assert not Results(tmp_path).is_done("small", "show", 0)


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
