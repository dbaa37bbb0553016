"""The store on disk: its folder, its manifest, its lock, its DuckDB session. Knows nothing of pickles."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hexdata.checks import check_location
from hexdata.errors import StoreError, StoreLockedError
from hexdata.remote import AnyPath, as_path, objects_below, scratch_folder, telling
from hexdata.store.files import exists, has_size, refuse_links, remove_file, remove_temporaries, remove_tree
from hexdata.store.lock import LOCK_NAME, Turn, locked
from hexdata.store.manifest import MANIFEST_NAME, Manifest
from hexdata.store.room import telling_full
from hexdata.text import shell_word

__all__ = ["Store", "store_word"]

_WORK_NAME: Final = ".work"
_FIRST_FOLDERS: Final = {"positions", "games", "sources", "rejected"}
"""What a first run makes before there is a manifest."""
_FOLDERS: Final = (*_FIRST_FOLDERS, "shuffled", "shards", "pickles", _WORK_NAME)
"""All that hexdata makes in a store's folder."""
_MADE_OF: Final = {
    "shuffle": ("games", "positions"),
    "export": ("shuffled",),
    "pickles-original": ("sources", "games", "positions"),
    "pickles-shuffled": ("sources", "games", "positions", "shuffled"),
}
"""The folders whose digest a stage keeps as ``of``."""
_COMMANDS: Final = {
    "pickles-original": "export --format pickle --order original",
    "pickles-shuffled": "export --format pickle --order shuffled",
}
"""The command of a stage, where it is not the stage's name."""


