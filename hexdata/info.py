"""Summary of a store: its content, its stages, what is out of date, and the next commands."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow.compute as pc

from hexdata.errors import StoreError
from hexdata.schema import SCHEMA_VERSION, SPLITS
from hexdata.storage import AnyPath, storage_of
from hexdata.store import STAGES, Store
from hexdata.store.commands import command_line, stage_command
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.integrity import find_damage, rebuild_commands
from hexdata.store.journal import read_journal
from hexdata.store.manifest import MANIFEST_NAME, Manifest
from hexdata.store.parquet import read_parquet
from hexdata.text import without_game

__all__ = ["StageInfo", "StoreInfo", "store_info"]

_INPUT_STAGE: Final = {"export": "shuffle", "pickles-shuffled": "shuffle"}
"""The stage whose output a stage reads, for stages that do not read the tables of convert."""


@dataclass(frozen=True)
class StageInfo:
    """A stage of a store.

    Attributes:
        stage: "convert", "shuffle", "export", "pickles-original" or "pickles-shuffled".
        state: "complete"; "outdated" if its input has changed since; "not run"; "interrupted" if a run has
            begun and not finished; "damaged" if files are missing or have another size.
        positions: Number of positions in its files.
        files: Number of files.
        bytes: Size of the files.
        finished: End time of the last run in UTC, such as "2026-01-31T12:00:00Z"; None if unknown.
        command: Command line that runs the stage with the same options; None if it has not run.
    """

    stage: str
    state: Literal["complete", "outdated", "not run", "interrupted", "damaged"]
    positions: int
    files: int
    bytes: int
    finished: str | None
    command: str | None


@dataclass(frozen=True)
class StoreInfo:
    """The content and the state of a store.

    Attributes:
        store: Path or address of the store.
        schema_version: Version of the tables.
        board_size: Cells along an edge; None for a store without positions.
        counts: Number of rows of the tables sources, games, positions and rejected.
        without_game: Number of positions that belong to no known game; None if the table of games is damaged.
        bytes: Size of all files.
        files: Number of files.
        splits: Number of games of each split; empty if the table of games is damaged.
        targets: Optional columns of the positions, such as "root_value".
        stages: The stages, in the order in which they run.
        missing: Files that are missing or have another size than recorded, and files of games with another
            digest.
        writer: The process that writes to the store now; None if there is none.
        notes: Facts that the user should know, as sentences.
        steps: (purpose, command line) of each next step, the most urgent first.
    """

    store: str
    schema_version: int
    board_size: int | None
    counts: dict[str, int]
    without_game: int | None
    bytes: int
    files: int
    splits: dict[str, int]
    targets: list[str]
    stages: list[StageInfo]
    missing: list[str]
    writer: str | None
    notes: list[str]
    steps: list[tuple[str, str]]


def store_info(store: str | AnyPath) -> StoreInfo:
    """Describe a store. Reads its manifest, the sizes of its files and the table of games.

    ``hexdata verify`` checks the contents of all files.

    Args:
        store: Folder of the store, or its address in an object store.

    Raises:
        ConfigError: ``store`` is not a path or a valid address.
        StoreError: There is no store, its manifest cannot be read, or the disk fails.
    """
    opened = _open(store)
    with translate_disk_full(opened.path):
        return _describe(opened)


def _open(store: str | AnyPath) -> Store:
    """Open a store, or a folder in which the first ``convert`` was interrupted before it wrote a manifest."""
    try:
        return Store.open(store)
    except StoreError:
        started = Store(store, Manifest())
        if started.unfinished("convert") is None or storage_of(started.path / MANIFEST_NAME).exists():
            raise
        return started


def _describe(opened: Store) -> StoreInfo:
    manifest = opened.manifest
    missing = {stage: _missing(opened, folders) for stage, folders in STAGES.items()}
    missing["convert"] = sorted({*missing["convert"], *_altered_games(opened)})
    finished = {entry.stage: entry.finished for entry in read_journal(opened.path)}
    stages = [_stage(opened, stage, bool(missing[stage]), finished.get(stage)) for stage in STAGES]
    writer = storage_of(opened.path).find_writer()
    unknown = None if missing["convert"] else opened.count_without_game()
    notes = _notes(opened, stages, writer)
    if unknown:
        notes.append(without_game(unknown, manifest.counts["positions"]))
    return StoreInfo(
        store=str(opened.path),
        schema_version=SCHEMA_VERSION,
        board_size=manifest.board_size,
        counts={name: manifest.counts.get(name, 0) for name in ("sources", "games", "positions", "rejected")},
        without_game=unknown,
        bytes=manifest.total_bytes,
        files=len(manifest.files),
        splits={} if missing["convert"] else _splits(opened),
        targets=list(manifest.targets),
        stages=stages,
        missing=[name for names in missing.values() for name in names],
        writer=writer,
        notes=notes,
        steps=_steps(opened, stages, missing),
    )


def _missing(store: Store, folders: tuple[str, ...]) -> list[str]:
    return [name for folder in folders for name in store.missing(folder)]


def _altered_games(store: Store) -> list[str]:
    """Return the files of games that differ from their digests; in an object store, none."""
    if storage_of(store.path).local is None:
        return []
    return list(find_damage(store, store.manifest.files_in("games")))


def _stage(store: Store, stage: str, damaged: bool, finished: str | None) -> StageInfo:
    lineage = store.manifest.stages.get(stage)
    files = [facts for folder in STAGES[stage] for facts in store.manifest.files_in(folder).values()]
    state: Literal["complete", "outdated", "not run", "interrupted", "damaged"] = "complete"
    if damaged:
        state = "damaged"
    elif store.unfinished(stage) is not None:
        state = "interrupted"
    elif lineage is None:
        state = "not run"
    elif _outdated(store, stage):
        state = "outdated"
    positions = 0
    if lineage is not None:
        positions = store.manifest.counts.get("positions", 0) if stage == "convert" else lineage["positions"]
    return StageInfo(
        stage=stage,
        state=state,
        positions=positions,
        files=len(files),
        bytes=sum(facts.bytes for facts in files),
        finished=finished if lineage is not None else None,
        command=None if lineage is None else stage_command(stage, lineage, store.path),
    )


def _outdated(store: Store, stage: str) -> bool:
    lineage = store.manifest.stages.get(stage)
    if lineage is None or stage == "convert":
        return False
    before = _INPUT_STAGE.get(stage)
    return lineage["of"] != store.input_digest(stage) or (before is not None and _outdated(store, before))


def _splits(store: Store) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for path in store.files("games"):
        found = pc.value_counts(read_parquet(path, ["split"])["split"])
        counts.update({row["values"]: row["counts"] for row in found.to_pylist()})
    return {split: counts[split] for split in SPLITS if counts[split]}


def _notes(store: Store, stages: list[StageInfo], writer: str | None) -> list[str]:
    notes = [f"{writer} is writing to this store"] if writer else []
    for stage in stages:
        if stage.state == "outdated":
            source = "shuffled positions" if stage.stage in _INPUT_STAGE else "positions"
            notes.append(f"the output of {stage.stage} is older than the {source} of the store")
    if store.manifest.removed_buckets:
        notes.append("the buckets of the shuffle were removed by `hexdata export --free-buckets`")
    return notes


def _steps(store: Store, stages: list[StageInfo], missing: dict[str, list[str]]) -> list[tuple[str, str]]:
    path, states = store.path, {stage.stage: stage.state for stage in stages}
    steps = [("List all damaged files", command_line("verify", path))] if any(missing.values()) else []
    for stage, state in states.items():
        if state == "damaged":
            steps += [
                (f"Write the files of {stage} again", c) for c in rebuild_commands(store, missing[stage])
            ]
        elif state in ("interrupted", "outdated"):
            purpose = "Finish" if state == "interrupted" else "Repeat"
            steps.append((f"{purpose} {stage}, with the same options", store.next_command(stage)))
        if state == "damaged" and stage == "convert":
            return steps
    if not store.manifest.counts.get("positions"):
        return steps or [("Convert your files", store.next_command("convert"))]
    steps.append(("Look at the games", command_line("browse", path)))
    if states["shuffle"] == "not run":
        steps.append(("Shuffle, to write shards", store.next_command("shuffle")))
    elif states["shuffle"] == "complete" and states["export"] == "not run":
        steps.append(("Write shards", store.next_command("export")))
    elif states["export"] == "complete":
        steps.append(("Check all files and the shuffle", command_line("verify", path)))
    return [*steps, ("Train from it", command_line("load", path))]
