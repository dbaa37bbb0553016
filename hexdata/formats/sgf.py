"""Reader of Hex games in SGF (Smart Game Format, FF[3] and FF[4]), one or several games per file.

Two notations of cells are read. ``B[a3]`` names column and row, as the SGF specification for Hex, HexGui and
Benzene do; Black connects top to bottom, as blue does in hexdata. ``W[dd]`` gives column and row as letters,
as Little Golem does. There, the first player connects top to bottom whatever the colour of its nodes,
``RE[B]`` names the first player (``PB``), and ``swap`` moves the stone to the mirrored cell.

Text outside of games is a comment, unless it has nodes. The beginning of a game is recognized within another
game too, by the first property: a missing bracket ends one game, and does not hide the games after it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import Any, ClassVar, Final

from hexdata.board import BLUE, PASS, RED, cell_index, player_to_move
from hexdata.errors import FormatError, Reason
from hexdata.formats.games import GameReader, GameRecord, mirrored
from hexdata.formats.run_header import iso_date
from hexdata.formats.source import SourceFormat

_MAX_LISTED: Final = 1000
"""Maximum number of games of a file whose players, dates and events are in the header of the source."""
_MAX_VALUE: Final = 512
"""Bytes of a value that are kept."""
_MAX_NODES: Final = 4096
"""Maximum number of nodes, and of stones, of a game. The longest has 1,024 moves, and as many passes."""

# Properties

_LISTED: Final = ("PB", "PW", "DT", "EV", "RE", "GN", "PC", "SO", "AP")
"""Properties of the first node that are in the header of the source."""
_ROOT: Final = frozenset(("GM", "SZ", "CA", *_LISTED))
_SETUP: Final = ("AB", "AW", "AE")
_PLAYED: Final = frozenset(("B", "W", "PL", *_SETUP))
_STRICT: Final = (*sorted(_PLAYED), "FF", "GM", "RE", "SZ")
"""Properties that training needs. In others, an unescaped "]" may be a part of the value."""

# Syntax

_FIRST_PROPERTY: Final = (
    rb"(?:G[a-z]*M|F[a-z]*F|S[a-z]*Z|C[a-z]*A|A[a-z]*P|E[a-z]*V|P[a-z]*B|P[a-z]*W)\s{0,9}"
    rb"\[(?![^\]\\]{0,99}\\)"
)
"""A property that only the first node of a game has. In a quoted game, its "]" has a backslash before it."""
_START: Final = re.compile(
    rb"\(\s{0,9};[\s\S]{0,4}?[^;()\\]{0,250}?(?<![A-Za-z])"
    + _FIRST_PROPERTY
    + rb"|[)\r\n]\s{0,99}(?:\(\s{0,9}\S?;?|[^\s()]?;)\s{0,9}"
    + _FIRST_PROPERTY
)
"""The beginning of a game inside of another one whose end is missing. Its "(" or its ";" may be damaged."""
_RESUME: Final = re.compile(rb"[\r\n]\s{0,99}\(\s{0,99};\s{0,99}(?![BW]\s{0,9}\[)|" + _START.pattern)
"""The beginning of a game after a syntax error: also "(;" at the beginning of a line, but for a variation."""
_RESUME_ANY: Final = re.compile(rb"[\r\n]\s{0,99}\(\s{0,99};|" + _START.pattern)
"""The same after a game that does not begin with such a property either."""
_BEGIN: Final = re.compile(rb"\((?![^()\[\];]{0,250}\))|[^\s()]?;\s{0,9}" + _FIRST_PROPERTY)
"""The beginning of a game after the end of another one, not of words in brackets. Its "(" may be damaged."""
_MORE: Final = re.compile(
    rb"(?!\s*(?:" + _BEGIN.pattern + rb"))\){0,99}(?:\s{0,99};\s{0,99}[A-Za-z]{1,64}\s{0,99}|[A-Z]{0,2})\["
)
"""More of a game after its last bracket, so that one of its brackets is wrong."""
# Bounded repetitions: a hostile text of many letters or blanks is not searched again from each of them.
_TOKEN: Final = re.compile(rb"\s*([();\[]|[A-Za-z]{1,64}(?=\s*\[))")
_UNKNOWN: Final = re.compile(rb"\s*(?:[A-Za-z]{1,64}\s*)?")
_VALUE_END: Final = re.compile(rb"[\]\\]")
_STRAY: Final = re.compile(
    rb"(?!\s{0,99}(?:[\[;()]|[A-Za-z]{1,64}\s{0,99}\[|\Z))(?!\s{0,99}(?:"
    + "|".join(_STRICT).encode()
    + rb"))[^\[\]\\;()]{0,99}\]"
)
"""Text after a "]" that does not end its value, with the "]" that may: a property whose "[" is missing is
none, so that no move and no size is hidden in a name."""


@dataclass(slots=True)
class _Tree:
    """The main line of one game, as text."""

    root: dict[str, bytes] = field(default_factory=dict)
    """The beginning of the first value of each property in ``_ROOT``."""
    nodes: list[list[tuple[str, bytes]]] = field(default_factory=list)
    """The properties in ``_PLAYED`` of each node, one for each value."""
    error: FormatError | None = None
    is_cut: bool = False
    """Whether the text ends within the game."""
    variations: int = 0
    """Number of variations beside the main line."""
    unescaped: int = 0
    """Number of brackets and backslashes within names and comments that have no backslash before them."""


def _check_syntax(condition: object, reason: str, found: object = None) -> None:
    if not condition:
        raise FormatError(reason, Reason.SGF_SYNTAX, found)


class Scanner:
    """Splits SGF text into games, without recursion.

    A syntax error ends a game. The next one begins where a game begins by its first property, or with "(;"
    at the beginning of a line.
    """

    def __init__(self, text: bytes) -> None:
        self._text, self._at = text, 0
        self.skipped = 0
        """Number of bytes between games."""

    def games(self) -> Iterator[_Tree]:
        """Yield the games of the text, each with its main line or an error."""
        while self._at < len(self._text):
            before = self._at
            self._seek(_BEGIN)
            self.skipped += self._at - before
            if self._at < len(self._text):
                yield self._read_game()

    def _seek(self, pattern: re.Pattern[bytes]) -> None:
        """Skip the text before the next match; all if there is none."""
        found = pattern.search(self._text, self._at)
        self._at = found.start() if found else len(self._text)

    def _read_game(self) -> _Tree:
        """Read one game from its "(" to its ")", or to an error and the beginning of the next game."""
        game = _Tree()
        resume = _RESUME if _START.match(self._text, self._at) else _RESUME_ANY
        try:
            self._read_tree(game)
            _check_syntax(not _MORE.match(self._text, self._at), "more of the game after its last bracket")
        except FormatError as error:
            game.error, game.is_cut = error, self._at >= len(self._text)
            error.found = "its end" if game.is_cut else repr(self._text[self._at : self._at + 20])
            self._seek(resume)
        return game

    def _read_tree(self, game: _Tree) -> None:
        """Read one game tree.

        Raises:
            FormatError: "sgf-syntax".
        """
        nodes = game.nodes
        depth = beside = 0  # beside: depth of the variation that is left out, or 0
        closed = False  # a subtree has ended
        name = ""
        while found := _TOKEN.match(self._text, self._at):
            self._at, token = found.end(), found[1]
            if token == b"[":
                _check_syntax(name, "a value without a property")
                value = self._read_value(game, name)
                if not beside and name in _PLAYED:
                    nodes[-1].append((name, value))
                    _check_syntax(len(nodes[-1]) <= _MAX_NODES, "too many stones or moves in a node")
                # Some programs write the result into the last node, or the size into the second one.
                elif not beside and name in _ROOT and (len(nodes) == 1 or name in ("RE", "SZ")):
                    game.root.setdefault(name, value)
                continue
            name, is_right = "", True
            if token == b"(":
                # A missing bracket would otherwise make the next game a variation of this one.
                if nodes and _START.match(self._text, found.start(1)):
                    self._at = found.start(1)
                    _check_syntax(False, "another game begins within the game")
                depth += 1
                is_right = depth == 1 or nodes != []
                # A subtree beside one that has ended is a variation; the first one belongs to the main line.
                if closed:
                    game.variations += 1
                    beside = beside or depth
            elif token == b")":
                beside = 0 if depth == beside else beside
                depth, closed = depth - 1, True
                if depth == 0 and nodes:
                    return
                is_right = depth > 0
            elif token == b";":
                # After a subtree, only others may follow; in a variation this does not matter.
                is_right = depth > 0 and (beside > 0 or (not closed and len(nodes) < _MAX_NODES))
                if not beside:
                    nodes.append([])
            else:
                # FF[3] allows lower-case letters in names, as in "GaMe"; only the capitals count.
                name = "".join(letter for letter in token.decode("ascii") if letter.isupper())
                is_right = nodes != [] and name != ""
            _check_syntax(is_right, "too many nodes, or a bracket, a node or a property in a wrong place")
        # Behind what is wrong, the beginning of the next game is looked for.
        self._at = _UNKNOWN.match(self._text, self._at).end()  # type: ignore[union-attr]
        _check_syntax(False, "not SGF, or the file ends within a game")

    def _read_value(self, game: _Tree, name: str) -> bytes:
        """Return the beginning of the value after "[", without escapes, and go behind its "]"."""
        text, value = self._text, bytearray()
        while found := _VALUE_END.search(text, self._at):
            start, end = self._at, found.start()
            if b"(" in text[start:end] or b";" in text[start:end]:
                # A game in the value would be read as part of it, because the end of the value is missing.
                other = _START.search(text, start, end + _MAX_VALUE)
                if other and other.start() < end:
                    self._at = other.start()
                    _check_syntax(False, "a value without an end, before another game")
            value += text[start:end]
            self._at = end + 1
            if found[0] == b"]":
                if name in _STRICT or not _STRAY.match(text, self._at):
                    return bytes(value[:_MAX_VALUE])
                value += b"]"
                game.unescaped += 1
            elif value[-1:] >= b"\x81" and _decoded(bytes(value[:_MAX_VALUE]), "utf-8") is None:
                value += b"\\"  # the second byte of a character, as in GBK
                game.unescaped += 1
            else:
                # An escaped line break is none; any other escaped character stands for itself.
                value += text[self._at : self._at + 1].strip(b"\r\n")
                self._at += 1
        self._at = len(text)  # the tree has no end either
        return b""


# Games


class SgfReader(GameReader):
    """Reader of one SGF file of Hex games: a :class:`hexdata.formats.source.SourceReader`.

    A game is rejected with one of these reasons: "sgf-syntax", "sgf-game" (another game than Hex, or none is
    stated), "sgf-variations", "setup-stones" (not before the first move), "board-size" (not from 3 to 32, not
    square, or another than that of the first valid game), "trmph-cell" (no cell of the board),
    "repeated-move", "move-order", "no-moves", "winner-value" (the result and a resignation contradict each
    other), "no-winner".

    A game that begins with stones that were set up has only the positions from there on, and
    ``position_in_game`` is not 0 in the first one.

    After a swap of sides, ``RE`` is not used, as some programs name the colour in it and others the player
    who had the colour before: only a resignation or a winning chain decides such a game.

    After a syntax error, the rest of the game is skipped up to the beginning of the next one: "(;" before a
    property of a first node, or at the beginning of a line.

    Args:
        path: The file, gzipped or plain.
        salvage: If True, a damaged file yields the complete games before the damage instead of raising.
        variations: "main" to read the first variation of each game that has some, and to count the others as
            "variations" in ``header``; "reject", the default, to reject such games.
        is_stated: Whether the user says that the file is of Hex, so that games need not say it.
    """

    unit = "game"
    winner_hint: ClassVar[str] = "RE[B+R] (not after a swap of sides), a resignation, or a winning chain"

    def __init__(self, *args: Any, variations: str = "reject", is_stated: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        self._listed: list[dict[str, object]] = []
        self._dates: set[str | None] = set()
        self.header["games"] = self._listed
        self._main_lines = variations == "main"
        if self._main_lines:
            self._counts["variations"] = 0
        self._is_named = is_stated or ".hsgf" in self.path.name.lower()

    def _games(self) -> Iterator[GameRecord]:
        scanner = Scanner(self._read_whole())
        for number, text in enumerate(scanner.games(), 1):
            if not (text.is_cut and self.damage):
                self._counts["games"] = number
                yield self._game(text, number, number)
        self._counts["bytes_between_games"] = scanner.skipped
        if len(self._dates) == 1 and None not in self._dates:
            self.header["run"] = {"date": self._dates.pop()}

    def _read_game(self, content: _Tree, game: GameRecord) -> None:
        if content.error is not None:
            raise content.error
        if content.variations and not self._main_lines:
            hint = "Add --variations main to read the main line."
            raise FormatError("the game has variations", Reason.SGF_VARIATIONS, hint=hint)
        root = content.root
        stones = (v for node in content.nodes for name, v in node if name in ("B", "W", "AB", "AW"))
        cells = filter(_CELL.fullmatch, (_lower(stone).partition(":")[0] for stone in stones))
        # The first cell shows the notation of the game, since swaps and passes are written alike in both.
        letters = next(cells, "").isalpha()
        _check_is_hex(root, self._is_named, letters)
        size = _SIZE.fullmatch(_lower(root.get("SZ", b"11")))
        if size is None or size[2] not in (None, size[1]):
            raise FormatError("the board is not square", Reason.BOARD_SIZE, root.get("SZ", b"")[:40])
        _play(game, content.nodes, int(size[1]), letters)
        listed, others = _listed_of(root)
        raw, result = root.get("RE", b""), str(listed.get("RE", "")).lower()
        texts = [result, *([] if raw.isascii() else (raw.decode(each, "replace") for each in _EASTERN))]
        stated = None if game.swap == "sides" else next(filter(None, map(_result, texts)), None)
        if not letters and game.first_player == RED and game.swap is None and result in _SCORES:
            stated = None  # its first number may be that of Black, or of the first player
        if stated is not None and game.winner is None:
            game.winner, game.end_reason = stated
        elif stated is not None and stated[0] != game.winner:
            raise FormatError("another winner than by the last move", Reason.WINNER_VALUE, f"RE[{result}]")
        game.finish()
        self._note("other_encodings", others)
        self._note("unescaped", content.unescaped)
        self._note("variations", content.variations)
        self._note("setup", any(game.setup))
        is_known = stated is not None or game.swap == "sides" or result in ("", "?", "0", "void", "draw")
        self._note("results", not is_known)
        date = str(listed.get("DT", ""))
        # DT may also be a part of a date or a list of dates, of which ``iso_date`` would take the beginning.
        self._dates.add(iso_date(date) if len(date) == len("2024-05-06") else None)
        if listed and len(self._listed) < _MAX_LISTED:
            self._listed.append({"game": game.number, **listed})
        elif listed:
            self._counts["games_not_listed"] += 1


# ``SZ``: 11, 11:11 or 11x11. More digits than a valid size has, so that the error is about the size.
_SIZE: Final = re.compile(r"([0-9]{1,4})(?:\s?[:x*]\s?([0-9]{1,4}))?")
_HEX_PROGRAM: Final = re.compile(rb"\s*(?:hexgui|hexworld|benzene|mohex|wolve|six)\b", re.IGNORECASE)
_OTHER_GAME: Final = re.compile(rb"(?!hex\.)[a-z0-9]+\.[a-z]+\b")
"""Event of another game of Little Golem, such as ``havannah.in.DEFAULT.1``."""


def _check_is_hex(root: dict[str, bytes], is_named: bool, letters: bool) -> None:
    kind, event = root.get("GM"), root.get("EV", b"").strip().lower()
    # GM decides where it is given. Otherwise event or program may name the game, and after them the file.
    says_hex = event.startswith(b"hex.") or _HEX_PROGRAM.match(root.get("AP", b"")) is not None
    is_other = kind is not None or _OTHER_GAME.match(event) is not None
    if not says_hex and not is_other:
        says_hex = is_named or (letters and b"littlegolem" in root.get("SO", b"").lower())
    if not (says_hex if kind is None else kind.strip() == b"11"):
        hint = None if is_other else "Add --format sgf if all games are Hex."
        found = f"GM[{_lower(kind or b'')[:40]}], EV[{_lower(event)[:40]}]"
        raise FormatError("not stated to be a game of Hex", Reason.SGF_GAME, found, "GM[11]", hint=hint)


# In lower case: column and row ("b3"), or two letters ("bc").
_CELL: Final = re.compile(r"[a-z]{1,2}[0-9]{1,2}|[a-z]{2}")
_SWAPS: Final = {"swap": None, "s": None, "swappieces": "pieces", "swapsides": "sides"}
"""Kind of swap that each move states, without blanks and hyphens; None if the next move's colour shows it."""
_BETWEEN_WORDS: Final = str.maketrans("", "", " -_")
_COLOURS: Final = {"b": "B", "black": "B", "1": "B", "w": "W", "white": "W", "2": "W"}
"""Colours that ``PL`` states; other texts are ignored."""
_Move = tuple[str, str]
"""Colour and text of a move, in lower case. A swap by setup has the text "swap-pieces"."""