class Store:
    """One dataset's directory. Cheap to make; the manifest is read when opened."""

    def __init__(self, path: str | AnyPath, manifest: Manifest, *, shares_work: bool = False) -> None:
        self.path = as_path(path)
        self.manifest = manifest
        self.shares_work = shares_work or isinstance(self.path, Path)
        """Whether unfinished work lies in the store, where other machines see it too."""
        self.require_lock: Callable[[], None] = lambda: None
        """Raises ``StoreLockedError`` where the lock, held to write, has been lost."""

    @classmethod
    def open(cls, path: str | AnyPath, *, shares_work: bool = False) -> Store:
        """Open a store that exists.

        Args:
            path: its folder or its address.
            shares_work: whether other machines are to see its unfinished work.

        Raises:
            StoreError: there is no store at ``path``, or one that this release cannot read.
        """
        folder = _encodable(path)
        with telling(folder):  # no bucket, no access: then it is not a store that is missing
            return cls(folder, Manifest.load(folder), shares_work=shares_work)

    @classmethod
    def open_or_create(cls, path: str | AnyPath, *, shares_work: bool = False) -> Store:
        """Do as :meth:`open`, or begin a store in a folder that is empty or does not exist.

        Raises:
            StoreError: the folder holds something that is not a store.
        """
        folder = _encodable(path)
        new = cls(folder, Manifest(), shares_work=shares_work)
        if exists(folder / MANIFEST_NAME):
            return cls.open(folder, shares_work=shares_work)
        if folder.is_file():
            raise StoreError("a store is a folder, and this is a file", path=folder)
        if folder.is_dir() and not _is_begun(new):
            raise StoreError(
                "this folder holds files and is no store",
                path=folder,
                expected="a new or an empty folder, or a store",
                hint="Give another folder for the store.",
            )
        return new

    @property
    def work(self) -> AnyPath:
        """Folder of unfinished work; nothing below it is part of the dataset.

        That of a store in an object store lies on this machine, unless other machines share in the work.
        """
        if self.shares_work or isinstance(self.path, Path):
            return self.path / _WORK_NAME
        return scratch_folder("work", self.path)

    def files(self, folder: str) -> list[AnyPath]:
        """Return the absolute paths of the manifest's files below ``folder``, sorted."""
        return [(self.path / name).resolve() for name in self.manifest.files_in(folder)]

    def missing(self, folder: str) -> Iterator[str]:
        """Give the names of the manifest's files below ``folder`` that are not there with their sizes.

        Those in an object store are listed, rather than asked for one by one.
        """
        files = self.manifest.files_in(folder)
        if files and not isinstance(self.path, Path):
            sizes = objects_below(self.path / folder)
            yield from (n for n, f in files.items() if sizes.get(n.removeprefix(f"{folder}/")) != f.bytes)
            return
        for name, facts in files.items():
            if not has_size(self.path / name, facts.bytes):
                yield name

    def made_of(self, stage: str) -> str:
        """Return the digest of what the store holds now of the things that ``stage`` is made of."""
        return self.manifest.digest(*_MADE_OF[stage])

    def require_stage(self, stage: str) -> None:
        """Check that ``stage`` has been run on what the store holds now.

        Raises:
            StoreError: it has not been run, or what it was made of has changed since.
        """
        lineage = self.manifest.stages.get(stage)
        if lineage is None:
            raise StoreError(
                f"this store has no {stage} stage yet",
                path=self.path,
                hint=f"Run `hexdata {stage} {store_word(self.path)}`.",
            )
        if stage in _MADE_OF and lineage["of"] != self.made_of(stage):
            raise StoreError(
                f"the {stage} stage is older than the {_MADE_OF[stage][-1]} it was made of",
                path=self.path,
                hint=f"Run `{self._command(stage)}` again.",
            )

    def _command(self, stage: str) -> str:
        verb, *options = _COMMANDS.get(stage, stage).split(maxsplit=1)
        return " ".join(["hexdata", verb, store_word(self.path), *options])

    @contextmanager
    def writing(self, stage: str) -> Iterator[None]:
        """Hold the store's lock, for the one process that may write, and read the manifest anew.

        What a killed process was in the middle of writing is removed first.

        Raises:
            StoreLockedError: another process holds it; the message names it.
            StoreError: a link leads out of the store, or the disk fails.
            BudgetError: the disk takes no more.
        """
        place = self.path if isinstance(self.path, Path) else self.work
        with telling_full(place), self._locked(stage) as turn:
            if not turn.goes_on:
                remove_tree(self.work)  # others have written since, and what it speaks of may be theirs
            self._remove_temporaries()
            if exists(self.path / MANIFEST_NAME):
                self.manifest = Manifest.load(self.path)
            self.manifest.before_saving = self.require_lock = turn.require
            try:
                yield
            finally:
                with suppress(StoreLockedError):  # they are another's by now
                    turn.require()
                    self._remove_temporaries()  # of workers that were killed, here or elsewhere

    @contextmanager
    def _locked(self, stage: str) -> Iterator[Turn]:
        if isinstance(self.path, Path):
            refuse_links(self.path, (*_FOLDERS, "logs"))
        with locked(self.path, stage, shares_work=self.shares_work) as turn:
            yield turn

    def remove(self, folder: str) -> None:
        """Remove a folder of the store, while its lock is held.

        Raises:
            StoreLockedError: the lock has been lost, and another may have written there.
        """
        self.require_lock()
        remove_tree(self.path / folder)

    def keep_only(self, folder: str, names: Container[str]) -> None:
        """Remove all objects below a folder but for these: a run that died, or was overtaken, left them.

        They would be in the way of those that are yet to be put; a file on a disk is simply replaced.

        Args:
            folder: relative to the store.
            names: relative to the store.

        Raises:
            StoreLockedError: the lock has been lost.
        """
        if isinstance(self.path, Path):
            return
        strays = [name for name in objects_below(self.path / folder) if f"{folder}/{name}" not in names]
        for name in strays:
            self.require_lock()
            remove_file(self.path / folder / name)

    def _remove_temporaries(self) -> None:
        if not isinstance(self.path, Path):
            remove_temporaries(self.path)
            return
        for folder in _FOLDERS:
            remove_temporaries(self.path / folder)
        remove_temporaries(self.path, below=False)


def store_word(path: str | AnyPath) -> str:
    """Return the path of a store as a word of a command line, which is no option."""
    text = str(path)
    return shell_word(f"./{text}" if text.startswith("-") else text)


def _encodable(path: str | AnyPath) -> AnyPath:
    """Return the path of a store, if the libraries below can be given it.

    Raises:
        StoreError: its bytes are not UTF-8.
        ConfigError: it is no path, or an address that cannot be used.
    """
    check_location("store", path)
    try:
        os.fsencode(str(path)).decode("utf-8")
    except UnicodeDecodeError:
        raise StoreError(
            "the path of a store must be UTF-8", found=ascii(str(path)), hint="Give another folder."
        ) from None
    return as_path(path)


def _is_begun(store: Store) -> bool:
    """Say whether a folder without a manifest is empty, or a store whose first run was interrupted."""
    names = {path.name for path in store.path.iterdir() if not path.name.startswith(".")}
    begun = store.work if isinstance(store.path, Path) else store.path / LOCK_NAME
    return not names or (names <= _FIRST_FOLDERS and exists(begun))
