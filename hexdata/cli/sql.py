"""``hexdata sql``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from hexdata.cli.app import AnyPath, Size
from hexdata.errors import ConfigError
from hexdata.text import shell_word
from hexdata.units import format_bytes

if TYPE_CHECKING:
    from hexdata.cli.render import Output
    from hexdata.sql import QueryResult

_SHOWN_ROWS: Final = 40
"""Maximum number of rows shown on a terminal."""
_COUNTED_ROWS: Final = 1_000_000
"""Maximum number of further rows that are counted."""


def sql(
    store: AnyPath,
    query: str | None = None,
    file: str | None = None,
    json: bool = False,
    csv: bool = False,
    parquet: AnyPath | None = None,
    memory: Size = "1GB",
    threads: int | None = None,
) -> None:
    """Query a store with SQL.

    Views: positions, games, sources, rejected, shuffled, shards.

    Examples:
        hexdata sql store "SELECT * FROM games LIMIT 3"
        hexdata sql store @first_moves
        hexdata sql store "FROM games" --csv > games.csv
        hexdata sql store -f query.sql
        hexdata sql store

    Arguments:
        query QUERY: A SELECT statement, a named query as @NAME, @ to list the named queries, or - to read the
            query from standard input. Without it, a terminal shows the DuckDB shell, if it is installed.

    Options:
        --file, -f FILE: Read the query from a text file.
        --json: Print a JSON array with one object per row, one per line.
        --csv: Print CSV with a header. Unsafe characters are escaped on a terminal only.
        --parquet FILE: Write the rows to a Parquet file. FILE is a path or an address outside the store.
    """
    from hexdata.cli.render import Output, is_terminal
    from hexdata.sql import named_queries, run_query
    from hexdata.system import memory_limit

    formats = json + csv + (parquet is not None)
    if formats > 1:
        raise ConfigError("more than one output format", expected="one of --json, --csv and --parquet")
    if query is not None and file is not None:
        raise ConfigError("the query is given twice: QUERY and --file")
    # The arguments are in the wrong order: the first is a query, and the second is a store.
    if query is not None and " " in str(store) and Path(query, "manifest.json").is_file():
        raise ConfigError("the store comes first", found=str(store), expected="hexdata sql STORE QUERY")
    output = Output(json)
    if query is None and file is None and not formats and is_terminal(sys.stdin, sys.stdout):
        _open_shell(store)
    text = _read_query(query, file)
    if text == "@":
        names = named_queries()
        if not output.print_json([{"name": name, "description": text} for name, text in names.items()]):
            output.table(["query", "description"], [[f"@{name}", text] for name, text in names.items()])
        return
    limits = {"memory": memory, "threads": threads}
    with memory_limit(memory, threads), run_query(store, text, **limits) as result:  # type: ignore[arg-type]
        _write(output, result, csv, parquet)


def _read_query(query: str | None, file: str | None) -> str:
    """Return the text of a query from the argument, a file or standard input.

    Raises:
        ConfigError: There is no query, or the file cannot be read.
    """
    from hexdata.cli.render import is_terminal

    if query is not None and query != "-":
        if query.endswith(".sql") and Path(query).is_file():
            hint = f"Use -f {shell_word(query)}."
            raise ConfigError("the query is the name of a file", found=query, hint=hint)
        return query
    try:
        if file is not None and file != "-":
            return Path(file).read_bytes().decode("utf-8-sig").strip()
        if file is None and query is None and (sys.stdin is None or is_terminal(sys.stdin)):
            wanted = "a query, --file FILE, or a query from standard input"
            raise ConfigError("there is no query", expected=wanted)
        return sys.stdin.buffer.read().decode("utf-8-sig").strip()
    except OSError as error:
        raise ConfigError("the query cannot be read", path=file, found=error.strerror) from error
    except UnicodeDecodeError as error:
        name = "standard input" if file in (None, "-") else file
        raise ConfigError("the query is not valid UTF-8", path=name, found=str(error)) from error


def _open_shell(store: AnyPath) -> None:
    """Replace this process by the DuckDB shell with the views of a store.

    Raises:
        ConfigError: The shell is not installed, or the store is in an object store.
    """
    from hexdata.sql import DATABASE_NAME
    from hexdata.storage import local_path
    from hexdata.store import Store

    shell = shutil.which("duckdb")
    if shell is None:
        raise ConfigError(
            "there is no query, and the DuckDB shell is not installed", hint="Run `pip install duckdb-cli`."
        )
    database = local_path(Store.open(store).path / DATABASE_NAME, "the database of the DuckDB shell")
    # The shell takes over the process, and with it the terminal and its signals.
    os.execv(shell, [shell, "-readonly", str(database)])  # noqa: S606 - the shell of the user


def _write(output: Output, result: QueryResult, as_csv: bool, parquet: AnyPath | None) -> None:
    """Print the notes and the rows of a result, or write the rows to a Parquet file.

    A terminal shows the first rows as a table, and the number of further rows.
    """
    from hexdata.sql import json_rows, save_parquet, text_rows, write_csv

    for note in result.notes:
        output.note(note)
    names = result.schema.names
    if output.as_json:
        for text in json_rows(result):
            typer.echo(text, nl=False)
    elif as_csv:
        write_csv(typer.get_binary_stream("stdout"), result, escaped=output.out.is_terminal)
    elif parquet is not None:
        facts = save_parquet(parquet, result)
        output.line(f"{parquet}: {facts.rows:,} rows, {format_bytes(facts.bytes)}")
    elif not output.out.is_terminal:
        output.tabbed([names])
        output.tabbed(row for batch in result.batches for row in text_rows(batch))
    else:
        rows: list[list[str]] = []
        count = 0
        for batch in result.batches:
            rows += text_rows(batch.slice(0, _SHOWN_ROWS - len(rows)))
            count += batch.num_rows
            # Counting the rows reads them, which may take hours.
            if count > _SHOWN_ROWS + _COUNTED_ROWS:
                break
        output.table(names, rows, numeric=result.numeric, shorten=True)
        if more := count - len(rows):
            counted = f"more than {_COUNTED_ROWS:,}" if more > _COUNTED_ROWS else f"{more:,}"
            output.note(f"{counted} rows are not shown; --csv, --json, --parquet or a pipe gets all")
