"""``hexdata report``."""

from __future__ import annotations

from hexdata.cli.app import AnyPath, Size, command, options_of
from hexdata.units import format_bytes


def report(
    store: AnyPath,
    output: AnyPath | None = None,
    memory: Size = "1GB",
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Write an HTML page about the shuffle and contents of a store.

    Examples:
        hexdata report store
        hexdata report store --output report.html

    Options:
        --output FILE: Path or address of the page. Default: report.html in the store.
    """
    from hexdata.report import write_report
    from hexdata.sql import SqlLimits

    limits = options_of(SqlLimits, locals())
    with command(json) as (out, bar):
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
    out.steps(result.verdict.todo)
    out.line()
    out.line(f"wrote {result.path}, {format_bytes(result.bytes)}: open it in a browser")
