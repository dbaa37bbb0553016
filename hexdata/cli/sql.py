"""``hexdata sql``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hexdata.cli.app import AnyPath, Memory, Store, Threads, parse_path
from hexdata.errors import ConfigError
from hexdata.text import printable
from hexdata.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.sql import QueryResult

__all__ = ["sql"]

_LIST: Final = "@"
"""The query text that lists the named queries."""
_SHOWN_ROWS: Final = 40
"""Maximum number of rows shown on a terminal."""
_COUNTED_ROWS: Final = 1_000_000
"""Maximum number of further rows that are counted."""
_BLOCK_ROWS: Final = 1_000
"""Rows per group with common column widths, in a file or a pipe."""
_GAP: Final = "  "
_MIN_WIDTH: Final = 6
"""Minimum width of a column of text, in characters."""

Row = Sequence[str]


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
    """Query a store with SQL. Views: positions, games, sources, rejected, shuffled, shards."""
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
    names = [printable(name) for name in result.schema.names]
    if output.out.is_terminal:
        rows, more = _first_rows(result)
        table = _Table(names, result.numeric, output.out.width)
        for line in (table.head(rows), *table.lines(rows)):
            output.line(line)
        if more:
            counted = f"more than {_COUNTED_ROWS:,}" if more > _COUNTED_ROWS else f"{more:,}"
            output.note(
                f"{counted} rows are not shown; use --csv, --json, --parquet or a pipe to get all rows"
            )
        return
    table = _Table(names, result.numeric, None)
    blocks = _blocks(result)
    typer.echo(table.head(first := next(blocks, [])))
    for rows in chain([first] if first else [], blocks):
        typer.echo("\n".join(table.lines(rows)))


def _first_rows(result: QueryResult) -> tuple[list[Row], int]:
    """Return the first rows, and the number of further rows, counted up to a limit."""
    from hexdata.sql import text_rows

    shown: list[Row] = []
    count = 0
    for batch in result.batches:
        shown += _printable_rows(text_rows(batch.slice(0, _SHOWN_ROWS - len(shown))))
        count += batch.num_rows
        if count > _SHOWN_ROWS + _COUNTED_ROWS:
            break
    return shown, count - len(shown)


def _blocks(result: QueryResult) -> Iterator[list[Row]]:
    """Yield the rows in groups."""
    from hexdata.sql import text_rows

    for batch in result.batches:
        rows = text_rows(batch)
        while block := _printable_rows(islice(rows, _BLOCK_ROWS)):
            yield block


def _printable_rows(rows: Iterable[list[str]]) -> list[Row]:
    return [[printable(text) for text in row] for row in rows]


class _Table:
    """Formats rows as text in columns. Numbers are right-aligned.

    Args:
        names: Names of the columns.
        numeric: Whether each column contains numbers, which are never shortened.
        width: Width of the lines in characters, for which texts are shortened; None to shorten nothing.
    """

    def __init__(self, names: list[str], numeric: list[bool], width: int | None) -> None:
        self.names = names
        self.numeric = numeric
        self.width = width
        self.widths: list[int] = []

    def head(self, rows: Sequence[Row]) -> str:
        """Set the column widths from these rows, and return the header line."""
        from rich.cells import cell_len

        columns = list(zip(*rows, strict=True)) or [()] * len(self.names)
        widths = [max(map(cell_len, column), default=0) for column in columns]
        if self.width is None:
            self.widths = [max(w, cell_len(name)) for w, name in zip(widths, self.names, strict=True)]
        else:
            self.widths = self._fitted(widths, [cell_len(name) for name in self.names], self.width)
        return self._line(self.names)

    def _fitted(self, cells: list[int], names: list[int], width: int) -> list[int]:
        """Return the widths under the highest limit that keeps lines to ``width``, if any does."""

        def limited(limit: int) -> list[int]:
            return [
                max(cell, min(name, limit)) if numeric else min(max(cell, name), limit)
                for cell, name, numeric in zip(cells, names, self.numeric, strict=True)
            ]

        available = width - len(_GAP) * (len(names) - 1)
        limits = range(max(width, _MIN_WIDTH), _MIN_WIDTH, -1)
        return next((w for limit in limits if sum(w := limited(limit)) <= available), limited(_MIN_WIDTH))

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Return the line of each row."""
        return [self._line(row) for row in rows]

    def _line(self, row: Row) -> str:
        cells = map(self._cell, row, self.widths, self.numeric)
        return _GAP.join(cells).rstrip()

    def _cell(self, text: str, width: int, numeric: bool) -> str:
        from rich.cells import cell_len, set_cell_size

        missing = width - cell_len(text)
        if missing < 0 and self.width is not None:
            return set_cell_size(text, width - 1) + "…"
        return " " * missing + text if numeric else text + " " * missing
