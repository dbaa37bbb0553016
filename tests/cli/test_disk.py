"""Full disks, for all functions that write outside the stages of a store: one clear error each.

Run in a separate process with a limit on the size of files, because the limit cannot be raised again.
It writes no bytecode: truncated bytecode files would break later imports of the modules.
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
write_report(store, out / "before.html")  # makes matplotlib write its list of fonts
drawing = read_game(store, 0).svg()


def query(text, file=None):
    with run_query(store, text, memory=400_000_000, threads=1) as result:
        return save_parquet(file, result) if file else list(result.batches)


def plan():
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 2_000))  # its tables are small
    return plan_shuffle(store, ShuffleOptions(per_game=2))


resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
errors = {}
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
        errors[name] = [error.path, error.reason, error.found, error.hint]
print(json.dumps(errors))
"""
AGAIN = "Free disk space and run the command again. It continues where it stopped."
ELSEWHERE = "Free disk space there, or set TMPDIR to a folder on another disk, and run the command again."
EXPECTED = {
    "report": ("after.html", "Choose another --output or free disk space, and run the command again."),
    "show": ("game.svg", "Free disk space, or choose another file."),
    "sql": ("a.parquet", "Free disk space or choose another path, and run the query again."),
    "spill": ("tmp/hexdata-duckdb-", ELSEWHERE),
    "demo": ("demo/v", AGAIN),
    "round trip": ("tmp/hexdata-written-", ELSEWHERE),
    "convert": ("store/", AGAIN),
    "plan": ("tmp/hexdata-plan-", ELSEWHERE),
}


@pytest.fixture(scope="module")
def outcome(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """The output folder, and the path, reason, found value and hint of each error, by name."""
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
def test_a_full_disk_is_one_clear_error(outcome: tuple[Path, dict[str, list[str]]], name: str) -> None:
    out, errors = outcome
    path, reason, found, hint = errors[name]
    location, expected = EXPECTED[name]
    assert path.startswith(str(out / location))
    assert reason == "the disk is full"
    assert os.strerror(errno.EFBIG) in found
    assert found.endswith(" free")
    assert hint == expected


def test_no_incomplete_file_remains(outcome: tuple[Path, dict[str, list[str]]]) -> None:
    out, _ = outcome
    assert list((out / "tmp").iterdir()) == []
    assert [path for path in out.rglob("*") if path.name.endswith(".tmp")] == []
    assert {path.name for path in out.iterdir()} == {"before.html", "demo", "store", "tmp"}
