"""The command ``hexdata run``, and the display of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hexdata.cli.app import Json, command, prints_to_stderr
from hexdata.cli.shuffle import show_choices
from hexdata.units import format_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.pipeline import RunResult
    from hexdata.quality import Quality


__all__ = ["run", "show_run"]


def run(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Path of a TOML file.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Run the stages of a config in order.

    A stage that is already done is not run again.

    Examples:
        hexdata run configs/demo.toml
    """
    from hexdata.pipeline import load_config, run_config

    with command(as_json) as (output, bar), prints_to_stderr():
        result = run_config(load_config(config), bar)
    show_run(output, result)


def show_run(output: Output, result: RunResult) -> None:
    """Print the result of each stage and the main figures on the quality of the shuffle."""
    if output.print_json(result):
        return
    rows = [
        [
            s.stage,
            f"{s.positions:,}",
            "" if s.games is None else f"{s.games:,}",
            "" if s.bytes is None else format_bytes(s.bytes),
            f"{s.seconds:.2f}",
            f"{s.positions_per_second:,.0f}",
            s.path or "",
        ]
        for s in result.stages
        if not s.kept
    ]
    if kept := [s.stage for s in result.stages if s.kept]:
        output.line(f"{result.store}: already complete: {', '.join(kept)}")
    if rows:
        output.table(
            ["stage", "positions", "games", "on disk", "seconds", "positions/s", "location"],
            rows,
            optional=["location", "positions/s"],
        )
    if result.shuffle is not None and (result.shuffle.left_out or result.shuffle.notes):
        output.line()
        show_choices(output, result.shuffle)
    if result.quality is not None:
        show_dispersion(output, result.quality)
    if result.verdict is not None:
        output.line()
        page = next(s.path for s in result.stages if s.stage == "report")
        output.line(f"{result.verdict.headline} See {page} in a browser.")


def show_dispersion(output: Output, quality: Quality) -> None:
    """Print the main figures of ``quality``; ``hexdata verify`` prints all."""

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{share:.3%}"

    largest, neighbours = quality["largest-share"], quality["neighbours-1"]
    output.line()
    output.table(
        ["dispersion of games in the training split", "share"],
        [
            [largest.title, percent(largest.after)],
            ["neighbours of the same game, input order", percent(neighbours.before)],
            ["neighbours of the same game, shuffled", percent(neighbours.after)],
            ["neighbours of the same game, expected of a uniform shuffle", percent(neighbours.expected)],
        ],
    )
