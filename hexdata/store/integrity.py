"""Integrity checks of store files against their recorded digests, and the commands that rebuild files.

A stage checks its input files before it reads them, and existing output files before it keeps them. The read
after a check is usually served from the system's page cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from hexdata.errors import StoreError
from hexdata.progress import SILENT, Progress
from hexdata.schema import table_schema
from hexdata.storage import AnyPath, storage_of, translate_errors
from hexdata.store import STAGES, Store
from hexdata.store.commands import command_line, stage_command
from hexdata.store.files import FileFacts, digest_file
from hexdata.store.parquet import ParquetRows, open_parquet
from hexdata.system import default_workers
from hexdata.text import count_of

BUCKETS_REMOVED: Final = "the buckets of the shuffle were removed by `hexdata export --free-buckets`"
"""Error of whatever reads the shuffled positions after that."""
_THREADS: Final = 8
"""Maximum number of files hashed at the same time; more do not increase disk throughput."""


def find_damage(
    store: Store,
    files: Mapping[str, FileFacts],
    *,
    threads: int | None = None,
    progress: Progress = SILENT,
    root: AnyPath | None = None,
) -> dict[str, StoreError]:
    """Hash files of a store and return those that differ from their recorded size and digest.

    Args:
        store: Store to check.
        files: Expected size and digest of each file, by name relative to the store.
        threads: Files hashed at the same time, at most 8; None for one per core (default).
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

    def check(name: str) -> StoreError | None:
        path = store.path / name
        try:
            with translate_errors():  # an unreachable object store is not a damaged file
                found = digest_file((root or store.path) / name)
        except FileNotFoundError:
            return StoreError("the file is missing", path=path, hint=rebuild_hint(store, name))
        except OSError as error:
            hint = f"Check the disk. {rebuild_hint(store, name)}"
            return StoreError("the file cannot be read", path=path, found=error.strerror or error, hint=hint)
        return files[name].difference(path, *found, rebuild_hint(store, name))

    with ThreadPoolExecutor(min(threads or default_workers(), _THREADS)) as pool:
        # Progress is reported on this thread, in the order of the names.
        for name, error in zip(listed, pool.map(check, listed), strict=True):
            if error is not None:
                damage[name] = error
            progress.advance(files[name].bytes)
    return damage


def require_intact(store: Store, folders: Iterable[str], progress: Progress = SILENT) -> None:
    """Check every file of some folders against the manifest.

    Args:
        store: Store to read.
        folders: Folders to check, relative to the store, such as "positions".
        progress: Receives a step "check files" (default: none).

    Raises:
        StoreError: A file is missing, altered or unreadable. The message contains its name and the command
            that writes it again.
    """
    files = {name: facts for folder in folders for name, facts in store.manifest.files_in(folder).items()}
    progress.begin("check files", None, "bytes")
    # Digests first, so that no library parses a file that has been altered.
    _require(store, files)
    check_tables(store, files)


def require_intact_once(store: Store, names: Iterable[str]) -> None:
    """Check files before a view shows their rows, each once for an open store.

    A view reads a small part of an object store, which checks its objects itself, so nothing is read there.

    Args:
        store: Store to read.
        names: Names of files in the manifest.

    Raises:
        StoreError: A file is missing, altered or unreadable, as in :func:`require_intact`.
    """
    if storage_of(store.path).local is not None:
        unchecked = {name: store.manifest.files[name] for name in {*names} - store.intact}
        _require(store, unchecked)
        store.intact |= unchecked.keys()


def intact_rows(store: Store, folder: str, start: int, stop: int) -> ParquetRows:
    """Return the rows ``start`` to ``stop`` (exclusive) of a folder, whose files are checked once.

    Raises:
        StoreError: As in :func:`require_intact_once`.
    """
    rows = store.rows(folder).part(start, stop)
    names = {store.path / name: name for name in store.manifest.files_in(folder)}
    require_intact_once(store, (names[path] for path, _ in rows.files))
    return rows


def _require(store: Store, files: Mapping[str, FileFacts]) -> None:
    """Raise the error of the first damaged file, which says how many others there are."""
    # All files are checked before the first error, so that the user learns how many are damaged.
    if damage := [*find_damage(store, files).values()]:
        if len(damage) > 1:
            damage[0].reason += f", and {count_of(len(damage) - 1, 'other file')} damaged or missing"
            damage[0].hint = f"{damage[0].hint} `{command_line('verify', store.path)}` lists all of them."
        raise damage[0]


def require_buckets(store: Store) -> None:
    """Check that the buckets of the shuffle were not removed.

    Raises:
        StoreError: ``export --free-buckets`` has removed them.
    """
    if store.manifest.removed_buckets:
        [command] = rebuild_commands(store, ["shuffled/"])
        hint = f"Run `{command}` to make them again, with the same bytes."
        raise StoreError(BUCKETS_REMOVED, path=store.path / "shuffled", hint=hint)


def check_tables(store: Store, files: Mapping[str, FileFacts]) -> None:
    """Check that the Parquet files among some files of a store are of their tables.

    Raises:
        StoreError: One has other columns or rows.
    """
    for name in sorted(files):
        if (table := name.partition("/")[0]) in (*STAGES["convert"], "shuffled"):
            schema = table_schema(table, store.manifest.board_size, store.manifest.targets_of(table))
            try:
                with open_parquet(store.path / name, schema, whole=files[name].rows):
                    pass
            except StoreError as error:
                error.hint = rebuild_hint(store, name)
                raise


def rebuild_hint(store: Store, name: str) -> str:
    """Return a sentence that says how to replace a damaged file of a store."""
    command = "` and then `".join(rebuild_commands(store, [name]))
    if _stage_of(name) == "convert":
        return f"Restore the file from a copy, or convert the original files into a new store: `{command}`."
    return f"Run `{command}` to write the file again."


def rebuild_commands(store: Store, names: Iterable[str]) -> list[str]:
    """Return the command lines that write files of a store again with their options, in running order.

    The tables cannot be written again in place, so their command creates a new store.
    """
    stages, lineages = {_stage_of(name) for name in names}, store.manifest.stages
    # These are made from the buckets, which have to be written again first.
    if store.manifest.removed_buckets and not stages.isdisjoint(("export", "pickles-shuffled")):
        stages.add("shuffle")
    targets = dict.fromkeys(STAGES, store.path) | {"convert": f"{store.path}-again"}
    return [stage_command(s, lineages.get(s, {}), targets[s]) for s in STAGES if s in stages]


def _stage_of(name: str) -> str:
    """Return the stage that writes a file."""
    return next(s for s, folders in STAGES.items() if name.startswith(tuple(f"{f}/" for f in folders)))
