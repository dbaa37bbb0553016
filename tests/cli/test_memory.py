"""The minimum memory that a stage accepts is sufficient, and the error for less memory is consistent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions
from hexdata.errors import BudgetError
from hexdata.export import ExportOptions, PicklesOptions
from hexdata.shuffle import ShuffleOptions
from hexdata.sql import SqlLimits
from hexdata.verify import VerifyOptions

STAGES = [ConvertOptions, ShuffleOptions, ExportOptions, PicklesOptions, VerifyOptions, SqlLimits]
STATUS = Path("/proc/self/status")
COMMAND = """if True:
    import sys
    from pathlib import Path
    from hexdata.__main__ import run
    status = sys.argv.pop(1)
    try:
        run()
    finally:
        Path(status).write_bytes(Path("/proc/self/status").read_bytes())
"""


def least(options: type) -> int:
    """Return the minimum memory of a stage in MB, according to its error."""
    with pytest.raises(BudgetError) as caught:
        options(memory=1)
    found = re.search(r"found 0 MB; expected at least (\d+) MB", str(caught.value))
    assert found
    return int(found[1])


@pytest.mark.parametrize("options", STAGES)
def test_the_minimum_in_the_message_is_accepted(options: type) -> None:
    megabytes = least(options)
    options(memory=megabytes * 10**6)
    for refused in (megabytes * 10**6 - 10**6, 10**6):
        with pytest.raises(
            BudgetError, match=f"found {refused // 10**6} MB; expected at least {megabytes} MB"
        ):
            options(memory=refused)


def test_a_finding_is_rounded_down_and_a_minimum_up() -> None:
    error = BudgetError.of_memory("too little", found=430_999_999, expected=431_000_001, hint="Raise it.")
    assert "found 430 MB; expected at least 432 MB" in str(error)


def peak(tmp_path: Path, *arguments: str | Path) -> int:
    """Run a command in one process and return its peak resident memory in bytes."""
    status = tmp_path / "status"
    subprocess.run([sys.executable, "-c", COMMAND, status, *map(str, arguments)], check=True, timeout=600)
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="the peak of a process is read from /proc")
def test_every_stage_stays_below_its_minimum_memory(trmph_store: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    stages = [
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
        if peak(tmp_path, *limited) >= megabytes * 10**6:  # rare, and only if other processes are busy
            assert peak(tmp_path, *limited) < megabytes * 10**6, arguments
