"""The formats of source files: the built-in ones, and those of other installed packages.

A package adds a format with an entry point of the group ``hexdata.formats`` whose value is a
:class:`SourceFormat`::

    [project.entry-points."hexdata.formats"]
    mygame = "mypackage.reader:FORMAT"

Entry points are loaded only if a file or a name matches no built-in format, or does so only by games among
other text. Files select a format but never name code to run: only installed packages add readers.
"""

from __future__ import annotations

import codecs
import functools
import io
import re
from collections.abc import Iterable, Iterator
from fnmatch import translate
from importlib.metadata import entry_points
from typing import Any, Final

from hexdata.errors import ConfigError, FormatError
from hexdata.formats import alphazero, katago, legacy, lines, playhex, sgf, trmph
from hexdata.formats.checked import CheckedReader
from hexdata.formats.games import GameReader
from hexdata.formats.gunzip import GunzipFile, GunzipLimits, has_lines, text_of
from hexdata.formats.source import OWN_READER, FilePart, FileReader, SourceFormat
from hexdata.storage import AnyPath, storage_of

ENTRY_POINT_GROUP: Final = "hexdata.formats"
"""Entry point group in which other packages publish their formats."""
_TEXTS: Final = (
    sgf.FORMAT,
    playhex.FORMAT,  # before the formats of lines, as its names and links may contain any text
    lines.HEXWORLD,  # before TRMPH, as which its links without options could be read
    trmph.FORMAT,
    lines.MOVES,
)
# KataHex before the arrays of any program, lists before all other pickles.
BUILT_IN_FORMATS: Final = (katago.FORMAT, alphazero.FORMAT, legacy.FORMAT, *_TEXTS)
"""The formats of hexdata, in the order in which they are compared with a file."""
_OWN_NAMES: Final = frozenset(each.name for each in BUILT_IN_FORMATS)
GAME_FORMATS: Final = tuple(each.name for each in _TEXTS)
"""Formats of sources that contain games, not examples. Their values are winners, 0 for blue."""
PATTERNS: Final = tuple(pattern for each in BUILT_IN_FORMATS for pattern in each.patterns)
"""Name patterns, in lower case, of the files of the built-in formats, which are read in a folder."""
# One comparison for each file of a folder.
_KNOWN_NAMES: Final = re.compile("|".join(map(translate, PATTERNS)))


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
    return f"{', '.join(names[:-1])} or {names[-1]}, gzipped or not; {OWN_READER}"


def known_patterns() -> tuple[str, ...]:
    """Return ``PATTERNS`` and the name patterns of the formats of other packages."""
    return tuple(pattern for each in source_formats() for pattern in each.patterns)


def is_known_name(name: str) -> bool:
    """Return whether a file name matches a pattern of a format, in upper or lower case."""
    return bool(_KNOWN_NAMES.match(name.lower())) or any(each.has_name(name) for each in installed_formats())


@functools.cache
def installed_formats() -> tuple[SourceFormat, ...]:
    """Return the formats of other packages, sorted by the names of their entry points.

    Raises:
        ConfigError: An entry point cannot be loaded, is not a ``SourceFormat``, has an invalid name or
            pattern, or has the name of another format.
    """
    formats: list[SourceFormat] = []
    # The first format that matches reads a file, so the order of installation must not decide.
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        try:
            value = entry.load()
        except Exception as error:  # noqa: BLE001 - of another package
            value = error
        # Later stages recognize legacy files, whose values need a convention, by this beginning of the name.
        is_usable = (
            isinstance(value, SourceFormat)
            and re.fullmatch(r"(?!legacy)[a-z][a-z0-9-]{0,31}", value.name)
            and value.name not in _OWN_NAMES | {each.name for each in formats}
            and all(each == each.lower() for each in value.patterns)
        )
        if not is_usable:
            package = entry.dist.name if entry.dist else "unknown"
            reason = f"the package {package} has a format that cannot be used: {entry.name} = {entry.value!r}"
            expected = "a SourceFormat with another name than all others, in lower case as its patterns"
            raise ConfigError(reason, found=repr(value), expected=expected)
        formats.append(value)
    return tuple(formats)


# Opening


_HEAD_BYTES: Final = 65_536
"""Bytes that formats examine. A smaller text is held, so that its reader does not open the file again."""
_HEAD_LIMITS: Final = GunzipLimits(decompressed_bytes=_HEAD_BYTES, ratio=1, ratio_floor=_HEAD_BYTES)
"""Limits that a head never exceeds: a bomb is refused by the reader of its format, not here."""


