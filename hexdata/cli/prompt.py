"""A prompt for SQL queries, with history and completion where Python has the module readline."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from hexdata.cli.app import print_error
from hexdata.cli.render import Output
from hexdata.errors import HexdataError
from hexdata.system import line_editor

__all__ = ["HISTORY_VARIABLE", "run_prompt"]

HISTORY_VARIABLE: Final = "HEXDATA_SQL_HISTORY"
"""Environment variable with the file of the history. Default: ``hexdata/sql_history`` in XDG_STATE_HOME."""
_FIRST: Final = "sql> "
_NEXT: Final = "...> "
_MOST: Final = 1_000
"""Maximum number of queries in the history."""
_LEAVE: Final = frozenset({"exit", "quit", ".exit", ".quit", r"\q"})
_HELP: Final = (
    "A query ends with ; and may have several lines. It can only read the store.",
    "  @            list the named queries",
    "  @NAME        run a named query",
    "  DESCRIBE games;   list the columns of a view",
    "  .help        show this text",
    "  .exit        leave; so does Ctrl-D",
    "Ctrl-C clears the input or stops the running query.",
    "The arrow keys recall earlier queries, and Tab completes names.",
)
_KEYWORDS: Final = (
    "SELECT FROM WHERE GROUP BY ORDER HAVING LIMIT DISTINCT JOIN USING ON AS AND OR NOT NULL IS IN BETWEEN "
    "LIKE CASE WHEN THEN ELSE END UNION DESC DESCRIBE SUMMARIZE SHOW TABLES WITH COUNT AVG SUM MIN MAX"
)


def run_prompt(output: Output, answer: Callable[[str], None], names: Callable[[], Sequence[str]]) -> None:
    """Read queries from the terminal and answer each, until the end of the input or ``.exit``.

    An error is printed, and the next query is read.

    Args:
        output: Where results and messages are printed.
        answer: Function that runs a query and prints its rows.
        names: Function that returns the names to complete: views, columns and macros.
    """
    with _editing(names) as remember:
        lines: list[str] = []
        while True:
            try:
                line = input(_NEXT if lines else _FIRST)
            except EOFError:
                output.line()
                return
            except KeyboardInterrupt:
                output.line()
                lines = []
                continue
            word = line.strip()
            if not lines and word.lower().rstrip(";") in _LEAVE:
                return
            if not lines and word in (".help", "help", "?"):
                for text in _HELP:
                    output.line(text)
            elif lines or word:
                lines.append(line)
                if _complete(lines):
                    remember(lines)
                    _answer(output, answer, "\n".join(lines).strip())
                    lines = []


def _complete(lines: Sequence[str]) -> bool:
    """Return whether lines are a named query, or a statement that ends with a semicolon."""
    text = "\n".join(lines).strip()
    return text.startswith("@") or sqlite3.complete_statement(text)


def _answer(output: Output, answer: Callable[[str], None], text: str) -> None:
    try:
        answer(text.rstrip("; \t") if text.startswith("@") else text)
    except HexdataError as error:
        print_error(error)
    except KeyboardInterrupt:
        output.error("interrupted")


@contextmanager
def _editing(names: Callable[[], Sequence[str]]) -> Iterator[Callable[[Sequence[str]], None]]:
    """Yield a function that adds the lines of a query to the history, which is saved at the end."""
    editor = line_editor()
    if editor is None:
        yield lambda _: None
        return
    editor.set_auto_history(False)
    editor.set_completer(_Completer(names))
    editor.set_completer_delims(" \t\n()[],;=<>+-*/'\"")
    backend = "libedit" if "libedit" in (editor.__doc__ or "") else "readline"
    editor.parse_and_bind("bind ^I rl_complete" if backend == "libedit" else "tab: complete")
    file = _history_file()
    editor.clear_history()
    with suppress(OSError):
        editor.read_history_file(file)
    try:
        yield lambda lines: _add(editor, lines)
    finally:
        editor.set_completer(None)
        editor.set_history_length(_MOST)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            editor.write_history_file(file)


def _add(editor: Any, lines: Sequence[str]) -> None:
    """Add a query as one line, or as several if it has a comment, which would swallow the rest."""
    for text in lines if any("--" in line for line in lines) else [" ".join(map(str.strip, lines))]:
        count = editor.get_current_history_length()
        if text.strip() and (not count or editor.get_history_item(count) != text):
            editor.add_history(text)


def _history_file() -> Path:
    if path := os.environ.get(HISTORY_VARIABLE):
        return Path(path)
    folder = os.environ.get("XDG_STATE_HOME")
    return (Path(folder) if folder else Path.home() / ".local" / "state") / "hexdata" / "sql_history"


class _Completer:
    """Completes names of the store and keywords. The names are read at the first use."""

    def __init__(self, names: Callable[[], Sequence[str]]) -> None:
        self._names = names
        self._words: list[str] | None = None

    def __call__(self, text: str, state: int) -> str | None:
        if self._words is None:
            self._words = [*sorted(set(self._names())), *_KEYWORDS.split()]
        found = [word for word in self._words if text and word.lower().startswith(text.lower())]
        return found[state] if state < len(found) else None
