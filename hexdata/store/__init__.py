"""The store: a folder or object-store prefix with its manifest, lock and temporary work files."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from hexdata.checks import check_location
from hexdata.errors import StoreError, StoreLockedError
from hexdata.retry import attempts_of
from hexdata.storage import LOCK_NAME, AnyPath, as_path, is_address, storage_of, translate_errors
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.manifest import MANIFEST_NAME, Manifest
from hexdata.store.parquet import ParquetFiles, read_parquet
from hexdata.text import shell_word

__all__ = ["Store", "store_argument"]

_WORK_NAME: Final = ".work"
_FIRST_FOLDERS: Final = {"positions", "games", "sources", "rejected", "logs"}
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
_COMMANDS: Final = {
    "pickles-original": "export --format pickle --order original",
    "pickles-shuffled": "export --format pickle --order shuffled",
}
"""Command of a stage, if it differs from the stage's name."""


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
            return cls(folder, Manifest.load(folder), shares_work=shares_work)

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
                hint=f"Run `hexdata {stage} {store_argument(self.path)}`.",
            )
        if stage in _INPUT_FOLDERS and lineage["of"] != self.input_digest(stage):
            raise StoreError(
                f"the {stage} stage is older than the {_INPUT_FOLDERS[stage][-1]}",
                path=self.path,
                hint=f"Run `{self._command(stage)}` again.",
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

    def _command(self, stage: str) -> str:
        verb, *options = _COMMANDS.get(stage, stage).split(maxsplit=1)
        return " ".join(["hexdata", verb, store_argument(self.path), *options])

    @contextmanager
    def writing(self, stage: str) -> Iterator[None]:
        """Hold the store's lock and read the current manifest.

        Incomplete files of killed processes are removed first.

        Args:
            stage: Name of the stage that writes, for the message of other processes.

        Raises:
            StoreLockedError: Another process holds the lock; the message names it.
            StoreError: A link leads out of the store, the disk fails, or the schema version is an older one.
            BudgetError: The disk is full.
        """
        self._require_permission()
        held = storage_of(self.path).lock(stage, _FOLDERS, shares_work=self.shares_work)
        with translate_disk_full(self.work_disk), held as lock:
            if not lock.has_current_work:
                storage_of(self.work).remove_tree()  # out of date: other machines have written since
            storage_of(self.path).remove_unfinished(_FOLDERS)
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


def store_argument(path: str | AnyPath) -> str:
    """Return the path of a store quoted for a shell, in a form that is not mistaken for an option."""
    text = str(path)
    return shell_word(f"./{text}" if text.startswith("-") else text)


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
