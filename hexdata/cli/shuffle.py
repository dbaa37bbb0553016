"""``hexdata shuffle``."""

from __future__ import annotations

from typing import Annotated

import typer

from hexdata.cli.app import Json, Memory, Seed, Store, command
from hexdata.units import format_bytes, parse_bytes

__all__ = ["shuffle"]


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
    with command(as_json) as (output, bar):
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
