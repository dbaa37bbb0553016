"""The formats of source files: the built-in ones, and those of other installed packages.

A package adds a format with an entry point of the group ``hexdata.formats`` whose value is a
:class:`SourceFormat`::

    [project.entry-points."hexdata.formats"]
    mygame = "mypackage.reader:FORMAT"

Entry points are loaded only if a file or a name matches no built-in format. Files select a format but never
name code to run: only installed packages add readers.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

from hexdata.errors import ConfigError
from hexdata.formats.source import FilePart, SourceReader
from hexdata.storage import AnyPath

__all__ = [
    "BUILT_IN_FORMATS",
    "ENTRY_POINT_GROUP",
    "OpenSource",
    "SourceFormat",
    "expected_contents",
    "find_format",
    "installed_formats",
    "source_formats",
]

ENTRY_POINT_GROUP: Final = "hexdata.formats"
"""Entry point group in which other packages publish their formats."""

_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")


class OpenSource(Protocol):
    """The function of a format that opens a file."""

    def __call__(self, path: AnyPath, *, salvage: bool, part: FilePart | None) -> SourceReader:
        """Open a source file.

        Args:
            path: Local file or remote object.
            salvage: If True, a damaged file yields the complete records before the damage.
            part: Range of bytes to read; None for the whole file. Only formats with ``appendable`` get one.

        Raises:
            FormatError: The file cannot be read.
            OSError: The file cannot be opened.
        """


@dataclass(frozen=True)
class SourceFormat:
    """A format of source files: how its files are recognised and opened.

    Attributes:
        name: Name of the format in messages: lower-case letters, digits and hyphens, such as "trmph".
        patterns: Name patterns, in lower case, of files that are read in a folder, such as ``"*.trmph.gz"``.
        matches: Function of the first bytes of a file, decompressed (at most 65,536; empty for an empty
            file), and of its name. Returns whether the file has this format.
        open: Function that opens a file and returns its reader.
        contents: What a file contains, for messages: "TRMPH games". Default: the name.
        appendable: Whether files are texts to which lines are appended, so that ``open`` accepts a part.
            Default False.
    """

    name: str
    patterns: tuple[str, ...]
    matches: Callable[[bytes, str], bool]
    open: OpenSource
    contents: str = ""
    appendable: bool = False

    def has_name(self, name: str) -> bool:
        """Return whether a file name matches one of ``patterns``, in upper or lower case."""
        return any(fnmatchcase(name.lower(), pattern) for pattern in self.patterns)


def _is_named_text(head: bytes, name: str, *suffixes: str) -> bool:
    """Return whether a file has the name of a text and may be one, although some of its bytes are damaged."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 16 * head.count(b"\0") > len(head):
        return False
    return any(suffix in name.lower() for suffix in suffixes)


def _is_legacy(head: bytes, _name: str) -> bool:
    from hexdata.formats.legacy.source import looks_like_pickle

    return looks_like_pickle(head)


def _open_legacy(path: AnyPath, *, salvage: bool, part: FilePart | None) -> SourceReader:
    from hexdata.formats.legacy import LegacyReader, SelfPlayGamesReader, has_games

    assert part is None  # pickles are not appendable
    if has_games(path):
        return SelfPlayGamesReader(path, salvage=salvage)
    return LegacyReader(path, salvage=salvage)


def _is_trmph(head: bytes, name: str) -> bool:
    from hexdata.formats.trmph import looks_like_trmph

    return looks_like_trmph(head) or _is_named_text(head, name, ".trmph")


def _open_trmph(path: AnyPath, *, salvage: bool, part: FilePart | None) -> SourceReader:
    from hexdata.formats.trmph import TrmphReader

    return TrmphReader(path, salvage=salvage, part=part)


def _is_katahex(head: bytes, _name: str) -> bool:
    from hexdata.formats.katago import looks_like_katahex

    return looks_like_katahex(head)


def _open_katahex(path: AnyPath, *, salvage: bool, part: FilePart | None) -> SourceReader:
    from hexdata.formats.katago import KataHexReader

    assert part is None  # zip archives are not appendable
    return KataHexReader(path, salvage=salvage)


def _is_hexworld(head: bytes, name: str) -> bool:
    from hexdata.formats.hexworld import looks_like_hexworld
    from hexdata.formats.sgf import looks_like_sgf
    from hexdata.formats.trmph import looks_like_trmph

    named = _is_named_text(head, name, ".hexworld")
    if ".trmph" in name.lower() and b"hexworld.org" not in head and looks_like_trmph(head):
        return False  # TRMPH whose first "#" is damaged looks like a link without its beginning
    return looks_like_hexworld(head) or (named and not looks_like_sgf(head))


def _open_hexworld(path: AnyPath, *, salvage: bool, part: FilePart | None) -> SourceReader:
    from hexdata.formats.hexworld import HexWorldReader

    return HexWorldReader(path, salvage=salvage, part=part)


