"""Limits of disk and memory: one clear error, and a sufficient minimum."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hexdata.convert import ConvertOptions
from hexdata.errors import BudgetError
from hexdata.export import ExportOptions, PicklesOptions
from hexdata.shuffle import ShuffleOptions
from hexdata.sql import SqlLimits
from hexdata.verify import VerifyOptions

# A process of its own, because the limit on the size of files cannot be raised again.
FULL_DISK = """
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
write_report(store, out / "before.html")  # loads its libraries
make_legacy(out / "pickles", DemoOptions(games=8))
convert_sources([out / "pickles"], out / "of pickles", ConvertOptions(workers=1))
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
    "spill": lambda: query("SELECT max(i) FROM (SELECT i, hash(i) h FROM range(6_000_000) t(i) ORDER BY h)"),
    "demo": lambda: make_legacy(out / "demo", DemoOptions(games=80)),
    "round trip": lambda: check_round_trip(out / "of pickles", out / "pickles"),
    "convert": lambda: convert_sources([games], out / "store", ConvertOptions(workers=1)),
    "plan": plan,
}.items():
    try:
        call()
    except BudgetError as error:
        errors[name] = [error.path, error.reason, error.found, error.hint]
print(json.dumps(errors))
"""
PATHS = {
    "report": "after.html",
    "show": "game.svg",
    "sql": "a.parquet",
    "spill": "tmp/hexdata-duckdb-",
    "demo": "demo/v",
    "round trip": "tmp/hexdata-written-",
    "convert": "store/",
    "plan": "tmp/hexdata-plan-",
}
"""Beginnings of the paths that the errors name. What writes temporary files names TMPDIR as a remedy."""


def test_a_full_disk_is_one_clear_error_and_leaves_no_incomplete_file(
    trmph_store: Path, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    # Bytecode that is cut at the limit would break later imports of the modules.
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", FULL_DISK, trmph_store, trmph_store.parent / "games", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert list(errors) == list(PATHS)
    for name, (path, reason, found, hint) in errors.items():
        assert path.startswith(str(tmp_path / PATHS[name]))
        assert reason == "the disk is full"
        assert os.strerror(errno.EFBIG) in found
        assert "TMPDIR" in hint or not path.startswith(str(tmp_path / "tmp"))
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")] == []
    assert {path.name for path in tmp_path.iterdir()} == {
        "before.html",
        "demo",
        "of pickles",
        "pickles",
        "store",
        "tmp",
    }


PEAK = """if True:
    import sys
    from pathlib import Path
    from hexdata.__main__ import run
    status = sys.argv.pop(1)
    try:
        run()
    finally:
        Path(status).write_bytes(Path("/proc/self/status").read_bytes())
"""
KINDS: list[Any] = [ConvertOptions, ShuffleOptions, ExportOptions, PicklesOptions, VerifyOptions, SqlLimits]


def least(options: Any) -> int:
    """Return the minimum memory of a stage in MB, according to its error."""
    with pytest.raises(BudgetError) as caught:
        options(memory=1)
    found = re.search(r"found 0 MB; expected at least (\d+) MB", str(caught.value))
    assert found
    return int(found[1])


@pytest.mark.parametrize("options", KINDS)
def test_the_minimum_in_the_message_is_accepted(options: Any) -> None:
    megabytes = least(options)
    options(memory=megabytes * 10**6)
    with pytest.raises(BudgetError, match=f"found {megabytes - 1} MB; expected at least {megabytes} MB"):
        options(memory=(megabytes - 1) * 10**6)


def test_a_finding_is_rounded_down_and_a_minimum_up() -> None:
    error = BudgetError.of_memory("too little", found=430_999_999, expected=431_000_001, hint="Raise it.")
    assert "found 430 MB; expected at least 432 MB" in str(error)


def peak(tmp_path: Path, *arguments: object) -> int:
    """Run a command in a process of its own and return its peak resident memory in bytes."""
    command = [sys.executable, "-c", PEAK, str(tmp_path / "status"), *map(str, arguments)]
    subprocess.run(command, check=True, timeout=600)
    found = re.search(r"VmHWM:\s*(\d+) kB", (tmp_path / "status").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_every_stage_stays_below_its_minimum_memory(trmph_store: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    stages: list[tuple[Any, list[object]]] = [
        (ConvertOptions, ["convert", trmph_store.parent / "games", store, "--workers", 1]),
        (ShuffleOptions, ["shuffle", store, "--threads", 1]),
        (ExportOptions, ["export", store, "--workers", 1]),
        (PicklesOptions, ["export", store, "--format", "pickle", "--workers", 1]),
        (VerifyOptions, ["verify", store, "--threads", 1]),
        (SqlLimits, ["sql", store, "SELECT * FROM positions ORDER BY hash(position_id)", "--threads", 1]),
        (SqlLimits, ["report", store, "--threads", 1]),
    ]
    for options, arguments in stages:
        megabytes = least(options)
        limited = (*arguments, "--memory", f"{megabytes}MB")
        assert peak(tmp_path, *limited) < megabytes * 10**6, arguments
