"""The steps that both exports have in common: find what is missing, write it in workers, publish it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from hexdata.cards import write_cards
from hexdata.engine import Engine
from hexdata.errors import StoreError
from hexdata.options import WorkerOptions, describe_options
from hexdata.progress import Progress
from hexdata.shards.manifest import MANIFEST_VERSION, ShardEntry
from hexdata.storage import AnyPath, client_memory
from hexdata.storage.errors import VERIFY_HINT
from hexdata.store import STAGES, Store
from hexdata.store.commands import RECORDED_OPTIONS, RunRecord
from hexdata.store.files import FileFacts
from hexdata.store.stage_files import StageFiles

Entry = ShardEntry | FileFacts
"""Ledger entry of a written file."""
_ORIGINAL: Final = "pickles-original"
"""The only export that is made from the tables of ``convert``. All others need the shuffle."""


@describe_options
@dataclass(frozen=True)
class ReplacingOptions(WorkerOptions):
    """Options of all exports.

    Attributes:
        replace: Whether to remove the files of an earlier export before the new ones are written, to save
            disk space. Default False: they are replaced when all new files are complete.
    """

    replace: bool = False


@dataclass(frozen=True)
class ExportFile:
    """A file to write."""

    positions: int
    write: Callable[[AnyPath], Entry]
    """Writes the file at a path and returns its ledger entry. It is called in a worker process, so it is a
    partial of a function at module level, whose bytes depend on its arguments and on the store only."""


@dataclass
class ExportRun:
    """One run of an export on a locked store.

    Attributes:
        store: The store.
        stage: Name of the stage in the manifest.
        options: Options of the export.
        progress: Receives progress reports and notes.
        engine: Runs the tasks that write files.
        files: The files of the run. After :meth:`write`, ``files.entries`` has the order of its argument.
        damage: Errors of the published files if the store has this export, none if all are undamaged; None if
            it does not have this export.
        is_done: Whether the store already had this export, undamaged.
        resumed: Number of files that were complete before :meth:`write`.
    """

    store: Store
    stage: str
    options: ReplacingOptions
    progress: Progress
    engine: Engine

    def __post_init__(self) -> None:
        self.resumed = 0
        self.damage: dict[str, StoreError] | None = None
        stage, entry = self.stage, ShardEntry if self.stage == "export" else FileFacts
        self.files = StageFiles(self.store, stage, entry, self.progress)
        # The identity of an export: its input, and the options that determine its bytes.
        self._plan = {name: getattr(self.options, name) for name in RECORDED_OPTIONS[stage]}
        self._plan["of"] = self.store.input_digest(stage)
        if stage == "export":
            self._plan["version"] = MANIFEST_VERSION
        # The same export is repaired in place. Another one is written beside
        # the present files, unless they may go first.
        if self._plan.items() <= self.store.manifest.stages.get(stage, {}).items():
            self.damage = self.files.find_damage(self.published)
        else:
            self.files.choose_target(replace=self.options.replace)
        self.is_done = self.damage == {}

    @property
    def published(self) -> dict[str, FileFacts]:
        """The files of the stage in the manifest."""
        return self.store.manifest.files_in(STAGES[self.stage][0])

    @property
    def bytes(self) -> int:
        """Size of these files."""
        return sum(facts.bytes for facts in self.published.values())

    def resume(self, names: Collection[str], published: Mapping[str, Entry]) -> list[str]:
        """Find complete files of this export or of an interrupted run; return the names of the missing files.

        Args:
            names: Names of all files of the export.
            published: Ledger entries of the published files if the store has this export.
        """
        # Published files without damage are kept, so that a repair writes the damaged ones only.
        intact = None if self.damage is None else {n: e for n, e in published.items() if n not in self.damage}
        self.files.resume(self._plan, names, intact)
        self.resumed = len(self.files.entries)
        return [name for name in names if name not in self.files.entries]

    def write(
        self,
        files: Mapping[str, ExportFile],
        missing: Sequence[str],
        seconds_per_position: float,
        block_memory: int = 0,
        release: Callable[[Iterable[str]], None] = lambda missing: None,  # noqa: ARG005
    ) -> None:
        """Write the files that are not complete yet.

        Args:
            files: All files of the export, by name.
            missing: Names of those to write, from :meth:`resume`.
            seconds_per_position: CPU time to write a position, approximately.
            block_memory: Bytes that a process needs for a block, besides ``WORKER_MEMORY``. Default 0.
            release: Called with the names of the files that are not in the ledger yet, at the beginning and
                whenever files have been saved there. Default: not called.

        Raises:
            BudgetError: The workers do not fit into the memory.
        """
        # Little work gets one process: starting more would take longer than the work.
        work = seconds_per_position * sum(files[name].positions for name in missing)
        extra = client_memory(self.store.path) + block_memory
        # Too little memory is an error before files of an earlier export are removed.
        workers = self.options.processes(self.engine.cores_for(work), extra)
        if self.damage is not None:
            self.progress.note(f"{len(self.damage):,} files are damaged; {len(missing):,} are written again")
        elif not self.resumed:
            # Removes the earlier result or unfinished files. A run that is
            # continued has done so, and its files must stay.
            self.files.begin_new(self.stage)
        self.progress.begin(self.stage, sum(file.positions for file in files.values()), "positions")
        # Leftovers of interrupted runs take space, and an object that exists cannot be written again.
        self.files.remove_others()
        # Files that are complete count as done, so that the rest is shown in proportion.
        self.progress.advance(sum(files[name].positions for name in self.files.entries))
        # A run that was killed may have recorded files before it released their input.
        release(missing)
        tasks = ((files[name], self.files.target / name) for name in missing)
        left = dict.fromkeys(missing)
        memory = self.options.WORKER_MEMORY + extra
        try:
            for index, entry in self.engine.run(_write_file, tasks, workers=workers, memory=memory):
                # Results arrive in any order; `left` is what still needs its input.
                del left[missing[index]]
                # Input may be removed only for files in a saved ledger: an unsaved
                # entry is lost when this process is killed.
                if self.files.record(missing[index], entry):
                    release(left)
                self.progress.advance(files[missing[index]].positions)
        finally:
            # After an error too: the next run continues with the files that are complete.
            self.files.save()
        self.files.entries = {name: self.files.entries[name] for name in files}  # in the order of the files
        found, manifest = self._rows(), self.store.manifest
        inputs = manifest.files_in("positions") if self.stage == _ORIGINAL else manifest.buckets()
        # Before the manifest is written: an export with missing positions must never be published.
        if found != (expected := sum(facts.rows for facts in inputs.values())):
            reason, hint = "the files do not contain every position of the store", VERIFY_HINT
            raise StoreError(reason, path=self.store.path, found=found, expected=expected, hint=hint)

    def publish(self, facts: Mapping[str, Any], further: Mapping[str, FileFacts] | None = None) -> None:
        """Publish the manifest with all files.

        Args:
            facts: What the manifest records of the stage, besides the plan and the positions.
            further: Other files of the export. Default None: none.
        """
        self.files.publish({**self._plan, "positions": self._rows(), "rejected": 0, **facts}, further)

    def _rows(self) -> int:
        return sum(entry.rows for entry in self.files.entries.values())


def _write_file(file: ExportFile, path: AnyPath) -> Entry:
    return file.write(path)


@contextmanager
def exporting(
    store: str | AnyPath, stage: str, options: ReplacingOptions, progress: Progress, engine: Engine
) -> Iterator[ExportRun]:
    """Open a store for an export, and finish what every export finishes.

    The arguments are those of :class:`ExportRun`.

    Yields:
        The run. If it is not done, the caller writes and publishes it.
    """
    target = Store.open(store, shares_work=engine.remote)
    with target.writing(stage, RunRecord.of(options)) as finish:
        if stage != _ORIGINAL:
            target.require_stage("shuffle")
        with engine.sharing(target.work):
            run = ExportRun(target, stage, options, progress, engine)
            yield run
            # After the manifest is published, which no longer needs the ledger.
            run.files.remove_work()  # also that of a run that was killed after publishing
        # Last, because they describe the published manifest; a killed
        # run writes them again when it is repeated.
        write_cards(target)
        if not run.is_done:
            positions = target.manifest.stages[stage]["positions"]
            finish(positions=positions, bytes=run.bytes, resumed=run.resumed > 0)
