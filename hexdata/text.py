"""Texts out of files, made such that they can be stored and shown: anything may stand in a file's name."""

from __future__ import annotations

__all__ = ["encodable", "printable"]


def encodable(text: str) -> str:
    """Return text that UTF-8 can hold: what it cannot (bytes of a file name, half a pair) as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Return a text on one line that a terminal, a log and a page can take: the rest of it as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
