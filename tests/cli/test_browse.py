"""``hexdata browse``: its address, its end, and the missing extra."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.cli.test_cli import hexdata_run

BROWSE = [sys.executable, "-m", "hexdata", "browse"]


def test_the_page_is_served_until_ctrl_c(trmph_store: Path, tmp_path: Path) -> None:
    for library in ("starlette", "uvicorn"):
        pytest.importorskip(library)
    command = [*BROWSE, str(trmph_store), "--port", "0", "--no-open", "--json"]
    environment = {**os.environ, "HEXDATA_CACHE": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as served:
        try:
            assert served.stdout is not None
            assert served.stderr is not None
            facts = json.loads(served.stdout.readline())
            assert facts["store"] == str(trmph_store)
            with urllib.request.urlopen(facts["address"]) as answer:
                assert b"<title>hexdata</title>" in answer.read()
            served.send_signal(signal.SIGINT)
            assert served.wait(60) == 0
            assert "Traceback" not in served.stderr.read()
        finally:
            served.kill()


@pytest.mark.parametrize("library", ["starlette", "uvicorn"])
def test_a_missing_extra_is_named(library: str, trmph_store: Path) -> None:
    code = f"import sys; sys.modules['{library}'] = None; from hexdata.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "browse", str(trmph_store)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("hexdata: the page of a store needs a library that is not installed; ")
    assert "pip install 'hexdata[browse]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["{folder}"], 1, "no manifest"),
        (["{store}", "--memory", "1MB"], 1, "expected at least 640 MB. Raise --memory.\n"),
        (["{store}", "--port", "70000"], 2, "--port"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], status: int, message: str, trmph_store: Path, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn")
    given = [text.format(folder=tmp_path, store=trmph_store) for text in arguments]
    ran = hexdata_run("browse", *given)
    assert (ran.status, message in ran.err) == (status, True), ran.err
