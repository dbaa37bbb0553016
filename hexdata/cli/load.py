"""``hexdata load``."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

from hexdata.cli.app import Json, Seed, command

__all__ = ["load"]

_CONTENT: Final = "Content of the batches"
_CACHE: Final = "Remote shards"
"""Groups of options in the help."""


def load(
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="Folder or address of a store or of shards.",
            show_default=False,
        ),
    ],
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", min=1, help="Number of epochs.")] = 1,
    split: Annotated[
        Literal["train", "val", "test"],
        typer.Option("--split", metavar="train|val|test", help="Split to load."),
    ] = "train",
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Number of positions per batch.")
    ] = 1_024,
    seed: Seed = 0,
    fields: Annotated[
        str,
        typer.Option(
            "--fields",
            metavar="NAMES",
            help="Fields of the batches, separated by commas, such as board,policy,root_value. value and "
            "position_id are added.",
            rich_help_panel=_CONTENT,
        ),
    ] = "board,policy,value",
    mode: Annotated[
        Literal["games", "exact", "stream"] | None,
        typer.Option(
            "--mode",
            metavar="games|exact|stream",
            help="games: hold the games of a converted store in memory and permute their positions. exact: "
            "permute the positions of mapped shards. stream: read shards sequentially and mix them in a "
            "buffer. Default: games for a store without shards, exact for a local folder of shards, else "
            "stream.",
        ),
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(
            "--shards",
            metavar="FIRST-LAST",
            help="Read only these shards of the split, such as 0-49. Not in games mode. Default: all.",
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="CONDITION",
            help="Load only positions that meet this SQL condition over their labels, the results of their "
            "search, their game and its source, such as 'visits >= 100'. Not in stream mode.",
            show_default=False,
            rich_help_panel=_CONTENT,
        ),
    ] = None,
    dedup: Annotated[
        Literal["none", "exact", "symmetric"],
        typer.Option(
            "--dedup",
            metavar="none|exact|symmetric",
            help="Load one game of each set of duplicates: with equal moves, or equal under a symmetry too. "
            "Not in stream mode.",
            rich_help_panel=_CONTENT,
        ),
    ] = "none",
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="EXPR",
            help="Weight of each position, an SQL expression over its labels and the results of its search, "
            "such as weight. An epoch delivers a position of weight w floor(w) or ceil(w) times. Default: "
            "each position once.",
            show_default=False,
            rich_help_panel=_CONTENT,
        ),
    ] = None,
    check: Annotated[
        Literal["sizes", "digests"],
        typer.Option(
            "--check",
            metavar="sizes|digests",
            help="With digests, also compare every board with the moves of its game in games mode, and "
            "hash all shards before the first epoch in exact mode.",
        ),
    ] = "sizes",
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            metavar="DIR",
            help="Cache remote shards in this directory. Default: below HEXDATA_CACHE, for object stores.",
            show_default=False,
            rich_help_panel=_CACHE,
        ),
    ] = None,
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache",
            help="Do not cache shards.",
            rich_help_panel=_CACHE,
        ),
    ] = False,
    cache_size: Annotated[
        str,
        typer.Option(
            "--cache-size",
            metavar="SIZE",
            help="Maximum size of the cache. Least recently used shards are removed first.",
            rich_help_panel=_CACHE,
        ),
    ] = "50GB",
    prefetch: Annotated[
        int | None,
        typer.Option(
            "--prefetch",
            metavar="N",
            min=0,
            help="Number of shards to download in advance, in stream mode. Default: one per stream.",
            show_default=False,
            rich_help_panel=_CACHE,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the training loader and measure its speed.

    Examples:
        hexdata load store
        hexdata load store --mode exact --batch-size 256
        hexdata load s3://bucket/store --cache-size 20GB
    """
    from hexdata.loader.trial import LoadOptions, run_loader_trial

    if no_cache and cache is not None:
        raise typer.BadParameter("--cache and --no-cache cannot be used together")
    options = LoadOptions(
        split=split,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        shards=shards,
        fields=tuple(name.strip() for name in fields.split(",")),
        mode=mode,
        where=where,
        dedup=dedup,
        weights=weights,
        check=check,
        cache=cache if cache is not None else not no_cache,
        cache_size=cache_size,
        prefetch=prefetch,
    )
    with command(as_json, store) as (output, bar):
        result = run_loader_trial(store, options, bar)
    if output.print_json(result):
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
        optional=["first ids", "digest"],
    )
    for e in result.epochs:
        if e.weight_sum is not None:
            output.line(
                f"epoch {e.epoch}: {e.delivered:,} positions delivered, {e.positions:,} of them different; "
                f"the weights add up to {e.weight_sum:,.2f}"
            )
    if result.games is not None and result.packed is not None:
        output.line(
            f"{result.positions - result.packed:,} positions of {result.games:,} games, "
            f"and {result.packed:,} packed positions"
        )
    output.line(
        f"{result.mode} mode, seed {result.seed}: opened in {result.seconds_to_open:.3f} s, "
        f"first batch {result.seconds_to_first_batch:.3f} s later"
    )
    output.line("fields of a batch: " + ", ".join(f"{name} {spec}" for name, spec in result.fields.items()))
