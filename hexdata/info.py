"""Facts of a store: its content, its stages, the order of its input, and what to do next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hexdata.errors import StoreError
from hexdata.quality import InputOrder, measure_input_order
from hexdata.schema import SCHEMA_VERSION, SPLITS
from hexdata.storage import AnyPath, storage_of, translate_errors
from hexdata.storage.lock import find_lock_holder
from hexdata.store import STAGES, Store
from hexdata.store.commands import command_line, stage_command
from hexdata.store.integrity import BUCKETS_REMOVED, check_tables, find_damage, rebuild_commands
from hexdata.store.journal import JournalEntry, read_journal
from hexdata.store.manifest import MANIFEST_NAME, Manifest
from hexdata.store.parquet import read_parquet
from hexdata.text import printable, without_game

__all__ = ["StageInfo", "StoreInfo", "loader_code", "store_info"]

State = Literal["complete", "outdated", "not run", "interrupted", "damaged"]
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
        missing: Files that are missing or have another size, and damaged files of the tables.
        lineage: Entry of the stage in the manifest, with the number of removed buckets as ``removed``; empty
            if it has not run.
        digest: SHA-256 over the names and digests of its files; of shards, that of their manifest, which is
            in the states of loaders, too.
        last: The last run in the journal; None if there is none.
    """

    stage: str
    state: State
    positions: int
    files: int
    bytes: int
    finished: str | None
    command: str | None
    missing: list[str] = field(default_factory=list)
    lineage: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    last: JournalEntry | None = None