def _play(game: GameRecord, nodes: list[list[tuple[str, bytes]]], n: int, letters: bool) -> None:
    """Play the moves of a game.

    Args:
        game: Receives the moves.
        nodes: The nodes.
        n: Cells along an edge.
        letters: Whether cells are two letters. Then the first player of a game without stones that were set
            up is blue, whatever its colour.

    Raises:
        FormatError: A move is invalid.
    """
    moves: list[_Move] = []
    stated: set[str] = set()
    setup: dict[str, list[int]] = {"AB": [], "AW": []}
    for node in nodes:
        texts = [(name, _lower(value)) for name, value in node]
        own = [each for each in texts if each[0] in "BW"]
        placed = [each for each in texts if each[0] in _SETUP]
        if not moves and not own:  # later, the moves themselves show who plays
            stated |= {_COLOURS[text] for name, text in texts if name == "PL" and text in _COLOURS}
        _check_syntax(len(own) <= 1, "a node with two moves", own[1:])
        if not moves and not any(name == "AE" for name, _ in placed):
            # HexGui has them in a node of their own
            for name, text in placed:
                setup[name] += _cells(text, letters, n)
        elif placed and len(moves) == 1 and _is_swap(moves[0], own, placed, letters, n):
            own = [("BW"[moves[0][0] == "B"], "swap-pieces")]
        elif placed:
            raise FormatError("stones set up after a move, or removed", Reason.SETUP_STONES, placed[0][0])
        moves += own
    is_set_up = any(setup.values())
    game.begin(n, setup["AB"], setup["AW"])
    first = moves[0][0] if moves else "B"
    if is_set_up and not moves:
        first = min(stated, default="BW"[player_to_move(len(setup["AB"]), len(setup["AW"]))])
    if stated - {first}:
        raise FormatError("PL states another player", Reason.MOVE_ORDER, f"{first} to move")
    blue = first if letters and not is_set_up else "B"
    game.first_player = BLUE if first == blue else RED
    for index, (colour, text) in enumerate(moves):
        player = BLUE if colour == blue else RED
        following = moves[index + 1][0] if index + 1 < len(moves) else None
        swap = text.translate(_BETWEEN_WORDS)
        if text in ("resign", "forfeit"):
            game.end(player, "resigned" if text == "resign" else "unknown")
            continue
        if player != game.player:
            raise FormatError(f"move {index + 1} is of the wrong player", Reason.MOVE_ORDER, colour)
        if index == 1 and not is_set_up:
            opening, *later = (each for _, each in moves)
            if text in ("", "pass") and following == colour:
                swap = "swapsides"  # a pass that takes over the colour of the first stone
            elif opening in later and _CELL.fullmatch(opening) and _CELL.fullmatch(text):
                # The mirrored stone, if the first cell is free after it: a later move plays there.
                is_mirrored = _cell(text, letters, n) == mirrored(_cell(opening, letters, n), n)
                swap = "swappieces" if is_mirrored else swap
        if swap in _SWAPS:
            kind = _SWAPS[swap]
            if following is None and kind is None:
                raise FormatError("a swap of no kind as the last move", Reason.MOVE_ORDER, text)
            # After a swap of sides, colours keep their stones: the colour that swapped moves. HexGui and
            # Benzene write W[swap-pieces] for it, and W[swap] may mean either, so the next move decides.
            if following is not None:
                kind = "sides" if kind == "sides" or following == colour else "pieces"
            game.swap_players(kind or "")
        else:
            game.play(PASS if text in ("", "pass") else _cell(text, letters, n))


