"""After a kill at any moment, the same command gives the bytes of an undisturbed run.

``tests/promises/test_advice.py`` kills every stage before changes of the disk; here, conversions that it
does not have.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from hexdata.convert import publish, run
from hexdata.errors import StoreError
from hexdata.progress import Silent
from hexdata.verify import verify_store
from tests.convert.conftest import flat
from tests.convert.kill_convert import running_processes
from tests.pairs import FULL


@pytest.fixture
def sources(make):
    """Three sources: tuples with a rejected record, a shuffled file and a broken file."""
    examples = make.tuples(flat(make.dicts(make.games(3))))
    make.write("a.pkl.gz", [*examples, (examples[0][0] + 2, None, 0.0)])
    mixed = flat(make.dicts(make.games(4, start=3)))
    make.write("shuffled_0000.pkl.gz", mixed[::-1], shuffling_stats={"source_files": ["x"]})
    make.write_bytes("z.pkl.gz", b"not a pickle")
    return make.folder


@pytest.mark.parametrize("stage", ["read", "write"] if FULL else ["write"])
def test_killed_with_workers_at_work(sources, convert, tmp_path, stage):
    command = [sys.executable, "-m", "tests.convert.kill_convert", "stage"]
    command += [str(tmp_path / "store"), str(sources), stage]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
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


@pytest.mark.usefixtures("one_source_a_batch")
@pytest.mark.parametrize("damaged", ["nothing", "raw.arrow", "*.parquet"])
def test_what_an_interrupted_run_wrote_is_used_if_it_is_intact(sources, convert, tmp_path, request, damaged):
    """Sources are not read again; a damaged or missing temporary file or part is made again."""
    stage = "read" if damaged == "raw.arrow" else "write"
    with pytest.raises(KeyboardInterrupt):
        convert(sources, progress=StopsAfter(stage, 1 if damaged == "nothing" else 2), max_reject_rate=1.0)
    paths = sorted((tmp_path / "store").rglob(damaged))
    assert bool(paths) == (damaged != "nothing")
    for number, path in enumerate(paths):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.unlink() if number and stage == "read" else path.write_bytes(data)
    if damaged == "nothing":
        request.getfixturevalue("no_reader")
    made = convert(sources, max_reject_rate=1.0)
    request.getfixturevalue("monkeypatch").undo()
    assert made.files() == convert(sources, store="undisturbed", max_reject_rate=1.0).files()


@pytest.mark.usefixtures("one_source_a_batch")
def test_what_an_interrupted_run_cut_off_is_not_rejected_by_a_run_of_fewer_files(make, convert):
    game, others = make.game(make.repeating(), (0, 500)), flat(make.dicts(make.games(30, start=5)))
    # Without the position of the repeated move, which is in the other file, nothing is cut off.
    make.write(
        "a.pkl.gz", [None, *game[:6], *game[7:], *others[::2]], shuffling_stats={"source_files": ["x"]}
    )
    left = make.write("b.pkl.gz", [game[6], *others[1::2]], shuffling_stats={"source_files": ["x"]})
    with pytest.raises(KeyboardInterrupt):
        convert(make.folder, truncate_repeats=True, progress=StopsAfter("write", 1))
    left.unlink()
    made = convert(make.folder, truncate_repeats=True)
    assert [row["reason"] for row in made.rows("rejected")] == ["example-layout"]
    assert made.files() == convert(make.folder, store="undisturbed", truncate_repeats=True).files()


@pytest.mark.usefixtures("one_source_a_batch")
def test_temporary_files_that_have_lost_positions_are_not_published(sources, convert, tmp_path, monkeypatch):
    find = publish.find_duplicates

    def removing(*arguments, **options):
        find(*arguments, **options)
        for path in (tmp_path / "store" / ".work").rglob("*.arrow"):
            if path.name in ("raw.arrow", "rows.arrow", "positions.arrow"):
                path.unlink()

    monkeypatch.setattr(publish, "find_duplicates", removing)
    with pytest.raises(StoreError, match="has 0 of 54 rows"):
        convert(sources, max_reject_rate=1.0)


def test_parts_of_an_interrupted_run_with_other_batches_are_not_used(make, convert, monkeypatch):
    """A file of another board size is in a batch, but in no part: without it, a part has one more source."""
    make.write_bytes("a.trmph", make.lines(1).encode())
    make.write_bytes("c.trmph", make.lines(1, start=2).encode())
    make.n = 9
    left = make.write_bytes("b.trmph", make.lines(9).encode())
    monkeypatch.setattr(run, "_BATCH_WEIGHT", 1000)
    with pytest.raises(KeyboardInterrupt):
        convert(make.folder, board_size=5, progress=StopsAfter("write", 2))
    left.unlink()
    made = convert(make.folder, board_size=5)
    assert made.files() == convert(make.folder, store="undisturbed", board_size=5).files()
