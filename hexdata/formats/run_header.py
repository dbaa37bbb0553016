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
from typing import Any, Final

from hexdata.text import encodable

_SEPARATED: Final = re.compile(r"([A-Za-z][A-Za-z _-]{0,40}?)\s*[:=]\s*(\S.*)")
_SPACED: Final = re.compile(r"([A-Za-z][A-Za-z _-]{0,40}?)\s+(\S+)")
_TITLE: Final = re.compile(r"\S.*? - (\d{4}-\d\d-\d\d)T[0-9:.+Z-]{5,30}")
"""First line of a header, such as ``# Self-play games - 2025-09-08T12:11:06.123456``."""
_NONE: Final = ("none", "unknown")
_MAX_VALUE: Final = 512
"""Longer values are not used; a path has at most 4,096 bytes, but real ones have about 100."""
_MAX_VALUES: Final = 8
"""Maximum number of values of a fact that are listed for one file."""


def _integer(text: str, least: int = -(1 << 63)) -> int | None:
    is_number = re.fullmatch(r"-?[0-9]{1,19}", text) and least <= int(text) < 1 << 63
    return int(text) if is_number else None


def _float(text: str) -> float | None:
    is_number = re.fullmatch(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?", text)
    return float(text) if is_number and math.isfinite(float(text)) else None


def iso_date(text: str) -> str | None:
    """Return the date at the beginning of an ISO time, as ISO text; None if there is none."""
    try:
        return date.fromisoformat(text[:10]).isoformat() if re.match(r"\d{4}-\d\d-\d\d(?!\d)", text) else None
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
            # Literals only: no name of the text is looked up or called.
            names = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
        if not all(isinstance(name, str) for name in names):
            return None
        text = ", ".join(dict.fromkeys(names))
    return encodable(text) if text and text.lower() not in _NONE else None


_FACTS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "model": ("model|models|model path|checkpoint", model_of),
    "simulations": ("mcts simulations|mcts sims|simulations|sims", lambda text: _integer(text, least=0)),
    "temperature": ("temperature", _float),
    "seed": ("random seed|run seed|seed", _integer),
    "commit": ("git commit|commit", lambda text: None if text.lower() in _NONE else text),
    "date": ("date|created", iso_date),
}
"""The facts of a run, which are columns of the table sources: the spellings of the name, in lower case with
single spaces, and the function that reads the value."""
_NUMBERS: Final = ("simulations", "temperature", "seed")
_FACT_OF: Final = {name: fact for fact, (names, _) in _FACTS.items() for name in names.split("|")}
FACT_NAMES: Final = "|".join(_FACT_OF).replace(" ", "[ _-]").encode()
"""Regular expression of the names of the facts."""


class RunHeader:
    """Collects the facts of the runs in one file.

    A file may contain games of several runs, each below its own header. Each fact is in force from its line
    to the next line with the same name, or to the next title line, which begins a new header.
    """

    def __init__(self) -> None:
        self._current: dict[str, Any] = {}
        self._values: dict[str, dict[Any, None]] = {}  # of games, in order; empty before the first comment
        self._changed = True
        self._has_games = False

    def read_comment(self, line: bytes) -> None:
        """Read a comment line, with its ``#``. A line that states no fact is ignored."""
        if not self._values:
            self._values = {fact: {None: None} if self._has_games else {} for fact in _FACTS}
        # Such a line states no value that is used, and regular expressions take time on long lines.
        if len(line) > 2 * _MAX_VALUE:
            return
        text = line.decode("utf-8", "replace").strip().lstrip("#").strip()
        if title := _TITLE.fullmatch(text):
            self._current = {}
        fact, value = ("date", iso_date(title[1])) if title else _fact(text)
        if value is not None:
            self._current[fact] = value
        self._changed = True

    def begin_game(self) -> None:
        """Count the facts of the last header as those of the next game."""
        self._has_games = True
        # Most games follow another game, not a header, so their facts are those of the game before.
        if self._changed:
            for fact, values in self._values.items():
                if len(values) <= _MAX_VALUES:
                    values[self._current.get(fact)] = None
        self._changed = False

    def as_json(self) -> dict[str, object]:
        """Return the items for the header of the source.

        Returns:
            ``run``: the facts that hold for all games of the file; of a file without games, those of its last
            header. ``run_changes``: for each other fact, the values in the order of the file, null for games
            without a value. Each key exists only if it has items.
        """
        if not self._values:  # nearly all small files
            return {}
        listed = {fact: [*values][:_MAX_VALUES] for fact, values in self._values.items()}
        changes = {fact: values for fact, values in listed.items() if len(values) > 1}
        run = {fact: values[0] for fact, values in listed.items() if len(values) == 1 and values != [None]}
        items = {"run": run, "run_changes": changes}
        if not any(listed.values()):  # no game
            items["run"] = self._current
        return {key: facts for key, facts in items.items() if facts}


def _fact(text: str) -> tuple[str, Any]:
    """Return the fact and the value that a line states; the value is None if it states none."""
    separated = _SEPARATED.fullmatch(text)
    stated = separated or _SPACED.fullmatch(text)
    if stated is None:
        return "", None
    fact = _FACT_OF.get(" ".join(re.split(r"[\s_-]+", stated[1].lower())), "")
    # Without a separator, "model of the week" would be a model; a number is hardly prose.
    if not fact or (separated is None and fact not in _NUMBERS) or len(stated[2]) > _MAX_VALUE:
        return "", None
    return fact, _FACTS[fact][1](stated[2].strip())


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
    if "20" not in name and "tournament_" not in name:  # neither pattern matches; the usual case
        return None
    for part in reversed(name.split("/")):
        dates = {iso_date(f"{year}-{month}-{day}") for year, _, month, day in _DATE.findall(part)} - {None}
        if not dates and (short := _SHORT_DATE.fullmatch(part)):
            dates = {iso_date("20" + "-".join(short.groups()))} - {None}
        if dates:
            return dates.pop() if len(dates) == 1 else None
    return None
