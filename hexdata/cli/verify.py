"""``hexdata verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hexdata.cli.app import AnyPath, Size, command, options_of

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.quality import Quality
    from hexdata.verify import RoundTrip, VerifyResult


def verify(
    store: AnyPath,
    round_trip: list[AnyPath] | None = None,
    memory: Size = "1GB",
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Check all files and tables of a store.

    Examples:
        hexdata verify store
        hexdata verify store --round-trip legacy/

    Options:
        --round-trip INPUT: Also write each source back and compare it with its original file. INPUT is that
            file or a folder to search. Can be repeated.
    """
    from hexdata.verify import VerifyOptions, check_round_trip, verify_store

    options = options_of(VerifyOptions, locals())
    with command(json) as (output, bar):
        result = verify_store(store, options, bar)
        # Sources are written back from the tables, so damaged tables would make sound sources differ.
        sources = check_round_trip(store, round_trip, bar) if round_trip and result.ok else []
    ok = result.ok and all(source.ok for source in sources)
    if not output.print_json({"ok": ok, **vars(result), "round_trip": sources}):
        _show_checks(output, result, sources)
    if not ok:
        raise typer.Exit(1)


def _show_checks(output: Output, result: VerifyResult, sources: list[RoundTrip]) -> None:
    output.table(
        ["check", "status", "found"], [[c.name, "ok" if c.ok else "FAILED", c.detail] for c in result.checks]
    )
    if result.commands:
        output.line()
        output.line("To write the damaged files again, run these commands in this order:")
        for line in result.commands:  # not in the table, which would wrap it
            output.line(f"  {line}")
    for stage in result.skipped:
        output.note(f"the store has no {stage} to verify")
    if result.quality is not None:
        _show_quality(output, result.quality)
    if sources:
        output.line()
        states = {(True, True): "ok", (True, False): "-", (False, False): "not checked"}
        output.table(
            ["source", "status", "round trip"],
            [[s.name, states.get((s.ok, s.checked), "FAILED"), s.detail] for s in sources],
        )


def _show_quality(output: Output, quality: Quality) -> None:
    """Print each figure before and after the shuffle, with the value expected of a random order."""
    rows = [figure.row() for figure in quality.figures]
    output.line()
    output.line(f"shuffle of the {quality.split} split:")
    output.table(
        list(rows[0]),
        [list(row.values()) for row in rows],
        optional=["note", "limit", "s.d.", "expected"],
    )
    if quality.sampled < quality.positions:
        output.line(
            f"Pairs, neighbours and correlations are measured on {quality.sampled:,} of "
            f"{quality.positions:,} positions."
        )
