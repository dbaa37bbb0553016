"""Small files that expand to gigabytes: convert stays within its memory and names the rejected files."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time

import psutil
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources, tables
from tests.legacy_pickles import EXPANDING, example, write_expanding
from tests.pairs import FULL

MEMORY = 1_000_000_000
SECONDS = 300
"""On the slowest machine; some took hours."""

REASONS = {
    "a shared list": ("metadata-size", 1),
    "a shared header": ("limit-header", 1),
    "unknown keys": ("example-layout", 5000),
    "a long key": ("metadata-size", 5000),
    "a shared note": ("metadata-size", 5000),
    "distinct notes": ("limit-held", 1),
    "nones": ("limit-rejected", 1),
    "distinct keys": ("limit-layouts", 1),
    "many keys": ("metadata-size", 1),
    "a shared payload": ("shared-payload", 1),
    "header keys": ("limit-held", 1),
    "lists": ("example-layout", 20_000),
}
ONE_OF_EACH = [
    "a shared list",
    "a shared header",
    "unknown keys",
    "nones",
    "distinct keys",
    "a shared payload",
    "header keys",
]
"""One content for each reason; the plain run converts only these."""


def peak_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process and return the highest memory of it and its children together, in bytes."""
    peak, started = 0, time.monotonic()
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        try:
            for one in [root, *root.children(recursive=True)]:
                total += one.memory_info().rss
        except psutil.Error:
            continue  # one of them just ended
        peak = max(peak, total)
        if peak > MEMORY or time.monotonic() - started > SECONDS:
            for one in [*root.children(recursive=True), root]:
                one.kill()
        time.sleep(0.05)  # listing the processes takes time itself
    return peak


@pytest.mark.parametrize("name", EXPANDING if FULL else ONE_OF_EACH)
def test_convert_stays_within_its_memory(tmp_path, name):
    source, store = tmp_path / "a.pkl.gz", tmp_path / "store"
    write_expanding(name, source)
    options = ["--memory", "1GB", "--max-reject-rate", "1", "--value-convention", "blue-is-0"]
    command = [sys.executable, "-m", "hexdata", "convert", str(source), str(store), *options]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ, stdout=log, stderr=log)
        peak = peak_of(process)
    assert process.wait() == 0, (tmp_path / "log").read_text()
    assert peak < MEMORY
    (part,) = (store / "rejected").glob("*")
    rejected = pq.read_table(part)
    assert set(rejected["reason"].to_pylist()) == {REASONS[name][0]}
    assert rejected.num_rows == REASONS[name][1]
    assert max(map(len, rejected["detail"].to_pylist())) < 1000


def test_large_headers_are_spooled_and_bounded_together(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_LARGE_HEADERS", 25_000)
    for number, size in enumerate((10, 12_000, 9_000, 20_000)):
        content = example(0, 0, n=13, policy=None, player_to_move=..., value=1.0, metadata={"winner": "RED"})
        top = {"examples": [content], "more": "x" * size, "n": number}
        (tmp_path / f"{number}.pkl").write_bytes(pickle.dumps(top, 4))
    options = ConvertOptions(max_reject_rate=1, value_convention="blue-is-0")
    result = convert_sources([tmp_path], tmp_path / "store", options)
    ((name, reason),) = result.failed_files.items()
    assert name.endswith("3.pkl")
    assert reason.startswith("limit-headers: its header has 20,")
    (part,) = (tmp_path / "store" / "sources").glob("*")
    headers = [json.loads(text) for text in pq.read_table(part)["header"].to_pylist()]
    assert [len(header.get("more", "")) for header in headers] == [10, 12_000, 9_000, 0]
    assert [header.get("n") for header in headers] == [0, 1, 2, None]
