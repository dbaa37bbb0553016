"""Sections about the stages that made the store: sizes, rates, memory and lineage."""

from __future__ import annotations

from typing import Final

from hexdata.report.blocks import Section, Table
from hexdata.report.facts import Facts, StageFacts
from hexdata.store.integrity import stage_command
from hexdata.units import format_bytes

__all__ = ["history_sections"]

_NAMES: Final = {
    "convert": "convert",
    "shuffle": "shuffle",
    "export": "export",
    "pickles-original": "pickles, original order",
    "pickles-shuffled": "pickles, shuffled",
}
_NOT_RECORDED: Final = "not recorded"


def history_sections(facts: Facts) -> list[Section]:
    """Return the sections about stages and lineage."""
    return [_stages(facts), _lineage(facts)]


def _stages(facts: Facts) -> Section:
    size = sum(stage.bytes for stage in facts.stages)
    rows = [_stage_row(stage) for stage in facts.stages]
    columns = [
        "stage",
        "positions",
        "files",
        "on disk",
        "a position",
        "took",
        "positions/s",
        "memory",
        "finished",
    ]
    finding = f"The files of all stages take {format_bytes(size)} on disk."
    if not rows:
        finding = "No stage has run."
    resumed = any(stage.last and stage.last.resumed for stage in facts.stages)
    more = "A resumed run did only part of the work, so its rate is not shown." if resumed else ""
    return Section(
        "stages",
        "Stages",
        finding,
        "Sizes are those of the current files. Time, rate and peak memory of all processes are those of the "
        "last run, from the journal of this folder. They depend on the machine, not on the data.",
        tables=[Table("Stages", columns, rows, more=more)],
    )


def _stage_row(stage: StageFacts) -> list[str]:
    each = f"{stage.bytes / stage.positions:.1f} B" if stage.positions else "-"
    row = [_NAMES[stage.stage], f"{stage.positions:,}", f"{stage.files:,}", format_bytes(stage.bytes), each]
    last = stage.last
    if last is None:
        return [*row, _NOT_RECORDED, "-", "-", "-"]
    rate = f"{last.positions / last.seconds:,.0f}" if last.seconds and not last.resumed else "-"
    memory = format_bytes(last.peak_bytes) if last.peak_bytes else "-"
    took = _duration(last.seconds) + (", resumed" if last.resumed else "")
    return [*row, took, rate, memory, last.finished.replace("T", " ").replace("Z", " UTC")]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _lineage(facts: Facts) -> Section:
    rows = [
        [_NAMES[stage.stage], stage_command(stage.stage, stage.lineage, "STORE"), stage.digest]
        for stage in facts.stages
    ]
    export = facts.stage("export")
    if export:
        rows.append(["shards, as the loader checks them", "", export.lineage["digest"]])
    rows.append(["manifest.json", "", facts.manifest_sha256])
    return Section(
        "lineage",
        "Lineage",
        "The same sources, commands and release give the same digests on any machine.",
        "The digest of a stage is a SHA-256 over the names and digests of its files. Two stores with equal "
        "manifests contain the same bytes. Click on a command or a digest to select it.",
        tables=[
            Table(
                f"Lineage, by hexdata {facts.version}",
                ["stage", "command", "SHA-256"],
                rows,
                texts=frozenset({0, 1, 2}),
                codes=frozenset({1, 2}),
                stacked=True,
            )
        ],
    )
