"""``hexdata report``."""

from __future__ import annotations

from typing import Annotated

import typer

from hexdata.cli.app import AnyPath, Json, Memory, Store, Threads, command, parse_path
from hexdata.units import format_bytes, parse_bytes

__all__ = ["report"]


def report(
    store: Store,
    output: Annotated[
        AnyPath | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Path or address of the page. Default: report.html in the store.",
            parser=parse_path,
        ),
    ] = None,
    memory: Memory = "1GB",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page about the shuffle and contents of a store.

    Examples:
        hexdata report store
        hexdata report store --output report.html
    """
    from hexdata.report import write_report
    from hexdata.sql import SqlLimits

    limits = SqlLimits(memory=parse_bytes(memory), threads=threads)
    with command(as_json, store, output) as (out, bar):
        result = write_report(store, output, limits, bar)
    if out.print_json(result):
        return
    out.line(result.verdict.headline)
    out.line()
    levels = {"good": "ok", "note": "note", "bad": "FAILED"}
    out.table(
        ["question", "status", "answer"],
        [[a.question, levels[a.level], f"{a.short}. {a.text}"] for a in result.verdict.answers],
    )
    out.line()
    for purpose, step in result.verdict.todo:
        out.line(f"{purpose}: {step}")
    out.line(f"wrote {result.path}, {format_bytes(result.bytes)}: open it in a browser")