@dataclass(frozen=True)
class StoreInfo:
    """The content and the state of a store.

    Attributes:
        store: Path or address of the store.
        schema_version: Version of the tables.
        board_size: Cells along an edge; None for a store without positions.
        counts: Number of rows of the tables sources, games, positions and rejected.
        without_game: Number of positions that belong to no known game; None if a table is damaged.
        bytes: Size of all files.
        files: Number of files.
        splits: Number of games of each split; empty if a table is damaged.
        targets: Optional columns of the positions, such as "root_value".
        stages: The stages, in the order in which they run.
        missing: Files that are missing or have another size than recorded, and files of the tables with
            another digest.
        writer: The process that writes to the store now; None if there is none.
        notes: Facts that the user should know, as sentences.
        steps: (purpose, command line or line of Python) of each next step, the most urgent first.
        duplicates: Number of games that repeat an earlier one or its mirror image.
        input_order: Order in which the positions were read; None if a table is damaged or in an object store.
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
    duplicates: int = 0
    input_order: InputOrder | None = None

    def stage(self, name: str) -> StageInfo | None:
        """Return the facts of a stage; None if it has not run."""
        return next((stage for stage in self.stages if stage.stage == name and stage.lineage), None)


def store_info(store: str | AnyPath) -> StoreInfo:
    """Describe a store. Checks the tables, which are read, and the sizes of the other files.

    In an object store, the positions are not read. ``hexdata verify`` checks the contents of all files.

    Args:
        store: Folder of the store, or its address in an object store.

    Raises:
        ConfigError: ``store`` is not a path or a valid address.
        StoreError: There is no store, its manifest cannot be read, or the disk fails.
    """
    try:
        opened = Store.open(store)
    except StoreError:  # the first convert may have been interrupted before it wrote a manifest
        # Its ledger shows such a run. A manifest that exists is damaged, which must not be reported as no
        # store.
        opened = Store(store, Manifest())
        if opened.unfinished("convert") is None or storage_of(opened.path / MANIFEST_NAME).exists():
            raise
    with translate_errors(opened.path):
        return describe(opened)


def describe(opened: Store) -> StoreInfo:
    """Return the facts of an open store, as :func:`store_info`."""
    manifest, positions = opened.manifest, opened.manifest.counts["positions"]
    missing = {s: [n for folder in STAGES[s] for n in opened.missing(folder)] for s in STAGES}
    is_local = storage_of(opened.path).local is not None
    if is_local and not missing["convert"]:
        names = [name for folder in STAGES["convert"] for name in manifest.files_in(folder)]
        # Files that this process has compared with their digests before are not read again.
        unchecked = {name: manifest.files[name] for name in names if name not in opened.intact}
        missing["convert"] = sorted(find_damage(opened, unchecked))
        if not missing["convert"]:  # a table may have other columns or nulls, and digests that agree
            check_tables(opened, unchecked)
    last = {entry.stage: entry for entry in read_journal(opened.path)}
    stages = [_stage(opened, stage, missing[stage], last.get(stage)) for stage in STAGES]
    unknown, splits, duplicates, order = None, Counter[str](), 0, None
    # A damaged table could give wrong numbers, or an error in place of the advice to repair it.
    if not missing["convert"]:
        # The games know how many positions they have; reading the positions would take longer.
        unknown = positions
        for path in opened.files("games"):
            games = read_parquet(path, ["split", "duplicate_of", "positions"])
            splits.update(games["split"].to_pylist())
            duplicates += len(games) - games["duplicate_of"].null_count
            unknown -= int(games["positions"].to_numpy().sum())
        # It reads values of positions, which an object store would have to send.
        order = measure_input_order(opened) if is_local and positions else None
    writer = find_lock_holder(opened.path)
    notes = [f"{writer} is writing to this store"] if writer else []
    for stage in stages:
        if stage.state == "outdated":
            source = "shuffled positions" if stage.stage in _INPUT_STAGE else "positions"
            notes.append(f"the output of {stage.stage} is older than the {source} of the store")
    if manifest.removed_buckets:
        notes.append(BUCKETS_REMOVED)
    if unknown:
        notes.append(without_game(unknown, positions))
    return StoreInfo(
        store=str(opened.path),
        schema_version=SCHEMA_VERSION,
        board_size=manifest.board_size,
        counts={name: manifest.counts[name] for name in ("sources", "games", "positions", "rejected")},
        without_game=unknown,
        bytes=manifest.total_bytes,
        files=len(manifest.files),
        splits={split: splits[split] for split in SPLITS if splits[split]},
        targets=list(manifest.targets),
        stages=stages,
        missing=[name for names in missing.values() for name in names],
        writer=writer,
        notes=notes,
        steps=_steps(opened, stages, duplicates),
        duplicates=duplicates,
        input_order=order,
    )


def _stage(store: Store, stage: str, missing: list[str], last: JournalEntry | None) -> StageInfo:
    lineage = store.manifest.stages.get(stage, {})
    files = [facts for folder in STAGES[stage] for facts in store.manifest.files_in(folder).values()]
    state: State = "outdated" if _is_outdated(store, stage) else "complete" if lineage else "not run"
    if missing or store.unfinished(stage) is not None:
        state = "damaged" if missing else "interrupted"
    return StageInfo(
        stage=stage,
        state=state,
        positions=(store.manifest.counts if stage == "convert" else lineage).get("positions", 0),
        files=len(files),
        bytes=sum(facts.bytes for facts in files),
        finished=last.finished if last and lineage else None,
        command=stage_command(stage, lineage, store.path) if lineage else None,
        missing=missing,
        lineage=lineage | ({"removed": len(lineage["removed"])} if "removed" in lineage else {}),
        digest=lineage.get("digest") or store.manifest.digest(*STAGES[stage]),
        last=last if lineage else None,
    )


def _is_outdated(store: Store, stage: str) -> bool:
    """Return whether a stage, or the one whose output it reads, was run on other files than those of now."""
    lineage = store.manifest.stages.get(stage, {})
    if "of" in lineage and lineage["of"] != store.input_digest(stage):
        return True
    return bool(lineage) and stage in _INPUT_STAGE and _is_outdated(store, _INPUT_STAGE[stage])


def _steps(store: Store, stages: list[StageInfo], duplicates: int) -> list[tuple[str, str]]:
    """Return the purpose and the command of each next step, the most urgent first."""
    path, states = store.path, {stage.stage: stage.state for stage in stages}
    steps = []
    if any(stage.missing for stage in stages):
        steps.append(("List all damaged files", command_line("verify", path)))
    for stage in stages:
        if stage.state == "damaged":
            again = rebuild_commands(store, stage.missing)
            steps += [(f"Write the files of {stage.stage} again", command) for command in again]
            # All other stages read these tables.
            if stage.stage == "convert":
                return steps
        elif stage.state in ("interrupted", "outdated"):
            purpose = "Finish" if stage.state == "interrupted" else "Repeat"
            steps.append((f"{purpose} {stage.stage}, with the same options", store.next_command(stage.stage)))
    if not store.manifest.counts["positions"]:
        return steps or [("Convert your files", store.next_command("convert"))]
    steps.append(("Train from it, in Python", loader_code(path)))
    steps.append(("Look at its games and openings", command_line("browse", path)))
    dedup = store.manifest.stages.get("shuffle", {}).get("choices", {}).get("dedup", "none")
    if duplicates and dedup == "none":
        steps.append(("Train without duplicate games", loader_code(path, dedup="symmetric")))
    if states["shuffle"] == "not run":
        steps.append(("Shuffle it, only to write shards", store.next_command("shuffle")))
    elif states["shuffle"] == "complete" and states["export"] == "not run":
        steps.append(("Write shards", store.next_command("export")))
    elif states["export"] == "complete":
        steps.append(("Check all files and the shuffle", command_line("verify", path)))
    return steps


def loader_code(path: str | AnyPath, **options: Any) -> str:
    """Return the Python that creates a loader of a store, which can be copied."""

    def literal(value: Any) -> str:
        # Double quotes as in the documents; repr escapes what needs it.
        is_plain = isinstance(value, str) and printable(value) == value and not {*value} & {'"', "\\"}
        return f'"{value}"' if is_plain else repr(value)

    arguments = [literal(str(path)), *(f"{name}={literal(value)}" for name, value in options.items())]
    return f"Loader({', '.join(arguments)})"
