"""The command line: flags, one library call, rendering. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hexdata
from hexdata.errors import ConfigError, HexdataError
from hexdata.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hexdata.cli.bar import Bar
    from hexdata.cli.render import Output
    from hexdata.export import PicklesResult
    from hexdata.pipeline import RunResult
    from hexdata.report import Dispersion
    from hexdata.verify import RoundTrip, VerifyResult

__all__ = ["app", "main"]

_INTERRUPTED = "interrupted; run the same command again and it goes on from there"

app = typer.Typer(
    name="hexdata",
    help="Board-game training data: legacy pickles to a queryable store, a provable global shuffle, "
    "training shards and batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Store = Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the facts as one line of JSON.")]
Memory = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Budget for all processes together, such as 1GB.")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Processes. Default: one a core, as far as --memory allows."),
]
Seed = Annotated[int, typer.Option("--seed", help="Names the order: the same seed, the same bytes.")]


def main() -> None:
    """Run the command line; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except HexdataError as error:
        _fail(error, 1)
    except KeyboardInterrupt:  # while a command is still being loaded
        sys.stderr.write(f"hexdata: {_INTERRUPTED}\n")
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"hexdata: {where}{error.strerror or error}\n")
        sys.exit(1)


def _fail(error: HexdataError, status: int) -> None:
    sys.stderr.write(f"hexdata: {error}\n")
    sys.exit(status)


@contextmanager
def _command(as_json: bool) -> Iterator[tuple[Output, Bar]]:
    """Give a command its output and, while it works, a progress bar."""
    from hexdata.cli.bar import Bar
    from hexdata.cli.render import Output

    output = Output(as_json)
    try:
        with Bar(output) as bar:
            yield output, bar
    except KeyboardInterrupt:
        output.error(_INTERRUPTED)
        raise typer.Exit(130) from None


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hexdata {hexdata.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to put it all.")] = Path(
        "hexdata-demo"
    ),
    games: Annotated[int, typer.Option("--games", min=1, help="How many games to make.")] = 1_500,
    seed: Seed = 7,
    as_json: Json = False,
) -> None:
    """Make legal games, write them as legacy files, run every stage on them, show the result."""
    from hexdata.demo import DemoOptions
    from hexdata.pipeline import demo_config, run_config

    with _command(as_json) as (output, bar):
        result = run_config(demo_config(folder, DemoOptions(games=games, seed=seed), seed=seed), bar)
    _show_run(output, result)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Run the stages of a config, one after the other."""
    from hexdata.pipeline import load_config, run_config

    with _command(as_json) as (output, bar):
        result = run_config(load_config(config), bar)
    _show_run(output, result)


@app.command()
def convert(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="INPUT...", help="Legacy files, or folders of them.", show_default=False),
    ],
    store: Store,
    workers: Workers = None,
    memory: Memory = "1GB",
    max_reject_rate: Annotated[
        float, typer.Option("--max-reject-rate", min=0, max=1, help="Publish nothing above this share.")
    ] = 0.01,
    value_sense: Annotated[
        str,
        typer.Option(
            "--value-sense", help="What a value means in files that do not show it: blue-is-0 or blue-is-1."
        ),
    ] = "auto",
    val: Annotated[float, typer.Option("--val", help="Share of games held out for validation.")] = 0.05,
    test: Annotated[float, typer.Option("--test", help="Share of games held out for testing.")] = 0.01,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Keep the whole examples before the damage of a damaged file.")
    ] = False,
    truncate_repeats: Annotated[
        bool, typer.Option("--truncate-repeats", help="Cut games before a move on an occupied cell.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert legacy files into a store, new or existing."""
    from hexdata.convert import ConvertOptions, convert_sources

    options = ConvertOptions(
        workers=workers,
        memory=parse_bytes(memory),
        max_reject_rate=max_reject_rate,
        value_sense=value_sense,
        val=val,
        test=test,
        salvage=salvage,
        truncate_repeats=truncate_repeats,
    )
    with _command(as_json) as (output, bar):
        result = convert_sources(inputs, store, options, bar)
    if output.facts(result):
        return
    for note in result.notes:
        output.note(note)
    for name, reason in result.failed_files.items():
        output.note(f"{name}: rejected as a whole: {reason}")
    output.table(
        ["sources", "records", "positions", "rejected", "games", "duplicates", "skipped"],
        [
            [
                f"{n:,}"
                for n in (
                    result.sources,
                    result.records,
                    result.positions,
                    result.rejected,
                    result.games,
                    result.duplicate_games,
                    result.skipped,
                )
            ]
        ],
    )
    if result.reasons:
        output.table(["rejected for", "records"], [[r, f"{n:,}"] for r, n in result.reasons.items()])
    if result.flags:
        output.table(["flagged", "games"], [[code, f"{n:,}"] for code, n in result.flags.items()])


