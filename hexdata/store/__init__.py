"""The store: a folder or object-store prefix with its manifest, lock and temporary work files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from hexdata.checks import check_location
from hexdata.errors import ConfigError, InputError, RejectRateError, StoreError, StoreLockedError
from hexdata.retry import attempts_of
from hexdata.storage import (
    LOCK_NAME,
    AnyPath,
    as_path,
    is_address,
    make_folder,
    storage_of,
    sync_folder,
    translate_errors,
)
from hexdata.store.commands import (
    MAX_RECORD_BYTES,
    RunRecord,
    read_record,
    record_path,
    run_command,
    stage_command,
    store_argument,
)
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.manifest import MANIFEST_NAME, Manifest
from hexdata.store.parquet import ParquetFiles, read_parquet

__all__ = ["STAGES", "Store"]

_WORK_NAME: Final = ".work"
_LOGS: Final = "logs"
_FIRST_FOLDERS: Final = {"positions", "games", "sources", "rejected", _LOGS}
"""Folders that the first run creates before the manifest exists."""
_FOLDERS: Final = (*_FIRST_FOLDERS, "shuffled", "shards", "pickles", _WORK_NAME)
"""All folders that hexdata creates in a store."""
STAGES: Final = {
    "convert": ("positions", "games", "sources", "rejected"),
    "shuffle": ("shuffled",),
    "export": ("shards",),
    "pickles-original": ("pickles/original",),
    "pickles-shuffled": ("pickles/shuffled",),
}
"""The stages that write files, and the folders they write, relative to the store."""
_INPUT_FOLDERS: Final = {
    "shuffle": ("games", "positions"),
    "export": ("shuffled",),
    "pickles-original": ("sources", "games", "positions"),
    "pickles-shuffled": ("sources", "games", "positions", "shuffled"),
}
"""Input folders of each stage. The manifest records their digest as ``of``."""
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
        self.shares_work = shares_work or storage_of(self.path).keeps_work
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
        with translate_errors(folder):  # a missing bucket or denied access is not reported as a missing store
            store = cls(folder, Manifest.load(folder), shares_work=shares_work)
            if store.work == folder / _WORK_NAME and storage_of(store.work / _READY / MANIFEST_NAME).exists():
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
        new = cls(folder, Manifest(), shares_work=shares_work)
        with translate_disk_full(folder):
            if storage_of(folder / MANIFEST_NAME).exists():
                return cls.open(folder, shares_work=shares_work)
            is_file = storage_of(folder).size() is not None
            is_started = not is_file and _is_started(new)
        if is_file:
            raise StoreError("a store must be a folder, but this is a file", path=folder)
        if not is_started:
            raise StoreError(
                "this folder contains files but is not a store",
                path=folder,
                expected="a new or an empty folder, or a store",
                hint="Choose another folder for the store; it is the last argument of `hexdata convert`.",
            )
        return new

    @property
    def work(self) -> AnyPath:
        """Folder of unfinished work, which is not part of the dataset.

        For an object store it is a folder on this machine, unless other machines share the work.
        """
        if self.shares_work:
            return self.path / _WORK_NAME
        return storage_of(self.path).work_path(_WORK_NAME, "work")

    @property
    def work_disk(self) -> AnyPath:
        """Path on the disk of the unfinished work."""
        return self.path if self.shares_work else self.work

    def files(self, folder: str) -> list[AnyPath]:
        """Return the absolute paths of the manifest's files below ``folder``, sorted."""
        return [(self.path / name).resolve() for name in self.manifest.files_in(folder)]

    def rows(self, folder: str) -> ParquetFiles:
        """Return the Parquet files of the manifest below ``folder``, sorted, as a sequence of rows."""
        files = [(self.path / name, facts.rows) for name, facts in self.manifest.files_in(folder).items()]
        return ParquetFiles(files)

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
        lineage = self.manifest.stages.get(stage)
        if lineage is None:
            raise StoreError(
                f"this store has no {stage} stage yet",
                path=self.path,
                hint=f"Run `{self.next_command(stage)}`.",
            )
        if stage in _INPUT_FOLDERS and lineage["of"] != self.input_digest(stage):
            raise StoreError(
                f"the {stage} stage is older than the {_INPUT_FOLDERS[stage][-1]}",
                path=self.path,
                hint=f"Run `{self.next_command(stage)}`.",
            )

    def _require_permission(self) -> None:
        """Check that the system allows this user to write to the folder of the store, if it is local.

        Raises:
            StoreError: The store is read-only.
        """
        local = storage_of(self.path).local
        if local is not None and local.is_dir() and not os.access(local, os.W_OK):
            raise StoreError(
                "the store is read-only",
                path=self.path,
                found="no permission to write to its folder",
                hint=f"Change the permissions with `chmod -R u+w {store_argument(self.path)}`, mount the "
                "disk for writing, or copy the store to a folder of your own, and run the command again.",
            )

    def unfinished(self, stage: str) -> RunRecord | None:
        """Return the options of the run of a stage that has begun and not finished; None if there is none."""
        return read_record(self.work, stage)

    def next_command(self, stage: str) -> str:
        """Return the command line that finishes the interrupted run of a stage, or runs it again or first."""
        run, lineage = self.unfinished(stage), self.manifest.stages.get(stage, {})
        if run is not None:
            return run_command(stage, self.path, run)
        again = stage_command(stage, lineage, self.path)
        return f"{again} --replace" if lineage and stage != "convert" and is_address(self.path) else again

    @contextmanager
    def _recording(self, stage: str, run: RunRecord) -> Iterator[None]:
        """Keep the options of a run until it has finished, for the command that resumes it.

        Each run appends a line, so a killed run always leaves its options or those of the run before.
        """
        path, before = record_path(self.work, stage), self.unfinished(stage)

        def record(options: RunRecord) -> None:
            line = json.dumps(asdict(options)).encode() + b"\n"
            storage_of(path).append(line, max_bytes=MAX_RECORD_BYTES)

        if isinstance(path.parent, Path):
            make_folder(path.parent)
        record(run)
        try:
            yield
        except BaseException as error:
            if isinstance(error, _REFUSALS) and before is not None:
                record(before)
            elif isinstance(error, _REFUSALS) or not storage_of(self.work / stage).names():
                storage_of(path).remove()
            raise
        storage_of(path).remove()

    @contextmanager
    def writing(self, stage: str, run: RunRecord | None = None) -> Iterator[None]:
        """Hold the store's lock and read the current manifest.

        Incomplete files of killed processes are removed first.

        Args:
            stage: Name of the stage that writes, for the message of other processes.
            run: Options of the run, for the command that resumes it. Default None: the defaults.

        Raises:
            StoreLockedError: Another process holds the lock; the message names it.
            StoreError: A link leads out of the store, the disk fails, or the schema version is an older one.
            BudgetError: The disk is full.
        """
        self._require_permission()
        try:
            with self._locked(stage), self._recording(stage, run or RunRecord({})):
                yield
        except _REFUSALS:
            self._remove_refused()
            raise

    @contextmanager
    def _locked(self, stage: str) -> Iterator[None]:
        """Hold the lock, remove incomplete files and read the manifest, as in :meth:`writing`."""
        held = storage_of(self.path).lock(stage, _FOLDERS, shares_work=self.shares_work)
        with translate_disk_full(self.work_disk), held as lock:
            if not lock.has_current_work:
                storage_of(self.work).remove_tree()  # out of date: other machines have written since
            storage_of(self.path).remove_unfinished(_FOLDERS)
            self._replace_files()
            if storage_of(self.path / MANIFEST_NAME).size() is not None:
                self.manifest = Manifest.load(self.path)
            self.manifest.before_saving = self.require_lock = lock.require
            store_answers = True
            try:
                yield
            except BaseException as error:
                store_answers = not is_address(self.path) or attempts_of(error) is None
                raise
            finally:
                if store_answers:
                    with suppress(StoreLockedError):  # the files now belong to another process
                        lock.require()
                        storage_of(self.path).remove_unfinished(_FOLDERS)  # of killed workers on any machine

    def target_of(self, stage: str, *, replace: bool) -> AnyPath:
        """Return the folder in which a stage writes its files, with their names in the store.

        This is the store, or a folder of the unfinished work if there is a result that stays until the new
        one is published. :meth:`publish` then replaces it.

        Args:
            stage: Name of the stage in the manifest.
            replace: Whether the user allows that the present result is removed first.

        Raises:
            ConfigError: There is a result in an object store, which must be removed first.
        """
        if replace or stage not in self.manifest.stages:
            return self.path
        if is_address(self.path):
            raise ConfigError(
                f"the store has a result of {stage}, and objects cannot be renamed to replace it",
                path=self.path,
                hint="Run the command with --replace, which removes the result first.",
            )
        return self.work / stage / "new"

    def publish(self, target: AnyPath) -> None:
        """Publish the manifest and the files in a folder of :meth:`target_of`."""
        self.manifest.save(target)
        if target != self.path:
            # From now on, a later process finishes what follows.
            Path(str(target)).replace(str(self.work / _READY))
            self._replace_files()

    def _replace_files(self) -> None:
        """Move the files of a complete result to their places, the manifest last, also after a kill."""
        ready = storage_of(self.work / _READY).local
        store = storage_of(self.path).local
        if ready is None or store is None or not (ready / MANIFEST_NAME).exists():
            return
        sync_folder(ready.parent)  # a power failure must not remove the result after the old files
        for folder in (folder for folders in STAGES.values() for folder in folders):
            if (ready / folder).exists():
                storage_of(store / folder).remove_tree(durable=True)
                make_folder((store / folder).parent)
                (ready / folder).replace(store / folder)
                sync_folder((store / folder).parent)
        (ready / MANIFEST_NAME).replace(store / MANIFEST_NAME)
        sync_folder(store)
        storage_of(ready).remove_tree()

    def _remove_refused(self) -> None:
        """Remove a local folder in which a refused run has published nothing, since it is not a store."""
        local, known = storage_of(self.path).local, {LOCK_NAME, _WORK_NAME, _LOGS}
        if local is None or self.unfinished("convert") is not None:
            return
        if {path.name for path in local.iterdir()} <= known:
            storage_of(self.work).remove_tree()
            storage_of(local / _LOGS).remove_tree()
            storage_of(local / LOCK_NAME).remove()
            with suppress(OSError):
                local.rmdir()

    def unpublish(self, *folders: str) -> None:
        """Remove folders of the store: their files from the manifest, which is saved, and then from the disk.

        The caller must hold the lock.

        Raises:
            OSError: As for :meth:`remove`.
            StoreLockedError: As for :meth:`remove`.
        """
        listed, prefixes = self.manifest.files, tuple(f"{folder}/" for folder in folders)
        self.manifest.files = {name: facts for name, facts in listed.items() if not name.startswith(prefixes)}
        self.manifest.save(self.path)
        for folder, prefix in zip(folders, prefixes, strict=True):
            self.remove(folder, [name.removeprefix(prefix) for name in listed if name.startswith(prefix)])

    def remove(self, folder: str, known: Iterable[str] = ()) -> None:
        """Remove a folder of the store, so that it is gone even after a crash. The caller must hold the lock.

        Args:
            folder: Name of the folder.
            known: Names of files below it, which the listing of an object store may lack if they are new.
                Default: none.

        Raises:
            OSError: A file could not be removed.
            StoreLockedError: The lock has been lost, so another process may have written there.
        """
        self.require_lock()
        storage_of(self.path / folder).remove_tree(self.require_lock, durable=True, known=known)

    def keep_only(self, folder: str, names: Container[str]) -> None:
        """Remove all objects below a folder except the given ones.

        Interrupted runs leave such objects behind, and an existing object would block a new one. On a disk
        nothing is removed, because new files replace old ones.

        Args:
            folder: Folder, relative to the store.
            names: Objects to keep, relative to the store.

        Raises:
            StoreLockedError: The lock has been lost.
        """
        for name in storage_of(self.path / folder).unreplaceable():
            if f"{folder}/{name}" not in names:
                self.require_lock()
                storage_of(self.path / folder / name).remove(self.require_lock)


def _check_path(path: str | AnyPath) -> AnyPath:
    """Return the path of a store after checking that the libraries accept it.

    Raises:
        StoreError: The path is not valid UTF-8.
        ConfigError: It is not a path or a valid address.
    """
    check_location("store", path)
    try:
        os.fsencode(str(path)).decode("utf-8")
    except UnicodeDecodeError:
        raise StoreError(
            "the path of a store must be valid UTF-8", found=ascii(str(path)), hint="Choose another folder."
        ) from None
    return as_path(path)


def _is_started(store: Store) -> bool:
    """Return whether a folder without a manifest is new or empty, or its first run was interrupted."""
    names = {name for name in storage_of(store.path).names() if not name.startswith(".")}
    return not names or (
        names <= _FIRST_FOLDERS
        and any(storage_of(store.path / name).exists() for name in (LOCK_NAME, _WORK_NAME))
    )