def _is_swap(first: _Move, own: list[_Move], placed: list[_Move], letters: bool, n: int) -> bool:
    """Return whether a node swaps the pieces: it removes the first stone and adds the mirrored one.

    Args:
        first: The first move.
        own: The moves of the node, at most one.
        placed: The setup properties of the node.
        letters: Whether cells are two letters.
        n: Cells along an edge.
    """
    cell = _cell(first[1], letters, n)
    stone = ("BW"[first[0] == "B"], mirrored(cell, n))
    added = {(name[1], _cell(text, letters, n)) for name, text in placed}
    for colour, text in own:
        kind = _SWAPS.get(text.translate(_BETWEEN_WORDS), "")
        added.add((colour, stone[1] if kind in (None, "pieces") else _cell(text, letters, n)))
    return added in ({("E", cell), stone}, {("E", cell)} if own else None)


def _cell(text: str, letters: bool, n: int) -> int:
    if _CELL.fullmatch(text) is None or text.isalpha() != letters:
        raise FormatError("not a move in the notation of the game", Reason.TRMPH_CELL, repr(text[:40]))
    # The second letter stands for the row: "cb" is c2.
    return cell_index(f"{text[0]}{ord(text[1]) - ord('a') + 1}" if letters else text, n)


def _cells(text: str, letters: bool, n: int) -> list[int]:
    """Return the cells of a point, or of a rectangle such as "a1:c3"."""
    first, _, last = text.partition(":")
    corners = (divmod(_cell(each, letters, n), n) for each in (first, last or first))
    (top, bottom), (left, right) = map(sorted, zip(*corners, strict=True))
    return [row * n + column for row in range(top, bottom + 1) for column in range(left, right + 1)]


