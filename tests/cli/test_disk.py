"""Disks without room, under everything that writes but the stages of a store: one clear error each.

In a process of its own, none of whose files may grow beyond a few bytes: the limit cannot be raised again.
It writes no bytecode: Python would leave cut files of it, which break every later import of the module.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, resource, sys
from pathlib import Path
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.errors import BudgetError
from hexdata.report import write_report
from hexdata.show import read_game, write_svg
from hexdata.shuffle import ShuffleOptions, plan_shuffle
from hexdata.sql import run_query, save_parquet
from hexdata.verify import check_round_trip

store, games, out = map(Path, sys.argv[1:])
write_report(store, out / "before.html")  # has the fonts looked for, of which a list is kept
drawing = read_game(store, 0).svg()


def query(text, file=None):
    with run_query(store, text, memory=400_000_000, threads=1) as result:
        return save_parquet(file, result) if file else list(result.batches)


def plan():
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 2_000))  # its tables are small
    return plan_shuffle(store, ShuffleOptions(per_game=2))


resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
told = {}
for name, call in {
    "report": lambda: write_report(store, out / "after.html"),
    "show": lambda: write_svg(out / "game.svg", drawing),
    "sql": lambda: query("SELECT * FROM positions", out / "a.parquet"),
    "spill": lambda: query("SELECT max(i) FROM (SELECT i, hash(i) h FROM range(20_000_000) t(i) ORDER BY h)"),
    "demo": lambda: make_legacy(out / "demo", DemoOptions(games=80)),
    "round trip": lambda: check_round_trip(store, games),
    "convert": lambda: convert_sources([games], out / "store", ConvertOptions(workers=1)),
    "plan": plan,
}.items():
    try:
        call()
    except BudgetError as error:
        told[name] = [error.path, error.reason, error.found, error.hint]
print(json.dumps(told))
"""
AGAIN = "Free disk space and run the command again. It continues where it stopped."
ELSEWHERE = "Free disk space there, or set TMPDIR to a folder on another disk, and run the command again."
EXPECTED = {
    "report": ("after.html", "Choose another --output or free disk space, and run the command again."),
    "show": ("game.svg", "Free disk space, or choose another file."),
    "sql": ("a.parquet", "Make room, or give a file elsewhere, and run the query again."),
    "spill": ("tmp/duckdb-", ELSEWHERE),
    "demo": ("demo/v", AGAIN),
    "round trip": ("tmp/hexdata-", ELSEWHERE),
    "convert": ("store/", AGAIN),
    "plan": ("tmp/hexdata-plan-", ELSEWHERE),
}


@pytest.fixture(scope="module")
def told(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Where it was written, and path, reason, found and hint of what each has told."""
    out = tmp_path_factory.mktemp("out")
    (out / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(trmph_store), str(trmph_store.parent / "games"), str(out)],
        env={**os.environ, "TMPDIR": str(out / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_disk_without_room_is_one_clear_error(told: tuple[Path, dict[str, list[str]]], name: str) -> None:
    out, errors = told
    path, reason, found, hint = errors[name]
    place, expected = EXPECTED[name]
    assert path.startswith(str(out / place))
    assert reason == "the disk is full"
    assert os.strerror(errno.EFBIG) in found
    assert found.endswith(" free")
    assert hint == expected


def test_nothing_half_written_stays(told: tuple[Path, dict[str, list[str]]]) -> None:
    out, _ = told
    assert list((out / "tmp").iterdir()) == []
    assert [path for path in out.rglob("*") if path.name.endswith(".tmp")] == []
    assert {path.name for path in out.iterdir()} == {"before.html", "demo", "store", "tmp"}
