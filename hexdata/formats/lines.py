"""Readers of texts with one game per line: what all of them share, HexWorld links, and plain lists of moves.

The grammar of HexWorld is that of the board at hexworld.org: a size, options of the drawing, and the moves,
separated by commas, such as ``https://hexworld.org/board/#13r9c1,a3:sg7f8:rb``. The second comma marks the
move at which the board is opened; the moves after it belong to the game too. Rotation, mirroring, move
numbers and colours (``r9``, ``m``, ``n``, ``c1``) change the drawing only. The first player, black or red
there, connects row 1 to the last row, as blue does in hexdata: the names of cells are kept.

A list of moves, such as ``a2 b4 d4 f7``, states neither size nor winner. The first player is blue. A winning
chain touches both edges of its player, so if the last board has one, the board is as large as the largest
column or row of a move. Games without one are rejected.
"""

from __future__ import annotations

import re
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any, ClassVar, Final
from urllib.parse import unquote

from hexdata.board import BLUE, MAX_SIZE, PASS, RED, cell_index
from hexdata.errors import FormatError, Reason
from hexdata.formats.games import GameReader, GameRecord, is_utf8
from hexdata.formats.gunzip import read_lines
from hexdata.formats.run_header import FACT_NAMES, RunHeader
from hexdata.formats.source import SourceFormat

_MAX_LINE: Final = 1 << 16
"""Maximum length of a line in bytes. The longest game, 1,024 moves, takes 5 kB; a comment may follow it."""
_MOVE: Final = re.compile(r"(?:([0-9]{1,3})[.)]\s*)?([a-z]{1,2}[0-9]{1,2})")
"""A move of a list, and its number, if it has one."""
_COMMENT: Final = re.compile(
    rb"#(?![ \t]*[0-9]*,[a-z]{1,2}[0-9])(?:[ \t][^\r]*|(?:" + FACT_NAMES + rb")[ \t]*[:=][^\r]*|)",
    re.IGNORECASE,
)
"""A comment: ``#`` alone, before a blank, or before the name of a fact. Moves after a size are none, nor are
lines that are not separated by a line feed: these are damaged games."""
_MARKS: Final = r"<>()\[\]{}\"'`*\u2018\u2019\u201c\u201d\u201e\xab\xbb"
"""Brackets and quotation marks around a game, within a class of characters."""
_COPIED: Final = re.compile(
    r"(?![^#]{0,200}[0-9],\s{0,9}[A-Za-z]{1,2}[0-9])"
    r"(?:[^#]{0,200}[\s" + _MARKS + r",;:|=\ufeff\u200b])?"
    r"(?:(?i:https?)://)?(?P<address>(?:[\w-]{1,60}\.){1,9}\w{2,9}[^\s#]{0,200})?"
    rf"#(?P<game>[0-9][^#{_MARKS}|]*+)[{_MARKS}]*+"
    r"(?P<tail>(?:[\s.,;|]{1,9}(?:[A-Za-z]{1,5}|[12]))?+)"
    rf"[{_MARKS}\s.,;|]*+"
    r"(?P<comment>(?:(?<=\s)#(?:[ \t][^\r]*)?)?)"
)
"""A line with text or brackets around its game. The text before it contains neither ``#`` nor a game. After
it may be a word or a number, which its reader may take as the winner.
Repetitions are bounded or possessive, so that a hostile line is not searched for long."""


def without_surroundings(text: str) -> str:
    """Return the game of a line that was copied from elsewhere, with its address and its comment.

    Percent signs of an encoded address are decoded; brackets and quotation marks around the game, and text
    before it such as the number of an item, are left out. Another line is returned as it is.
    """
    found = _COPIED.fullmatch(unquote(text).strip())
    if found is None:
        return text
    address = f"https://{found['address']}" if found["address"] else ""
    game = f"{found['game']}{found['tail'].replace('|', ',')}".rstrip(" \t.,;")
    return f"{address}#{game} {found['comment']}".rstrip(" ")