# Results and names

_SCORES: Final = {"1-0": BLUE, "0-1": RED}
"""Winners of results that count points of the first player and the second."""
# "b+resign", "w+t", "black wins", "winner: white", "white lost on time".
_RESULT: Final = re.compile(
    r"(?:the\s|winner[\s:]{1,9}|player\s)*(?P<player>b|w|black|white)(?:\s?\+(?P<how>.*)"
    r"|\s(?:has\s)?(?P<verb>wins?|won|resign|los[et]|forfeit|time)(?P<rest>.*)|)",
    re.DOTALL,
)
_EASTERN: Final = ("gb18030", "big5", "shift_jis", "euc_kr")
"""Encodings in which a result is read that is in none of those that the file states."""
_EASTERN_RESULT: Final = re.compile(
    r"(?P<player>[黑黒흑白백])[方棋番]?(?:の|获|獲)?"
    r"(?:(?P<by>中盘|中盤|中押し|불계)?(?:[胜勝승]利?|勝ち|勝利)|(?P<resigns>认输|認輸|投了))"
)
"""A result in Chinese, Japanese or Korean, such as "black wins" or "white resigns"."""


def _result(text: str) -> tuple[int, str] | None:
    """Return the winner and the end of a result such as "b+resign", or None if it names no winner.

    "B" is blue in both notations: Black, or PB, the first player on Little Golem.
    """
    if text in _SCORES:
        return _SCORES[text], "unknown"
    if words := _EASTERN_RESULT.fullmatch("".join(text.split())):
        end = "+r" if words["by"] else " resign" if words["resigns"] else "+"
        text = ("w" if words["player"] in "白백" else "b") + end
    result = _RESULT.fullmatch(text)
    if result is None:
        return None
    names_loser = result["verb"] and result["verb"][0] != "w"
    winner = BLUE if (result["player"][0] == "b") != bool(names_loser) else RED
    how = f"{result['how'] or ''}{result['verb'] or ''}{result['rest'] or ''}".strip()
    if how == "r" or "resign" in how:
        return winner, "resigned"
    return winner, "time" if how == "t" or "time" in how else "unknown"


