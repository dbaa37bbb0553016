"""``hexdata export``."""

from __future__ import annotations

from typing import Any, Literal

from hexdata.cli.app import AnyPath, Size, command, options_of, using_engine
from hexdata.errors import ConfigError
from hexdata.text import count_of
from hexdata.units import format_bytes


def export(
    store: AnyPath,
    format: Literal["webdataset", "pickle"] = "webdataset",  # noqa: A002 - the name of the option
    order: Literal["shuffled", "original"] | None = None,
    level: int | None = None,
    shard_size: int | None = None,
    block_size: int | None = None,
    free_buckets: bool = False,
    replace: bool = False,
    workers: int | None = None,
    memory: Size = "1GB",
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    json: bool = False,
) -> None:
    """Write tar shards for training, or legacy pickles.

    They replace the present ones of the store when all of them are complete.

    Examples:
        hexdata export store
        hexdata export store --shard-size 65536
        hexdata export store --format pickle --order original

    Options:
        --format: webdataset: tar shards for training. pickle: legacy pickles.
        --replace: Remove the present files of this format and order before the new ones are written: for
            disks that cannot hold both, and for object stores.

    Options of --format pickle:
        --order: One file per bucket, or one file per source. Default: shuffled.
        --level N: Compression level of gzip, from 1 to 9. Default: 6.

    Options of --format webdataset:
        --shard-size N: Positions per shard. Default: 262144.
        --block-size N: Positions per block. Default: 4096.
        --free-buckets: Remove each bucket of the shuffle as soon as all shards with its rows are written.
    """
    # Before any import here, which would be among the local names.
    given = locals()
    others = {"pickle": ("shard_size", "block_size", "free_buckets"), "webdataset": ("order", "level")}
    if wrong := [f"--{name.replace('_', '-')}" for name in others[format] if given[name]]:
        raise ConfigError(f"{', '.join(wrong)} cannot be used with --format {format}")
    from hexdata.export import ExportOptions, PicklesOptions, PicklesResult, export_pickles, export_shards

    is_pickle = format == "pickle"
    kind: Any = PicklesOptions if is_pickle else ExportOptions
    run: Any = export_pickles if is_pickle else export_shards
    options = options_of(kind, given)
    with command(json) as (output, bar), using_engine(engine, address) as runner:
        result = run(store, options, bar, engine=runner)
    if output.print_json(result):
        return
    if result.already_done:
        output.note(f"the store already has these {'pickles' if is_pickle else 'shards'}")
    if isinstance(result, PicklesResult):
        files = f"{count_of(result.files, 'file')}, {result.order} order, {format_bytes(result.bytes)}"
        output.line(f"{count_of(result.positions, 'position')} in {files}")
        return
    output.splits(result.splits, "shards", result.shards)
    output.line(f"{result.positions:,} positions, {format_bytes(result.bytes)}, digest {result.digest[:16]}")
    if result.buckets_removed:
        output.line(f"removed {count_of(result.buckets_removed, 'bucket')} of the shuffle")
