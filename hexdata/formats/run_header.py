"""Facts of the run that wrote a file of games: from comment lines of TRMPH text, and from names of files.

Spellings of a fact, in upper or lower case: ``# Model: x``, ``# model = x``, ``# MCTS simulations: 400``. A
number may also follow its name without a separator: ``# temperature 1.0``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from datetime import date
from pathlib import PurePosixPath
from typing import Any, Final

from hexdata.text import encodable

__all__ = ["FACT_NAMES", "RUN_FACTS", "RunHeader", "date_of_name", "model_of"]

RUN_FACTS: Final = ("model", "simulations", "temperature", "seed", "commit", "date")
"""The facts of a run, which are columns of the table sources."""

_NAMES: Final = {
    "model": "model",
    "models": "model",
    "model path": "model",
    "checkpoint": "model",
    "mcts simulations": "simulations",
    "mcts sims": "simulations",
    "simulations": "simulations",
    "sims": "simulations",
    "temperature": "temperature",
    "random seed": "seed",
    "run seed": "seed",
    "seed": "seed",
    "git commit": "commit",
    "commit": "commit",
    "date": "date",
    "created": "date",
}
"""Fact of each spelling of its name, in lower case with single spaces."""

FACT_NAMES: Final = b"|".join(name.replace(" ", "[ _-]").encode() for name in _NAMES)
"""Regular expression of these names."""

_NUMBERS: Final = ("simulations", "temperature", "seed")
_SEPARATED: Final = re.compile(r"([A-Za-z][A-Za-z _-]{0,40}?)\s*[:=]\s*(\S.*)")
_SPACED: Final = re.compile(r"([A-Za-z][A-Za-z _-]{0,40}?)\s+(\S+)")
_TITLE: Final = re.compile(r"\S.*? - (\d{4}-\d\d-\d\d)T[0-9:.+Z-]{5,30}")
"""First line of a header, such as ``# Self-play games - 2025-09-08T12:11:06.123456``."""
_MAY_BE_MEANT: Final = re.compile(r"[:=](?!\s*(?:none|unknown)$)", re.IGNORECASE)
"""Matches a line that states a value, but not one that states that there is none."""
_MAX_VALUE: Final = 512
"""Longer values are not used; a path has at most 4,096 bytes, but real ones have about 100."""
_MAX_VALUES: Final = 8
"""Maximum number of values of a fact that are listed for one file."""


class RunHeader:
    """Collects the facts of the runs in one file.

    A file may contain games of several runs, each below its own header. Each fact is in force from its line
    to the next line with the same name, or to the next title line, which begins a new header.
    """

    def __init__(self) -> None:
        self._current: dict[str, Any] = {}
        self._in_force: dict[str, list[Any]] = {}
        self._unread: dict[str, list[str]] = {}
        self._changed = True

    def read_comment(self, line: bytes) -> None:
        """Read a comment line, with its ``#``. A line that states no fact is ignored."""
        if len(line) > 2 * _MAX_VALUE:
            return
        text = line.decode("utf-8", "replace").strip().lstrip("#").strip()
        if title := _TITLE.fullmatch(text):
            self._current = {}
            found = ("date", _date(title[1]))
        else:
            found = _fact(text)
        name, value = found
        if value is not None:
            self._current[name] = value
        elif name in (*_NUMBERS, "date") and _MAY_BE_MEANT.search(text):
            texts = self._unread.setdefault(name, [])
            if text not in texts and len(texts) < _MAX_VALUES:
                texts.append(text)
        self._changed = True

    def begin_game(self) -> None:
        """Count the facts of the last header as those of the next game."""
        if not self._changed:
            return
        self._changed = False
        for name in RUN_FACTS:
            values = self._in_force.setdefault(name, [])
            value = self._current.get(name)
            if value not in values and len(values) <= _MAX_VALUES:
                values.append(value)

    def as_json(self) -> dict[str, object]:
        """Return the items for the header of the source.

        Returns:
            ``run``: the facts that hold for all games of the file; of a file without games, those of its last
            header. ``run_changes``: for each other fact, the values in the order of the file, null for games
            without a value. ``run_unread``: lines such as ``Temperature: hot``, which state no number or
            date, by fact. Each key exists only if it has items.
        """
        unread: dict[str, object] = {"run_unread": self._unread} if self._unread else {}
        if not self._in_force:
            return {"run": self._current, **unread} if self._current else unread
        run = {name: values[0] for name, values in self._in_force.items() if values != [None]}
        changes = {name: self._in_force[name][:_MAX_VALUES] for name in run if len(self._in_force[name]) > 1}
        run = {name: value for name, value in run.items() if name not in changes}
        stated: dict[str, object] = {"run": run, "run_changes": changes}
        return {name: facts for name, facts in stated.items() if facts} | unread


