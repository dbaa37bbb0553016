"""Reader of HexWorld links and the text after their ``#``, one game per line.

The grammar is that of the board at hexworld.org: a size, options of the drawing, and the moves, separated by
commas, such as ``https://hexworld.org/board/#13r9c1,a3:sg7f8:rb``. The second comma marks the move at which
the board is opened; the moves after it belong to the game too. Rotation, mirroring, move numbers and colours
(``r9``, ``m``, ``n``, ``c1``) change the drawing only. The first player, black or red there, connects row 1
to the last row, as blue does in hexdata: the names of cells are kept.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from typing import ClassVar, Final

from hexdata.board import BLUE, RED, cell_index
from hexdata.errors import FormatError, Reason
from hexdata.formats.games import GameBuilder, GameRecord, LineReader, is_comment

__all__ = ["HexWorldReader", "looks_like_hexworld"]

_LINE: Final = re.compile(
    r"(?:(?P<url>https?://[^\s#]*)?#)?"
    r"(?P<columns>[0-9]{1,4})(?:x(?P<rows>[0-9]{1,4}))?(?P<options>(?:r[0-9]{1,3}|c[0-9]{1,3}|m|n)*)"
    r"(?:,(?P<before>[a-z0-9:S]*))?(?:,(?P<after>[a-z0-9:S]*))?,*"
    r"(?:\s+#(?:[ \t][^\r]*)?)?"
)
_MOVE: Final = re.compile(r"[a-z]{1,3}[1-9][0-9]{0,3}|:s|:S|:p|:[rf][bw]")
_SIZE: Final = rb"[0-9]{1,2}(?:x[0-9]{1,2})?"
_GAME: Final = re.compile(
    rb"https?://(?:www\.)?hexworld\.org/board/?[^\s#]*#[0-9]"
    rb"|(?:(?:https?://[^\s#]*)?#)?" + _SIZE + rb"(?:r[0-9]{1,2}|c[0-9]|m|n)+(?:,|\s|$)"
    rb"|" + _SIZE + rb",,?[a-z]{1,2}[0-9]{1,2}(?:[a-z]|:)"
)
"""Beginning of a game. ``#13,a1b2``, without options, is TRMPH unless ``hexworld.org`` precedes it."""

_LOSERS: Final = {"b": BLUE, "w": RED}
_END_REASONS: Final = {"r": "resigned", "f": "unknown"}


def looks_like_hexworld(head: bytes) -> bool:
    """Return whether the beginning of a file is HexWorld text: its first line with a game is one.

    Args:
        head: The first bytes of the file, decompressed; some kB are enough.
    """
    if b"\0" in head:
        return False
    lines = map(bytes.strip, head.removeprefix(BOM_UTF8).split(b"\n"))
    first = next((line for line in lines if line and not is_comment(line)), b"")
    return _GAME.match(first) is not None


class HexWorldReader(LineReader):
    """Reader of one file of HexWorld links: a :class:`hexdata.formats.source.SourceReader`.

    A resignation (``:rb``, ``:rw``) or forfeit (``:fb``, ``:fw``) decides the winner; ``end_reason`` is
    "resigned" for the former only. Passes (``:p``), swaps of pieces (``:s``) and of sides (``:S``) are read
    as :class:`hexdata.formats.games.GameBuilder` describes. A line is rejected with one of these reasons:
    "hexworld-syntax", "board-size" (not from 3 to 32, not square, or another than that of the first valid
    game), "trmph-cell", "repeated-move", "move-order", "no-moves", "no-winner", "line-too-long", "not-utf8".

    Args:
        path: The file, gzipped or plain.
        limits: Limits on the decompressed size and on the compression ratio.
        salvage: If True, a damaged file yields the complete lines before the damage instead of raising.
        part: Range of bytes to read of a text without gzip. Default None: the whole file.
    """

    format = "hexworld"
    _winner_hint: ClassVar[str] = "a resignation, such as :rb, or a winning chain"

    def _read_game(self, text: str, game: GameRecord) -> None:
        parts = _LINE.fullmatch(text.strip())
        if parts is None:
            raise _syntax_error(text.strip(), "https://hexworld.org/board/#13c1,a3:sg7f8:rb")
        columns, rows = int(parts["columns"]), int(parts["rows"] or parts["columns"])
        if columns != rows:
            raise FormatError(
                "the board is not square",
                code=Reason.BOARD_SIZE,
                found=f"{columns} x {rows}",
                expected="as many columns as rows",
            )
        builder = GameBuilder(columns)
        for name in _moves((parts["before"] or "") + (parts["after"] or "")):
            _play(builder, name)
        builder.write_to(game)
        self._spelling["https://...#" if parts["url"] else "#" if text.lstrip()[:1] == "#" else ""] += 1


def _moves(text: str) -> list[str]:
    moves = _MOVE.findall(text)
    if "".join(moves) != text:
        good = 0
        while match := _MOVE.match(text, good):
            good = match.end()
        raise _syntax_error(text[good:], "moves such as a1, aa27, :s, :S, :p, :rb, :rw, :fb, :fw")
    return moves


def _play(builder: GameBuilder, name: str) -> None:
    if name == ":p":
        builder.skip()
    elif name in (":s", ":S"):
        builder.swap_players("pieces" if name == ":s" else "sides")
    elif name[0] == ":":
        builder.end(_LOSERS[name[2]], _END_REASONS[name[1]])
    else:
        builder.play(cell_index(name, builder.board_size))


def _syntax_error(found: str, expected: str) -> FormatError:
    return FormatError(
        "not a HexWorld link", code=Reason.HEXWORLD_SYNTAX, found=repr(found[:60]), expected=expected
    )
