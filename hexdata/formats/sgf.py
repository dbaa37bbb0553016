"""Reader of Hex games in SGF (Smart Game Format, FF[3] and FF[4]), one or several games per file.

Two notations of cells are read. ``B[a3]`` names column and row, as the SGF specification for Hex, HexGui and
Benzene do; Black connects top to bottom, as blue does in hexdata. ``W[dd]`` gives column and row as letters,
as Little Golem does. There, the first player connects top to bottom whatever the colour of its nodes,
``RE[B]`` names the first player (``PB``), and ``swap`` moves the stone to the mirrored cell.

The text is scanned in pieces without recursion: nesting costs no memory, and of each value only the beginning
is kept.

Text outside of games is a comment, unless it has nodes. The beginning of a game is recognized within another
game too, by the first property: a missing bracket ends one game, and does not hide the games after it.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import Any, ClassVar, Final

from hexdata.board import BLUE, RED, cell_index
from hexdata.errors import FormatError, Reason
from hexdata.formats.games import GameBuilder, GameReader, GameRecord

__all__ = ["MAX_GAMES_LISTED", "SgfReader", "contains_sgf", "looks_like_sgf"]

MAX_GAMES_LISTED: Final = 1000
"""Maximum number of games of a file whose players, dates and events are in the header of the source."""

_PIECE: Final = 1 << 16
"""Bytes read at a time."""
_MAX_VALUE: Final = 512
"""Bytes of a value that are kept."""
_MAX_NODES: Final = 4096
"""Maximum number of nodes of a game. The longest game has 1,024 moves, and as many passes."""

_HEAD: Final = re.compile(rb"\s*\(\s*;\s*(?:[A-Za-z]+\s*\[|[;()])")
_FIRST: Final = (
    rb"(?:G[a-z]*M|F[a-z]*F|S[a-z]*Z|C[a-z]*A|A[a-z]*P|E[a-z]*V|P[a-z]*B|P[a-z]*W)\s{0,9}"
    rb"\[(?![^\]\\]{0,99}\\)"
)
"""A property that only the first node of a game has. In a quoted game, its "]" has a backslash before it."""
_START: Final = re.compile(
    rb"\(\s{0,9};[\s\S]{0,4}?[^;()\\]{0,250}?(?<![A-Za-z])"
    + _FIRST
    + rb"|[)\r\n]\s{0,99}(?:\(\s{0,9}\S?;?|[^\s()]?;)\s{0,9}"
    + _FIRST
)
"""The beginning of a game inside of another one whose end is missing. Its "(" or its ";" may be damaged."""
_RESUME: Final = re.compile(rb"[\r\n]\s{0,99}\(\s{0,99};\s{0,99}(?![BW]\s{0,9}\[)|" + _START.pattern)
"""The beginning of a game after a syntax error: also "(;" at the beginning of a line, but for a variation."""
_RESUME_ANY: Final = re.compile(rb"[\r\n]\s{0,99}\(\s{0,99};|" + _START.pattern)
"""The same after a game that does not begin with such a property either."""
_BEGIN: Final = re.compile(rb"\(|[^\s()]?;\s{0,9}" + _FIRST)
"""The beginning of a game after the end of another one. Its "(" may be damaged."""
_MORE: Final = re.compile(rb"\)*(?:\s{0,99};\s{0,99}[A-Za-z]{1,64}\s{0,99}|[A-Z]{0,2})\[")
"""More of a game after its last bracket, so that one of its brackets is wrong."""
_LONGEST_START: Final = 640
"""Maximum length in bytes of a match of these expressions."""
_GAME: Final = re.compile(
    rb"\(\s{0,9};\s{0,9}[A-Za-z]{1,64}\s{0,9}\[|(?:\(\s{0,9}[^\s;()]?|;)\s{0,9}" + _FIRST
)
"""A game, for the recognition of files."""
_SPACE: Final = re.compile(rb"\s*")
_TOKEN: Final = re.compile(rb"[();\[]|[A-Za-z]{1,64}")
_VALUE_END: Final = re.compile(rb"[\]\\]")
_CELL: Final = re.compile(r"[a-z]{1,2}[0-9]{1,2}")
_LETTERS: Final = re.compile(r"[a-z]{2}")
_SIZE: Final = re.compile(r"([0-9]{1,4})(?::([0-9]{1,4}))?")
_RESULT: Final = re.compile(r"(b|w|black|white)(?:\+(.*))?", re.DOTALL)
_OTHER_GAME: Final = re.compile(rb"(?!hex\.)[a-z0-9]+\.[a-z]+\b")
"""Event of another game of Little Golem, such as ``havannah.in.DEFAULT.1``."""
_DATE: Final = re.compile(r"(\d{4})-(\d\d)-(\d\d)")

_SETUP: Final = ("AB", "AW", "AE")
_LISTED: Final = ("PB", "PW", "DT", "EV", "RE", "GN", "PC", "SO", "AP")
"""Properties of the first node that are in the header of the source."""
_KEPT: Final = frozenset(("B", "W", "PL", "GM", "FF", "SZ", "CA", *_SETUP, *_LISTED))
_ROOT: Final = frozenset(("GM", "FF", "SZ", "CA", *_LISTED))
_SWAPS: Final = ("swap", "swap-pieces", "swap-sides")
_END_REASONS: Final = {"r": "resigned", "resign": "resigned", "t": "time", "time": "time"}
"""End reasons of results such as ``B+R`` and ``B+Time``; others are "unknown"."""

_ENCODINGS: Final = re.compile(
    r"ascii|utf_8|(iso8859_|cp125)\d+|koi8_[rut]|euc_(jp|kr)|gb2312|mac_\w+|latin_1|iso8859_1"
)
"""Python's names of the encodings that are read: "]" and "\\" are never a part of another character."""