def _fact(text: str) -> tuple[str, Any]:
    """Return the fact and the value that a line states; the value is None if it states none."""
    separated = _SEPARATED.fullmatch(text)
    stated = separated or _SPACED.fullmatch(text)
    if stated is None:
        return "", None
    name = _NAMES.get(" ".join(re.split(r"[\s_-]+", stated[1].lower())), "")
    if not name or (separated is None and name not in _NUMBERS) or len(stated[2]) > _MAX_VALUE:
        return "", None
    return name, _READERS[name](stated[2].strip())


def _integer(text: str) -> int | None:
    number = int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None
    return number if number is not None and -(1 << 63) <= number < 1 << 63 else None


def _simulations(text: str) -> int | None:
    number = _integer(text)
    return number if number is not None and number >= 0 else None


def _float(text: str) -> float | None:
    if not re.fullmatch(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?", text):
        return None
    return float(text) if math.isfinite(float(text)) else None


def _date(text: str) -> str | None:
    """Return the date at the beginning of an ISO time, as ISO text."""
    found = re.match(r"(\d{4})-(\d\d)-(\d\d)(?!\d)", text)
    return None if found is None else _iso_date(*found.groups())


def _iso_date(year: str, month: str, day: str) -> str | None:
    try:
        return date(int(year), int(month), int(day)).isoformat()
    except ValueError:
        return None


def model_of(text: str) -> str | None:
    """Return the model that a header names, as text that UTF-8 can encode.

    Args:
        text: A name or path; or a Python list of names, as in headers of tournaments.

    Returns:
        The name; several names separated by ", ", in their order; None if there is none.
    """
    if text.startswith("["):
        try:
            names = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
        if not all(isinstance(name, str) for name in names):
            return None
        text = ", ".join(dict.fromkeys(names))
    return encodable(text) if text and text.lower() not in ("none", "unknown") else None


def _commit(text: str) -> str | None:
    return None if text.lower() in ("none", "unknown") else text


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "model": model_of,
    "simulations": _simulations,
    "temperature": _float,
    "seed": _integer,
    "commit": _commit,
    "date": _date,
}

_DATE: Final = re.compile(r"(?<!\d)(20\d\d)([-_]?)(\d\d)\2(\d\d)(?!\d)")
_SHORT_DATE: Final = re.compile(r"tournament_.*?_?(\d\d)(\d\d)(\d\d)_\d\d")
"""Folder of a tournament of the legacy tools: year, month and day with two digits each, and the hour."""


def date_of_name(name: str) -> str | None:
    """Return the date in the name of a source, as ISO text.

    Names such as ``2025-09-30``, ``20250930``, ``tournament_20250930_1530`` and ``tournament_x_250930_15``
    contain one. The name of the file is searched first, then its folders from the innermost to the outermost.

    Args:
        name: Path of the file, with ``/``.

    Returns:
        The date; None if no part contains one, or the first part that does contains different ones.
    """
    for part in reversed(PurePosixPath(name).parts):
        found = {_iso_date(year, month, day) for year, _, month, day in _DATE.findall(part)}
        if not found - {None}:
            short = _SHORT_DATE.fullmatch(part)
            found = {None if short is None else _iso_date("20" + short[1], short[2], short[3])}
        if dates := found - {None}:
            return dates.pop() if len(dates) == 1 else None
    return None