_WITH_ASCII: Final = re.compile(
    "(ascii|utf_8|latin_1|johab)$|iso8859_|cp125|cp9|koi8_|euc_|gb|big5|shift_j|mac_"
)
_ENCODINGS: Final = frozenset(filter(_WITH_ASCII.match, (*aliases.values(), "koi8_u")))
"""Python's names of the encodings that are read, in which brackets and cells are ASCII. Only these are looked
up, since Python then looks for a module with the name of the encoding."""


def _listed_of(root: dict[str, bytes]) -> tuple[dict[str, object], int]:
    """Return the properties of the first node for the header, decoded.

    A value that is not in the stated encoding (``CA``) is read as UTF-8, or else its characters that cannot
    be read are replaced. Without a known encoding, other text than UTF-8 is read as Latin-1.

    Returns:
        The properties; and the number of values that are not in the stated encoding, by default UTF-8.
    """
    stated = normalize_encoding(_lower(root.get("CA", b"")))
    stated = aliases.get(stated, stated)
    if stated not in _ENCODINGS:
        stated = ""
    others = 0
    listed: dict[str, object] = {}
    for key in _LISTED:
        value = root.get(key, b"")
        text = _decoded(value, stated or "utf-8")
        if text is None:
            others += 1
            text = _decoded(value, "utf-8") or value.decode(stated or "latin-1", "replace")
        if text := " ".join(text.split()):
            listed[key] = text
    return listed, others


