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
from collections.abc import Iterator
from fnmatch import translate
from importlib.metadata import entry_points
from typing import Any, Final

from hexdata.errors import ConfigError, FormatError
from hexdata.formats.alphazero import AlphaZeroReader, is_alphazero
from hexdata.formats.checked import CheckedReader
from hexdata.formats.games import GameReader
from hexdata.formats.gunzip import GunzipFile, GunzipLimits, has_lines, is_utf16
from hexdata.formats.katago import KataHexReader, is_katahex
from hexdata.formats.legacy import LegacyReader, SelfPlayGamesReader, has_games, looks_like_pickle
from hexdata.formats.lines import MOVES, HexWorldReader, MovesReader, first_game_line, without_surroundings
from hexdata.formats.playhex import PlayHexReader
from hexdata.formats.sgf import FIRST_PROPERTY, SgfReader
from hexdata.formats.source import FilePart, FileReader, SourceFormat, SourceReader
from hexdata.formats.trmph import TrmphReader
from hexdata.storage import AnyPath, storage_of

ENTRY_POINT_GROUP: Final = "hexdata.formats"
"""Entry point group in which other packages publish their formats."""

# Which format a text has

_BINARY: Final = re.compile(rb"PAR1|\x89HDF|PK\x03\x04|%PDF-|\x1f\x8b\x08|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd")
"""Beginning of files that are given by mistake with the name of a text."""
_CONTROLS: Final = bytes(set(range(32)) - set(b"\t\n\v\f\r"))
"""Bytes that no text has: one in ten bytes of compressed data."""

_SIZE: Final = rb"[0-9]{1,2}(?:x[0-9]{1,2})?"
"""Board size of a link: ``11``, or ``11x11``."""
_HEXWORLD: Final = re.compile(
    rb"https?://(?:www\.)?hexworld\.org/board/?[^\s#]*#[0-9]"
    rb"|(?:(?:https?://[^\s#]*)?#)?" + _SIZE + rb"(?:r[0-9]{1,2}|c[0-9]|m|n)+(?:,|\s|$)"
    rb"|" + _SIZE + rb",,?[a-z]{1,2}[0-9]{1,2}(?:[a-z]|:)"
)
"""Beginning of a link. ``#13,a1b2``, without options, is TRMPH unless ``hexworld.org`` precedes it."""
_TRMPH: Final = re.compile(
    rb"^(?:[^#\n{]{0,200}[\s<(\[])?(?:https?://)?(?:[\w.-]{1,60}\.\w{2,9}/?[^\s#]{0,200})?"
    rb"#[0-9]{1,3},\s?(?:[a-z]{1,2}[0-9]|\s|$)",
    re.MULTILINE | re.IGNORECASE,
)
"""Beginning of a line of TRMPH, also after text, a bracket or an address, as people copy it. Any line may
show the format, as the first ones may be damaged."""
_SGF_HEAD: Final = re.compile(rb"\s*\(\s*;\s*(?:[A-Za-z]+\s*\[|[;()])")
"""Beginning of a text that is SGF whatever its name is."""
_SGF_GAME: Final = re.compile(
    rb"\(\s{0,9};\s{0,9}[A-Za-z]{1,64}\s{0,9}\[|(?:\(\s{0,9}[^\s;()]?|;)\s{0,9}" + FIRST_PROPERTY
)
"""A game within a text with the name of SGF: after the headers of a mail, or without its first bracket."""
_PLAYHEX: Final = re.compile(
    rb'\s*(\[\s*\]\s*$|\[?\s*\{[^{}]{0,4000}"(?:boardsize|boardSize)"\s*:)', re.DOTALL
)
"""Beginning of a list or an object of PlayHex. The size is one of the first keys."""
_MOVES: Final = re.compile(MOVES + "{2,}", re.IGNORECASE)
"""A list of moves. A single one could be any word with a number."""


