"""Hostile filters: their length is limited; in ``hexdata browse``, memory is bounded, other lists are made,
and Ctrl-C ends the command.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command_line import hexdata_run

LIMIT = 1_300_000_000
PATIENT = 300.0
"""Seconds after which a command is considered to hang."""
FILTERS = {
    "a long constant": "repeat('x',2200000000)='y'",
    "a list of constants": "len(range(1000000000)) > game_id",
    "a scan without end": f"(SELECT count(*) FROM {','.join(f'games g{i}' for i in range(7))}) > game_id",
    "a function without end": "levenshtein(repeat('x',999999),repeat('y',999999))>0",
    "nested lists": "[" * 3_000 + "1" + "]" * 3_000,
    "many operators": "1" + "+1" * 3_000,
    "nested functions": "abs(" * 1_500 + "1" + ")" * 1_500,
}


RUN = """if True:
    from hexdata.__main__ import run
    from hexdata.browse import library
    library._STARTING, library._STUCK = 2.0, 0.5
    run()
"""
"""Waits less long for a query that does not start."""


class Served:
    """A running ``hexdata browse``."""

    def __init__(self, store: Path, cache: Path) -> None:
        command = [sys.executable, "-c", RUN, "browse", store, "--port", "0", "--no-open", "--json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={"HEXDATA_CACHE": str(cache)}
        )
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]

    def listed(self, condition: str, seconds: float, *, is_sound: bool = False) -> Any:
        """Return the answer to a filter: a complete list or an error, or None after some seconds.

        A sound filter is tried again after an error: a busy machine may not start its query in time.
        """
        query = urllib.parse.urlencode({"table": "games", "filter": condition})
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                with urllib.request.urlopen(f"{self.address}api/list?{query}", timeout=PATIENT) as answer:
                    content = json.load(answer)
            except urllib.error.HTTPError as error:
                with error:
                    content = json.load(error)
            if content.get("complete") or ("error" in content and not is_sound):
                return content
            time.sleep(0.1)
        return None

    def memory(self) -> int:
        """Return the largest memory of the process in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s*([0-9]+)", status)[0]) << 10


@pytest.fixture
def served(trmph_store: Path, tmp_path: Path) -> Iterator[Served]:
    """A page of a store."""
    for library in ("starlette", "uvicorn"):
        pytest.importorskip(library)
    if not Path("/proc/self/status").exists():
        pytest.skip("memory is read from /proc")
    found = Served(trmph_store, tmp_path)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.communicate()


def test_hostile_filters_harm_neither_memory_nor_other_lists(served: Served) -> None:
    assert served.listed("game_id < 3", PATIENT, is_sound=True)["found"] == 3
    for name, condition in FILTERS.items():
        served.listed(condition, 0.5)
        assert served.memory() < LIMIT, name
        assert served.process.poll() is None, name
    assert served.listed("game_id < 2", PATIENT, is_sound=True)["found"] == 2
    for _ in range(2):  # the query still runs, so a request does not begin it again
        assert "error" in served.listed(FILTERS["a function without end"], PATIENT)
    assert served.memory() < LIMIT
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(PATIENT) == 0


def test_a_long_filter_is_refused(served: Served) -> None:
    assert "too long" in served.listed("game_id = 1 OR " * 400 + "true", PATIENT)["error"][0]


@pytest.mark.parametrize(
    "arguments",
    [
        ("sql", "{store}", "SELECT {text}"),
        ("load", "{store}", "--where", "{text}"),
        ("load", "{store}", "--weights", "{text}"),
        ("shuffle", "{store}", "--dry-run", "--where", "{text}"),
        ("shuffle", "{store}", "--dry-run", "--balance-by", "{text}"),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-2]}",
)
def test_every_command_refuses_a_long_text(arguments: tuple[str, ...], trmph_store: Path) -> None:
    """DuckDB's parser would need memory for it without a limit."""
    text = "move = 1 OR " * 4_000 + "true"
    done = hexdata_run(*(argument.format(store=trmph_store, text=text) for argument in arguments))
    assert done.status == 2
    assert "too long" in done.err
    assert len(done.err.splitlines()) == 1
