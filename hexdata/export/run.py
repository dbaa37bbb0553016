"""One run of an export: resumes an interrupted run, writes the missing files in workers, publishes them."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Protocol

from hexdata.checks import check_fields
from hexdata.engine import Engine
from hexdata.errors import StoreError
from hexdata.pool import WorkerOptions
from hexdata.progress import Progress
from hexdata.shards.manifest import ShardEntry
from hexdata.storage import AnyPath, client_memory, storage_of
from hexdata.store import Store
from hexdata.store.files import FileFacts
from hexdata.store.integrity import find_damage, find_folder_damage, require_intact
from hexdata.store.ledger import Ledger
from hexdata.store.stage_log import StageLog

__all__ = ["ExportFile", "ExportRun", "ReplacingOptions", "files_per_task"]

_TASKS_PER_WORKER: Final = 256
"""A task writes several files only if each worker has at least this number of tasks."""
_MAX_FILES_PER_TASK: Final = 16

Entry = ShardEntry | FileFacts
"""Ledger entry of a written file."""


@dataclass(frozen=True)
class ReplacingOptions(WorkerOptions):
    """Options of all exports.

    Attributes:
        workers: Number of processes. Default None: 1 for little data, else one per core, as far as ``memory``
            allows.
        memory: Memory limit in bytes for all processes together. Default 1 GB.
        replace: Whether to remove the files of an earlier export before the new ones are written, to save
            disk space. Default False: they are replaced when all new files are complete.
    """

    replace: bool = False

    def __post_init__(self) -> None:
        check_fields(self, {"workers": 1, "memory": 0}, flags=("replace",))
        super().__post_init__()


class ExportFile(Protocol):
    """A file to write. Its bytes depend on the fields of this object and on the store only."""

    @property
    def positions(self) -> int:
        """Number of positions in the file."""

    def write(self, path: AnyPath) -> Entry:
        """Write the file and return its ledger entry. Called in a worker process."""


class ExportRun(ABC):
    """One run of an export. The caller must hold the store's lock.

    Attributes:
        stage: Name of the stage in the manifest.
        folder: Folder of the files, relative to the store.
        inputs: Folders that the export reads, relative to the store.
    """

    ENTRY: ClassVar[type[Entry]]
    """Type of the ledger entries."""
    PLAN: ClassVar[tuple[str, ...]]
    """Options that determine the bytes of the export."""
    UNIT_PREFIX: ClassVar[str] = ""
    """Start of a file's name that its unit in the ledger leaves out."""

    stage: str
    folder: str
    inputs: tuple[str, ...]

    def __init__(self, store: Store, options: ReplacingOptions, progress: Progress, engine: Engine) -> None:
        self.store = store
        self.options = options
        self.progress = progress
        self.engine = engine
        self.target = store.path
        """Folder in which the files are written, with their names in the store."""
        self.intact: set[str] = set()
        """Names of files that this run has found undamaged."""

    @property
    @abstractmethod
    def seconds_per_position(self) -> float:
        """CPU time to write a position, approximately."""

    @property
    def policy_memory(self) -> int:
        """Bytes that a process needs for policies, besides ``WORKER_MEMORY``."""
        return 0

    @abstractmethod
    def list_files(self) -> Mapping[str, ExportFile]:
        """Return the files to write, by name relative to the store."""

    @abstractmethod
    def complete(self, entries: Mapping[str, Any]) -> tuple[dict[str, FileFacts], dict[str, Any]]:
        """Check the written files, and write further files such as a manifest of the shards.

        Args:
            entries: The ledger entry of each file, by name.

        Returns:
            The further files, and what the store's manifest records of the stage besides plan and positions.

        Raises:
            StoreError: The files do not contain every position.
        """

    def find_damage(self) -> dict[str, StoreError]:
        """Return the damaged files of the published export, by name."""
        return find_folder_damage(self.store, self.folder, engine=self.engine, progress=self.progress)

    def intact_entries(self, damage: Mapping[str, StoreError]) -> Mapping[str, Entry]:
        """Return the ledger entries of the published files that are not damaged, by name."""
        published = self.store.manifest.files_in(self.folder)
        return {name: facts for name, facts in published.items() if name not in damage}

    def require_inputs(self, plan: Mapping[str, Any], damage: Mapping[str, StoreError] | None) -> None:
        """Check the files that this run will read.

        Args:
            plan: Plan of the export, as in the ledger.
            damage: Damaged files of the published export, by name; None if it has not been published.

        Raises:
            StoreError: A file is damaged.
        """
        del plan, damage
        require_intact(self.store, self.inputs, engine=self.engine, progress=self.progress)

    def begin(self, files: Mapping[str, ExportFile], missing: Sequence[str]) -> None:  # noqa: B027
        """Prepare to write the missing files. The others are complete."""

    def release(self, names: Sequence[str]) -> None:  # noqa: B027
        """Remove inputs that are no longer needed after these files have been written and recorded."""

    def release_all(self) -> None:  # noqa: B027
        """Remove inputs that are no longer needed, because all files are published."""

    def run(self) -> tuple[int, bool]:
        """Write and publish all files that the store does not have yet.

        Returns:
            The number of files that did not have to be written, and whether the store already had this
            export, undamaged.

        Raises:
            StoreError: An input is damaged, or the files do not contain every position.
            BudgetError: The workers do not fit into the memory.
        """
        options = {name: getattr(self.options, name) for name in self.PLAN}
        plan = {"of": self.store.input_digest(self.stage), **options}
        damage = None
        if plan.items() <= self.store.manifest.stages.get(self.stage, {}).items():
            damage = self.find_damage()
            if not damage:
                self.release_all()
                # A run may have been killed after it wrote the manifest and before it removed this folder.
                storage_of(self._work).remove_tree()
                return 0, True
        if damage is None:
            self.target = self.store.target_of(self.stage, replace=self.options.replace)
        self.require_inputs(plan, damage)
        # Too little memory is an error before files of an earlier export are removed.
        self.options.processes(self.engine.machines.cores, self._extra_memory)
        ledger = self.ledger(plan)
        if not len(ledger):
            if damage is None:
                self._begin_new()
            else:
                self._keep_intact(damage, ledger)
        resumed = len(ledger)
        files = self.list_files()
        self._write(files, ledger)
        self._publish({name: self._entry(name, ledger) for name in files}, plan)
        return resumed, False

    def ledger(self, plan: Mapping[str, Any], *, read_only: bool = False) -> Ledger:
        """Open the ledger of the export; see ``Ledger``."""
        path = self._work / "progress.json"
        return Ledger(path, self.stage, plan, self.ENTRY, read_only=read_only)

    @property
    def _work(self) -> AnyPath:
        return self.store.work / self.stage

    @property
    def _extra_memory(self) -> int:
        """Bytes that each process needs besides ``WORKER_MEMORY``."""
        return client_memory(self.store.path) + self.policy_memory

    def _unit(self, name: str) -> str:
        return name.removeprefix(self.UNIT_PREFIX)

    def _entry(self, name: str, ledger: Ledger) -> Entry:
        return self.ENTRY(**ledger[self._unit(name)])

    def _begin_new(self) -> None:
        """Remove unfinished files, or first the earlier export from the manifest if ``replace`` is given."""
        if self.stage in self.store.manifest.stages:
            self.progress.note(f"replaces the files of an earlier export in {self.folder}")
        if self.target != self.store.path:
            storage_of(self.target).remove_tree()
            return
        self.store.manifest.stages.pop(self.stage, None)
        self.store.unpublish(self.folder)

    def _keep_intact(self, damage: Mapping[str, StoreError], ledger: Ledger) -> None:
        entries = self.intact_entries(damage)
        self.intact = set(entries)
        ledger.finish_all({self._unit(name): asdict(entry) for name, entry in entries.items()})
        total = len(self.store.manifest.files_in(self.folder))
        self.progress.note(
            f"{len(damage):,} of {total:,} files in {self.folder} are damaged; "
            f"{total - len(entries):,} are written again"
        )

    def _write(self, files: Mapping[str, ExportFile], ledger: Ledger) -> None:
        """Write the files that are not complete yet."""
        self.progress.begin(self.stage, sum(file.positions for file in files.values()), "positions")
        complete = self.complete_files(files, ledger)
        missing = [name for name in files if name not in complete]
        self.store.keep_only(self.folder, complete)
        self.progress.advance(sum(files[name].positions for name in complete))
        self.begin(files, missing)
        extra = self._extra_memory
        machines = self.engine.machines
        work = self.seconds_per_position * sum(files[name].positions for name in missing)
        workers = self.options.processes(machines.cores_for(work), extra)
        memory = self.options.WORKER_MEMORY + extra
        count = files_per_task(len(missing), workers * machines.count)
        groups = [missing[start : start + count] for start in range(0, len(missing), count)]
        tasks = (([(files[name], self.target / name) for name in group],) for group in groups)
        unsaved: list[str] = []
        log = StageLog(self.store.path, self.stage)
        facts = {name: getattr(self.options, name) for name in self.PLAN}
        facts["seed"] = self.store.manifest.stages.get("shuffle", {}).get("seed")
        log.line(f"{len(missing):,} files to write: {json.dumps(facts)}")
        try:
            results = self.engine.run(_write_files, tasks, workers=workers, memory=memory)
            for index, entries in results:
                for name, (entry, seconds) in zip(groups[index], entries, strict=True):
                    unsaved.append(name)
                    log.line(f"{name}: {files[name].positions:,} positions in {seconds:.2f} s")
                    if ledger.finish_buffered(self._unit(name), asdict(entry)):
                        self.release(unsaved)
                        unsaved.clear()
                    self.progress.advance(files[name].positions)
        finally:
            ledger.save()
        log.publish()
        self.release(unsaved)

    def complete_files(self, names: Iterable[str], ledger: Ledger) -> set[str]:
        """Return the names of the complete files. Files of an earlier run are hashed first."""
        written = {
            name: _file_facts(self._entry(name, ledger)) for name in names if self._unit(name) in ledger
        }
        unchecked = {name: facts for name, facts in written.items() if name not in self.intact}
        damage = find_damage(self.store, unchecked, engine=self.engine, root=self.target)
        return written.keys() - damage.keys()

    def _publish(self, entries: Mapping[str, Entry], plan: dict[str, Any]) -> None:
        further_files, further_facts = self.complete(entries)
        files = {name: _file_facts(entry) for name, entry in entries.items()}
        manifest = self.store.manifest
        kept = {name: f for name, f in manifest.files.items() if not name.startswith(f"{self.folder}/")}
        manifest.files = kept | files | further_files
        manifest.stages[self.stage] = {
            **plan,
            "positions": sum(facts.rows for facts in files.values()),
            "rejected": 0,
            **further_facts,
        }
        self.store.publish(self.target)
        self.release_all()
        storage_of(self._work).remove_tree()


def files_per_task(files: int, workers: int) -> int:
    """Return how many files a task writes: one, or several if there are very many files.

    Submitting a task takes the driver milliseconds with Ray. A killed run loses the files of the tasks that
    were running.

    Args:
        files: Number of files to write.
        workers: Number of workers on all machines.
    """
    return min(max(files // (_TASKS_PER_WORKER * workers), 1), _MAX_FILES_PER_TASK)


def _write_files(files: Sequence[tuple[ExportFile, AnyPath]]) -> list[tuple[Entry, float]]:
    """Write files; return the ledger entry of each, and the seconds that it took."""
    written = []
    for file, path in files:
        start = time.perf_counter()
        written.append((file.write(path), time.perf_counter() - start))
    return written


def _file_facts(entry: Entry) -> FileFacts:
    if isinstance(entry, FileFacts):
        return entry
    return FileFacts(entry.positions, entry.bytes, entry.sha256)