def listed_moves(text: str) -> list[str]:
    """Return the cells of a list of moves in lower case, some of which may be numbered.

    Raises:
        FormatError: "trmph-syntax", if the numbers count neither the moves nor pairs of moves from 1: where a
            move is missing, the moves after it are of the wrong players.
    """
    moves = _MOVE.findall(text)
    numbers = [(ply, int(number)) for ply, (number, _) in enumerate(moves) if number]
    if not any(all(number == ply // each + 1 for ply, number in numbers) for each in (1, 2)):
        found, expected = repr(text[:60]), "1. a2 2. b4 3. d4, or 1. a2 b4 2. d4"
        raise FormatError("moves with wrong numbers", Reason.TRMPH_SYNTAX, found, expected)
    return [cell for _, cell in moves]


def is_comment(line: bytes) -> bool:
    """Return whether a line is a comment: ``# text``, ``#`` alone, or a fact of the run such as ``#seed: 1``.

    Any other line that is not blank is a record, which is rejected if it is no game.
    """
    return _COMMENT.fullmatch(line.strip()) is not None


def first_game_line(head: bytes) -> bytes:
    """Return the first line of a text that is neither blank nor a comment; empty if there is none."""
    lines = map(bytes.strip, head.removeprefix(BOM_UTF8).split(b"\n"))
    return next((line for line in lines if line and not is_comment(line)), b"")


_JSON: Final = re.compile(rb'\s*(?:\{|\[[\[\s]*[{"])')
"""Beginning of JSON, not of a link in brackets. A game within it may have its winner in another line."""


def games_of(text: bytes) -> bytes:
    """Return a text with the game alone in each line that has other text around it, but JSON as it is."""
    if _JSON.match(text):
        return text
    lines = text.decode(errors="surrogateescape").split("\n")
    return "\n".join(map(without_surroundings, lines)).encode(errors="surrogateescape")


_TRMPH: Final = re.compile(
    rb"^[ \t]{0,9}(?:https?://)?(?:[\w.-]{1,60}\.\w{2,9}/?[^\s#]{0,200})?"
    rb"#[0-9]{1,3},\s?(?:[a-z]{1,2}[0-9]|\s|$)",
    re.MULTILINE | re.IGNORECASE,
)
"""Beginning of a line of TRMPH. Any line may show the format, as the first ones may be damaged."""


def has_trmph(head: bytes) -> bool:
    """Return whether a text has a line of TRMPH, or comments only, as in a run that has just begun."""
    if b"\0" in head:
        return False
    return _TRMPH.search(head) is not None or (bool(head) and not first_game_line(head))


class LineReader(GameReader):
    """Reader of a file with one game per line, blank lines, and comment lines as of ``is_comment``.

    A format implements :meth:`read_line`. Comment lines that state facts of the run, such as ``# Model: x``,
    are in ``header`` under "run" and "run_changes", as ``RunHeader.as_json`` describes.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counts["comments"] = 0

    def read_line(self, text: str, game: GameRecord) -> None:
        """Read the game of a line into ``game``: call its methods, and set its winner if the line states one.

        Raises:
            FormatError: The line is rejected.
        """
        raise NotImplementedError

    def _read_game(self, content: bytes, game: GameRecord) -> None:
        if len(content) > _MAX_LINE:
            raise FormatError("too long", Reason.LINE_TOO_LONG, expected=f"at most {_MAX_LINE:,} bytes")
        self.read_line(content.decode(errors="replace"), game)

    def _games(self) -> Iterator[GameRecord]:
        run, line_idx, at = RunHeader(), 0, 0
        start, stop = (self._part.start, self._part.stop) if self._part else (0, sys.maxsize)
        try:
            for number, (line, size) in enumerate(read_lines(self._stream, _MAX_LINE, stop), 1):
                # The lines before a part are read, too: the numbers of lines and the last header need them.
                is_before, at = at < start, at + size
                # Of a longer line only the beginning is known, so it is a record even if that is blank.
                is_blank = len(line) <= _MAX_LINE and not line.strip()
                line_idx += not is_blank
                if is_blank or is_comment(line):
                    if not is_blank:
                        run.read_comment(line)  # also before the part: the last header holds for later games
                    if not is_before:
                        self._counts["bytes_between_games"] += size
                        self._counts["comments"] += not is_blank
                        self._note("other_encodings", not is_utf8(line[:_MAX_LINE]))
                elif is_before:
                    # The sidecar has a record of each game, also of those before the part.
                    self._add_to_game(line, None)
                else:
                    run.begin_game()
                    game = self._game(line, number, line_idx)
                    self._note("other_encodings", not (game.reason or is_utf8(line)))
                    self._add_to_game(line, game)
                    yield game
        except FormatError as error:
            self._stop_at(error)
        self.header |= run.as_json()

    def _add_to_game(self, line: bytes, game: GameRecord | None) -> None:
        """Add what another file states about the game of a line, which is None before the part."""


# HexWorld

_LINK: Final = re.compile(
    r"(?:(?:https?://[^\s#]*)?#)?"
    # More digits than a valid size has, so that the error is about the size, not the syntax.
    r"(?P<columns>[0-9]{1,4})(?:x(?P<rows>[0-9]{1,4}))?(?:r[0-9]{1,3}|c[0-9]{1,3}|m|n)*"
    r"(?:,(?P<before>[a-z0-9:S]*))?(?:,(?P<after>[a-z0-9:S]*))?,*"
    r"(?:\s+#(?:[ \t][^\r]*)?)?"
)
_LINK_MOVE: Final = re.compile(r"[a-z]{1,3}[1-9][0-9]{0,3}|:s|:S|:p|:[rf][bw]")


class HexWorldReader(LineReader):
    """Reader of one file of HexWorld links: a :class:`hexdata.formats.source.SourceReader`.

    A resignation (``:rb``, ``:rw``) or forfeit (``:fb``, ``:fw``) decides the winner; ``end_reason`` is
    "resigned" for the former only. Passes (``:p``), swaps of pieces (``:s``) and of sides (``:S``) are read
    as :class:`hexdata.formats.games.GameRecord` describes. A line is rejected with one of these reasons:
    "hexworld-syntax", "board-size" (not from 3 to 32, not square, or another than that of the first valid
    game), "trmph-cell", "repeated-move", "move-order", "no-moves", "no-winner", "line-too-long".
    """

    winner_hint: ClassVar[str] = "a resignation, such as :rb, or a winning chain"

    def read_line(self, text: str, game: GameRecord) -> None:
        """Read a link, also as people copy it: with text around it, or with cells in upper case."""
        parts = _LINK.fullmatch(text.strip())
        if parts is None:
            address, mark, link = without_surroundings(text).partition("#")
            # Beside cells in upper case, ":S" may mean either swap, so the line is rejected.
            is_upper = re.search("[A-Z][0-9]", link) and ":S" not in link
            parts = _LINK.fullmatch(f"{address}{mark}{link.lower() if is_upper else link}")
        moves = "" if parts is None else (parts["before"] or "") + (parts["after"] or "")
        names = _LINK_MOVE.findall(moves)
        if parts is None or "".join(names) != moves:  # findall skips what is not a move
            found, expected = repr(text.strip()[:60]), "https://hexworld.org/board/#13c1,a3:sg7f8:rb"
            raise FormatError("not a HexWorld link", Reason.HEXWORLD_SYNTAX, found, expected)
        size = int(parts["columns"])
        if parts["rows"] and int(parts["rows"]) != size:
            raise FormatError("the board is not square", Reason.BOARD_SIZE, f"{size} x {parts['rows']}")
        game.begin(size)
        for name in names:
            if name == ":p":
                game.play(PASS)
            elif name in (":s", ":S"):
                game.swap_players("pieces" if name == ":s" else "sides")
            elif name[0] == ":":
                game.end(BLUE if name[2] == "b" else RED, "resigned" if name[1] == "r" else "unknown")
            else:
                game.play(cell_index(name, size))
        game.finish()


_SIZE: Final = r"[0-9]{1,2}(?:x[0-9]{1,2})?"
"""Board size of a link: ``11``, or ``11x11``."""
_LINK_START: Final = re.compile(
    r"https?://(?:www\.)?hexworld\.org/board/?[^\s#]*#[0-9]"
    r"|(?:(?:https?://[^\s#]*)?#)?" + _SIZE + r"(?:r[0-9]{1,2}|c[0-9]|m|n)+(?:,|\s|$)"
    r"|" + _SIZE + r",,?[a-z]{1,2}[0-9]{1,2}(?:[a-z]|:)"
)
"""Beginning of a link. ``#13,a1b2``, without options, is TRMPH unless ``hexworld.org`` precedes it."""
_LATER_LINK: Final = re.compile(rb"(?mi)^https?://(?:www\.)?hexworld\.org/board/?[^\s#]*#[0-9]")
"""Beginning of a link in any line, as the first one may be a title or the header of a table."""


def _is_hexworld(head: bytes, name: str) -> bool:
    # TRMPH whose first "#" is damaged looks like a link without its beginning.
    if ".trmph" in name and b"hexworld.org" not in head and has_trmph(head):
        return False
    first = first_game_line(head)
    game = games_of(first)
    # Latin-1 has a character for every byte, so that a damaged line can be compared, too.
    link = (game if b"hexworld.org" in game.lower() else first).decode("latin-1").lower()
    is_other = _SEVERAL.fullmatch(link) or has_trmph(head)
    has_link = _LINK_START.match(link) or (_LATER_LINK.search(head) and not is_other)
    return ".hexworld" in name or (b"\0" not in head and bool(has_link))


HEXWORLD: Final = SourceFormat(
    "hexworld", ("*.hexworld", "*.hexworld.gz"), _is_hexworld, HexWorldReader, "HexWorld links"
)


# Lists of moves

_LISTED: Final = r"(?:(?:[0-9]{1,3}[.)]\s*)?[a-z]{1,2}[1-9][0-9]?(?:[\s,;]+|(?=[a-z])|$))"
"""A move of a list, which may have a number, and what separates it from the next one: blanks, commas,
semicolons, or nothing."""
_MOVES: Final = re.compile(_LISTED + "+")


class MovesReader(LineReader):
    """Reader of one file of lists of moves: a :class:`hexdata.formats.source.SourceReader`.

    A line is rejected with one of these reasons: "trmph-syntax", "trmph-cell", "board-size", "repeated-move",
    "no-winner", "line-too-long".
    """

    states_size: ClassVar[bool] = False
    winner_hint: ClassVar[str] = "a winning chain, or board size and winner in each line: #11,a2b4d4f7 b"

    def read_line(self, text: str, game: GameRecord) -> None:
        """Read a line of moves, whose largest column or row is that of the board."""
        text = text.strip().lower()
        if _MOVES.fullmatch(text) is None:
            raise FormatError("not a list of moves", Reason.TRMPH_SYNTAX, repr(text[:60]), "a2 b4 d4")
        moves = listed_moves(text)
        # The largest board has all cells; row and column of a name do not depend on the size.
        size = max(1 + max(divmod(cell_index(move, MAX_SIZE), MAX_SIZE)) for move in moves)
        game.begin(size)
        for move in moves:
            game.play(cell_index(move, size))
        game.finish()


_SEVERAL: Final = re.compile(_LISTED + "{2,}", re.IGNORECASE)
"""A list of moves. A single one could be any word with a number."""
MOVES: Final = SourceFormat(
    "moves",
    ("*.moves", "*.moves.gz"),
    lambda head, _name: bool(_SEVERAL.fullmatch(first_game_line(head).decode(errors="replace"))),
    MovesReader,
    "lists of moves",
)
