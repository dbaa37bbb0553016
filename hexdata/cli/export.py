"""``hexdata export``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from hexdata.cli.app import Address, AnyPath, EngineName, Json, Memory, Store, Workers, command, using_engine
from hexdata.errors import ConfigError
from hexdata.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.export import PicklesResult


__all__ = ["export"]

_SHARDS: Final = "Options of --format webdataset"


def export(
    store: Store,
    to: Annotated[
        Literal["webdataset", "pickle"],
        typer.Option(
            "--format",
            metavar="webdataset|pickle",
            help="webdataset: tar shards for training. pickle: legacy pickles.",
        ),
    ] = "webdataset",
    order: Annotated[
        Literal["shuffled", "original"] | None,
        typer.Option(
            "--order",
            metavar="shuffled|original",
            help="One file per bucket, or one file per source. Default: shuffled.",
            rich_help_panel="Options of --format pickle",
        ),
    ] = None,
    level: Annotated[
        int | None,
        typer.Option(
            "--level",
            metavar="N",
            min=1,
            max=9,
            help="Compression level of gzip. Default: 6.",
            rich_help_panel="Options of --format pickle",
        ),
    ] = None,
    shard_size: Annotated[
        int | None,
        typer.Option(
            "--shard-size",
            metavar="N",
            min=1,
            help="Positions per shard. Default: 262144.",
            rich_help_panel=_SHARDS,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size",
            metavar="N",
            min=1,
            help="Positions per block. Default: 4096.",
            rich_help_panel=_SHARDS,
        ),
    ] = None,
    layout: Annotated[
        Literal["blocks", "samples"] | None,
        typer.Option(
            "--layout",
            metavar="blocks|samples",
            help="blocks: one tar sample per block. samples: one per position, larger and slower to read. "
            "Default: blocks.",
            rich_help_panel=_SHARDS,
        ),
    ] = None,
    free_buckets: Annotated[
        bool,
        typer.Option(
            "--free-buckets",
            help="Remove each bucket of the shuffle as soon as all shards with its rows are written.",
            rich_help_panel=_SHARDS,
        ),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Remove the present files of this format and order before the new ones are written, if the "
            "disk cannot hold both.",
        ),
    ] = False,
    workers: Workers = None,
    memory: Memory = "1GB",
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Write tar shards for training, or legacy pickles.

    They replace the present ones of the store when all of them are complete.

    Examples:
        hexdata export store
        hexdata export store --shard-size 65536
        hexdata export store --format pickle --order original
    """
    pickle_options = _given(order=order, level=level)
    shard_options = _given(
        shard_size=shard_size, block_size=block_size, layout=layout, free_buckets=free_buckets or None
    )
    if to == "pickle":
        _refuse(shard_options, to)
        pickle_options["replace"] = replace
        _export_pickles(store, pickle_options, workers, memory, (engine, address), as_json)
        return
    _refuse(pickle_options, to)
    from hexdata.export import ExportOptions, export_shards

    options = ExportOptions(**shard_options, replace=replace, workers=workers, memory=parse_bytes(memory))
    with command(as_json, store) as (output, bar), using_engine(engine, address) as runner:
        result = export_shards(store, options, bar, engine=runner)
    if output.print_json(result):
        return
    if result.already_done:
        output.note("the store already has these shards")
    output.table(
        ["split", "positions", "shards"],
        [[split, f"{n:,}", f"{result.shards[split]:,}"] for split, n in result.splits.items()],
    )
    output.line(f"{result.positions:,} positions, {format_bytes(result.bytes)}, digest {result.digest[:16]}")
    if result.buckets_removed:
        output.line(f"removed {result.buckets_removed:,} buckets of the shuffle")


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that were given; the library has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}


def _refuse(options: dict[str, Any], chosen: str) -> None:
    """Refuse options that do not apply to the chosen format."""
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise ConfigError(f"{names} cannot be used with --format {chosen}", hint="Remove the option.")


def _export_pickles(
    store: AnyPath,
    given: dict[str, Any],
    workers: int | None,
    memory: str,
    engine: tuple[str, str | None],
    as_json: bool,
) -> None:
    from hexdata.export import PicklesOptions, export_pickles

    options = PicklesOptions(**given, workers=workers, memory=parse_bytes(memory))
    with command(as_json, store) as (output, bar), using_engine(*engine) as runner:
        result = export_pickles(store, options, bar, engine=runner)
    _show_pickles(output, result)


def _show_pickles(output: Output, result: PicklesResult) -> None:
    if output.print_json(result):
        return
    if result.already_done:
        output.note("the store already has these pickles")
    output.line(
        f"{result.positions:,} positions in {result.files:,} files, {result.order} order, "
        f"{format_bytes(result.bytes)}"
    )
