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
    read_path,
    running_on,
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
            help="Also write each source back and compare it with its file, found here or below. "
            "May be given several times.",
            parser=read_path,
        ),
    ] = None,
    memory: Memory = "1GB",
    threads: Threads = None,
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Recount, rehash and compare: prove that the store holds what it says."""
    from hexdata.verify import VerifyOptions, check_round_trip, verify_store

    options = VerifyOptions(memory=parse_bytes(memory), threads=threads)
    with command(as_json, store, *(round_trip or [])) as (output, bar), running_on(engine, address) as runner:
        result = verify_store(store, options, bar, engine=runner)
        returned = check_round_trip(store, round_trip, bar) if round_trip and result.ok else []
    _show_checks(output, result, returned)
    if not (result.ok and all(source.ok for source in returned)):
        raise typer.Exit(1)


def _show_checks(output: Output, result: VerifyResult, returned: list[RoundTrip]) -> None:
    facts = {
        "ok": result.ok and all(source.ok for source in returned),
        "checks": result.checks,
        "commands": result.commands,
        "skipped": result.skipped,
        "quality": result.quality,
        "round_trip": returned,
    }
    if output.facts(facts):
        return
    output.table(
        ["check", "", "found"], [[c.name, "ok" if c.ok else "FAILED", c.detail] for c in result.checks]
    )
    if result.commands:
        output.line()
        output.line("These commands write the damaged files again, in this order:")
        for line in result.commands:  # below the table, which would fold it
            output.line(f"  {line}")
    for stage in result.skipped:
        output.note(f"no {stage} to verify yet")
    if result.quality is not None:
        _show_quality(output, result.quality)
    if returned:
        output.line()
        states = {(True, True): "ok", (True, False): "-", (False, False): "not checked"}
        output.table(
            ["source", "", "written back"],
            [[s.name, states.get((s.ok, s.checked), "FAILED"), s.detail] for s in returned],
        )


def _show_quality(output: Output, quality: Quality) -> None:
    """Show each figure before and after the shuffle, beside what chance makes of it."""
    output.line()
    output.table(
        [f"the {quality.split} split, shuffled", "", "before", "after", "by chance", "s.d.", "off by", ""],
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
    )
    if quality.sampled < quality.positions:
        output.line(
            f"pairs, neighbours and correlations: of {quality.sampled:,} of {quality.positions:,} positions"
        )


def _figure(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.unit == "share":
        return f"{100 * value:.4g}%"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
