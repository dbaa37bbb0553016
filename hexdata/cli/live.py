"""``hexdata live``."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from hexdata.live.trial import LiveMetrics


def live(
    directory: str,
    config: str | None = None,
    allow_code: bool = False,
    seed: int | None = None,
    split: Literal["train", "val", "test"] | None = None,
    batch_size: int | None = None,
    pool_size: int | None = None,
    reuse: float | None = None,
    reservoir: int | None = None,
    batches: int | None = None,
    seconds: float | None = None,
    prometheus: int | None = None,
    prometheus_host: str = "127.0.0.1",
    json: bool = False,
) -> None:
    """Load batches from a directory that self-play writes to.

    Shows the state of each stage.

    Examples:
        hexdata live selfplay/
        hexdata live selfplay/ --batch-size 256 --seconds 60
        hexdata live selfplay/ --config live.toml

    Arguments:
        directory DIRECTORY: Directory with the games.

    Options:
        --config FILE: Config in TOML, such as configs/live.toml.
        --allow-code: Allow the config to import Python code.
        --seed N: Seed of all random draws. Default: 0.
        --split: Split to use. Default: train.
        --batch-size N: Positions per batch. Default: 1024.
        --batches N: Stop after this many batches. Default: no limit.
        --seconds S: Stop after this many seconds. Default: no limit.
        --json: Print metrics as one line of JSON per second.

    Pool and reservoir:
        --pool-size N: Maximum number of games in the pool, which keeps the newest. Default: 100000.
        --reuse X: Draw games at most this many times per new game, then wait. Default: no limit.
        --reservoir N: Number of positions in the reservoir. Default: 1000000.

    Metrics:
        --prometheus PORT: Serve metrics for Prometheus on this port.
        --prometheus-host ADDRESS: Address to serve the metrics at.
    """
    from dataclasses import replace

    from rich.live import Live

    from hexdata.cli.render import Output, console, is_terminal
    from hexdata.cli.view import View
    from hexdata.live import LiveOptions, load_live_config
    from hexdata.live.trial import run_live_trial

    logging.getLogger("hexdata.live").addHandler(logging.NullHandler())  # the view shows the same facts
    # Options of the command line replace those of the config, which replace the defaults.
    options = LiveOptions() if config is None else load_live_config(config, allow_code=allow_code)
    given: dict[str, Any] = {"seed": seed, "split": split, "batch_size": batch_size}
    given |= {"pool_size": pool_size, "reuse": reuse, "reservoir": reservoir}
    options = replace(options, **{name: value for name, value in given.items() if value is not None})
    serve = None
    if prometheus is not None:
        from hexdata.live.prometheus import serve_metrics

        serve = partial(serve_metrics, port=prometheus, host=prometheus_host)
    output, title, reason = Output(json), f"hexdata live {directory}", ""
    # Each call of `show` draws the view, so rich needs no thread for it.
    screen = Live(console=console(stderr=True, soft_wrap=False), auto_refresh=False, transient=True)
    draws = not json and is_terminal(sys.stderr)

    def show(metrics: LiveMetrics) -> None:
        nonlocal reason
        before, reason = reason, re.sub(r"[\d,.]+", "", metrics.waiting or "")  # numbers change all the time
        if output.print_json(metrics):
            sys.stdout.flush()  # for a reader at the other end of a pipe
        elif draws:
            screen.update(View(title, metrics), refresh=True)
        elif reason not in ("", before):
            output.note(f"no batch: {metrics.waiting}")

    with screen if draws else nullcontext():
        result = run_live_trial(directory, options, show, serve, batches=batches, seconds=seconds)
    if not output.print_json(result):
        output.out.print(View(title, result), soft_wrap=False)
    if result.ended == "interrupted":
        raise typer.Exit(130)
