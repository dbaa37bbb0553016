"""After a kill at any moment, the same command gives the bytes of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import psutil
import pytest

from hexdata.convert.spool import Spool
from hexdata.errors import RejectRateError, StoreError, StoreLockedError
from hexdata.formats.trmph import write_trmph
from hexdata.progress import Silent
from hexdata.store import Store
from hexdata.verify import verify_store
from tests.convert.kill_convert import running_processes
from tests.pairs import FULL

KILL_CONVERT = Path(__file__).parent / "kill_convert.py"
ROOT = Path(__file__).parents[2]


def run_kill_convert(*arguments):
    command = [sys.executable, str(KILL_CONVERT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)


@pytest.fixture
def sources(make):
    """Three sources: tuples with a rejected record, a shuffled file and a broken file."""
    examples = make.tuples(chain.from_iterable(make.dicts(make.games(3))))
    make.write("a.pkl.gz", [*examples, (examples[0][0] + 2, None, 0.0)])
    mixed = list(chain.from_iterable(make.dicts(make.games(4, start=3))))
    make.write("shuffled_0000.pkl.gz", mixed[::-1], shuffling_stats={"source_files": ["x"]})
    make.write_bytes("z.pkl.gz", b"not a pickle")
    return make.folder


STEP = 2 if FULL else 5
"""Distance between the changes at which the plain run kills."""


@pytest.mark.parametrize(("adding", "first"), [(False, 0), (True, 1)])
def test_killed_before_any_change_on_disk(sources, make, convert, tmp_path, adding, first):
    started = tmp_path / "begun"
    if adding:
        convert(make.v2("b.pkl.gz", make.games(2, start=5)), store="begun")
    result = run_kill_convert("changes", started, sources, tmp_path / "killed", first, STEP)
    assert result.returncode == 0, result.stderr
    killed = sorted((tmp_path / "killed").iterdir())
    assert len(killed) >= 24 // STEP
    if adding:
        shutil.copytree(started, tmp_path / "undisturbed")
    undisturbed = convert(sources, store="undisturbed", max_reject_rate=1.0)
    for store in killed:
        assert manifest_of(store) in (manifest_of(started), manifest_of(undisturbed.path))
        again = convert(sources, store=f"killed/{store.name}", max_reject_rate=1.0)
        assert again.files() == undisturbed.files(), store.name


def manifest_of(store):
    """Return the bytes of the manifest, or None. It changes only once, after all other files."""
    path = store / "manifest.json"
    return path.read_bytes() if path.exists() else None


@pytest.mark.parametrize("stage", ["read", "write"])
def test_killed_with_workers_at_work(sources, convert, tmp_path, stage):
    result = run_kill_convert("stage", tmp_path / "store", sources, stage)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert len(result.stdout.split()) >= 2
    assert psutil.wait_procs(running_processes(result.stdout), timeout=300)[1] == []
    assert not (tmp_path / "store" / "manifest.json").exists()
    again = convert(sources, max_reject_rate=1.0)
    assert again.files() == convert(sources, store="undisturbed", max_reject_rate=1.0).files()
    assert verify_store(again.path).ok


class StopsAfter(Silent):
    """Interrupts a run after a number of sources have completed a stage."""

    def __init__(self, stage, sources):
        self.stage, self.left, self.current = stage, sources, ""

    def begin(self, stage, total, unit):
        self.current = stage

    def advance(self, amount):
        self.left -= bool(amount) and self.current == self.stage
        if not self.left:
            raise KeyboardInterrupt("stopped")


def stop_after(stage, convert, *inputs, sources=1, **options):
    with pytest.raises(KeyboardInterrupt):
        convert(*inputs, progress=StopsAfter(stage, sources), **{"max_reject_rate": 1.0, **options})


def test_sources_are_not_read_again(sources, convert, request):
    stop_after("write", convert, sources)
    request.getfixturevalue("no_reader")
    assert convert(sources, max_reject_rate=1.0).result.sources == 3


@pytest.mark.parametrize("change", ["lost", "flipped"])
def test_a_spool_that_was_damaged_is_read_again(sources, convert, tmp_path, change):
    stop_after("read", convert, sources)
    for path in (tmp_path / "store" / ".work").rglob("r*w*.arrow"):  # raw and rows
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.unlink() if change == "lost" else path.write_bytes(data)
    made = convert(sources, max_reject_rate=1.0)
    assert made.files() == convert(sources, store="undisturbed", max_reject_rate=1.0).files()


def test_a_part_that_was_damaged_is_written_again(sources, convert, tmp_path):
    stop_after("write", convert, sources, sources=2)
    for path in (tmp_path / "store" / "positions").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    made = convert(sources, max_reject_rate=1.0)
    assert made.files() == convert(sources, store="undisturbed", max_reject_rate=1.0).files()


def test_a_spool_that_has_lost_its_positions_is_not_published(sources, convert, tmp_path, monkeypatch):
    monkeypatch.setattr(Spool, "is_intact", lambda spool, facts: True)
    stop_after("read", convert, sources)
    for path in (tmp_path / "store" / ".work").rglob("r*w*.arrow"):  # raw and rows
        path.unlink()
    with pytest.raises(
        StoreError, match="positions are missing from the temporary files of this source; found 0; expected"
    ):
        convert(sources, max_reject_rate=1.0)


def test_a_run_with_other_sources_removes_parts_of_an_interrupted_run(sources, make, convert, tmp_path):
    """No manifest lists the parts of the first run."""
    stop_after("write", convert, sources, sources=2)
    assert len(list((tmp_path / "store" / "positions").iterdir())) == 2
    shutil.rmtree(sources)
    store = convert(make.v2("other.pkl.gz", make.games(2)))
    assert store.files() == convert(make.folder, store="undisturbed").files()
    assert verify_store(store.path).ok


@pytest.mark.parametrize("options", [{"value_convention": "blue-is-1"}, {"val": 0.4}, {"test": 0.4}])
def test_parts_of_an_interrupted_run_are_not_reused_with_other_options(make, convert, options):
    for name, start in (("a.pkl.gz", 0), ("b.pkl.gz", 9)):
        examples = list(chain.from_iterable(game[:-1] for game in make.dicts(make.games(9, start=start))))
        for example in examples:
            example["metadata"]["winner"] = None  # nothing shows the sense
        make.write(name, examples)
    first = {"value_convention": "blue-is-0"}
    stop_after("write", convert, make.folder, **first)
    store = convert(make.folder, **{**first, **options})
    assert store.files() == convert(make.folder, store="undisturbed", **{**first, **options}).files()


def test_a_run_that_publishes_nothing_leaves_the_store_as_it_was(sources, make, convert):
    store = convert(make.v2("b.pkl.gz", make.games(2, start=5)))
    before = store.files()
    with pytest.raises(RejectRateError):
        convert(sources, max_reject_rate=0.0)
    after = {file_name: c for file_name, c in store.files().items() if not file_name.startswith(".work/")}
    assert after == before


def test_two_runs_at_once_are_refused(sources, convert, tmp_path):
    holder = Store.open_or_create(tmp_path / "store")
    with holder.writing("convert"), pytest.raises(StoreLockedError, match=f"process {os.getpid()}"):
        convert(sources, max_reject_rate=1.0)
    assert convert(sources, max_reject_rate=1.0).result.sources == 3


GAMES = 40
"""Number of times that each game is in a file: enough to be interrupted while workers read."""


def test_ctrl_c_stops_cleanly_and_the_same_command_resumes(make, tmp_path):
    """SIGINT is sent to the whole process group while workers run, as a terminal does."""
    make.n = 9
    make.folder.mkdir()
    games = make.games(40)
    for name in "ab":
        write_trmph(make.folder / f"{name}.trmph", games * GAMES, make.n)
        games.reverse()
    command = [sys.executable, "-m", "hexdata", "convert", str(make.folder), str(tmp_path / "store")]
    process = subprocess.Popen(
        [*command, "--workers", "2"], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list((tmp_path / "store").rglob("*raw.arrow*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "again" in stderr
    assert "Traceback" not in stderr
    assert psutil.wait_procs(workers, timeout=300)[1] == []
    assert not (tmp_path / "store" / "manifest.json").exists()
    done = subprocess.run([*command, "--workers", "1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Store.open(tmp_path / "store").manifest.counts["games"] == 2 * 40 * GAMES


def test_foreign_files_in_the_folder_are_kept(sources, convert, tmp_path):
    """The file has the name of a temporary file, but is in a folder that hexdata does not use."""
    foreign = tmp_path / "store" / ".git" / ".keep.1.tmp"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    convert(sources, max_reject_rate=1.0)
    assert foreign.exists()
