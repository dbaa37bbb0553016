"""Reader of the games of PlayHex (playhex.org) in JSON: a list of objects, or an object on each line.

The list may be ``games`` of an object, whose other keys are ignored, as are those of the games.

Red moves first and connects top and bottom, as blue does in hexdata.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from hexdata.board import BLUE, PASS, RED, cell_index
from hexdata.errors import FormatError, Reason, StoreError
from hexdata.formats.games import GameReader, GameRecord, chain_winners, is_utf8
from hexdata.formats.source import SourceFormat
from hexdata.json_models import read_json

_END_REASONS: Final = {"path": None, "resign": "resigned", "time": "time"}
"""By ``outcome``. None for a path, since the chain on the final board shows it."""


class PlayHexReader(GameReader):
    """Reader of one file of PlayHex: a :class:`hexdata.formats.source.SourceReader`.

    A game has ``boardsize``, ``moves`` (a text such as "a10 swap-pieces d4", or a list), ``winner`` and
    ``outcome``. A game without a winner needs a winning chain. A game is rejected with one of these reasons:
    "game-layout", "board-size", "trmph-cell", "repeated-move", "move-order", "no-moves", "no-winner",
    "winner-value" (also if ``outcome`` is "path" and the winner has no chain).

    Args:
        path: The file, gzipped or plain.
        salvage: Without effect, because JSON is read as a whole.
    """

    unit = "game"
    winner_hint: ClassVar[str] = '"winner": "red" or "blue", or a winning chain'

    def _games(self) -> Iterator[GameRecord]:
        data = self._read_whole()
        if self.damage is not None:
            return  # a part of a JSON text is none
        self._note("other_encodings", not is_utf8(data))
        data = data.removeprefix(BOM_UTF8).decode(errors="replace").encode()  # names in another encoding
        if data.lstrip().startswith(b"{") and _NEXT_LINE.search(data):
            data = b"[" + _NEXT_LINE.sub(b"},\n{", data) + b"]"
        try:
            content = read_json(data, self.path, what="this file", metadata=True)
        except StoreError as wrong:
            raise FormatError(wrong.reason, found=wrong.found, path=self.path) from wrong
        if isinstance(content, dict) and isinstance(content.get("games"), list):
            content = content["games"]
        for number, item in enumerate(content if isinstance(content, list) else [content], start=1):
            yield self._game(item, number, number)

    def _read_game(self, content: Any, game: GameRecord) -> None:
        fields = content if isinstance(content, dict) else {}
        size, moves = fields.get("boardsize", fields.get("boardSize")), fields.get("moves")
        moves = moves.split() if isinstance(moves, str) else moves
        if type(size) is not int or not isinstance(moves, list) or not all(isinstance(m, str) for m in moves):
            found = f"keys {sorted(map(str, fields))[:10]}"
            raise FormatError("not a game of PlayHex", Reason.GAME_LAYOUT, found, "boardsize, moves, winner")
        game.begin(size)
        for move in moves:
            if move == "swap-pieces":
                game.swap_players("pieces")
            else:
                game.play(PASS if move == "pass" else cell_index(move.lower(), size))
        game.finish()
        winner, outcome = fields.get("winner"), fields.get("outcome")
        if winner is None:
            return
        if winner not in ("red", "blue"):
            raise FormatError("an unknown winner", Reason.WINNER_VALUE, repr(winner)[:40])
        game.winner = BLUE if winner == "red" else RED
        game.end_reason = _END_REASONS.get(str(outcome), "unknown")
        if outcome == "path" and chain_winners([game], size)[0] != game.winner:
            # Early versions of PlayHex gave other edges to each colour.
            raise FormatError("the winner has no winning chain", Reason.WINNER_VALUE, winner)


_NEXT_LINE: Final = re.compile(rb"\}[ \t\r]*+\n\s*+\{")
"""Between two objects of JSON lines. Within JSON, a comma would separate them."""
_GAME: Final = rb'\{[^{}]{0,4000}"(?:boardsize|boardSize)"\s*:'
"""Beginning of a game. The size is one of its first keys."""
_START: Final = re.compile(rb"\s*(?:\[\s*\]\s*$|\[?\s*" + _GAME + rb")")
"""Beginning of a list or an object of PlayHex."""
_LIST_IN_OBJECT: Final = re.compile(rb'\s*\{[\s\S]*?"games"\s*:\s*\[\s*(?:\]|' + _GAME + rb")")
"""Beginning of an object with a list of games."""
FORMAT: Final = SourceFormat(
    "playhex",
    ("*playhex*.json", "*playhex*.json.gz"),
    lambda head, name: bool(
        _START.match(head)
        or _LIST_IN_OBJECT.match(head)
        # Other keys, whose values may be objects, may come before the size.
        or ("playhex" in name and re.match(rb"\s*\[?\s*\{", head))
    ),
    PlayHexReader,
    "games of PlayHex",
)