@app.command()
def shuffle(
    store: Store,
    seed: Seed = 0,
    buckets: Annotated[
        int | None,
        typer.Option("--buckets", min=1, help="Buckets of the largest split. Default: from --memory."),
    ] = None,
    memory: Memory = "1GB",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads. Default: one a core.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Shuffle a store's positions globally, out of core."""
    from hexdata.shuffle import ShuffleOptions, shuffle_store

    options = ShuffleOptions(seed=seed, buckets=buckets, memory=parse_bytes(memory), threads=threads)
    with _command(as_json) as (output, bar):
        result = shuffle_store(store, options, bar)
    if output.facts(result):
        return
    if result.already_done:
        output.note("this shuffle was done already")
    output.table(
        ["split", "positions", "buckets"],
        [[split, f"{n:,}", f"{result.buckets[split]:,}"] for split, n in result.splits.items()],
    )
    output.line(f"seed {result.seed}, {result.positions:,} positions, {format_bytes(result.bytes)}")


@app.command()
def export(
    store: Store,
    to: Annotated[
        str, typer.Option("--format", help="webdataset, or pickle: the legacy files, written back.")
    ] = "webdataset",
    order: Annotated[
        str | None,
        typer.Option("--order", help="Of pickles: shuffled (default), or original: each source as it was."),
    ] = None,
    shard_size: Annotated[
        int | None, typer.Option("--shard-size", min=1, help="Positions a shard. Default: 262144.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", min=1, help="Positions a block. Default: 4096.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", help="blocks (default), or samples: one a position, slow and large."),
    ] = None,
    workers: Workers = None,
    memory: Memory = "1GB",
    as_json: Json = False,
) -> None:
    """Write the positions as WebDataset tar shards, or back as legacy pickles."""
    of_pickles = _given(order=order)
    of_shards = _given(shard_size=shard_size, block_size=block_size, layout=layout)
    if to == "pickle":
        _refuse(of_shards, to)
        _export_pickles(store, of_pickles, workers, memory, as_json)
        return
    if to != "webdataset":
        raise ConfigError("unknown format", found=to, expected="webdataset or pickle")
    _refuse(of_pickles, to)
    from hexdata.export import ExportOptions, export_shards

    options = ExportOptions(**of_shards, workers=workers, memory=parse_bytes(memory))
    with _command(as_json) as (output, bar):
        result = export_shards(store, options, bar)
    if output.facts(result):
        return
    if result.already_done:
        output.note("these shards were written already")
    output.table(
        ["split", "positions", "shards"],
        [[split, f"{n:,}", f"{result.shards[split]:,}"] for split, n in result.splits.items()],
    )
    output.line(f"{result.positions:,} positions, {format_bytes(result.bytes)}, digest {result.digest[:16]}")


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that were given, so that the library's defaults hold for the others."""
    return {name: value for name, value in options.items() if value is not None}


def _refuse(options: dict[str, Any], chosen: str) -> None:
    """Refuse options that mean nothing for the format chosen."""
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise ConfigError(f"{names} has no meaning with --format {chosen}", cure="Leave it out.")


def _export_pickles(
    store: Path, given: dict[str, Any], workers: int | None, memory: str, as_json: bool
) -> None:
    from hexdata.export import PicklesOptions, export_pickles

    options = PicklesOptions(**given, workers=workers, memory=parse_bytes(memory))
    with _command(as_json) as (output, bar):
        result = export_pickles(store, options, bar)
    _show_pickles(output, result)


@app.command()
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

    with _command(as_json) as (output, bar):
        result = verify_store(store, bar)
        returned = check_round_trip(store, round_trip, bar) if round_trip and result.ok else []
    _show_checks(output, result, returned)
    if not (result.ok and all(source.ok for source in returned)):
        raise typer.Exit(1)


@app.command()
def load(
    store: Store,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How many epochs to run.")] = 1,
    split: Annotated[str, typer.Option("--split", help="train, val or test.")] = "train",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Positions a batch.")] = 1_024,
    seed: Seed = 0,
    window_shards: Annotated[
        int, typer.Option("--window-shards", min=1, help="Shards shuffled together in memory.")
    ] = 8,
    as_json: Json = False,
) -> None:
    """Drive the training loader; print its rate and what it delivers."""
    from hexdata.loader.drive import LoadOptions, drive_loader

    options = LoadOptions(
        split=split, epochs=epochs, batch_size=batch_size, seed=seed, window_shards=window_shards
    )
    with _command(as_json) as (output, bar):
        result = drive_loader(store, options, bar)
    if output.facts(result):
        return
    output.table(
        ["epoch", "batches", "positions", "positions/s", "mean value", "first ids"],
        [
            [
                str(e.epoch),
                f"{e.batches:,}",
                f"{e.positions:,}",
                f"{e.positions_per_second:,.0f}",
                f"{e.value_mean:.4f}",
                " ".join(map(str, e.first_ids)),
            ]
            for e in result.epochs
        ],
    )
    output.line("a batch holds " + ", ".join(f"{name} {spec}" for name, spec in result.fields.items()))


def _show_pickles(output: Output, result: PicklesResult) -> None:
    if output.facts(result):
        return
    if result.already_done:
        output.note("these pickles were written already")
    output.line(
        f"{result.positions:,} positions in {result.files:,} files, {result.order} order, "
        f"{format_bytes(result.bytes)}"
    )


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


def _show_run(output: Output, result: RunResult) -> None:
    if output.facts(result):
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
    ]
    output.table(["stage", "positions", "games", "on disk", "seconds", "positions/s", "where"], rows)
    if result.dispersion is not None:
        _show_dispersion(output, result.dispersion)


def _show_dispersion(output: Output, found: Dispersion) -> None:
    def percent(share: float | None) -> str:
        return "-" if share is None else f"{share:.3%}"

    output.line()
    output.table(
        ["dispersion of games in the training split", "share"],
        [
            [
                f"largest share of one game in a bucket ({found.games_in_bucket} games)",
                percent(found.largest_share),
            ],
            ["neighbours of the same game, input order", percent(found.neighbours_before)],
            ["neighbours of the same game, shuffled", percent(found.neighbours_after)],
            [
                "neighbours of the same game, expected of a uniform shuffle",
                percent(found.neighbours_expected),
            ],
        ],
    )
