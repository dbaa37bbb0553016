"""``hexdata convert``."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

from hexdata.cli.app import (
    Address,
    AnyPath,
    EngineName,
    Json,
    Memory,
    Store,
    Workers,
    command,
    parse_path,
    using_engine,
)
from hexdata.text import lines_by_cause
from hexdata.units import parse_bytes

__all__ = ["convert"]

_CHOICE: Final = "Files"
_FAULTS: Final = "Damaged files and invalid records"
_SPLITS: Final = "Splits"
"""Groups of options in the help."""


def convert(
    inputs: Annotated[
        list[AnyPath],
        typer.Argument(
            metavar="INPUT",
            help="Files or folders to convert, on disk or in an object store.",
            show_default=False,
            parser=parse_path,
        ),
    ],
    store: Store,
    workers: Workers = None,
    memory: Memory = "1GB",
    max_reject_rate: Annotated[
        float,
        typer.Option(
            "--max-reject-rate",
            metavar="SHARE",
            min=0,
            max=1,
            help="Largest share of rejected records; above it, nothing is published.",
            rich_help_panel=_FAULTS,
        ),
    ] = 0.01,
    value_convention: Annotated[
        Literal["auto", "blue-is-0", "blue-is-1"],
        typer.Option(
            "--value-convention",
            metavar="auto|blue-is-0|blue-is-1",
            help="Value that means a win of blue, for files that do not show it. auto makes such a file an "
            "error.",
            rich_help_panel=_CHOICE,
        ),
    ] = "auto",
    val: Annotated[
        float,
        typer.Option(
            "--val",
            metavar="SHARE",
            help="Share of games held out for validation.",
            rich_help_panel=_SPLITS,
        ),
    ] = 0.05,
    test: Annotated[
        float,
        typer.Option(
            "--test",
            metavar="SHARE",
            help="Share of games held out for testing.",
            rich_help_panel=_SPLITS,
        ),
    ] = 0.01,
    salvage: Annotated[
        bool,
        typer.Option(
            "--salvage",
            help="Keep the complete examples before the damage in a damaged file.",
            rich_help_panel=_FAULTS,
        ),
    ] = False,
    truncate_repeats: Annotated[
        bool,
        typer.Option(
            "--truncate-repeats",
            help="Truncate games before a move on an occupied cell.",
            rich_help_panel=_FAULTS,
        ),
    ] = False,
    board_size: Annotated[
        int | None,
        typer.Option(
            "--board-size",
            metavar="N",
            help="Convert only files of this board size. Default: files of several sizes are an error.",
            show_default=False,
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    max_positions: Annotated[
        int | None,
        typer.Option(
            "--max-positions",
            metavar="N",
            min=1,
            help="Maximum number of positions in the store. Skip the first file that would exceed it and all "
            "files after it, in the order of their names. Default: no maximum.",
            show_default=False,
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    engine: EngineName = "local",
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Convert source files into a new or existing store.

    Examples:
        hexdata convert legacy/ store
        hexdata convert a.trmph b.sgf store --val 0.1 --test 0
        hexdata convert s3://bucket/games/ store --memory 2GB
    """
    from hexdata.convert import ConvertOptions, convert_sources

    options = ConvertOptions(
        workers=workers,
        memory=parse_bytes(memory),
        max_reject_rate=max_reject_rate,
        value_convention=value_convention,
        val=val,
        test=test,
        salvage=salvage,
        truncate_repeats=truncate_repeats,
        board_size=board_size,
        max_positions=max_positions,
    )
    with command(as_json, store, *inputs) as (output, bar), using_engine(engine, address) as runner:
        result = convert_sources(inputs, store, options, bar, engine=runner)
    if output.print_json(result):
        return
    for note in result.notes:
        output.note(note)
    by_note = [(note, name, "") for name, notes in result.file_notes.items() for note in notes]
    failed = sorted((reason, name) for name, reason in result.failed_files.items())
    parts = [(*reason.partition(": ")[::2], name) for reason, name in failed]
    by_reason = [(f"rejected as a whole: {reason}", name, detail) for reason, detail, name in parts]
    for line in lines_by_cause([*by_note, *by_reason]):
        if line.startswith("  "):
            output.note_line(line)
        else:
            output.note(line)
    if not result.sources:  # a note has given the reason
        return
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
    if result.duplicate_games:
        share = result.duplicate_games / result.games
        output.line(
            f"{result.duplicate_games:,} of {result.games:,} games ({share:.1%}) "
            'duplicate an earlier one. Leave them out with Loader(…, dedup="symmetric"), or with --dedup '
            "symmetric of `hexdata load` and `hexdata shuffle`."
        )
    if result.reasons:
        output.table(["reject reason", "records"], [[r, f"{n:,}"] for r, n in result.reasons.items()])
    if result.flags:
        output.table(["flag", "games"], [[code, f"{n:,}"] for code, n in result.flags.items()])
