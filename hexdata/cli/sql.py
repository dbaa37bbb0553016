"""``hexdata sql``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from hexdata.cli.app import AnyPath, Memory, Store, Threads, parse_path
from hexdata.errors import ConfigError
from hexdata.text import shell_word
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
        str | None,
        typer.Argument(
            metavar="QUERY",
            help="A SELECT statement, a named query as @NAME, @ to list the named queries, or - to read the "
            "query from standard input. Without it, a terminal shows the DuckDB shell, if it is installed.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Read the query from a text file.", show_default=False
        ),
    ] = None,
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
        hexdata sql store "SELECT * FROM games LIMIT 3"
        hexdata sql store @first_moves
        hexdata sql store "FROM games" --csv > games.csv
        hexdata sql store -f query.sql
        hexdata sql store
    """
    from hexdata.cli.render import Output, is_terminal
    from hexdata.pool import memory_limit
    from hexdata.sql import run_query
    from hexdata.storage import translate_errors

    formats = as_json + as_csv + (parquet is not None)
    if formats > 1:
        raise ConfigError("more than one output format", expected="one of --json, --csv and --parquet")
    if query is not None and file is not None:
        raise ConfigError("the query is given twice", found="QUERY and --file", expected="one of them")
    if query is not None and any(letter.isspace() for letter in str(store)) and _is_store(query):
        raise ConfigError("the store comes first", found=str(store), expected="hexdata sql STORE QUERY")
    output, limit = Output(as_json), parse_bytes(memory)
    if query is None and file is None and not formats and is_terminal(sys.stdin, sys.stdout):
        _open_shell(store)
    text = _read_query(query, file)
    if text == _LIST:
        _list(output)
        return
    try:
        with (
            translate_errors(store, parquet),
            memory_limit(limit, threads),
            run_query(store, text, memory=limit, threads=threads) as result,
        ):
            _write(output, result, as_csv, parquet)
    except KeyboardInterrupt:
        output.error("interrupted")
        raise typer.Exit(130) from None


def _is_store(path: str) -> bool:
    return Path(path, "manifest.json").is_file()


def _read_query(query: str | None, file: str | None) -> str:
    """Return the text of a query from the argument, a file or standard input.

    Raises:
        ConfigError: There is no query, or the file cannot be read.
    """
    from hexdata.cli.render import is_terminal

    if query is not None and query != "-":
        if query.endswith(".sql") and Path(query).is_file():
            raise ConfigError(
                "the query is the name of a file", found=query, hint=f"Use -f {shell_word(query)}."
            )
        return query
    if file in (None, "-"):
        if file is None and query is None and (sys.stdin is None or is_terminal(sys.stdin)):
            raise ConfigError(
                "there is no query",
                expected="a query, --file FILE, or a query from standard input",
            )
        data, name = sys.stdin.buffer.read(), "standard input"
    else:
        assert file is not None
        name = file
        try:
            data = Path(file).read_bytes()
        except OSError as error:
            raise ConfigError("the query cannot be read", path=file, found=error.strerror) from error
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ConfigError("the query is not valid UTF-8", path=name, found=str(error)) from error


def _open_shell(store: AnyPath) -> NoReturn:
    """Replace this process by the DuckDB shell with the views of a store.

    Raises:
        ConfigError: The shell is not installed, or the store is in an object store.
    """
    from hexdata.sql import DATABASE_NAME
    from hexdata.storage import local_path
    from hexdata.store import Store as OpenStore

    shell = shutil.which("duckdb")
    if shell is None:
        raise ConfigError(
            "there is no query, and the DuckDB shell is not installed",
            expected="a query, --file FILE, or the program duckdb",
            hint="Run `pip install duckdb-cli`.",
        )
    database = local_path(OpenStore.open(store).path / DATABASE_NAME, "the database of the DuckDB shell")
    os.execv(shell, [shell, "-readonly", str(database)])  # noqa: S606 - the shell of the user


def _write(output: Output, result: QueryResult, as_csv: bool, parquet: AnyPath | None) -> None:
    """Print the notes and the rows of a result, or write the rows to a Parquet file."""
    from hexdata.sql import json_rows, save_parquet, write_csv

    for note in result.notes:
        output.note(note)
    if output.as_json:
        for text in json_rows(result):
            typer.echo(text, nl=False)
    elif as_csv:
        write_csv(typer.get_binary_stream("stdout"), result, escaped=output.out.is_terminal)
    elif parquet is not None:
        facts = save_parquet(parquet, result)
        output.line(f"{parquet}: {facts.rows:,} rows, {format_bytes(facts.bytes)}")
    else:
        _show(output, result)


def _list(output: Output) -> None:
    from hexdata.sql import named_queries

    queries = named_queries()
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
