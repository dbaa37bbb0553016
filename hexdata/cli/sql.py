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
"""The query that lists the named ones."""
_SHOWN_ROWS: Final = 40
"""Rows of a result that a terminal shows."""
_COUNTED_ROWS: Final = 1_000_000
"""Rows beyond those that are counted, and no more."""
_BLOCK_ROWS: Final = 1_000
"""Rows whose widths are looked at together where all go into a file or a pipe."""
_GAP: Final = "  "
_NARROWEST: Final = 6
"""Letters that a column of texts keeps, however many columns there are."""

Row = Sequence[str]


def sql(
    store: Store,
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help="One SQL statement that reads; or @NAME, a named query; or @ to list those.",
            show_default=False,
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array, one object a row and one row a line.")
    ] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV with a header; texts are exact except on a terminal.")
    ] = False,
    parquet: Annotated[
        AnyPath | None,
        typer.Option(
            "--parquet",
            metavar="FILE",
            help="Write the rows into a Parquet file, or its address.",
            parser=parse_path,
        ),
    ] = None,
    memory: Memory = "1GB",
    threads: Threads = None,
) -> None:
    """Ask the store in SQL: positions, games, sources, rejected, shuffled, shards."""
    from hexdata.cli.render import Output
    from hexdata.pool import memory_limit
    from hexdata.sql import json_rows, named_queries, run_query, save_parquet, write_csv
    from hexdata.storage import translate_errors

    if as_json + as_csv + (parquet is not None) > 1:
        raise ConfigError("more than one form of output", expected="one of --json, --csv and --parquet")
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
    if not output.print_json([{"name": name, "answers": answers} for name, answers in queries.items()]):
        output.table(["query", "answers"], [[f"@{name}", answers] for name, answers in queries.items()])


def _show(output: Output, result: QueryResult) -> None:
    """Print the rows as a table: all of them, or on a terminal the first ones and how many more there are."""
    names = [printable(name) for name in result.schema.names]
    if output.out.is_terminal:
        rows, more = _first_rows(result)
        table = _Table(names, result.numeric, output.out.width)
        for line in (table.head(rows), *table.lines(rows)):
            output.line(line)
        if more:
            counted = f"more than {_COUNTED_ROWS:,}" if more > _COUNTED_ROWS else f"{more:,}"
            output.note(f"{counted} rows are not shown; --csv, --json, --parquet or a pipe give all")
        return
    table = _Table(names, result.numeric, None)
    blocks = _blocks(result)
    typer.echo(table.head(first := next(blocks, [])))
    for rows in chain([first] if first else [], blocks):
        typer.echo("\n".join(table.lines(rows)))


def _first_rows(result: QueryResult) -> tuple[list[Row], int]:
    """Return the rows that a terminal shows and the number of those it does not, as far as it matters."""
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
    """Give the rows some at a time."""
    from hexdata.sql import text_rows

    for batch in result.batches:
        rows = text_rows(batch)
        while block := _printable_rows(islice(rows, _BLOCK_ROWS)):
            yield block


def _printable_rows(rows: Iterable[list[str]]) -> list[Row]:
    return [[printable(text) for text in row] for row in rows]


class _Table:
    """Lays rows out in columns, numbers to the right.

    Args:
        names: of the columns.
        numeric: which hold numbers; these are never cut.
        width: that lines should keep to, by cutting texts; None to cut nothing.
    """

    def __init__(self, names: list[str], numeric: list[bool], width: int | None) -> None:
        self.names = names
        self.numeric = numeric
        self.width = width
        self.widths: list[int] = []

    def head(self, rows: Sequence[Row]) -> str:
        """Return the line of names, for columns as wide as these rows need."""
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

        room = width - len(_GAP) * (len(names) - 1)
        limits = range(max(width, _NARROWEST), _NARROWEST, -1)
        return next((w for limit in limits if sum(w := limited(limit)) <= room), limited(_NARROWEST))

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Return rows as lines."""
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
