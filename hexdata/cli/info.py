"""``hexdata info``."""

from __future__ import annotations

from typing import Final

from hexdata.cli.app import AnyPath, command
from hexdata.text import count_of
from hexdata.units import format_bytes

_SHOWN: Final = ("convert", "shuffle", "export")
"""Stages that are listed even if they have not run."""
_SHOWN_FILES: Final = 5
"""Maximum number of missing files that are listed."""


def info(store: AnyPath | None = None, json: bool = False) -> None:
    """Show the content of a store, its stages and what to do next.

    Examples:
        hexdata info store
        hexdata info s3://bucket/store --json

    Arguments:
        store STORE: Folder of the store, or its address, such as s3://BUCKET/STORE. Default: this folder.
    """
    from hexdata.info import store_info

    with command(json) as (output, _):
        facts = store_info(store or ".")
    if output.print_json(facts):
        return
    counts = facts.counts
    size = "no positions" if facts.board_size is None else f"board size {facts.board_size}"
    output.line(facts.store)
    output.line(f"{size}, {count_of(counts['games'], 'game')}, {count_of(counts['positions'], 'position')}")
    sources = count_of(counts["sources"], "source file")
    output.line(f"from {sources}, {count_of(counts['rejected'], 'rejected record')}")
    if facts.splits:
        output.line(f"games by split: {', '.join(f'{name} {n:,}' for name, n in facts.splits.items())}")
    if facts.targets:
        output.line(f"optional columns: {', '.join(facts.targets)}")
    if facts.input_order:
        output.line(f"order of the input: {facts.input_order.text}")
        output.line(f"  {facts.input_order.meaning}")
    output.line(
        f"{count_of(facts.files, 'file')}, {format_bytes(facts.bytes)}, schema version {facts.schema_version}"
    )
    output.line()
    listed = [each for each in facts.stages if each.state != "not run" or each.stage in _SHOWN]
    columns = ("stage", "state", "positions", "files", "bytes", "finished")
    output.records(listed, columns, optional=("files", "finished", "bytes"))
    output.line()
    for name in facts.missing[:_SHOWN_FILES]:
        output.line(f"Missing or damaged: {name}")
    if len(facts.missing) > _SHOWN_FILES:
        output.line(f"… and {len(facts.missing) - _SHOWN_FILES:,} more")
    for note in facts.notes:
        output.line(f"Note: {note}.")
    if facts.missing or facts.notes:
        output.line()
    output.steps(facts.steps)
