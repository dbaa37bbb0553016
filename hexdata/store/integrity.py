"""The files of a store checked against the digests in its manifest, and the commands that write them again.

Only reads. A stage checks its inputs before it makes anything of them, and its own outputs before it calls
them done. Between the digest and the read that follows, the page cache of the system serves both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from hexdata.engine import LOCAL, Engine
from hexdata.errors import StoreError
from hexdata.progress import SILENT, Progress
from hexdata.remote import AnyPath, telling
from hexdata.schema import table_schema
from hexdata.store import Store, store_word
from hexdata.store.files import FileFacts, digest_file
from hexdata.store.parquet import check_table
from hexdata.text import shell_word

__all__ = [
    "check_tables",
    "find_damage",
    "find_published_damage",
    "rebuild_command",
    "rebuild_commands",
    "rebuild_hint",
    "require_intact",
    "stage_command",
]

_TABLES: Final = ("positions", "games", "sources", "rejected")
"""Folders that ``convert`` writes."""
_ORDER: Final = (*_TABLES, "shuffled", "shards", "pickles")
"""Folders before those that are made of them."""
_THREADS: Final = 8
"""Files hashed at a time, at most: more do not make a disk faster."""
_SHOWN_DIGITS: Final = 16


def _inspect(path: AnyPath) -> tuple[int, str] | str:
    """Return bytes and digest of a file, or why it cannot be read; empty if it is missing."""
    with telling(path):  # an object store that does not answer says nothing about the file
        try:
            return digest_file(path)
        except FileNotFoundError:
            return ""
        except OSError as error:
            if not isinstance(path, Path):
                raise
            return error.strerror or str(error)


def find_damage(
    store: Store,
    files: Mapping[str, FileFacts],
    *,
    engine: Engine = LOCAL,
    workers: int | None = None,
    progress: Progress = SILENT,
) -> dict[str, StoreError]:
    """Hash files of a store and return those that are not what is stated of them.

    Args:
        store: to check.
        files: what the manifest or a ledger states of them, by name relative to the store.
        engine: where they are hashed.
        workers: files at a time on each machine; None for one a core.
        progress: advanced by the bytes of each file.

    Returns:
        An error for each file that is missing, altered or unreadable, by name; its hint is the command that
        writes the file again.

    Raises:
        StoreError: an object store does not answer.
    """
    listed = sorted(files)
    damage: dict[str, StoreError] = {}
    threads = min(workers or engine.machines.cores, _THREADS)
    tasks = ((store.path / name,) for name in listed)
    for index, found in engine.run_light(_inspect, tasks, workers=max(threads, 1)):
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


def find_published_damage(
    store: Store, folder: str, *, engine: Engine = LOCAL, progress: Progress = SILENT
) -> dict[str, StoreError]:
    """Do as :func:`find_damage` for all files of one folder, as a step "check files"."""
    files = store.manifest.files_in(folder)
    progress.begin("check files", None, "bytes")
    return find_damage(store, files, engine=engine)


def require_intact(
    store: Store, folders: Iterable[str], *, engine: Engine = LOCAL, progress: Progress = SILENT
) -> None:
    """Check every file of some folders against the manifest, before anything is made of them.

    Args:
        store: to read.
        folders: relative to the store, such as "positions".
        engine: where files are hashed.
        progress: told of a step "check files".

    Raises:
        StoreError: a file is missing, altered or unreadable, or has other columns or rows than its table; the
            message names it, and the command that writes it again.
    """
    files = {name: facts for folder in folders for name, facts in store.manifest.files_in(folder).items()}
    progress.begin("check files", None, "bytes")
    damage = list(find_damage(store, files, engine=engine).values())
    if not damage:
        check_tables(store, files, engine=engine)
        return
    error = damage[0]
    if len(damage) > 1:
        error.reason += (
            f", and so {'was 1 other' if len(damage) == 2 else f'were {len(damage) - 1:,} others'}"
        )
        error.hint = f"{error.hint} `hexdata verify {store_word(store.path)}` lists all of them."
    raise error


def check_tables(store: Store, files: Mapping[str, FileFacts], *, engine: Engine = LOCAL) -> None:
    """Check that the Parquet files among some files of a store are of their tables.

    Raises:
        StoreError: one has other columns or rows.
    """
    size, tables = store.manifest.board_size, (*_TABLES, "shuffled")
    tasks = [
        (store.path / name, table_schema(table, size), facts.rows)
        for name, facts in sorted(files.items())
        if (table := name.partition("/")[0]) in tables
    ]
    for _ in engine.run_light(check_table, tasks, workers=_THREADS):
        pass


def rebuild_hint(store: Store, name: str) -> str:
    """Return what to do about a damaged file of a store, as a sentence."""
    command = rebuild_command(store, name)
    if name.partition("/")[0] in _TABLES:
        return f"Restore the file from a copy, or convert the original files into a new store: `{command}`."
    return f"Run `{command}`: it writes the file again."


def rebuild_command(store: Store, name: str) -> str:
    """Return the command line that writes a file of a store again, with the options that it was made with.

    The tables cannot be written again in place: their command makes a new store.
    """
    match name.split("/"):
        case ["shuffled", *_]:
            stage = "shuffle"
        case ["shards", *_]:
            stage = "export"
        case ["pickles", order, *_]:
            stage = f"pickles-{order}"
        case _:
            stage = "convert"
    at = f"{store.path}-again" if stage == "convert" else str(store.path)
    return stage_command(stage, store.manifest.stages.get(stage, {}), at)


def rebuild_commands(store: Store, names: Iterable[str]) -> list[str]:
    """Return the command lines that write files of a store again, each once, in the order to run them in."""
    ordered = sorted(names, key=lambda name: _ORDER.index(name.partition("/")[0]))
    return list(dict.fromkeys(rebuild_command(store, name) for name in ordered))


def stage_command(stage: str, lineage: Mapping[str, Any], store: str) -> str:
    """Return the command line that runs a stage with the options that the manifest records.

    Args:
        stage: its name in the manifest.
        lineage: what the manifest records of it.
        store: path or address of the store.
    """
    word = store_word(store)
    if stage == "shuffle":
        buckets = max(lineage.get("buckets", {}).values(), default=None)
        asked = {"seed": lineage.get("seed"), "buckets": buckets, **lineage.get("choices", {})}
        return f"hexdata shuffle {word}{_options(asked)}"
    if stage == "export":
        names = ("shard_size", "block_size", "layout")
        return f"hexdata export {word}{_options({name: lineage.get(name) for name in names})}"
    if stage == "convert":
        flags = [name for name in ("salvage", "truncate_repeats") if lineage.get(name)]
        options = _options({name: lineage.get(name) for name in ("val", "test")})
        options += "".join(f" --{name.replace('_', '-')}" for name in flags)
        return f"hexdata convert INPUT... {word}{options}"
    return f"hexdata export {word} --format pickle --order {stage.removeprefix('pickles-')}"


def _options(values: dict[str, Any]) -> str:
    return "".join(
        f" --{name.replace('_', '-')} {shell_word(value if isinstance(value, str) else json.dumps(value))}"
        for name, value in values.items()
        if value is not None
    )
