"""Full and failing disks: refused at the start, stopped cleanly, resumed, or retried."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from hexdata.errors import BudgetError, ConfigError, StoreError
from hexdata.progress import Silent
from hexdata.retry import is_transient
from hexdata.shuffle import RetryPolicy, ShuffleOptions, plan_shuffle, shuffle_store
from hexdata.storage import is_disk_full
from hexdata.store import Store
from hexdata.store.session import duckdb_session
from tests.pairs import FULL
from tests.shuffle.test_killed import SCRIPT

if TYPE_CHECKING:
    from tests.conftest import CopyStore, StoreBytes

OPTIONS = ShuffleOptions(seed=5, buckets=6, threads=2)
QUICK = RetryPolicy(attempts=4, first_wait=0.0)
SPILLING = "SELECT max(i) FROM (SELECT i, hash(i) h FROM range(20_000_000) t(i) ORDER BY h)"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(scope="module")
def expected(
    trmph_store: Path, tmp_path_factory: pytest.TempPathFactory, store_bytes: StoreBytes
) -> dict[str, str]:
    """The bytes of a shuffle without disk errors."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("undisturbed") / "store")
    shuffle_store(store, OPTIONS)
    return store_bytes(store)


def temporaries(store: Path) -> list[Path]:
    return [p for p in store.rglob("*") if p.name.endswith(".tmp") or p.name.startswith("hexdata-")]


# --- full disks ---------------------------------------------------------------------------------------


def test_too_little_disk_is_refused_before_anything_is_written(
    trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_store(trmph_store)
    shuffle_store(store, ShuffleOptions(seed=4))
    before = store_bytes(store)
    plan = plan_shuffle(store, replace(OPTIONS, replace=True))
    assert 0 < plan.disk_freed < plan.disk_needed
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 0, plan.disk_needed - 1))
    with pytest.raises(BudgetError, match=rf"{store}: too little disk space.*expected .*--replace"):
        shuffle_store(store, OPTIONS)
    assert store_bytes(store) == before
    assert 'seed": 5' not in (store / "logs" / "shuffle.log").read_text()
    freed = plan.disk_needed - plan.disk_freed
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 0, freed))
    shuffle_store(store, replace(OPTIONS, replace=True))


