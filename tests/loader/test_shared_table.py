"""Tests of the file through which the copies of a loader share its table."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hexdata.errors import BudgetError
from hexdata.loader import Loader

TIMEOUT = 300
"""Seconds after which a process is assumed to hang."""
OWNER = """
import glob, os, pickle, sys, time
from hexdata.loader import Loader
loader = Loader(sys.argv[1], batch_size=100, fields=("position_id",))
given = pickle.load(open(sys.argv[2], "rb"))
pickle.dumps(loader)
for leave in (sys.exit, os._exit):
    if not os.fork():
        ids = [number for each in (loader, given) for batch in each for number in batch["position_id"]]
        leave(len(ids) - 2 * loader.positions)
    assert os.wait()[1] == 0
print(len(glob.glob(os.environ["TMPDIR"] + "/hexdata-arrays-*")), flush=True)
time.sleep(float(sys.argv[3]))
"""


def make(store: Path) -> Loader:
    return Loader(store, batch_size=100, fields=("board", "position_id"))


def shared_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("hexdata-arrays-*"))


def test_copies_share_one_file(trmph_store: Path, temporary: Path) -> None:
    loader = make(trmph_store)
    expected = [batch["board"].tobytes() for batch in loader]
    loader.set_epoch(0)
    data = pickle.dumps(loader)
    (file,) = shared_files(temporary)
    assert len(data) < 10_000
    assert pickle.dumps(loader) == data
    copies = [pickle.loads(data), pickle.loads(pickle.dumps(pickle.loads(data)))]
    for each in (loader, *copies):
        assert [batch["board"].tobytes() for batch in each] == expected
        assert not each.games.arrays["fill"].flags.writeable
    del copies, each
    assert shared_files(temporary) == [file]
    del loader
    assert shared_files(temporary) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")
def test_a_file_is_removed_with_its_process(trmph_store: Path, temporary: Path) -> None:
    """Forked processes leave it. That of a killed process is removed by the next one that writes a file."""
    loader = make(trmph_store)
    (temporary / "loader").write_bytes(pickle.dumps(loader))
    command = [sys.executable, "-W", "ignore", "-c", OWNER, str(trmph_store), str(temporary / "loader")]
    with subprocess.Popen([*command, "600"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "2\n"  # its own file and that of the loader
        finally:
            process.send_signal(signal.SIGKILL)
    assert len(shared_files(temporary)) == 2
    done = subprocess.run([*command, "0"], stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout == "2\n"
    assert len(shared_files(temporary)) == 1
    assert len(list(pickle.loads((temporary / "loader").read_bytes()))) == len(loader)


def test_a_full_temporary_folder(
    trmph_store: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    (small_disk / "full").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    loader = make(trmph_store)
    with pytest.raises(BudgetError, match="TMPDIR"):
        pickle.dumps(loader)
    assert [path.name for path in small_disk.iterdir()] == ["full"]
    (small_disk / "full").unlink()
    assert len(list(pickle.loads(pickle.dumps(loader)))) == len(loader)
