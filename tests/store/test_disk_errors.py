"""Disk errors: each gives one message with the file and a hint, at every failing call."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import BudgetError, HexdataError, StoreError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.retry import is_transient
from hexdata.shuffle import RetryPolicy, ShuffleOptions, shuffle_store
from hexdata.sql import database
from hexdata.storage import HashingFile, LocalStorage, add_path_to_error, local
from hexdata.store import Store
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.integrity import find_damage
from hexdata.store.manifest import Manifest
from hexdata.verify import verify_store
from tests.pairs import every_pair

if TYPE_CHECKING:
    from tests.conftest import CopyStore, DemoTrmph

ONCE = RetryPolicy(attempts=1)
HINTS = {
    errno.EIO: "Check the disk",
    errno.EROFS: "Mount the disk for writing",
    errno.EMFILE: "ulimit -n",
    errno.ENOSPC: "Free disk space",
}


@pytest.fixture(scope="module")
def shuffled(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shuffled store. Read only: copy it."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("shuffled") / "store")
    shuffle_store(store, ShuffleOptions(threads=1))
    return store


def splits_of(store: Path) -> ConvertOptions:
    begun = Manifest.load(store).stages["convert"]
    return ConvertOptions(val=begun["val"], test=begun["test"])


Stage = Callable[[Path, Path], Any]
STAGES: dict[str, Stage] = {
    "convert": lambda store, inputs: convert_sources(inputs, store, splits_of(store)),
    "shuffle": lambda store, _: shuffle_store(store, ShuffleOptions(seed=9, threads=1), retry=ONCE),
    "export": lambda store, _: export_shards(store, ExportOptions(workers=1)),
    "pickles": lambda store, _: export_pickles(store, PicklesOptions(order="original", workers=1)),
}


def failing_write(failing: Failing, folder: Path) -> Callable[[Any, Any], int]:
    """Return a replacement for ``HashingFile.write`` that calls ``failing`` first for files below a folder.

    The garbage collector may end files of earlier tests, in which an error was raised.
    """
    whole = HashingFile.write

    def write(file: Any, data: Any) -> int:
        if Path(file._path).is_relative_to(folder):
            with add_path_to_error(file._path):
                failing()
        return whole(file, data)

    return write


class Failing:
    """A system function that fails at its n-th call, with an error that has no file name.

    An error that may be temporary is also that of all later calls.
    """

    def __init__(self, function: Callable[..., Any], call: int, code: int) -> None:
        self.function, self.left, self.code = function, call, code
        self.lock = threading.Lock()  # several threads may call at the same time

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.left -= 1
            is_failing = self.left == 0 or (self.left < 0 and is_transient(OSError(self.code, "")))
        if is_failing:
            raise OSError(self.code, os.strerror(self.code))
        return self.function(*args, **kwargs)


@every_pair(stage=STAGES, call=["fsync", "flock", "write"], code=HINTS, number=[1, 2, 5])
def test_every_failing_call_gives_one_message(
    stage: str,
    call: str,
    code: int,
    number: int,
    shuffled: Path,
    demo_trmph: DemoTrmph,
    tmp_path: Path,
    copy_store: CopyStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = tmp_path / "more"
    demo_trmph(inputs, files=1, games=8, seed=5)
    store = copy_store(shuffled)
    failing, raised = Failing(lambda: None, number, code), None
    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", Failing(os.fsync, number, code))
        elif call == "flock":
            fcntl = pytest.importorskip("fcntl")
            patch.setattr(fcntl, "flock", Failing(fcntl.flock, 1, code))
        else:
            patch.setattr(HashingFile, "write", failing_write(failing, tmp_path))
        try:
            STAGES[stage](store, inputs)
        except HexdataError as error:
            raised = error
    if raised is None and call == "write" and number > 2:
        assert failing.left > 0  # units were saved together, so the stage wrote less often
        return
    assert isinstance(raised, BudgetError if code == errno.ENOSPC else StoreError)
    assert str(raised.path).startswith(str(store))
    full = code == errno.ENOSPC and "the disk is full" in str(raised)
    assert full or os.strerror(code) in str(raised)
    assert HINTS[code] in str(raised)
    STAGES[stage](store, inputs)  # resumes
    opened = Store.open(store)
    assert not find_damage(opened, opened.manifest.files)


class FailingBelow(Failing):
    """A system function that fails at its n-th call for a path below a folder, and names the path.

    Folders that exist are not made, so these calls do not count.
    """

    def __init__(self, function: Callable[..., Any], call: int, code: int, folder: Path) -> None:
        super().__init__(function, call, code)
        self.folder = folder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = args[0] if isinstance(args[0], str | Path) else getattr(args[0], "name", "")
        is_made = self.function.__name__ == "mkdir" and Path(named).is_dir()
        if is_made or not str(named).startswith(f"{self.folder}/"):
            return self.function(*args, **kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except OSError as error:
            if self.left <= 0 and error.errno == self.code:
                error.filename = str(named)
            raise


CALLS: dict[str, tuple[Any, str]] = {
    "mkdir": (os, "mkdir"),
    "open": (io, "open"),
    "os.open": (os, "open"),
    "read": (hashlib, "file_digest"),
    "rename": (os, "replace"),
    "list": (os, "scandir"),
}
"""Functions of the system that take a path or a file, by what they do."""


@every_pair(stage=STAGES, call=CALLS, code=[errno.EIO, errno.ENOSPC], number=[1, 4])
def test_every_failing_call_with_a_path_gives_one_message(
    stage: str,
    call: str,
    code: int,
    number: int,
    shuffled: Path,
    demo_trmph: DemoTrmph,
    tmp_path: Path,
    copy_store: CopyStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a log or the database, a warning is given instead, and the stage completes."""
    inputs = tmp_path / "more"
    demo_trmph(inputs, files=1, games=8, seed=5)
    module, name = CALLS[call]
    store = copy_store(shuffled)
    failing = FailingBelow(getattr(module, name), number, code, store)
    error = None
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(module, name, failing)
        try:
            STAGES[stage](store, inputs)
        except HexdataError as caught:
            error = caught
    if failing.left > 0:  # fewer calls than that
        assert error is None
        return
    if error is None:
        assert warned
    else:
        assert str(error.path).startswith(str(store))
        assert os.strerror(code) in str(error)
        assert error.hint
    STAGES[stage](store, inputs)  # resumes
    opened = Store.open(store)
    assert not find_damage(opened, opened.manifest.files)


