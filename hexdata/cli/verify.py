"""``hexdata verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hexdata.cli.app import (
    Address,
    AnyPath,
    EngineName,
    Json,
    Memory,
    Store,
    Threads,
    command,
    parse_path,
    using_engine,
)
from hexdata.units import parse_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.quality import Figure, Quality
    from hexdata.verify import RoundTrip, VerifyResult


__all__ = ["verify"]


def verify(
    store: Store,
    round_trip: Annotated[
        list[AnyPath] | None,
        typer.Option(
            "--round-trip",
            metavar="INPUT",
            help="Also write each source back and compare it with its original file. INPUT is that file or "
            "a folder to search. Can be repeated.",
            parser=parse_path,
        ),
    ] = None,
    memory: Memory = "1GB",
    threads: Threads = None,
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Check all files and tables of a store.

    Examples:
        hexdata verify store
        hexdata verify store --round-trip legacy/
    """
    from hexdata.verify import VerifyOptions, check_round_trip, verify_store

    options = VerifyOptions(memory=parse_bytes(memory), threads=threads)
    with (
        command(as_json, store, *(round_trip or [])) as (output, bar),
        using_engine(engine, address) as runner,
    ):
        result = verify_store(store, options, bar, engine=runner)
        sources = check_round_trip(store, round_trip, bar) if round_trip and result.ok else []
    _show_checks(output, result, sources)
    if not (result.ok and all(source.ok for source in sources)):
        raise typer.Exit(1)


def _show_checks(output: Output, result: VerifyResult, sources: list[RoundTrip]) -> None:
    facts = {
        "ok": result.ok and all(source.ok for source in sources),
        "checks": result.checks,
        "commands": result.commands,
        "skipped": result.skipped,
        "quality": result.quality,
        "round_trip": sources,
    }
    if output.print_json(facts):
        return
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
    output.line()
    output.table(
        [
            f"shuffle of the {quality.split} split",
            "status",
            "before",
            "after",
            "expected",
            "s.d.",
            "deviation",
            "note",
        ],
        [
            [
                figure.title,
                ("ok" if figure.ok else "FAILED") if figure.judged else "-",
                _figure(figure, figure.before),
                _figure(figure, figure.after),
                _figure(figure, figure.expected),
                _figure(figure, figure.deviation),
                "-" if figure.z is None else f"{figure.z:+.1f} s.d.",
                figure.note,
            ]
            for figure in quality.figures
        ],
        optional=["note", "s.d.", "expected"],
    )
    if quality.sampled < quality.positions:
        output.line(
            f"Pairs, neighbours and correlations are measured on {quality.sampled:,} of "
            f"{quality.positions:,} positions."
        )


def _figure(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.unit == "share":
        return f"{100 * value:.4g}%"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
