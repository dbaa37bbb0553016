"""``hexdata demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from hexdata.cli.app import Json, Seed, command
from hexdata.cli.run import show_run

__all__ = ["demo"]


def demo(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder to write to.")] = "hexdata-demo",
    games: Annotated[
        int, typer.Option("--games", metavar="N", min=1, help="Number of games to generate.")
    ] = 1_500,
    seed: Seed = 7,
    as_json: Json = False,
) -> None:
    """Generate games, run all stages on them and show the result.

    The games are written as legacy files first. The last lines show how to train from the converted
    games.

    Examples:
        hexdata demo
        hexdata demo my-demo --games 200
    """
    from hexdata.demo import DemoOptions
    from hexdata.errors import ConfigError
    from hexdata.pipeline import demo_config, run_config
    from hexdata.report import require_libraries

    with command(as_json) as (output, bar):
        options, with_report = DemoOptions(games=games, seed=seed), True
        try:
            require_libraries()
        except ConfigError as missing:
            bar.note(f"no report is written: {missing}")
            with_report = False
        result = run_config(demo_config(folder, options, seed=seed, with_report=with_report), bar)
    show_run(output, result)
    if not as_json:
        output.line()
        output.line("To train from the converted games, in Python:")
        output.line()
        output.line("    from hexdata import Loader")
        output.line(f"    loader = Loader({result.store!r}, mode='games')")
        output.line("    for batch in loader:")
        output.line("        board, policy = batch['board'], batch['policy']")
        output.line("        value = batch['value']")
