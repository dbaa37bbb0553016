"""``hexdata convert``."""

from __future__ import annotations

from typing import Literal

from hexdata.cli.app import AnyPath, Size, command, options_of, using_engine
from hexdata.cli.messages import print_stderr
from hexdata.text import lines_by_cause


def convert(
    inputs: list[AnyPath],
    store: AnyPath,
    workers: int | None = None,
    memory: Size = "1GB",
    max_reject_rate: float = 0.01,
    value_convention: Literal["auto", "blue-is-0", "blue-is-1"] = "auto",
    val: float = 0.05,
    test: float = 0.01,
    salvage: bool = False,
    truncate_repeats: bool = False,
    board_size: int | None = None,
    variations: Literal["reject", "main"] = "reject",
    format: str | None = None,  # noqa: A002 - the name of the option
    alphazero_convention: str | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    json: bool = False,
) -> None:
    """Convert source files into a new or existing store.

    Examples:
        hexdata convert legacy/ store
        hexdata convert a.trmph b.sgf store --val 0.1 --test 0
        hexdata convert s3://bucket/games/ store --memory 2GB

    Arguments:
        inputs INPUT: Files or folders to convert, on disk or in an object store.

    Damaged files and invalid records:
        --max-reject-rate SHARE: Largest share of rejected records, from 0 to 1; above it, nothing is
            published.
        --salvage: Keep the complete examples before the damage in a damaged file.
        --truncate-repeats: Truncate games before a move on an occupied cell.
        --variations: Reject SGF games with variations, or read the main line of each.

    Files:
        --value-convention: Value that means a win of blue, for files that do not show it. auto makes such a
            file an error.
        --board-size N: Convert only boards of this size. Default: files of several sizes are an error.
        --format NAME: Format of all inputs, such as sgf, for files that do not show it. Default: the content
            of each file shows it.
        --alphazero-convention STONES/EDGES/VALUES: Whose stones, edges and wins the positions of
            AlphaZero-style programs contain, such as mover/top-bottom/mover. Default: the games of a file
            must show it.

    Splits:
        --val SHARE: Share of games held out for validation.
        --test SHARE: Share of games held out for testing.
    """
    from hexdata.convert import ConvertOptions, convert_sources
    from hexdata.store.commands import command_line

    options = options_of(ConvertOptions, locals())
    with command(json) as (output, bar), using_engine(engine, address) as runner:
        result = convert_sources(inputs, store, options, bar, engine=runner)
    if output.print_json(result):
        return
    for note in result.notes:
        output.note(note)
    noted = [("", note, name) for name, notes in result.file_notes.items() for note in notes]
    noted += [("rejected as a whole: ", reason, name) for name, reason in result.failed_files.items()]
    # Files are grouped by the text before the colon; the text after it may differ between them.
    parts = [(prefix, *text.partition(": ")[::2], name) for prefix, text, name in noted]
    for line in lines_by_cause((prefix + cause, name, detail) for prefix, cause, detail, name in parts):
        print_stderr(f"  {line}" if line.startswith("  ") else f"note: {line}")
    if not result.sources:  # a note has given the reason
        return
    columns = ("sources", "records", "positions", "rejected", "games", "duplicate_games", "skipped")
    output.records([result], columns)
    if result.duplicate_games:
        share = result.duplicate_games / result.games
        output.line(
            f"{result.duplicate_games:,} of {result.games:,} games ({share:.1%}) "
            'duplicate an earlier one. Leave them out with Loader(…, dedup="symmetric"), or with --dedup '
            "symmetric of `hexdata load` and `hexdata shuffle`."
        )
    found = [*(("rejected records", *each) for each in result.reasons.items())]
    found += [("flagged games", *each) for each in result.flags.items()]
    if found:
        output.table(["kind", "code", "number"], [[kind, code, f"{n:,}"] for kind, code, n in found])
    output.line(f"`{command_line('info', store)}` shows what is in the store and what to do next.")