@functools.lru_cache(maxsize=1)  # each format asks for the same file
def _text_format(head: bytes, name: str = "") -> str:
    """Return the format of a text: "hexworld", "sgf", "trmph", "playhex", "moves", or "" for no known one.

    Args:
        head: The first bytes of the file, decompressed; some kB are enough.
        name: Name of the file. It matters if the content does not tell, or is damaged.
    """
    text, name = head.removeprefix(codecs.BOM_UTF8), name.lower()
    first = first_game_line(head)
    # A few control characters may be damage of a text. Binary files, whatever their name, have far more: read
    # as a text, a file that was compressed twice would be a few hundred bad lines instead of all its games.
    # The comment of a text may have any number, but compressed data are no UTF-8.
    is_text = "\ufffd" not in head[:-4].decode(errors="replace")
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if _BINARY.match(head) or (16 * controls > len(head) and not is_text):
        name = ""
    has_zeros, is_sgf = b"\0" in head, _SGF_HEAD.match(text) is not None
    # Comments only are TRMPH of a run that has just begun.
    is_trmph = bool(head) and not has_zeros and (_TRMPH.search(text) is not None or not first)
    # TRMPH whose first "#" is damaged looks like a link without its beginning.
    if not (is_trmph and ".trmph" in name and b"hexworld.org" not in head):
        # Latin-1 has a character for every byte, so that a damaged line can be compared, too.
        game = without_surroundings(first.decode("latin-1")).encode("latin-1", "replace")
        is_link = _HEXWORLD.match(first) or (b"hexworld.org" in game and _HEXWORLD.match(game))
        if (".hexworld" in name and not is_sgf) or (is_link and not has_zeros):
            return "hexworld"
    is_named = ".sgf" in name or ".hsgf" in name
    if is_sgf or (is_named and (not head.strip() or _SGF_GAME.search(head))):
        return "sgf"
    if is_trmph or ".trmph" in name:
        return "trmph"
    if _PLAYHEX.match(text):
        return "playhex"
    return "moves" if _MOVES.fullmatch(first.decode(errors="replace")) else ""


# The formats


def _is_legacy(head: bytes, _name: str) -> bool:
    return looks_like_pickle(head)


def _open_legacy(path: AnyPath, *, salvage: bool) -> SourceReader:
    return (SelfPlayGamesReader if has_games(path) else LegacyReader)(path, salvage=salvage)


def _text(reader: type[GameReader], endings: str, what: str, options: str = "salvage part") -> SourceFormat:
    """Return a format of texts, the names of whose files have one of these endings, or ".gz" after it."""
    name = reader.format
    patterns = tuple(f"*{ending}{gz}" for ending in endings.split() for gz in ("", ".gz"))
    # Only TRMPH is read in parts: a game of another text may be on several lines.
    is_part = reader is TrmphReader
    matches = lambda head, file: _text_format(head, file) == name  # noqa: E731
    return SourceFormat(name, patterns, matches, reader, what, is_part, tuple(options.split()))


_TEXTS: Final = (
    _text(HexWorldReader, ".hexworld", "HexWorld links"),
    _text(SgfReader, ".sgf .hsgf", "Hex games in SGF", "salvage variations is_stated"),
    _text(TrmphReader, ".trmph", "TRMPH games", "salvage part has_sidecar"),
    _text(PlayHexReader, "playhex*.json", "games of PlayHex"),
    _text(MovesReader, ".moves", "lists of moves"),
)
_SALVAGE: Final = ("salvage",)
_STATED: Final = ("alphazero_convention",)
_PICKLES: Final = ("*.pkl.gz", "*.pkl", "*.pickle.gz", "*.pickle")
BUILT_IN_FORMATS: Final = (
    # KataHex before the arrays of any program, lists before all other pickles.
    SourceFormat("katahex", ("*.npz",), is_katahex, KataHexReader, "data of KataHex", options=_SALVAGE),
    SourceFormat(
        "alphazero", ("*.examples",), is_alphazero, AlphaZeroReader, "AlphaZero data", options=_STATED
    ),
    SourceFormat("legacy", _PICKLES, _is_legacy, _open_legacy, "a pickle", options=_SALVAGE),
    *_TEXTS,
)
"""The formats of hexdata, in the order in which they are compared with a file."""
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
    return f"{', '.join(names[:-1])} or {names[-1]}, gzipped or not"


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
            and value.name not in {each.name for each in (*BUILT_IN_FORMATS, *formats)}
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
    if part is None and is_utf16(head):
        head = head.decode("utf-16", "replace").encode()  # as the readers of texts do
    usable = (each for each in source_formats() if each.appendable or part is None)
    found = next((e for e in usable if (e.name == format if format else _matches(e, head, path.name))), None)
    if not head and (format or found is None):
        return TrmphReader(path, salvage=salvage, part=part)  # as a file of comments only: no records
    if found is None:
        start = repr(head[:64].strip()[:16])
        reason, expected = "the file has no known format", expected_contents()
        raise FormatError(reason, path=path, found=f"a file that begins with {start}", expected=expected)
    given = {"salvage": salvage, "part": part, "is_stated": format is not None, **options}
    reader = found.open(path, **{name: given[name] for name in found.options if name in given})
    if isinstance(reader, GameReader):
        reader.content = content
    if format and format != "legacy":  # the header of a legacy pickle is that of the file
        reader.header["stated_format"] = format
    if found in BUILT_IN_FORMATS and isinstance(reader, FileReader):
        return reader
    return CheckedReader(reader, found.name)


def _matches(source_format: SourceFormat, head: bytes, name: str) -> bool:
    try:
        return source_format.matches(head, name)
    except Exception as error:
        reason = f"the format {source_format.name!r} of an installed package failed to examine a file"
        raise ConfigError(reason, path=name, found=repr(error)) from error


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
