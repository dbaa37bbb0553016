"""Escaping of texts from files, which may contain any characters, for storage, display and shells."""

from __future__ import annotations

import os
import re
import shlex
from typing import Final

__all__ = ["encodable", "printable", "shell_word"]

_INVISIBLE: Final = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Invisible letters and marks that ``str.isprintable`` accepts. With them, two names could look the same."""


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
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))
