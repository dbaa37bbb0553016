"""The commands ``hexdata run`` and ``hexdata demo``, and the display of their result."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from hexdata.cli.app import command, options_of
from hexdata.cli.shuffle import show_choices

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.pipeline import RunResult


def run(config: str, json: bool = False) -> None:
    """Run the stages of a config in order.

    A stage that is already done is not run again.

    Examples:
        hexdata run configs/demo.toml

    Arguments:
        config CONFIG: Path of a TOML file.
    """
    from hexdata.pipeline import load_config, run_config

    with command(json) as (output, bar), redirect_stdout(sys.stderr):  # Ray prints
        result = run_config(load_config(config), bar)
    _show_run(output, result)


def demo(folder: str = "hexdata-demo", games: int = 1_500, seed: int = 7, json: bool = False) -> None:
    """Generate games, run all stages on them and show the result.

    The games are written as legacy files first. The last lines show how to train from the converted
    games.

    Examples:
        hexdata demo
        hexdata demo my-demo --games 200

    Arguments:
        folder FOLDER: Folder to write to.

    Options:
        --games N: Number of games to generate.
        --seed N: Random seed of the games and of the shuffle.
    """
    from hexdata.demo import DemoOptions
    from hexdata.errors import ConfigError
    from hexdata.pipeline import demo_config, run_config
    from hexdata.report import require_libraries

    options, with_report = options_of(DemoOptions, locals()), True
    with command(json) as (output, bar):
        try:
            # The report is an extra. Without it, the demo shows everything else.
            require_libraries()
        except ConfigError as missing:
            bar.note(f"no report is written: {missing}")
            with_report = False
        result = run_config(demo_config(folder, options, seed=seed, with_report=with_report), bar)
    _show_run(output, result)
    if not json:
        for line in (
            "",
            "To train from the converted games, in Python:",
            "",
            "    from hexdata import Loader",
            f"    loader = Loader({result.store!r}, mode='games')",
            "    for batch in loader:",
            "        board, policy = batch['board'], batch['policy']",
            "        value = batch['value']",
        ):
            output.line(line)


def _show_run(output: Output, result: RunResult) -> None:
    """Print the result of each stage and the main figures on the quality of the shuffle."""
    if output.print_json(result):
        return
    if kept := [stage.stage for stage in result.stages if stage.kept]:
        output.line(f"{result.store}: already complete: {', '.join(kept)}")
    # A stage that wrote nothing has no speed.
    if ran := [stage for stage in result.stages if not stage.kept]:
        columns = ("stage", "positions", "games", "bytes", "seconds", "positions_per_second", "path")
        output.records(ran, columns, optional=("path", "positions_per_second"))
    if result.shuffle is not None and (result.shuffle.left_out or result.shuffle.notes):
        output.line()
        show_choices(output, result.shuffle)
    if result.quality is not None:  # its main figures; ``hexdata verify`` prints all
        largest, neighbours = result.quality["largest-share"], result.quality["neighbours-1"]
        shares = {
            largest.title: largest.after,
            "neighbours of the same game, input order": neighbours.before,
            "neighbours of the same game, shuffled": neighbours.after,
            "neighbours of the same game, expected of a uniform shuffle": neighbours.expected,
        }
        output.line()
        output.table(
            ["dispersion of games in the training split", "share"],
            [[name, "-" if share is None else f"{share:.3%}"] for name, share in shares.items()],
        )
    if result.verdict is not None:
        page = next(stage.path for stage in result.stages if stage.stage == "report")
        output.line()
        output.line(f"{result.verdict.headline} See {page} in a browser.")
