"""Escaping of texts from files, which may contain any characters, for storage and display."""

from __future__ import annotations

__all__ = ["encodable", "printable"]


def encodable(text: str) -> str:
    """Return text that UTF-8 can encode; lone surrogates, such as those of file names, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Return text on one line; characters that are not printable are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
