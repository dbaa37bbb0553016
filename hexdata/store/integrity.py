"""Integrity checks of store files against their recorded digests, and the commands that rebuild files.

A stage checks its input files before it reads them, and existing output files before it keeps them. The read
after a check is usually served from the system's page cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from hexdata.engine import LOCAL, Engine
from hexdata.errors import StoreError
from hexdata.progress import SILENT, Progress
from hexdata.schema import table_schema
from hexdata.storage import AnyPath, is_fault, storage_of, translate_errors
from hexdata.store import STAGES, Store
from hexdata.store.commands import command_line, stage_command
from hexdata.store.files import FileFacts, digest_file
from hexdata.store.parquet import ParquetRows, check_table

__all__ = [
    "BUCKETS_REMOVED",
    "VERIFY_HINT",
    "check_tables",
    "find_damage",
    "find_folder_damage",
    "rebuild_command",
    "rebuild_commands",
    "rebuild_hint",
    "removed_buckets_error",
    "require_buckets",
    "require_intact",
    "require_intact_once",
    "require_rows_intact_once",
]

BUCKETS_REMOVED: Final = "the buckets of the shuffle were removed by `hexdata export --free-buckets`"
"""Error of whatever reads the shuffled positions after that."""
VERIFY_HINT: Final = "Run `hexdata verify` to list the faults."
_TABLES: Final = ("positions", "games", "sources", "rejected")
"""Folders that ``convert`` writes."""
_ORDER: Final = (*_TABLES, "shuffled", "shards", "pickles")
"""Folders in the order of the pipeline: each follows the folders it is made from."""
_THREADS: Final = 8
"""Maximum number of files hashed at the same time; more do not increase disk throughput."""
_SHOWN_DIGITS: Final = 16


def _digest_or_problem(path: AnyPath) -> tuple[int, str] | str:
    """Return the size and digest of a file, or the reason why it cannot be read (empty if it is missing)."""
    with translate_errors(path):  # an unreachable object store is not a damaged file
        try:
            return digest_file(path)
        except FileNotFoundError:
            return ""
        except OSError as error:
            if is_fault(error) or storage_of(path).is_temporary(error):
                raise
            return error.strerror or str(error)


def find_damage(
    store: Store,
    files: Mapping[str, FileFacts],
    *,
    engine: Engine = LOCAL,
    workers: int | None = None,
    progress: Progress = SILENT,
    root: AnyPath | None = None,
) -> dict[str, StoreError]:
    """Hash files of a store and return those that differ from their recorded size and digest.

    Args:
        store: Store to check.
        files: Expected size and digest of each file, by name relative to the store.
        engine: Engine that hashes the files (default: this machine).
        workers: Files hashed at the same time on each machine, at most 8; None for one per core (default).
        progress: Advanced by the size of each file (default: none).
        root: Folder of the files; None for the store (default).

    Returns:
        An error by name for each file that is missing, altered or unreadable. Its hint is the command that
        writes the file again.

    Raises:
        StoreError: The object store cannot be reached.
    """
    listed = sorted(files)
    damage: dict[str, StoreError] = {}
    threads = min(workers or engine.machines.cores, _THREADS)
    tasks = (((root or store.path) / name,) for name in listed)
    for index, found in engine.run_light(_digest_or_problem, tasks, workers=max(threads, 1)):
        name = listed[index]
        if error := _difference(store, name, files[name], found):
            damage[name] = error
        progress.advance(files[name].bytes)
    return dict(sorted(damage.items()))


def _difference(store: Store, name: str, facts: FileFacts, found: tuple[int, str] | str) -> StoreError | None:
    path, hint = store.path / name, rebuild_hint(store, name)
    if isinstance(found, str):
        if not found:
            return StoreError("the file is missing", path=path, hint=hint)
        return StoreError("the file cannot be read", path=path, found=found, hint=f"Check the disk. {hint}")
    if found == (facts.bytes, facts.sha256):
        return None
    return StoreError(
        "the file was altered",
        path=path,
        found=_facts_text(*found),
        expected=_facts_text(facts.bytes, facts.sha256),
        hint=hint,
    )


def _facts_text(size: int, sha256: str) -> str:
    return f"{size:,} bytes, sha256 {sha256[:_SHOWN_DIGITS]}…"


def find_folder_damage(
    store: Store, folder: str, *, engine: Engine = LOCAL, progress: Progress = SILENT
) -> dict[str, StoreError]:
    """Check all files of one folder with :func:`find_damage`, as the progress step "check files"."""
    files = store.manifest.files_in(folder)
    progress.begin("check files", None, "bytes")
    return find_damage(store, files, engine=engine)


def require_intact(
    store: Store, folders: Iterable[str], *, engine: Engine = LOCAL, progress: Progress = SILENT
) -> None:
    """Check every file of some folders against the manifest.

    Args:
        store: Store to read.
        folders: Folders to check, relative to the store, such as "positions".
        engine: Engine that hashes the files (default: this machine).
        progress: Receives a step "check files" (default: none).

    Raises:
        StoreError: A file is missing, altered or unreadable. The message contains its name and the command
            that writes it again.
    """
    files = {name: facts for folder in folders for name, facts in store.manifest.files_in(folder).items()}
    progress.begin("check files", None, "bytes")
    _require_none(store, list(find_damage(store, files, engine=engine).values()))
    check_tables(store, files, engine=engine)


def require_intact_once(store: Store, names: Iterable[str]) -> None:
    """Check files before a view shows their rows, each once for an open store.

    A view reads a small part of an object store, which checks its objects itself, so nothing is read there.

    Args:
        store: Store to read.
        names: Names of files in the manifest.

    Raises:
        StoreError: A file is missing, altered or unreadable, as in :func:`require_intact`.
    """
    if storage_of(store.path).local is None:
        return
    unchecked = {name: store.manifest.files[name] for name in names if name not in store.intact}
    if unchecked:
        _require_none(store, list(find_damage(store, unchecked).values()))
        store.intact |= unchecked.keys()


def require_rows_intact_once(store: Store, rows: ParquetRows) -> None:
    """Check the files of some rows of :meth:`Store.rows`, as in :func:`require_intact_once`."""
    root = storage_of(store.path).local
    if root is not None:
        names = [Path(str(path)).relative_to(root).as_posix() for path, _ in rows.files]
        require_intact_once(store, names)


def _require_none(store: Store, damage: list[StoreError]) -> None:
    """Raise the first error, which says how many others there are."""
    if not damage:
        return
    error = damage[0]
    if len(damage) > 1:
        others = "1 other file is" if len(damage) == 2 else f"{len(damage) - 1:,} other files are"
        error.reason += f", and {others} damaged or missing"
        error.hint = f"{error.hint} `{command_line('verify', store.path)}` lists all of them."
    raise error


def require_buckets(store: Store) -> None:
    """Check that the buckets of the shuffle were not removed.

    Raises:
        StoreError: ``export --free-buckets`` has removed them.
    """
    if store.manifest.removed_buckets:
        raise removed_buckets_error(store)


def removed_buckets_error(store: Store) -> StoreError:
    """Return the error for a reader of buckets that ``export --free-buckets`` has removed."""
    return StoreError(
        BUCKETS_REMOVED,
        path=store.path / "shuffled",
        hint=f"Run `{rebuild_command(store, 'shuffled/')}` to make them again, with the same bytes.",
    )


def check_tables(store: Store, files: Mapping[str, FileFacts], *, engine: Engine = LOCAL) -> None:
    """Check that the Parquet files among some files of a store are of their tables.

    Raises:
        StoreError: One has other columns or rows.
    """
    manifest, tables = store.manifest, (*_TABLES, "shuffled")
    tasks = [
        (
            store.path / name,
            table_schema(table, manifest.board_size, manifest.targets_of(table)),
            facts.rows,
            table == "positions",
        )
        for name, facts in sorted(files.items())
        if (table := name.partition("/")[0]) in tables
    ]
    for _ in engine.run_light(check_table, tasks, workers=_THREADS):
        pass


def rebuild_hint(store: Store, name: str) -> str:
    """Return a sentence that says how to replace a damaged file of a store."""
    command = rebuild_command(store, name)
    if _needs_removed_buckets(store, name):
        command = f"{rebuild_command(store, 'shuffled/')}` and then `{command}"
    if name.partition("/")[0] in _TABLES:
        return f"Restore the file from a copy, or convert the original files into a new store: `{command}`."
    return f"Run `{command}` to write the file again."


def rebuild_command(store: Store, name: str) -> str:
    """Return the command line that writes a file of a store again with its original options.

    The tables cannot be written again in place, so their command creates a new store.
    """
    stage = next(s for s, folders in STAGES.items() if name.startswith(tuple(f"{f}/" for f in folders)))
    target = f"{store.path}-again" if stage == "convert" else store.path
    return stage_command(stage, store.manifest.stages.get(stage, {}), target)


def rebuild_commands(store: Store, names: Iterable[str]) -> list[str]:
    """Return the command lines that write files of a store again, without repetition and in running order."""
    ordered = sorted(names, key=lambda name: _ORDER.index(name.partition("/")[0]))
    if any(_needs_removed_buckets(store, name) for name in ordered):
        ordered.insert(0, "shuffled/")
        ordered.sort(key=lambda name: _ORDER.index(name.partition("/")[0]))
    return list(dict.fromkeys(rebuild_command(store, name) for name in ordered))


def _needs_removed_buckets(store: Store, name: str) -> bool:
    """Return whether a file is made from buckets that were removed."""
    return name.startswith(("shards/", "pickles/shuffled/")) and bool(store.manifest.removed_buckets)