def _is_sgf(head: bytes, name: str) -> bool:
    from hexdata.formats.sgf import contains_sgf, looks_like_sgf

    named = _is_named_text(head, name, ".sgf", ".hsgf")
    return looks_like_sgf(head) or (named and (not head.strip() or contains_sgf(head)))


def _open_sgf(path: AnyPath, *, salvage: bool, part: FilePart | None) -> SourceReader:
    from hexdata.formats.sgf import SgfReader

    assert part is None  # a game may be on several lines, so SGF is not appendable
    return SgfReader(path, salvage=salvage)


BUILT_IN_FORMATS: Final = (
    SourceFormat(
        "legacy",
        ("*.pkl.gz", "*.pkl", "*.pickle.gz", "*.pickle"),
        _is_legacy,
        _open_legacy,
        contents="a pickle",
    ),
    SourceFormat(
        "hexworld",
        ("*.hexworld", "*.hexworld.gz"),
        _is_hexworld,
        _open_hexworld,
        contents="HexWorld links",
    ),
    SourceFormat(
        "sgf",
        ("*.sgf", "*.sgf.gz", "*.hsgf", "*.hsgf.gz"),
        _is_sgf,
        _open_sgf,
        contents="Hex games in SGF",
    ),
    SourceFormat(
        "trmph",
        ("*.trmph", "*.trmph.gz"),
        _is_trmph,
        _open_trmph,
        contents="TRMPH games",
        appendable=True,
    ),
    SourceFormat(
        "katahex",
        ("*.npz",),
        _is_katahex,
        _open_katahex,
        contents="training data of KataHex",
    ),
)
"""The formats of hexdata, in the order in which they are compared with a file."""


def source_formats() -> Iterator[SourceFormat]:
    """Yield the built-in formats, then those of other packages, which are loaded when they are reached.

    Raises:
        ConfigError: An entry point of another package is broken.
    """
    yield from BUILT_IN_FORMATS
    yield from installed_formats()


def expected_contents() -> str:
    """Return what a source file may contain, for messages: "a pickle or TRMPH games, gzipped or not"."""
    names = [each.contents or each.name for each in source_formats()]
    return f"{', '.join(names[:-1])} or {names[-1]}, gzipped or not"


def find_format(head: bytes, name: str, *, appendable: bool = False) -> SourceFormat | None:
    """Return the first format that a file has, or None.

    Args:
        head: The first bytes of the file, decompressed.
        name: The name of the file.
        appendable: If True, only formats of texts to which lines are appended. Default False.

    Raises:
        ConfigError: The file has no built-in format, and a format of another package is broken.
    """
    for source_format in source_formats():
        if appendable and not source_format.appendable:
            continue
        try:
            if source_format.matches(head, name):
                return source_format
        except Exception as error:
            if source_format in BUILT_IN_FORMATS:
                raise
            raise ConfigError(
                f"the format {source_format.name!r} of an installed package failed to examine a file",
                path=name,
                found=f"{type(error).__name__}: {error}",
                hint="Correct or uninstall the package.",
            ) from error
    return None


@functools.cache
def installed_formats() -> tuple[SourceFormat, ...]:
    """Return the formats of other packages, sorted by the names of their entry points.

    Raises:
        ConfigError: An entry point cannot be loaded, is not a ``SourceFormat``, has an invalid name or
            pattern, or has the name of another format.
    """
    formats: list[SourceFormat] = []
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        added = _load(entry)
        if any(added.name == other.name for other in (*BUILT_IN_FORMATS, *formats)):
            raise _broken(entry, f"the format name {added.name!r}", "a name that no other format has")
        formats.append(added)
    return tuple(formats)


def _load(entry: EntryPoint) -> SourceFormat:
    try:
        value = entry.load()
    except Exception as error:
        raise _broken(entry, f"{type(error).__name__}: {error}", "an object that can be imported") from error
    if not isinstance(value, SourceFormat):
        raise _broken(entry, type(value).__name__, "a hexdata.formats.SourceFormat")
    if not _NAME.fullmatch(value.name):
        raise _broken(
            entry, f"the format name {value.name!r}", "lower-case letters, digits and hyphens, such as mygame"
        )
    if not value.patterns or any(pattern != pattern.lower() for pattern in value.patterns):
        raise _broken(entry, f"the patterns {value.patterns!r}", "patterns in lower case, such as *.mygame")
    return value


def _broken(entry: EntryPoint, found: str, expected: str) -> ConfigError:
    package = entry.dist.name if entry.dist else "unknown"
    return ConfigError(
        f"the package {package} has a format that cannot be used: entry point {entry.name} = {entry.value!r} "
        f"of the group {ENTRY_POINT_GROUP}",
        found=found,
        expected=expected,
        hint=f"Correct or uninstall the package {package}.",
    )
