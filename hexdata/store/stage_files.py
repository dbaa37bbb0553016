"""The files of one run of a stage: are they done? write, record, publish.

``convert``, ``shuffle`` and both exports take the same steps on a locked store:

1. If the manifest lists a result of the same inputs and options, its files are checked. An undamaged result
   is done. Of a damaged one, only the damaged files are written again, in place.
2. Otherwise the files are written to the store, or to a folder of the unfinished work while there is a
   result that stays until the new one is published.
3. Files that an interrupted run of the same plan has recorded in its ledger are kept if they are undamaged.
4. Each further file is recorded in the ledger when it has its final name.
5. The manifest is published last; then the unfinished work, with the ledger, is removed.

Each step can be repeated: a run that was killed at any moment is finished by the same command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from hexdata.errors import ConfigError, StoreError
from hexdata.progress import Progress
from hexdata.storage import is_address, storage_of
from hexdata.store import STAGES, Store
from hexdata.store.files import FileFacts, Ledger
from hexdata.store.integrity import find_damage

_SUFFIXES: Final = (".parquet", ".tar", ".pkl.gz", ".json")
"""Ends of the names of all files that stages write."""


class StageFiles:
    """The files that one run of a stage writes. The caller must hold the store's lock.

    Attributes:
        work: Folder of the unfinished work of the stage.
        target: Folder in which the files are written, with their names in the store.
        entries: Facts of the complete files of this run, by name relative to the store. They are models
            of the class ``entry`` with ``rows``, ``bytes`` and ``sha256``, and perhaps more.
    """

    def __init__(self, store: Store, stage: str, entry: type, progress: Progress) -> None:
        self.work = store.work / stage
        self.target = store.path
        self.entries: dict[str, Any] = {}
        self._store = store
        self._stage = stage
        self._entry = entry
        self._progress = progress

    def find_damage(self, files: Mapping[str, FileFacts]) -> dict[str, StoreError]:
        """Return the damaged ones among some files of the target, as the progress step "check files"."""
        self._progress.begin("check files", None, "bytes")
        return find_damage(self._store, files, root=self.target)

    def choose_target(self, *, replace: bool) -> None:
        """Choose where a new result is written.

        Args:
            replace: Whether the user allows that the present result is removed first.

        Raises:
            ConfigError: There is a result in an object store, which must be removed first.
        """
        if not replace and self._stage in self._store.manifest.stages:
            if is_address(self._store.path):
                reason = f"the store has a result of {self._stage}, and objects cannot be replaced together"
                hint = "Run the command with --replace, which removes the result first."
                raise ConfigError(reason, path=self._store.path, hint=hint)
            # On the disk of the store, so that the old result can be replaced by renaming.
            self.target = self.work / "new"

    def open_ledger(self, plan: object) -> Ledger:
        """Open the ledger. That of another plan has no units and is replaced when a file is recorded."""
        return Ledger(self.work / "progress.json", self._stage, plan, self._entry)

    def resume(self, plan: object, names: Iterable[str], intact: Mapping[str, Any] | None = None) -> None:
        """Find the files that need not be written.

        Args:
            plan: All that determines the files, as a JSON value.
            names: Names of all files of the result.
            intact: Undamaged files of the published result that is repaired; None if there is none (default).
        """
        self._ledger = self.open_ledger(plan)
        stays = intact is not None or self._stage == "convert" or self.target != self._store.path
        if not stays and self._stage in self._store.manifest.stages:
            self._ledger.done.clear()  # another machine has published a result since, which is removed first
        self.entries = dict(intact or {})
        # A disk may have lost or changed a file after it was recorded.
        left = [name for name in names if name in self._ledger.done and name not in self.entries]
        if left:
            damaged = self.find_damage({name: _facts(self._ledger.done[name]) for name in left})
            self.entries |= {name: self._ledger.done[name] for name in left if name not in damaged}

    def begin_new(self, *stages: str) -> None:
        """Remove the files of unfinished runs, and in the store itself these stages with their files.

        They are removed from the manifest first, so that no reader finds it without its files.
        """
        manifest, folders = self._store.manifest, [folder for stage in stages for folder in STAGES[stage]]
        if self.target != self._store.path:
            storage_of(self.target).remove_tree()
            return
        manifest.stages = {name: each for name, each in manifest.stages.items() if name not in stages}
        manifest.files = _without(manifest.files, folders)
        manifest.save(self._store.path)
        for folder in folders:
            self._store.remove(folder)

    def remove_others(self) -> None:
        """Remove files of the stage in the store that belong neither to this run nor to a result that stays.

        Interrupted runs leave them, and an object that exists would block a new one.

        Raises:
            StoreLockedError: The lock has been lost.
        """
        if self.target != self._store.path:
            return
        named = self._kept_files().keys() | self.entries.keys()
        for folder in STAGES[self._stage]:
            for name in storage_of(self._store.path / folder).files():
                if name.endswith(_SUFFIXES) and f"{folder}/{name}" not in named:
                    # Before each removal: a process that has taken the lock may have written this file.
                    self._store.require_lock()
                    storage_of(self._store.path / folder / name).remove()

    def record(self, name: str, entry: Any) -> bool:
        """Record a file that has its final name; return whether all files so far are saved in the ledger."""
        self.entries[name] = entry
        return self._ledger.finish(name, entry)

    def save(self) -> None:
        """Save the files in the ledger that are recorded and not saved yet."""
        self._ledger.save()

    def publish(self, lineage: dict[str, Any], further: Mapping[str, Any] | None = None) -> None:
        """Publish the manifest with the files of this run. :meth:`remove_work` is the next and last step.

        Args:
            lineage: Entry of the stage in the manifest.
            further: Other files of the result, which are not in the ledger; None for no others (default).
        """
        manifest = self._store.manifest
        # The manifest has rows, bytes and digest only; entries may have more, such as counts for the ledger.
        written = {name: _facts(entry) for name, entry in self.entries.items()}
        manifest.files = self._kept_files() | written | dict(further or {})
        manifest.stages[self._stage] = lineage
        # The manifest is the last file: until it exists under its name, no reader uses the files of this run.
        manifest.save(self.target)
        if self.target != self._store.path:
            self._store.replace_files(Path(str(self.target)))

    def remove_work(self) -> None:
        """Remove the unfinished work of the stage, also that of a run that was killed after publishing."""
        storage_of(self.work).remove_tree()

    def _kept_files(self) -> dict[str, FileFacts]:
        """Return the files of the manifest that this run does not replace: ``convert`` adds to its tables."""
        folders = () if self._stage == "convert" else STAGES[self._stage]
        return _without(self._store.manifest.files, folders)


def _without(files: Mapping[str, FileFacts], folders: Iterable[str]) -> dict[str, FileFacts]:
    """Return the files that are below none of these folders."""
    prefixes = tuple(f"{folder}/" for folder in folders)
    return {name: facts for name, facts in files.items() if not name.startswith(prefixes)}


def _facts(entry: Any) -> FileFacts:
    return FileFacts(entry.rows, entry.bytes, entry.sha256)
