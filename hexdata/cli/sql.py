"""``hexdata sql``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from hexdata.cli.app import AnyPath, Memory, Store, Threads, parse_path
from hexdata.errors import ConfigError
from hexdata.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.sql import QueryResult

__all__ = ["sql"]

_LIST: Final = "@"
"""The query text that lists the named queries."""
_SHOWN_ROWS: Final = 40
"""Maximum number of rows shown on a terminal."""
_SHOWN_VERTICAL: Final = 5
"""Maximum number of rows shown on a terminal that is too narrow for their columns."""
_COUNTED_ROWS: Final = 1_000_000
"""Maximum number of further rows that are counted."""


def sql(
    store: Store,
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help="A SELECT statement, a named query as @NAME, or @ to list the named queries.",
            show_default=False,
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array with one object per row, one per line.")
    ] = False,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Print CSV with a header. Unsafe characters are escaped on a terminal only."
        ),
    ] = False,
    parquet: Annotated[
        AnyPath | None,
        typer.Option(
            "--parquet",
            metavar="FILE",
            help="Write the rows to a Parquet file. FILE is a path or an address outside the store.",
            parser=parse_path,
        ),
    ] = None,
    memory: Memory = "1GB",
    threads: Threads = None,
) -> None:
    """Query a store with SQL.

    Views: positions, games, sources, rejected, shuffled, shards.

    Examples:
        hexdata sql store "SELECT winner, count(*) FROM games GROUP BY winner"
        hexdata sql store @first_moves
        hexdata sql store "FROM games" --csv > games.csv
    """
    from hexdata.cli.render import Output
    from hexdata.pool import memory_limit
    from hexdata.sql import json_rows, named_queries, run_query, save_parquet, write_csv
    from hexdata.storage import translate_errors

    if as_json + as_csv + (parquet is not None) > 1:
        raise ConfigError("more than one output format", expected="one of --json, --csv and --parquet")
    output = Output(as_json)
    if query == _LIST:
        _list(output, named_queries())
        return
    try:
        with (
            translate_errors(store, parquet),
            memory_limit(parse_bytes(memory), threads),
            run_query(store, query, memory=parse_bytes(memory), threads=threads) as result,
        ):
            if as_json:
                for text in json_rows(result):
                    typer.echo(text, nl=False)
            elif as_csv:
                write_csv(typer.get_binary_stream("stdout"), result, escaped=output.out.is_terminal)
            elif parquet is not None:
                facts = save_parquet(parquet, result)
                output.line(f"{parquet}: {facts.rows:,} rows, {format_bytes(facts.bytes)}")
            else:
                _show(output, result)
    except KeyboardInterrupt:
        output.error("interrupted")
        raise typer.Exit(130) from None


def _list(output: Output, queries: dict[str, str]) -> None:
    if not output.print_json([{"name": name, "description": text} for name, text in queries.items()]):
        output.table(["query", "description"], [[f"@{name}", text] for name, text in queries.items()])


def _show(output: Output, result: QueryResult) -> None:
    """Print the rows as a table. On a terminal, print the first rows and the number of further rows."""
    from hexdata.sql import text_rows

    names = result.schema.names
    if not output.out.is_terminal:
        output.tabbed([names])
        output.tabbed(row for batch in result.batches for row in text_rows(batch))
        return
    rows, more = _first_rows(result)
    shown = output.table(names, rows, numeric=result.numeric, shorten=True, most_vertical=_SHOWN_VERTICAL)
    more += len(rows) - shown
    if more:
        counted = f"more than {_COUNTED_ROWS:,}" if more > _COUNTED_ROWS else f"{more:,}"
        output.note(f"{counted} rows are not shown; use --csv, --json, --parquet or a pipe to get all rows")


def _first_rows(result: QueryResult) -> tuple[list[list[str]], int]:
    """Return the first rows, and the number of further rows, counted up to a limit."""
    from hexdata.sql import text_rows

    shown: list[list[str]] = []
    count = 0
    for batch in result.batches:
        shown += text_rows(batch.slice(0, _SHOWN_ROWS - len(shown)))
        count += batch.num_rows
        if count > _SHOWN_ROWS + _COUNTED_ROWS:
            break
    return shown, count - len(shown)