def test_a_lock_that_cannot_be_truncated_is_named(
    shuffled: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untruncatable(io.FileIO):
        def truncate(self, size: int | None = None) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = copy_store(shuffled)
    monkeypatch.setattr("hexdata.storage.lock.open_in_place", lambda path: Untruncatable(path, "a+"))
    with pytest.raises(StoreError, match=r"Input/output error.*Check the disk") as caught:
        shuffle_store(store, ShuffleOptions(seed=9, threads=1))
    assert caught.value.path == str(store / ".lock")


def test_a_database_that_cannot_be_written_is_a_note(
    trmph_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "hexdata.duckdb")

    store = copy_store(trmph_store)
    monkeypatch.setattr(database, "write_bytes", failing)
    with pytest.warns(UserWarning, match="hexdata.duckdb was not written, the stage is complete"):
        result = shuffle_store(store, ShuffleOptions(threads=1, seed=2))
    assert not result.already_done
    assert verify_store(store).ok


def test_a_log_that_cannot_be_written_is_a_note(
    trmph_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one warning, regardless of the number of lines."""

    append = LocalStorage.append

    def failing(file: LocalStorage, line: bytes, *, max_bytes: int) -> None:
        if file.path.name == "shuffle.log":
            raise OSError(errno.EIO, os.strerror(errno.EIO), "shuffle.log")
        append(file, line, max_bytes=max_bytes)

    store = copy_store(trmph_store)
    monkeypatch.setattr(LocalStorage, "append", failing)
    with pytest.warns(UserWarning, match="the log cannot be written") as caught:
        shuffle_store(store, ShuffleOptions(threads=1, seed=2))
    assert len(caught) == 1
    assert verify_store(store).ok


def failing_unlink(ending: str, kept: list[str]) -> Callable[..., None]:
    """Return a replacement for ``os.unlink`` that fails for names with an ending, and lists them."""
    unlink = os.unlink

    def fail(path: str | Path, **options: Any) -> None:
        if str(path).endswith(ending):
            kept.append(str(path))
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path, **options)

    return fail


def test_a_shuffle_ends_if_old_shards_cannot_be_removed(
    shuffled: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers would take them for shards of the new shuffle. The same command again removes them."""
    store = copy_store(shuffled)
    export_shards(store, ExportOptions(workers=1))
    again = ShuffleOptions(seed=9, threads=1, replace=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", failing_unlink(".tar", []))
        with pytest.raises(StoreError, match=rf"{store}/shards/.*\.tar.*Check the disk"):
            shuffle_store(store, again, retry=ONCE)
    assert any((store / "shards").iterdir())
    shuffle_store(store, again)
    assert not (store / "shards").exists()
    verify_store(store).require()


def test_removed_folders_of_a_store_are_removed_after_a_crash_too(
    shuffled: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_store(shuffled)
    synced: list[Path] = []

    def record(folder: Path) -> None:
        assert not (store / "shuffled").exists()
        synced.append(folder)

    opened = Store.open(store)
    with opened.writing("shuffle"), monkeypatch.context() as patched:
        patched.setattr(local, "sync_folder", record)
        opened.remove("shuffled")
    assert synced == [store]


def test_removed_shards_that_a_process_has_open_on_nfs_are_no_error(
    shuffled: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS renames an open file instead of removing it, so its folder stays."""
    store = copy_store(shuffled)
    export_shards(store, ExportOptions(workers=1))
    unlink = os.unlink

    def rename(path: str | Path, *, dir_fd: int | None = None) -> None:
        if str(path).endswith(".tar"):
            os.rename(path, f".nfs{path}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", rename)
        shuffle_store(store, ShuffleOptions(seed=9, threads=1, replace=True), retry=ONCE)
    assert all(path.name.startswith(".nfs") for path in (store / "shards").iterdir())
    export_shards(store, ExportOptions(workers=1))


def test_an_error_names_its_file_also_if_the_name_is_a_path(tmp_path: Path) -> None:
    """``io.FileIO`` keeps the path that it was given."""
    message = rf"{tmp_path}/shard\.tar: the system cannot read"
    with pytest.raises(StoreError, match=message), translate_disk_full(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), tmp_path / "shard.tar")


def test_a_temporary_file_that_cannot_be_removed_does_not_fail_a_check(
    shuffled: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(os, "unlink", failing_unlink(".parquet", kept))
    verify_store(shuffled).require()
    assert kept
    assert list(temporary.rglob(kept[0]))