def _decoded(value: bytes, encoding: str) -> str | None:
    """Return the text of a value, which may be cut at its end, or None if it has another encoding."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(value, final=len(value) < _MAX_VALUE)
    except UnicodeDecodeError:
        return None


def _lower(value: bytes) -> str:
    return value.decode("latin-1").strip().lower()


# The format

_HEAD: Final = re.compile(rb"\s*\(\s*;\s*(?:[A-Za-z]+\s*\[|[;()])")
"""Beginning of a text that is SGF whatever its name is."""
_GAME: Final = re.compile(
    rb"\(\s{0,9};\s{0,9}[A-Za-z]{1,64}\s{0,9}\[|(?:\(\s{0,9}[^\s;()]?|;)\s{0,9}" + _FIRST_PROPERTY
)
"""A game within a text with the name of SGF: after the headers of a mail, or without its first bracket."""


def _is_sgf(head: bytes, name: str) -> bool:
    is_named = ".sgf" in name or ".hsgf" in name
    return bool(_HEAD.match(head) or (is_named and (not head.strip() or _GAME.search(head))))


FORMAT: Final = SourceFormat(
    "sgf",
    ("*.sgf", "*.sgf.gz", "*.hsgf", "*.hsgf.gz"),
    _is_sgf,
    SgfReader,
    "Hex games in SGF",
    options=("salvage", "variations", "is_stated"),
)
