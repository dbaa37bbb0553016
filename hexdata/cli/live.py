"""``hexdata live``."""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from hexdata.cli.render import Output
    from hexdata.live.metrics import LiveMetrics, MetricsByStage

__all__ = ["live"]

_DRAWS: Final = "Pool and reservoir"
"""Group of options in the help."""


def live(
    directory: Annotated[
        str,
        typer.Argument(metavar="DIRECTORY", help="Directory with the games.", show_default=False),
    ],
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="Config in TOML, such as configs/live.toml."),
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Allow the config to import Python code.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of all random draws. Default: 0.")
    ] = None,
    split: Annotated[
        Literal["train", "val", "test"] | None,
        typer.Option("--split", metavar="train|val|test", help="Split to use. Default: train."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help="Positions per batch. Default: 1024.")
    ] = None,
    pool_size: Annotated[
        int | None,
        typer.Option(
            "--pool-size",
            metavar="N",
            help="Maximum number of games in the pool, which keeps the newest. Default: 100000.",
            rich_help_panel=_DRAWS,
        ),
    ] = None,
    reuse: Annotated[
        float | None,
        typer.Option(
            "--reuse",
            metavar="X",
            help="Draw games at most this many times per new game, then wait. Default: no limit.",
            rich_help_panel=_DRAWS,
        ),
    ] = None,
    reservoir: Annotated[
        int | None,
        typer.Option(
            "--reservoir",
            metavar="N",
            help="Number of positions in the reservoir. Default: 1000000.",
            rich_help_panel=_DRAWS,
        ),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option("--batches", metavar="N", help="Stop after this many batches. Default: no limit."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="S", help="Stop after this many seconds. Default: no limit."),
    ] = None,
    prometheus: Annotated[
        int | None,
        typer.Option(
            "--prometheus",
            metavar="PORT",
            help="Serve metrics for Prometheus on this port.",
            rich_help_panel="Metrics",
        ),
    ] = None,
    prometheus_host: Annotated[
        str,
        typer.Option(
            "--prometheus-host",
            metavar="ADDRESS",
            help="Address to serve the metrics at.",
            rich_help_panel="Metrics",
        ),
    ] = "127.0.0.1",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print metrics as one line of JSON per second.")
    ] = False,
) -> None:
    """Load batches from a directory that self-play writes to.

    Shows the state of each stage.

    Examples:
        hexdata live selfplay/
        hexdata live selfplay/ --batch-size 256 --seconds 60
        hexdata live selfplay/ --config live.toml
    """
    from dataclasses import replace

    from hexdata.cli.render import Output
    from hexdata.cli.view import View
    from hexdata.live import LiveOptions, load_live_config
    from hexdata.live.trial import LiveTrialOptions, run_live_trial

    options = LiveOptions() if config is None else load_live_config(config, allow_code=allow_code)
    given: dict[str, Any] = {"seed": seed, "split": split, "batch_size": batch_size}
    given |= {"pool_size": pool_size, "reuse": reuse, "reservoir": reservoir}
    options = replace(options, **{name: value for name, value in given.items() if value is not None})
    limits = LiveTrialOptions(batches=batches, seconds=seconds)
    serve = None if prometheus is None else _server(prometheus, prometheus_host)

    output, title = Output(as_json), f"hexdata live {directory}"
    with _screen(output, title) as show:
        result = run_live_trial(directory, options, limits, show, serve)
    if not output.print_json(result):
        output.out.print(View(title, result), soft_wrap=False)
    if result.ended == "interrupted":
        raise typer.Exit(130)


def _server(port: int, host: str) -> Callable[[Callable[[], MetricsByStage]], AbstractContextManager[object]]:
    from hexdata.live.prometheus import serve_metrics

    return partial(serve_metrics, port=port, host=host)


def _screen(output: Output, title: str) -> AbstractContextManager[Callable[[LiveMetrics], None]]:
    """Return a context manager whose value shows metrics: as JSON lines, as a view, or as notes."""
    if output.as_json:
        return nullcontext(partial(_print_line, output))
    if not output.err.is_terminal:
        return nullcontext(_WaitNotes(output))
    from hexdata.cli.view import LiveView

    return LiveView(title)


class _WaitNotes:
    """Prints why no batch is delivered, once for each reason."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._last = ""

    def __call__(self, metrics: LiveMetrics) -> None:
        reason = re.sub(r"[\d,.]+", "", metrics.waiting or "")  # numbers alone change all the time
        if metrics.waiting and reason != self._last:
            self._output.note(f"no batch: {metrics.waiting}")
        self._last = reason


def _print_line(output: Output, metrics: LiveMetrics) -> None:
    output.print_json(metrics)
    sys.stdout.flush()  # for a reader at the other end of a pipe
