"""``hexdata load``."""

from __future__ import annotations

from typing import Annotated

import typer

from hexdata.cli.app import Json, Seed, command

__all__ = ["load"]


def load(
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE", help="The store's folder, one of shards, or its address.", show_default=False
        ),
    ],
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How many epochs to run.")] = 1,
    split: Annotated[str, typer.Option("--split", help="train, val or test.")] = "train",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Positions a batch.")] = 1_024,
    seed: Seed = 0,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            help="exact permutes the whole split, stream reads front to back. Default: exact for a folder.",
        ),
    ] = None,
    check: Annotated[
        str, typer.Option("--check", help="What of the shards is checked first: sizes or digests.")
    ] = "sizes",
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            metavar="DIR",
            help="Keep copies here of shards that lie elsewhere. Default, of object stores: HEXDATA_CACHE.",
            show_default=False,
        ),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Keep none.")] = False,
    cache_size: Annotated[
        str, typer.Option("--cache-size", metavar="SIZE", help="What the copies may take.")
    ] = "50GB",
    prefetch: Annotated[
        int | None,
        typer.Option(
            "--prefetch",
            min=0,
            help="Shards that stream mode fetches ahead. Default: one a stream.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Drive the training loader; print its rate and what it delivers."""
    from hexdata.loader.trial import LoadOptions, run_loader_trial

    if no_cache and cache is not None:
        raise typer.BadParameter("--cache and --no-cache exclude each other")
    options = LoadOptions(
        split=split,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        mode=mode,  # type: ignore[arg-type]  # LoadOptions refuses others
        check=check,  # type: ignore[arg-type]
        cache=cache if cache is not None else not no_cache,
        cache_size=cache_size,
        prefetch=prefetch,
    )
    with command(as_json, store) as (output, bar):
        result = run_loader_trial(store, options, bar)
    if output.facts(result):
        return
    output.table(
        ["epoch", "batches", "positions", "positions/s", "mean value", "digest", "first ids"],
        [
            [
                str(e.epoch),
                f"{e.batches:,}",
                f"{e.positions:,}",
                f"{e.positions_per_second:,.0f}",
                f"{e.value_mean:.4f}",
                e.digest,
                " ".join(map(str, e.first_ids)),
            ]
            for e in result.epochs
        ],
    )
    output.line(
        f"{result.mode} mode: opened in {result.seconds_to_open:.3f} s, "
        f"first batch after {result.seconds_to_first_batch:.3f} s more"
    )
    output.line("a batch holds " + ", ".join(f"{name} {spec}" for name, spec in result.fields.items()))