def test_files_of_an_interrupted_shuffle_reduce_the_needed_space(
    trmph_store: Path, copy_store: CopyStore, expected: dict[str, str], store_bytes: StoreBytes
) -> None:
    class Stop(Silent):
        written = 0

        def advance(self, amount: int) -> None:
            self.written += amount
            if self.written > 1_000:
                raise KeyboardInterrupt

    store = copy_store(trmph_store)
    before = plan_shuffle(store, OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(store, OPTIONS, Stop())
    after = plan_shuffle(store, OPTIONS)
    assert before.buckets_done == 0
    assert after.disk_needed < before.disk_needed
    assert shuffle_store(store, OPTIONS).resumed == after.buckets_done > 0
    assert store_bytes(store) == expected


def test_a_file_size_limit_stops_the_shuffle_cleanly(
    trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    """The limit is set in a separate process because it cannot be raised again."""
    store, whole = copy_store(trmph_store), copy_store(trmph_store, "whole")
    options = {"seed": 5, "buckets": 2, "threads": 2}
    shuffle_store(whole, ShuffleOptions(**options))
    largest = max(path.stat().st_size for path in whole.rglob("bucket-*"))
    for size in (6_000, largest - 1):
        settings = json.dumps({"options": options, "file_size": size})
        command = [sys.executable, str(SCRIPT), str(store), settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("BudgetError: ")
        assert "the disk is full" in done.stderr
        assert "Free disk space and run the command again" in done.stderr
        assert "shuffle" not in Store.open(store).manifest.stages
        assert temporaries(store) == []
    assert shuffle_store(store, ShuffleOptions(**options)).resumed > 0
    assert store_bytes(store) == store_bytes(whole)


class Filler(Silent):
    """Fills the disk when the first bucket is written."""

    def __init__(self, disk: Path) -> None:
        self.ballast = disk / "ballast"

    def advance(self, amount: int) -> None:
        if amount and not self.ballast.exists():
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                self._fill()

    def _fill(self) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass


def test_a_disk_that_fills_up_stops_the_shuffle_cleanly(
    small_disk: Path, trmph_store: Path, store_bytes: StoreBytes, expected: dict[str, str]
) -> None:
    store = shutil.copytree(trmph_store, small_disk / "store")
    filler = Filler(small_disk)
    with pytest.raises(BudgetError, match=r"the disk is full; found .* free; expected .*Free disk space"):
        shuffle_store(store, OPTIONS, filler)
    assert filler.ballast.exists()
    assert "shuffle" not in Store.open(store).manifest.stages
    assert temporaries(store) == []
    filler.ballast.unlink()
    shuffle_store(store, OPTIONS)
    assert store_bytes(store) == expected


def test_a_query_that_cannot_spill_is_a_full_disk(small_disk: Path) -> None:
    with (
        pytest.raises(OSError, match=r"spill|offload|temp") as caught,
        duckdb_session(memory=64 << 20, threads=1, spill=small_disk) as con,
    ):
        con.sql(SPILLING).fetchall()
    assert is_disk_full(caught.value)
    assert list(small_disk.iterdir()) == []


SPILLS = """
import resource, sys
from pathlib import Path
from hexdata.store.session import duckdb_session

sys.dont_write_bytecode = True  # truncated bytecode files would break later imports
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    with duckdb_session(memory=64 << 20, threads=1, spill=Path(sys.argv[1])) as con:
        con.sql(sys.argv[2]).fetchall()
except OSError as error:
    print(error.errno)
"""


def test_a_spill_file_at_its_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    """The limit is set in a separate process because it cannot be raised again."""
    command = [sys.executable, "-c", SPILLS, str(tmp_path), SPILLING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert is_disk_full(OSError(int(done.stdout), "from the process"))


# --- temporary errors ------------------------------------------------------------------------------


def failing(times: int, code: int, original: Callable[[int], None], every: int = 2) -> Callable[[int], None]:
    """Return a function like ``os.fsync`` whose every n-th call fails, ``times`` times in total."""
    calls, left = itertools.count(1), itertools.repeat(None, times)

    def fsync(descriptor: int) -> None:
        if next(calls) % every == 0 and next(left, "none") is None:
            raise OSError(code, os.strerror(code))
        original(descriptor)

    return fsync


def of_buckets(fsync: Callable[[int], None]) -> Callable[[int], None]:
    """Fail only for the files of buckets."""
    original = os.fsync

    def call(descriptor: int) -> None:
        is_bucket = "bucket-" in Path(f"/proc/self/fd/{descriptor}").readlink().name
        (fsync if is_bucket else original)(descriptor)

    return call


TEMPORARY = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY]
PERMANENT = [errno.EROFS, errno.ENOENT, errno.EACCES]


@pytest.mark.parametrize("code", TEMPORARY if FULL else TEMPORARY[:2])
def test_temporary_errors_are_retried(
    trmph_store: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    store = copy_store(trmph_store)
    monkeypatch.setattr(os, "fsync", of_buckets(failing(3, code, os.fsync)))
    assert shuffle_store(store, OPTIONS, retry=QUICK).resumed == 0
    assert store_bytes(store) == expected


@pytest.mark.parametrize("code", PERMANENT if FULL else PERMANENT[:2])
def test_permanent_errors_are_not_retried(
    trmph_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = copy_store(trmph_store)
    monkeypatch.setattr(os, "fsync", of_buckets(failing(1, code, os.fsync)))
    with pytest.raises((OSError, StoreError), match=os.strerror(code)) as caught:
        shuffle_store(store, OPTIONS, retry=QUICK)
    assert str(store / "shuffled") in str(caught.value)  # the file
    assert "attempt" not in (store / "logs" / "shuffle.log").read_text()
    assert temporaries(store) == []


def test_the_error_of_the_last_attempt_is_raised(
    trmph_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_store(trmph_store)
    monkeypatch.setattr(os, "fsync", of_buckets(failing(10**9, errno.EIO, os.fsync, every=1)))
    with pytest.raises(StoreError, match=rf"{os.strerror(errno.EIO)}\. Check the disk") as caught:
        shuffle_store(store, OPTIONS, retry=QUICK)
    assert str(caught.value.path).startswith(str(store / "shuffled"))


def run_failing(retry: RetryPolicy, errors: list[OSError | None]) -> tuple[list[float], BaseException | None]:
    """Call a function that raises these errors in turn; return the waits and the raised error."""
    waits: list[float] = []
    coming = iter(errors)

    def work() -> None:
        if error := next(coming):
            raise error

    try:
        retry.call(work, sleep=waits.append, log=lambda text: None)
    except OSError as error:
        return waits, error
    return waits, None


def test_waits_double_up_to_the_maximum() -> None:
    error = OSError(errno.EIO, "no")
    retry = RetryPolicy(attempts=7, first_wait=0.5, longest_wait=3.0)
    assert run_failing(retry, [error] * 5 + [None]) == ([0.5, 1.0, 2.0, 3.0, 3.0], None)
    assert run_failing(retry, [error] * 9) == ([0.5, 1.0, 2.0, 3.0, 3.0, 3.0], error)
    other, full = OSError(errno.EIO, "no"), OSError(errno.ENOSPC, "no")  # ``error`` is used up
    assert run_failing(retry, [other, full, None]) == ([0.5], full)


def test_temporary_errors_are_recognized() -> None:
    assert all(is_transient(OSError(code, "")) for code in (*TEMPORARY, errno.EAGAIN))
    lasting = (*PERMANENT, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    assert not any(is_transient(OSError(code, "")) for code in lasting)
    assert not is_transient(OSError("no number"))
    assert not is_transient(ValueError())


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first_wait": -1.0}, {"longest_wait": -0.1}])
def test_retry_policies_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RetryPolicy(**wrong)
