"""``hexdata load``."""

from __future__ import annotations

from typing import Literal

import typer

from hexdata.cli.app import command, options_of


def load(
    store: str,
    epochs: int = 1,
    split: Literal["train", "val", "test"] = "train",
    batch_size: int = 1_024,
    seed: int = 0,
    fields: str = "board,policy,value",
    mode: Literal["games", "exact", "stream"] | None = None,
    shards: str | None = None,
    where: str | None = None,
    dedup: Literal["none", "exact", "symmetric"] = "none",
    weights: str | None = None,
    check: Literal["sizes", "digests"] = "sizes",
    cache: str | None = None,
    no_cache: bool = False,
    cache_size: str = "50GB",
    prefetch: int | None = None,
    json: bool = False,
) -> None:
    """Run the training loader and measure its speed.

    Examples:
        hexdata load store
        hexdata load store --mode exact --batch-size 256
        hexdata load s3://bucket/store --cache-size 20GB

    Arguments:
        store STORE: Folder or address of a store or of shards.

    Options:
        --epochs N: Number of epochs.
        --split: Split to load.
        --batch-size N: Number of positions per batch.
        --seed N: Random seed. The same seed gives the same order.
        --mode: games: hold the games of a converted store in memory and permute their positions. exact: read
            the shards of the split into memory and permute their positions. stream: read shards sequentially
            and mix them in a buffer. Default: games for a store without shards, exact for a local folder of
            shards, else stream.
        --shards FIRST-LAST: Read only these shards of the split, such as 0-49. Not in games mode. Default:
            all.
        --check: With digests, also compare every board with the moves of its game in games mode, and hash all
            shards before the first epoch in exact mode.

    Content of the batches:
        --fields NAMES: Fields of the batches, separated by commas, such as board,policy,root_value. value and
            position_id are added.
        --where CONDITION: Load only positions that meet this SQL condition over their labels, the results of
            their search, their game and its source, such as 'visits >= 100'. Not in stream mode.
        --dedup: Load one game of each set of duplicates: with equal moves, or equal under a symmetry too. Not
            in stream mode.
        --weights EXPR: Weight of each position, an SQL expression over its labels and the results of its
            search, such as weight. An epoch delivers a position of weight w floor(w) or ceil(w) times.
            Default: each position once.

    Remote shards:
        --cache DIR: Cache remote shards in this directory. Default: below HEXDATA_CACHE, for object stores.
        --no-cache: Do not cache shards.
        --cache-size SIZE: Maximum size of the cache. Least recently used shards are removed first.
        --prefetch N: Number of shards to download in advance, in stream mode. Default: one per stream.
    """
    # Before the imports, which would be among the local names.
    given = locals()
    from hexdata.loader.trial import LoadOptions, run_loader_trial

    if no_cache and cache is not None:
        raise typer.BadParameter("--cache and --no-cache cannot be used together")
    given["fields"] = tuple(name.strip() for name in fields.split(","))
    # One option of the loader: a directory, or True or False for the default one.
    given["cache"] = cache if cache is not None else not no_cache
    options = options_of(LoadOptions, given)
    with command(json) as (output, bar):
        result = run_loader_trial(store, options, bar)
    if output.print_json(result):
        return
    columns = ("epoch", "batches", "positions", "positions_per_second", "value_mean", "digest", "first_ids")
    output.records(result.epochs, columns, optional=("first_ids", "digest"))
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
