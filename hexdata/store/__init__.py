"""The store: a folder or object-store prefix with its manifest, lock and temporary work files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from hexdata.checks import check_location
from hexdata.errors import ConfigError, InputError, RejectRateError, StoreError
from hexdata.storage import (
    AnyPath,
    as_path,
    client_memory,
    is_address,
    local_work,
    storage_of,
    translate_errors,
)
from hexdata.storage.local import make_folder, sync_folder
from hexdata.storage.lock import LOCK_NAME
from hexdata.store.commands import RunRecord, read_record, record_path, run_command, stage_command
from hexdata.store.files import write_bytes
from hexdata.store.journal import journaled
from hexdata.store.manifest import MANIFEST_NAME, Manifest
from hexdata.store.parquet import ParquetRows, memory_returned, read_parquet

_WORK_NAME: Final = ".work"
STAGES: Final = {
    "convert": ("positions", "games", "sources", "rejected"),
    "shuffle": ("shuffled",),
    "export": ("shards",),
    "pickles-original": ("pickles/original",),
    "pickles-shuffled": ("pickles/shuffled",),
}
"""The stages that write files, and the folders they write, relative to the store."""
_FIRST_FOLDERS: Final = {*STAGES["convert"], "logs"}
"""Folders that the first run creates before the manifest exists."""
_FOLDERS: Final = (*_FIRST_FOLDERS, "shuffled", "shards", "pickles", _WORK_NAME)
"""All folders that hexdata creates in a store."""
_INPUT_FOLDERS: Final = {
    "shuffle": ("games", "positions"),
    "export": ("shuffled",),
    "pickles-original": ("sources", "games", "positions"),
    "pickles-shuffled": ("sources", "games", "positions", "shuffled"),
}
"""Input folders of each stage. The manifest records their digest as ``of``."""
_FILE_MEMORY: Final = 10_000
"""Bytes of memory for each Parquet file: its facts, and its footer, which DuckDB does not count.

