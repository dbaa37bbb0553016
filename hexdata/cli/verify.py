"""``hexdata verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hexdata.cli.app import Json, Store, command

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.verify import RoundTrip, VerifyResult


__all__ = ["verify"]


def verify(
    store: Store,
    round_trip: Annotated[
        list[Path] | None,
        typer.Option(
            "--round-trip",
            metavar="INPUT",
            help="Also write each source back and compare it with its file, found here or below. "
            "May be given several times.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Recount, rehash and compare: prove that the store holds what it says."""
    from hexdata.verify import check_round_trip, verify_store

    with command(as_json) as (output, bar):
        result = verify_store(store, bar)
        returned = check_round_trip(store, round_trip, bar) if round_trip and result.ok else []
    _show_checks(output, result, returned)
    if not (result.ok and all(source.ok for source in returned)):
        raise typer.Exit(1)


def _show_checks(output: Output, result: VerifyResult, returned: list[RoundTrip]) -> None:
    facts = {
        "ok": result.ok and all(source.ok for source in returned),
        "checks": result.checks,
        "skipped": result.skipped,
        "round_trip": returned,
    }
    if output.facts(facts):
        return
    output.table(
        ["check", "", "found"], [[c.name, "ok" if c.ok else "FAILED", c.detail] for c in result.checks]
    )
    for stage in result.skipped:
        output.note(f"no {stage} to verify yet")
    if returned:
        output.line()
        states = {(True, True): "ok", (True, False): "-", (False, False): "not checked"}
        output.table(
            ["source", "", "written back"],
            [[s.name, states.get((s.ok, s.checked), "FAILED"), s.detail] for s in returned],
        )
