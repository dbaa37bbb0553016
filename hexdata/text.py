"""Escaping of texts from files, which may contain any characters, for storage, display and shells."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Final

_INVISIBLE: Final = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Invisible letters and marks that ``str.isprintable`` accepts. With them, two names could look the same."""

_SHOWN: Final = 80
"""Maximum number of characters of a text from a file in a message."""
_NUMBER: Final = re.compile(r"-?|[+-]?[\d,.:]+(e[+-]\d+)?( ?(%|s|s\.d\.|B|[kMGT]B))?")
_COMMAND: Final = re.compile(r"`[^`]*`")
_MIN_WIDTH: Final = 20
"""Texts are not wrapped to fewer characters."""


def encodable(text: str) -> str:
    """Return text that UTF-8 can encode; lone surrogates, such as those of file names, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Return text on one line, with escapes for characters that a terminal does not show as a letter.

    These are control characters, line and paragraph separators, characters that change the direction of
    writing, invisible characters, spaces other than U+0020, unassigned characters and lone surrogates.
    """
    if text.isprintable() and (text.isascii() or _INVISIBLE.search(text) is None):
        return text
    return "".join(map(_shown, text))


def _shown(letter: str) -> str:
    if letter.isprintable() and not _INVISIBLE.match(letter):
        return letter
    return letter.encode("unicode_escape").decode("ascii")


def shortened(text: str) -> str:
    """Return a text from a file for a message: printable, and shortened to 80 characters."""
    # Cut before it is escaped, since a text from a file may be of any length.
    shown = printable(text[: _SHOWN + 1])
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def is_number(text: str) -> bool:
    """Return whether a cell of a table is a number, with or without a unit, or stands for an unknown one."""
    return _NUMBER.fullmatch(text) is not None


def shell_word(text: str) -> str:
    """Return text as one word of a shell command that can be printed and copied.

    Characters that a terminal does not show as a letter are escaped in ``$'...'``, for bash, zsh and ksh.
    """
    if printable(text) == text:
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(letter: str) -> str:
    if letter in "\\'":
        return f"\\{letter}"
    if printable(letter) == letter:
        return letter
    # The bytes of the name on the disk, so that the printed command finds the file.
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text that is wrapped at spaces, for a terminal. Further lines are indented.

    A word that is longer than the width is not broken, nor is a command in backticks, which can be copied.
    """
    # A character that is no space for ``textwrap`` and cannot occur in a command.
    kept = _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        kept, max(width, _MIN_WIDTH), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines] or [text]


def did_you_mean(name: str, known: Collection[str]) -> str | None:
    """Return a hint with the most similar known name, or None if none is similar."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else None


def without_game(count: int, positions: int) -> str:
    """Return the sentence, without a full stop, about positions that belong to no known game."""
    return (
        f"{count:,} of {count_of(positions, 'position')} belong to no known game: they are in train, and "
        "dispersion, duplicates and the split by game cannot be checked for them"
    )


def count_of(number: int, noun: str) -> str:
    """Return a number with a noun, such as "1 file" or "1,200 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(texts: Sequence[str], most: int = 3) -> str:
    """Return the first of some texts on one line, with the number of the others."""
    rest = len(texts) - most
    return ", ".join([*texts[:most], *([f"… and {rest:,} more"] if rest > 0 else [])])


def lines_by_cause(findings: Iterable[tuple[str, str, str]], *, most: int = 5) -> list[str]:
    """Return a list of files for the user: one line per file, grouped by cause.

    Args:
        findings: Cause, name of the file and detail of each finding. The detail may be empty.
        most: Maximum number of files listed per cause. Default 5. A last line has the number of the others.

    Returns:
        For a cause with one file, one line. Otherwise a line with the number of files and the cause, and one
        line per file that begins with two spaces.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for cause, name, detail in findings:
        groups.setdefault(cause, []).append((name, detail))
    lines = []
    for cause, files in groups.items():
        if len(files) == 1:
            lines.append(": ".join(filter(None, (files[0][0], cause, files[0][1]))))
            continue
        # A detail that all files share is printed once, beside the cause.
        details = {detail for _, detail in files}
        common = details.pop() if len(details) == 1 else ""
        lines.append(": ".join(filter(None, (count_of(len(files), "file"), cause, common))))
        for name, detail in files[:most]:
            lines.append(f"  {name}: {detail}" if detail and not common else f"  {name}")
        if len(files) > most:
            lines.append(f"  … and {len(files) - most:,} more")
    return lines