With 10,400 files of positions and as many of games, the rules of ``verify`` took 197 MB more than with 6.
"""
_READY: Final = "ready"
"""Folder of the unfinished work for a complete result while it replaces the one before."""
_REFUSALS: Final = (ConfigError, InputError, RejectRateError)
"""Errors that the same command meets again."""


class Store:
    """One dataset on disk or in an object store.

    Create it with :meth:`open` or :meth:`open_or_create`, which read the manifest.

    Attributes:
        path: Folder or address of the store.
        manifest: Content of the store.
    """

    def __init__(self, path: str | AnyPath, manifest: Manifest, *, shares_work: bool = False) -> None:
        self.path = as_path(path)
        self.manifest = manifest
        self.shares_work = shares_work or not is_address(self.path)
        """True if unfinished work is kept in the store, so that other machines can see it."""
        self.require_lock: Callable[[], None] = lambda: None
        """Raises ``StoreLockedError`` if the lock, held for writing, has been lost."""
        self.intact: set[str] = set()
        """Names of the files that were compared with their digests before a view read them."""

    @classmethod
    def open(cls, path: str | AnyPath, *, shares_work: bool = False) -> Store:
        """Open an existing store.

        Args:
            path: Folder or address of the store.
            shares_work: Whether other machines need to see its unfinished work (default: False).

        Raises:
            StoreError: There is no store at ``path``, or this release cannot read it.
            ConfigError: ``path`` is not a path or a valid address.
        """
        folder = _check_path(path)
        with translate_errors():  # a missing bucket or denied access is not reported as a missing store
            store = cls(folder, Manifest.load(folder), shares_work=shares_work)
            if not is_address(folder) and storage_of(store.work / _READY / MANIFEST_NAME).size() is not None:
                # Taking the lock finishes the replacement. In a store that is read-only or locked, the reader
                # uses what it finds.
                with suppress(OSError, StoreError), store._locked("replace"):
                    pass  # a process was killed while it replaced files
            return store

    @classmethod
    def open_or_create(cls, path: str | AnyPath, *, shares_work: bool = False) -> Store:
        """Open a store as :meth:`open` does, or start one in an empty or new folder.

        Args:
            path: Folder or address of the store.
            shares_work: Whether other machines need to see its unfinished work (default: False).

        Raises:
            StoreError: The folder contains something other than a store, or the disk fails.
            ConfigError: ``path`` is not a path or a valid address.
        """
        folder = _check_path(path)
        storage = storage_of(folder)
        with translate_errors(folder):
            if storage_of(folder / MANIFEST_NAME).size() is not None:
                return cls.open(folder, shares_work=shares_work)
            is_file, all_names = storage.size() is not None, storage.names()
        # Hidden files, such as .DS_Store, do not count as content.
        names = {name for name in all_names if not name.startswith(".")}
        was_begun = not {LOCK_NAME, _WORK_NAME}.isdisjoint(all_names)  # its first run was interrupted
        # A killed first run leaves some of these folders. The lock or the work shows that they are hexdata's.
        if is_file or (names and not (was_begun and names <= _FIRST_FOLDERS)):
            found = "this is a file" if is_file else "this folder contains files but is not a store"
            hint = "Choose another folder as the last argument of `hexdata convert`."
            raise StoreError(f"a store needs a new folder: {found}", path=folder, hint=hint)
        return cls(folder, Manifest(), shares_work=shares_work)

    @property
    def work(self) -> AnyPath:
        """Folder of unfinished work, which is not part of the dataset.

        For an object store it is a folder on this machine, unless other machines share the work.
        """
        return self.path / _WORK_NAME if self.shares_work else local_work(self.path, _WORK_NAME)

    def reader_memory(self, folder: str = "") -> int:
        """Return the bytes that reading the Parquet files below ``folder`` takes besides their rows.

        They are for each file, and for the client of an object store. Default: all files of the store.
        """
        names = [name for name in self.manifest.files if name.startswith(folder)]
        return client_memory(self.path) + _FILE_MEMORY * sum(name.endswith(".parquet") for name in names)

    def files(self, folder: str) -> list[AnyPath]:
        """Return the absolute paths of the manifest's files below ``folder``, sorted."""
        return [(self.path / name).resolve() for name in self.manifest.files_in(folder)]

    def rows(self, folder: str) -> ParquetRows:
        """Return the Parquet files of the manifest below ``folder``, sorted, as a sequence of rows."""
        files = [(self.path / name, facts.rows) for name, facts in self.manifest.files_in(folder).items()]
        return ParquetRows.of(files)

    def missing(self, folder: str) -> Iterator[str]:
        """Yield the names of the manifest's files below ``folder`` that are missing or have another size.

        The folder is listed once, since an object store needs a request for each file otherwise.
        """
        if files := self.manifest.files_in(folder):
            sizes = storage_of(self.path / folder).files()
            yield from (n for n, f in files.items() if sizes.get(n.removeprefix(f"{folder}/")) != f.bytes)

    def count_without_game(self) -> int:
        """Return the number of positions that belong to no known game."""
        tables = (read_parquet(path, ["positions"]) for path in self.files("games"))
        in_games = sum(int(table["positions"].to_numpy().sum()) for table in tables)
        return self.manifest.counts.get("positions", 0) - in_games

    def input_digest(self, stage: str) -> str:
        """Return the digest of the current input files of ``stage``."""
        return self.manifest.digest(*_INPUT_FOLDERS[stage])

    def require_stage(self, stage: str) -> None:
        """Check that ``stage`` has been run on the current content of the store.

        Raises:
            StoreError: The stage has not been run, or its inputs have changed since.
        """
        lineage, fault = self.manifest.stages.get(stage), f"this store has no {stage} stage yet"
        if lineage is not None and lineage["of"] != self.input_digest(stage):
            newer = _INPUT_FOLDERS[stage][-1].replace("shuffled", "shuffled positions")
            fault = f"the {stage} stage is older than the {newer} of the store"
        elif lineage is not None:
            return
        raise StoreError(fault, path=self.path, hint=f"Run `{self.next_command(stage)}`.")

    def unfinished(self, stage: str) -> RunRecord | None:
        """Return the options of the run of a stage that has begun and not finished; None if there is none."""
        return read_record(self.work, stage)

    def next_command(self, stage: str) -> str:
        """Return the command line that finishes the interrupted run of a stage, or runs it again or first."""
        run, lineage = self.unfinished(stage), self.manifest.stages.get(stage, {})
        if run is not None:
            return run_command(stage, self.path, run)
        again = stage_command(stage, lineage, self.path)
        # Objects cannot be renamed, so a stage replaces a result there only with --replace.
        return f"{again} --replace" if lineage and stage != "convert" and is_address(self.path) else again

    @contextmanager
    def writing(self, stage: str, run: RunRecord | None = None) -> Iterator[Callable[..., None]]:
        """Hold the store's lock, read the current manifest and measure the run for the journal.

        Incomplete files of killed processes are removed first.

        Args:
            stage: Name of the stage that writes, for the message of other processes.
            run: Options of the run, for the command that resumes it. Default None: the defaults.

        Yields:
            A function to call with ``positions``, ``bytes`` and ``resumed`` when the manifest is published.

        Raises:
            StoreLockedError: Another process holds the lock; the message names it.
            StoreError: A link leads out of the store, the disk fails, or the schema version is an older one.
            BudgetError: The disk is full.
        """
        options = RunRecord({}) if run is None else run
        try:
            with self._locked(stage), journaled(self.path, stage) as finish, memory_returned():
                before = self.unfinished(stage)
                self._keep(stage, options)
                try:
                    yield finish
                except BaseException as error:
                    # Without any unfinished file there is nothing to resume.
                    resumes = options if storage_of(self.work / stage).names() else None
                    # The same command would be refused again, so the one that resumes is that before.
                    self._keep(stage, before if isinstance(error, _REFUSALS) else resumes)
                    raise
                self._keep(stage, None)
        except _REFUSALS:
            # Only now, since the lock that was held until here is a file in the folder that may be removed.
            self._remove_refused()
            raise

    def _keep(self, stage: str, run: RunRecord | None) -> None:
        """Keep the options of a run until it has finished, for the command that resumes it; None for none.

        A killed run always leaves its options or those of the run before.
        """
        path = record_path(self.work, stage)
        if run is None:
            storage_of(path).remove()
        else:
            # In ASCII, as names of inputs may have bytes that are not UTF-8.
            write_bytes(path, json.dumps(msgspec.to_builtins(run)).encode())

    @contextmanager
    def _locked(self, stage: str) -> Iterator[None]:
        """Hold the lock, remove incomplete files and read the manifest, as in :meth:`writing`."""
        storage = storage_of(self.path)
        with translate_errors(self.work), storage.lock(stage, _FOLDERS) as require_lock:
            # Under the lock no other process writes here, so these files are of killed processes.
            storage.remove_unfinished(_FOLDERS)
            self._replace_files()
            if storage_of(self.path / MANIFEST_NAME).size() is not None:
                self.manifest = Manifest.load(self.path)
            self.manifest.before_saving = self.require_lock = require_lock
            try:
                yield
            finally:
                storage.remove_unfinished(_FOLDERS)  # of killed workers, on a local disk

    def replace_files(self, new: Path) -> None:
        """Replace files of a local store by those of a folder with their names, also its manifest.

        Once the folder has been renamed, a later process finishes what follows.
        """
        # This rename decides: before it the old result stays, after it any process completes the new one.
        new.replace(str(self.work / _READY))
        self._replace_files()

    def _replace_files(self) -> None:
        """Move the files of a complete result to their places, the manifest last, also after a kill."""
        ready = storage_of(self.work / _READY).local
        store = storage_of(self.path).local
        if ready is None or store is None or not (ready / MANIFEST_NAME).exists():
            return
        sync_folder(ready.parent)  # a power failure must not remove the result after the old files
        for folder in (folder for folders in STAGES.values() for folder in folders):
            # After a kill, folders that were already moved are no longer here and are skipped.
            if (ready / folder).exists():
                # A folder cannot be renamed to the name of one that contains files.
                storage_of(store / folder).remove_tree(self.require_lock)
                make_folder((store / folder).parent)
                (ready / folder).replace(store / folder)
                sync_folder((store / folder).parent)
        # Last: as long as the manifest is in the folder of the result, the next process repeats these steps.
        (ready / MANIFEST_NAME).replace(store / MANIFEST_NAME)
        sync_folder(store)
        storage_of(ready).remove_tree()

    def _remove_refused(self) -> None:
        """Remove a local folder in which a refused run has published nothing, since it is not a store."""
        local = storage_of(self.path).local
        # The files of an interrupted convert stay, so that it can be resumed.
        if local is None or self.unfinished("convert") is not None:
            return
        if {path.name for path in local.iterdir()} <= {LOCK_NAME, _WORK_NAME, "logs"}:
            for name in (_WORK_NAME, "logs"):
                storage_of(local / name).remove_tree()
            storage_of(local / LOCK_NAME).remove()
            with suppress(OSError):
                local.rmdir()

    def remove(self, folder: str) -> None:
        """Remove a folder of the store, so that it is gone even after a crash. The caller must hold the lock.

        Args:
            folder: Name of the folder.

        Raises:
            OSError: A file could not be removed.
            StoreLockedError: The lock has been lost, so another process may have written there.
        """
        storage_of(self.path / folder).remove_tree(self.require_lock)


def _check_path(path: str | AnyPath) -> AnyPath:
    """Return the path of a store after checking that the libraries accept it.

    Raises:
        StoreError: The path is not valid UTF-8.
        ConfigError: It is not a path or a valid address.
    """
    check_location("store", path)
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise StoreError("the path of a store must be valid UTF-8", found=ascii(str(path))) from None
    return as_path(path)
