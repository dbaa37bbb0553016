"""Small files that expand to gigabytes: convert stays within its memory and names the rejected files."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections import Counter

import psutil
import pyarrow.parquet as pq
import pytest

from hexdata.convert import run
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
    "distinct notes": ("limit-ratio", 1),
    "nones": ("limit-rejected", 1),
    "distinct keys": ("limit-layouts", 1),
    "many keys": ("metadata-size", 1),
    "a shared payload": ("shared-payload", 1),
    "header keys": ("limit-items", 1),
    "lists": ("example-layout", 20_000),
}
ONE_OF_EACH = ["a shared list", "unknown keys", "nones"]
"""The plain run converts only these: metadata, records and rejections that expand."""


@pytest.mark.parametrize("names", [[name] for name in EXPANDING] if FULL else [ONE_OF_EACH], ids="+".join)
def test_convert_stays_within_its_memory(tmp_path, names):
    folder, store, peak, started = tmp_path / "in", tmp_path / "store", 0, time.monotonic()
    folder.mkdir()
    for number, name in enumerate(names):
        write_expanding(name, folder / f"{number}.pkl.gz")
    options = ["--memory", "1GB", "--max-reject-rate", "1", "--value-convention", "blue-is-0"]
    command = [sys.executable, "-m", "hexdata", "convert", str(folder), str(store), *options]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    root = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            running = [root, *root.children(recursive=True)]
            peak = max(peak, sum(one.memory_info().rss for one in running))
        except psutil.Error:
            continue  # one of them just ended
        if peak > MEMORY or time.monotonic() - started > SECONDS:
            for one in reversed(running):
                one.kill()
        time.sleep(0.05)  # listing the processes takes time itself
    assert process.wait() == 0, (tmp_path / "log").read_text()
    assert peak < MEMORY
    (part,) = (store / "rejected").glob("*")
    rejected = pq.read_table(part)
    counts = Counter(zip(rejected["source_id"].to_pylist(), rejected["reason"].to_pylist(), strict=True))
    assert counts == {(number, REASONS[name][0]): REASONS[name][1] for number, name in enumerate(names)}
    assert max(map(len, rejected["detail"].to_pylist())) < 1000


def test_large_headers_are_bounded_together(make, convert, monkeypatch):
    monkeypatch.setattr(run, "LARGE_HEADERS", 25_000)
    for number, size in enumerate((10, 12_000, 9_000, 20_000)):
        content = example(0, 0, n=13, policy=None, player_to_move=..., value=1.0, metadata={"winner": "RED"})
        top = {"examples": [content], "more": "x" * size, "n": number}
        make.write_bytes(f"{number}.pkl", pickle.dumps(top, 4))
    store = convert(make.folder, max_reject_rate=1, value_convention="blue-is-0")
    ((name, reason),) = store.result.failed_files.items()
    assert (name, reason.partition(":")[0]) == ("legacy/3.pkl", "limit-headers")
    headers = [json.loads(row["header"]) for row in store.rows("sources")]
    assert [len(header.get("more", "")) for header in headers] == [10, 12_000, 9_000, 0]
    assert [header.get("n") for header in headers] == [0, 1, 2, None]
    again = convert(make.folder, value_convention="blue-is-0").result  # the other files are known
    assert (again.sources, again.positions, again.failed_files) == (1, 1, {})