def looks_like_sgf(head: bytes) -> bool:
    """Return whether the beginning of a file is SGF: a game tree, after blanks or a byte order mark.

    Args:
        head: The first bytes of the file, decompressed; some kB are enough.
    """
    return _HEAD.match(head.removeprefix(codecs.BOM_UTF8)) is not None


def contains_sgf(head: bytes) -> bool:
    """Return whether a game tree begins after other text, such as the header of a message.

    Args:
        head: The first bytes of the file, decompressed; some kB are enough.
    """
    return _GAME.search(head) is not None


class _DamagedFileError(Exception):
    """The file is damaged or exceeds a limit. Not a FormatError, which would reject one game only.

    Args:
        error: What is wrong.
    """

    def __init__(self, error: FormatError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(slots=True)
class _Game:
    """The main line of one game, as text."""

    number: int
    nodes: list[list[tuple[str, bytes]]] = field(default_factory=list)
    """Properties of each node, those in ``_KEPT`` only, each with the beginning of one value."""
    error: FormatError | None = None
    is_cut: bool = False
    """Whether the text ends within the game."""

    def fail(self, error: FormatError) -> None:
        """Keep the first error and drop the nodes."""
        self.error = self.error or error
        self.nodes = self.nodes[:1]


class SgfReader(GameReader):
    """Reader of one SGF file of Hex games: a :class:`hexdata.formats.source.SourceReader`.

    A game is rejected with one of these reasons: "sgf-syntax", "sgf-game" (another game than Hex, or none is
    stated), "sgf-variations", "setup-stones", "board-size" (not from 3 to 32, not square, or another than
    that of the first valid game), "trmph-cell" (no cell of the board), "repeated-move", "move-order",
    "no-moves", "winner-value" (the result and a resignation contradict each other), "no-winner", "not-utf8"
    (text that is not in the stated encoding).

    After a swap of sides, ``RE`` is not used, as some programs name the colour in it and others the player
    who had the colour before: only a resignation or a winning chain decides such a game.

    After a syntax error, the rest of the game is skipped up to the beginning of the next one: "(;" before a
    property of a first node, or at the beginning of a line.

    Args:
        path: The file, gzipped or plain.
        limits: Limits on the decompressed size and on the compression ratio.
        salvage: If True, a damaged file yields the complete games before the damage instead of raising.
    """

    format = "sgf"
    unit = "game"
    _winner_hint: ClassVar[str] = "a result such as RE[B+R], a resignation, or a winning chain"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._spelling: Counter[str] = Counter()
        self._listed: list[dict[str, object]] = []
        self._dates: set[str | None] = set()
        self.header = {"spelling": self._spelling, "counts": self._counts, "games": self._listed}
        self._is_hsgf = ".hsgf" in self.path.name.lower()

    def _games(self) -> Iterator[GameRecord]:
        scanner = _Scanner(self._pieces())
        try:
            for text in scanner.games():
                if text.is_cut and self.damage is not None:
                    break
                game = GameRecord(text.number, text.number)
                self._counts["games"] += 1
                try:
                    if text.error is not None:
                        raise text.error
                    self._read_game(text, game)
                except FormatError as error:
                    game.reject(error, self.unit)
                yield game
        except _DamagedFileError as damaged:
            raise damaged.error from None
        self._counts["bytes_between_games"] = scanner.skipped
        if len(self._dates) == 1 and None not in self._dates:
            self.header["run"] = {"date": self._dates.pop()}

    def _pieces(self) -> Iterator[bytes]:
        try:
            while piece := self._file.read1(_PIECE):
                yield piece
        except FormatError as error:
            try:
                self._handle_damage(error)
            except FormatError as damage:
                raise _DamagedFileError(damage) from error

    def _read_game(self, text: _Game, game: GameRecord) -> None:
        root = dict(text.nodes[0])
        moves = list(_moves_of(text.nodes))
        letters = _are_letters(moves)
        _check_is_hex(root, self._is_hsgf)
        for nodes in text.nodes:
            if any(name in _SETUP for name, _ in nodes):
                raise FormatError(
                    "the game has stones that were set up, not played",
                    code=Reason.SETUP_STONES,
                    found=next(name for name, _ in nodes if name in _SETUP),
                    expected="only moves, from the empty board",
                )
        listed = _listed_of(root)
        builder = GameBuilder(_board_size(root))
        _play(builder, moves, _first_colour(moves, text.nodes), letters)
        stated = None if builder.swap == "sides" else _result(str(listed.get("RE", "")))
        if stated is not None and builder.winner is None:
            builder.winner, builder.end_reason = stated
        elif stated is not None and stated[0] != builder.winner:
            raise FormatError(
                "the result and the last move name different winners",
                code=Reason.WINNER_VALUE,
                found=f"RE[{listed['RE']}]",
                expected="the opponent of the player who resigned",
            )
        builder.write_to(game)
        self._spelling["W[dd]" if letters else "B[a3]"] += 1
        self._dates.add(_iso_date(str(listed.get("DT", ""))))
        if listed and len(self._listed) < MAX_GAMES_LISTED:
            self._listed.append({"game": text.number, **listed})
        elif listed:
            self._counts["games_not_listed"] += 1


# Meaning


def _check_is_hex(root: dict[str, bytes], is_hsgf: bool) -> None:
    kind, event = root.get("GM"), root.get("EV", b"").strip().lower()
    named = event.startswith(b"hex.") or (is_hsgf and not _OTHER_GAME.match(event))
    is_hex = named if kind is None else kind.strip() == b"11"
    if not is_hex:
        raise FormatError(
            "not stated to be a game of Hex" if kind is None else "not a game of Hex",
            code=Reason.SGF_GAME,
            found=f"no GM, EV[{_shown(event)}]" if kind is None else f"GM[{_shown(kind)}]",
            expected="GM[11], EV[hex.…] or a file *.hsgf",
        )


def _board_size(root: dict[str, bytes]) -> int:
    text = _shown(root.get("SZ", b"11"))
    size = _SIZE.fullmatch(text)
    if size is None or size[2] not in (None, size[1]):
        raise FormatError(
            "the board is not square" if size else "not a board size",
            code=Reason.BOARD_SIZE,
            found=f"SZ[{text}]",
            expected="one number, such as SZ[13]",
        )
    return int(size[1])


def _moves_of(nodes: list[list[tuple[str, bytes]]]) -> Iterator[tuple[str, str]]:
    """Yield the colour and the text of each move, in lower case.

    Raises:
        FormatError: "sgf-syntax", if a node has two moves.
    """
    for node in nodes:
        moves = [(name, value) for name, value in node if name in "BW"]
        if len(moves) > 1:
            raise _syntax_error("a node with two moves", moves[1][0], "one move per node")
        for name, value in moves:
            yield name, value.decode("latin-1").strip().lower()


def _are_letters(moves: list[tuple[str, str]]) -> bool:
    """Return whether the first cell is given by two letters, as Little Golem does."""
    return next((bool(_LETTERS.fullmatch(text)) for _, text in moves if _is_cell(text)), False)


def _is_cell(text: str) -> bool:
    return _CELL.fullmatch(text) is not None or _LETTERS.fullmatch(text) is not None


def _first_colour(moves: list[tuple[str, str]], nodes: list[list[tuple[str, bytes]]]) -> str:
    """Return the colour of the first move: "B" or "W".

    Raises:
        FormatError: "move-order", if ``PL`` states the other colour.
    """
    first = moves[0][0] if moves else "B"
    values = [value for node in nodes for name, value in node if name == "PL"]
    stated = {value.strip().upper()[:1].decode("latin-1") for value in values}
    if stated - {first}:
        raise _order_error("PL states another player", f"PL[{min(stated - {first})}]", f"PL[{first}]")
    return first


def _play(builder: GameBuilder, moves: list[tuple[str, str]], first: str, letters: bool) -> None:
    """Play the moves of a game.

    Args:
        builder: Receives the moves.
        moves: Colour and text of each.
        first: Colour of the first move.
        letters: Whether cells are two letters. Then the first player is blue, whatever its colour.

    Raises:
        FormatError: A move is invalid.
    """
    players = {first: BLUE, "W" if first == "B" else "B": RED} if letters else {"B": BLUE, "W": RED}
    builder.first_player = players[first]
    for index, (colour, text) in enumerate(moves):
        player = players[colour]
        if text in ("resign", "forfeit"):
            builder.end(player, "resigned" if text == "resign" else "unknown")
            continue
        if player != builder.player:
            raise _order_error(
                f"the move {text!r} of the wrong player",
                f"{colour} at move {index + 1}",
                "players who move in turn, and B[pass] for a pass",
            )
        if text in _SWAPS:
            following = moves[index + 1][0] if index + 1 < len(moves) else None
            builder.swap_players(_swap_kind(text, colour, following))
        elif text in ("", "pass"):
            builder.skip()
        else:
            builder.play(_cell(text, letters, builder.board_size))


def _swap_kind(text: str, colour: str, following: str | None) -> str:
    """Return whether a swap is one of "pieces" or "sides".

    After a swap of pieces, the opponent moves. After a swap of sides, colours keep their stones, so that the
    colour that swapped moves. HexGui and Benzene write ``W[swap-pieces]`` for a swap of sides, and
    ``W[swap]`` may mean either. The colour of the next move therefore decides.

    Args:
        text: "swap", "swap-pieces" or "swap-sides".
        colour: Colour of the swap.
        following: Colour of the next move, or None if there is none.
    """
    if following is None:
        if text == "swap":
            raise _order_error("a swap as the last move", text, "swap-pieces, swap-sides, or a move after it")
        return text.removeprefix("swap-")
    return "sides" if text == "swap-sides" or following == colour else "pieces"


def _cell(text: str, letters: bool, n: int) -> int:
    if letters and _LETTERS.fullmatch(text):
        column, row = ord(text[0]) - ord("a"), ord(text[1]) - ord("a")
        if column < n and row < n:
            return row * n + column
        raise FormatError(
            "no such cell", code=Reason.TRMPH_CELL, found=repr(text), expected=f"letters up to {chr(96 + n)}"
        )
    if letters or not _CELL.fullmatch(text):
        expected = "two letters, as in the moves before" if letters else "a1, swap-pieces, pass or resign"
        raise FormatError("not a move", code=Reason.TRMPH_CELL, found=repr(text[:40]), expected=expected)
    return cell_index(text, n)


def _result(text: str) -> tuple[int, str] | None:
    """Return the winner and the end of a result such as "B+Resign", or None if it names no winner.

    "B" is blue in both notations: Black, or PB, the first player on Little Golem.
    """
    result = _RESULT.fullmatch(text.strip().lower())
    if result is None:
        return None
    return (BLUE if result[1][0] == "b" else RED), _END_REASONS.get((result[2] or "").strip(), "unknown")


def _listed_of(root: dict[str, bytes]) -> dict[str, object]:
    """Return the properties of the first node for the header, decoded.

    Raises:
        FormatError: "not-utf8", if a value is not in the stated encoding (``CA``; UTF-8 if it has none).
    """
    stated = root.get("CA", b"UTF-8").decode("latin-1").strip()
    try:
        name = codecs.lookup(stated).name.replace("-", "_")
    except (LookupError, ValueError):
        name = ""
    if not _ENCODINGS.fullmatch(name):
        raise FormatError(
            "unsupported encoding", code=Reason.NOT_UTF8, found=f"CA[{stated[:40]}]", expected="CA[UTF-8]"
        )
    listed: dict[str, object] = {}
    for key in _LISTED:
        value = root.get(key, b"")
        try:
            decoder = codecs.getincrementaldecoder(name)()
            text = decoder.decode(value, final=len(value) < _MAX_VALUE)
        except UnicodeDecodeError as error:
            if "CA" in root:
                raise FormatError(
                    f"{key} is not in the stated encoding {stated}", code=Reason.NOT_UTF8, found=str(error)
                ) from error
            text = value.decode("latin-1")  # the default of the specification
        if text := " ".join(text.split()):
            listed[key] = text
    return listed


def _iso_date(text: str) -> str | None:
    found = _DATE.fullmatch(text)
    try:
        return None if found is None else date(*map(int, found.groups())).isoformat()
    except ValueError:
        return None


def _shown(value: bytes) -> str:
    return value[:40].decode("latin-1").strip()


def _order_error(reason: str, found: str, expected: str) -> FormatError:
    return FormatError(reason, code=Reason.MOVE_ORDER, found=found, expected=expected)


def _syntax_error(reason: str, found: object, expected: str | None = None) -> FormatError:
    return FormatError(reason, code=Reason.SGF_SYNTAX, found=found, expected=expected)


# Syntax


class _Scanner:
    """Splits SGF text into games.

    A syntax error ends a game. The next one begins where a game begins by its first property, or with "(;"
    at the beginning of a line.

    Args:
        pieces: The text, in pieces of any length.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._more = pieces
        self._buffer = b""
        self._at = 0
        self._origin = 0  # offset of the buffer in the text
        self._ended = False
        self.skipped = 0
        """Number of bytes between games."""

    def games(self) -> Iterator[_Game]:
        """Yield the games of the text, each with its main line or an error."""
        number = 0
        while self._find_game():
            number += 1
            game = _Game(number)
            resume = _RESUME if self._begins(_START) else _RESUME_ANY
            try:
                self._scan(game)
                self._need(_LONGEST_START)
                if _MORE.match(self._buffer, self._at) and not self._begins(_BEGIN):
                    raise _syntax_error("more of the game after its last bracket", self._shown())
            except FormatError as error:
                game.fail(error)
                game.is_cut = self._ended and self._at >= len(self._buffer)
                self._seek(resume)
            yield game

    def _fill(self) -> bool:
        """Append the next piece to the bytes that are not scanned; return False at the end."""
        piece = b"" if self._ended else next(self._more, b"")
        if not piece:
            self._ended = True
            return False
        self._buffer = self._buffer[self._at :] + piece
        self._origin += self._at
        self._at = 0
        return True

    def _need(self, count: int) -> None:
        """Read pieces until ``count`` bytes are not scanned, or the text ends."""
        while len(self._buffer) - self._at < count and self._fill():
            pass

    def _peek(self) -> bytes:
        """Skip blanks and return the next byte, empty at the end."""
        while True:
            self._at = _SPACE.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                return self._buffer[self._at : self._at + 1]
            if not self._fill():
                return b""

    def _shown(self) -> str:
        return repr(self._buffer[self._at : self._at + 20])

    def _seek(self, pattern: re.Pattern[bytes]) -> bool:
        """Skip the text before the next match; return False if there is none."""
        while True:
            self._need(2 * _LONGEST_START)
            found = pattern.search(self._buffer, self._at)
            last = len(self._buffer) - (0 if self._ended else _LONGEST_START)
            if found and found.start() <= last:
                self._at = found.start()
                return True
            self._at = last
            if self._ended:
                return False

    def _begins(self, pattern: re.Pattern[bytes]) -> bool:
        """Return whether a game begins at the next byte that is no blank."""
        self._peek()
        self._need(_LONGEST_START)
        return pattern.match(self._buffer, self._at) is not None

    def _find_game(self) -> bool:
        """Skip the text before the next game; return False if there is none."""
        before = self._origin + self._at
        found = self._seek(_BEGIN)
        self.skipped += self._origin + self._at - before
        return found

    def _scan(self, game: _Game) -> None:
        """Read one game tree, from its "(" to its ")".

        Raises:
            FormatError: "sgf-syntax".
        """
        depth = 0
        closed = False  # a subtree has ended
        name = ""
        while True:
            token = self._token(game)
            if token == b"(":
                self._at -= 1
                if game.nodes and self._begins(_START):
                    raise _syntax_error("another game begins within the game", self._shown())
                self._at += 1
                depth += 1
                if closed:
                    game.fail(_variations_error())
                if depth > 1 and not game.nodes:
                    raise _syntax_error("a variation before the first node", "(")
                name = ""
            elif token == b")":
                depth -= 1
                closed = True
                name = ""
                if depth == 0:
                    if not game.nodes:
                        raise _syntax_error("a game without nodes", "()")
                    return
            elif token == b";":
                if not depth:
                    raise _syntax_error("a node without a bracket before it", self._shown())
                if closed and game.error is None:
                    raise _syntax_error("a node after a variation", ";")
                if game.error is None:
                    game.nodes.append([])
                    if len(game.nodes) > _MAX_NODES:
                        game.fail(_syntax_error("too many nodes", None, f"at most {_MAX_NODES:,}"))
                name = ""
            elif token == b"[":
                if not name:
                    raise _syntax_error("a value without a property", "[")
                self._add(game, name, self._value())
            else:
                if not game.nodes:
                    raise _syntax_error("a property before the first node", repr(token[:20]))
                name = "".join(letter for letter in token.decode("ascii") if letter.isupper())
                if not name or self._peek() != b"[":
                    raise _syntax_error("a property without a value", repr(token[:20]))

    def _add(self, game: _Game, name: str, value: bytes) -> None:
        if name not in _KEPT or game.error is not None:
            return
        node = game.nodes[-1]
        if name in _SETUP and (name, b"") not in node:
            node.append((name, b""))
        elif name in _ROOT and len(game.nodes) > 1:
            return
        elif name in ("B", "W") or not any(name == known for known, _ in node):
            if len(node) > len(_KEPT) + 2:
                raise _syntax_error("too many moves in a node", name)
            node.append((name, value))

    def _token(self, game: _Game) -> bytes:
        """Return the next token: a bracket, a semicolon or the name of a property."""
        if not self._peek():
            raise _syntax_error("the file ends within a game", f"{len(game.nodes):,} nodes")
        self._need(65)  # more than the longest token
        token = _TOKEN.match(self._buffer, self._at)
        if token is None:
            raise _syntax_error(
                "not SGF", repr(self._buffer[self._at : self._at + 20]), "a property, a node or a variation"
            )
        self._at = token.end()
        return token[0]

    def _value(self) -> bytes:
        """Return the beginning of the value after "[", without escapes, and go behind its "]"."""
        kept = bytearray()

        def keep(stop: int) -> None:
            if len(kept) < _MAX_VALUE:
                kept.extend(self._buffer[self._at : stop])

        def fail_at_end() -> FormatError:
            keep(len(self._buffer))
            self._at = len(self._buffer)
            return _syntax_error("the file ends within a value", repr(bytes(kept[:40])))

        while True:
            end = _VALUE_END.search(self._buffer, self._at)
            if end is None:
                stop = max(self._at, len(self._buffer) - _LONGEST_START)  # a game may begin after it
                keep(stop)
                self._at = stop
                if not self._fill():
                    raise fail_at_end()
            elif end[0] == b"]":
                length = self._check_value(end.start() - self._at)
                keep(self._at + length)
                self._at += length + 1
                return bytes(kept[:_MAX_VALUE])
            else:
                keep(end.start())
                self._at = end.end()
                if self._at >= len(self._buffer) and not self._fill():
                    raise fail_at_end()
                if self._buffer[self._at : self._at + 1] not in (b"\n", b"\r"):
                    keep(self._at + 1)
                self._at += 1

    def _check_value(self, length: int) -> int:
        """Check that no game begins in the last ``length`` bytes of a value, and return ``length``."""
        value = self._buffer[self._at : self._at + length]
        if b"(" in value or b";" in value:
            self._need(length + _LONGEST_START)
            first = self._at + max(0, length - _LONGEST_START)
            begin = _START.search(self._buffer, first, self._at + length + _LONGEST_START)
            if begin and begin.start() < self._at + length:
                self._at = begin.start()
                raise _syntax_error("a value without an end, before another game", self._shown())
        return length


def _variations_error() -> FormatError:
    return FormatError(
        "the game has variations",
        code=Reason.SGF_VARIATIONS,
        found="a second variation",
        expected="one sequence of moves",
        hint="Write the main line alone into another file.",
    )
