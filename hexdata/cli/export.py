"""``hexdata export``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hexdata.cli.app import Address, AnyPath, EngineName, Json, Memory, Store, Workers, command, running_on
from hexdata.errors import ConfigError
from hexdata.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.export import PicklesResult


__all__ = ["export"]


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
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Write the positions as WebDataset tar shards, or back as legacy pickles."""
    of_pickles = _given(order=order)
    of_shards = _given(shard_size=shard_size, block_size=block_size, layout=layout)
    if to == "pickle":
        _refuse(of_shards, to)
        _export_pickles(store, of_pickles, workers, memory, (engine, address), as_json)
        return
    if to != "webdataset":
        raise ConfigError("unknown format", found=to, expected="webdataset or pickle")
    _refuse(of_pickles, to)
    from hexdata.export import ExportOptions, export_shards

    options = ExportOptions(**of_shards, workers=workers, memory=parse_bytes(memory))
    with command(as_json, store) as (output, bar), running_on(engine, address) as runner:
        result = export_shards(store, options, bar, engine=runner)
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
        raise ConfigError(f"{names} has no meaning with --format {chosen}", hint="Leave it out.")


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
    with command(as_json, store) as (output, bar), running_on(*engine) as runner:
        result = export_pickles(store, options, bar, engine=runner)
    _show_pickles(output, result)


def _show_pickles(output: Output, result: PicklesResult) -> None:
    if output.facts(result):
        return
    if result.already_done:
        output.note("these pickles were written already")
    output.line(
        f"{result.positions:,} positions in {result.files:,} files, {result.order} order, "
        f"{format_bytes(result.bytes)}"
    )
