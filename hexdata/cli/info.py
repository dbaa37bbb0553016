"""``hexdata info``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hexdata.cli.app import Json, Store, command
from hexdata.text import count_of
from hexdata.units import format_bytes

if TYPE_CHECKING:
    from hexdata.info import StageInfo, StoreInfo

__all__ = ["info"]

_SHOWN: Final = ("convert", "shuffle", "export")
"""Stages that are listed even if they have not run."""
_SHOWN_FILES: Final = 5
"""Maximum number of missing files that are listed."""


def info(store: Store, as_json: Json = False) -> None:
    """Show the content of a store, its stages and what to run next.

    Examples:
        hexdata info store
        hexdata info s3://bucket/store --json
    """
    from hexdata.info import store_info

    with command(as_json, store) as (output, _):
        facts = store_info(store)
    if output.print_json(facts):
        return
    output.line(facts.store)
    for line in _content(facts):
        output.line(line)
    output.line()
    output.table(
        ["stage", "state", "positions", "files", "size", "finished (UTC)"],
        [_row(stage) for stage in facts.stages if stage.stage in _SHOWN or stage.state != "not run"],
        optional=["files", "finished (UTC)", "size"],
    )
    output.line()
    for name in facts.missing[:_SHOWN_FILES]:
        output.line(f"Missing, or of another size than recorded: {name}")
    if len(facts.missing) > _SHOWN_FILES:
        output.line(f"… and {len(facts.missing) - _SHOWN_FILES:,} more")
    for note in facts.notes:
        output.line(f"Note: {note}.")
    if facts.missing or facts.notes:
        output.line()
    output.line("Next:")
    for purpose, line in facts.steps:
        output.line(f"  {purpose}:")
        output.line(f"    {line}")


def _content(facts: StoreInfo) -> list[str]:
    counts = facts.counts
    size = "no positions" if facts.board_size is None else f"board size {facts.board_size}"
    lines = [
        f"{size}, {count_of(counts['games'], 'game')}, {count_of(counts['positions'], 'position')}",
        f"from {count_of(counts['sources'], 'source file')}, "
        f"{count_of(counts['rejected'], 'rejected record')}",
    ]
    if facts.splits:
        lines.append(f"games by split: {', '.join(f'{name} {n:,}' for name, n in facts.splits.items())}")
    if facts.targets:
        lines.append(f"optional columns: {', '.join(facts.targets)}")
    lines.append(
        f"{count_of(facts.files, 'file')}, {format_bytes(facts.bytes)}, schema version {facts.schema_version}"
    )
    return lines


def _row(stage: StageInfo) -> list[str]:
    if stage.state == "not run":
        return [stage.stage, stage.state, "", "", "", ""]
    finished = "" if stage.finished is None else stage.finished[:16].replace("T", " ")
    numbers = [f"{stage.positions:,}", f"{stage.files:,}", format_bytes(stage.bytes)]
    return [stage.stage, stage.state, *numbers, finished]