def open_source(
    path: AnyPath,
    *,
    salvage: bool = False,
    part: FilePart | None = None,
    format: str | None = None,  # noqa: A002 - the name of the option
    content: bytes | None = None,
    **options: Any,
) -> FileReader | CheckedReader:
    """Open a source file with the reader for its format.

    The format is detected from the first bytes of the content, unless it is given. The name matters only if
    the content does not tell. An empty file, whatever its name, is read as a text without games.

    Args:
        path: Local file or remote object. Remote objects are read piece by piece.
        salvage: If True, a damaged file yields the complete records before the damage instead of raising.
        part: Range of bytes to read of a text without gzip, such as TRMPH. Default None: the whole file.
        format: Name of the format that the user states, such as "sgf". Default None: it is detected. A
            stated format is ``stated_format`` in the header of the reader, except of a legacy pickle.
        content: All bytes of the file, a small text without gzip, if they are known. Default None: it is
            read.
        options: Options of single formats, which the others ignore: ``variations`` and
            ``alphazero_convention`` of ``ConvertOptions``; ``has_sidecar``, False if the folder of the file
            was listed and has no sidecar, so that none is looked for.

    Returns:
        The open reader, a context manager. The batches of a reader of another package are checked.

    Raises:
        FormatError: "unknown-layout", "truncated" or "corrupt-gzip"; also "unknown-layout" if
            ``part`` is given and the format of the file is not ``appendable``.
        ConfigError: The file has no built-in format, and a format of another package is broken.
        OSError: The file cannot be opened.
    """
    head, content = _head(path) if content is None else (content[:_HEAD_BYTES], content)
    head = text_of(io.BytesIO(head)).read().removeprefix(codecs.BOM_UTF8)
    usable = (each for each in source_formats() if each.appendable or part is None)
    if format:
        found = next((each for each in usable if each.name == format), None)
    elif (found := _first_match(usable, head, path.name)) is None and not _is_binary(head):
        # Games among other text, such as a table, which the format of another package may know better.
        usable = (each for each in _TEXTS if each.appendable or part is None)
        found = _first_match(usable, lines.games_of(head), path.name)
    if not head and (format or found is None):
        empty = trmph.TrmphReader(path, salvage=salvage, part=part)  # as a file of comments only: no records
        empty.content = content
        return empty
    if found is None:
        start = ", ".join(filter(None, (repr(head[:64].strip()[:16]), _kind_of(head))))
        reason, expected = "the file has no known format", expected_contents()
        raise FormatError(reason, path=path, found=f"a file that begins with {start}", expected=expected)
    given = {"salvage": salvage, "part": part, "is_stated": format is not None, **options}
    reader = found.open(path, **{name: given[name] for name in found.options if name in given})
    if isinstance(reader, GameReader):
        reader.content = content
    if format and format != "legacy":  # the header of a legacy pickle is that of the file
        reader.header["stated_format"] = format
    if found.name in _OWN_NAMES and isinstance(reader, FileReader):
        reader.format = reader.format or found.name
        return reader
    return CheckedReader(reader, found.name)


_OTHERS: Final = {
    rb"\((?:dp|lp)|[}\]]q": "a pickle of protocol 0 or 1, not 2 to 5",
    rb"PAR1": "Parquet",
    rb"\x89HDF": "HDF5",
    rb"\x93NUMPY": "a single NumPy array",
    rb"PK\x03\x04": "a zip archive: unpack it, unless it is of torch.save",
    rb"%PDF-": "PDF",
    rb"\x1f\x8b\x08": "gzip within gzip",
    rb"BZh": "bzip2: unpack it",
    rb"\xfd7zXZ": "xz: unpack it",
    rb"\x28\xb5\x2f\xfd": "Zstandard: unpack it",
    rb".{257}ustar": "a tar archive: unpack it",
    rb"version https://git-lfs": "a pointer of Git LFS instead of the file",
    rb"(?:[ -~]\0){8}|(?:\0[ -~]){8}": "UTF-16 without a byte order mark",
}
"""Contents of files that are given by mistake, also with the name of a text, by a pattern of their first
bytes."""
_OTHER: Final = re.compile(b"|".join(b"(%b)" % start for start in _OTHERS), re.DOTALL)
_CONTROLS: Final = bytes(set(range(32)) - set(b"\t\n\v\f\r"))
"""Bytes that no text has: one in ten bytes of compressed data."""


def _kind_of(head: bytes) -> str:
    """Return the content of a file that is given by mistake; empty if it is unknown."""
    found = _OTHER.match(head)
    return [*_OTHERS.values()][found.lastindex - 1] if found and found.lastindex else ""


def _is_binary(head: bytes) -> bool:
    """Return whether a file is no text, so that its name does not show its format.

    Read as a text, a file that was compressed twice would be a few hundred bad lines, not all its games.
    """
    if _kind_of(head):
        return True
    # A few control characters may be damage of a text. Binary files have far more.
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if 16 * controls <= len(head):
        return False
    try:  # the comment of a text may have any number, but compressed data are no UTF-8
        return "\ufffd" in head[:-4].decode()
    except UnicodeDecodeError:
        return True


def _first_match(formats: Iterable[SourceFormat], head: bytes, name: str) -> SourceFormat | None:
    """Return the first format that a file has, by its first bytes and its name."""
    shown = "" if _is_binary(head) else name.lower()
    for each in formats:
        try:
            if each.matches(head, shown if each.name in _OWN_NAMES else name):
                return each
        except Exception as error:
            reason = f"the format {each.name!r} of an installed package failed to examine a file"
            raise ConfigError(reason, path=name, found=repr(error)) from error
    return None


def _head(path: AnyPath) -> tuple[bytes, bytes | None]:
    """Return the first bytes of a file, decompressed; of a damaged file, those before the damage.

    The second result is the whole file, if it is a small text without gzip.
    """
    head = b""
    with storage_of(path).open(block=_HEAD_BYTES) as raw:
        if has_lines(raw.peek(2)):  # without the decompressor, which takes as long as reading a small file
            head = raw.read(_HEAD_BYTES)
            return head, head if len(head) < _HEAD_BYTES else None
        with GunzipFile(raw, _HEAD_LIMITS, salvage=True) as file:
            try:
                while piece := file.read(_HEAD_BYTES - len(head)):
                    head += piece
            except FormatError as error:
                if not head:
                    raise error.at(path) from None
    return head, None
