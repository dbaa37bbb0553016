"""Reader and writer of TRMPH text, one game per line.

The reader accepts plain and gzipped text and converts each line to the positions of its game, or to a
rejection with a reason. It repairs no data. The writer produces plain text.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterable
from pathlib import Path
from typing import IO, ClassVar, Final

import numpy as np
import numpy.typing as npt

from hexdata.board import TrmphLine, check_no_repeats, format_moves, parse_moves, split_trmph
from hexdata.errors import FormatError, Reason
from hexdata.formats.games import GAME_LIMITS, GameRecord, LineReader, is_comment

__all__ = ["DEFAULT_LIMITS", "TrmphReader", "is_game_line", "looks_like_trmph", "write_trmph"]

DEFAULT_LIMITS: Final = GAME_LIMITS

_GAME: Final = re.compile(rb"^[ \t]*(?:https?://[^\s#]*)?#[0-9]{1,3},(?:[a-z]{1,2}[0-9]|\s|$)", re.MULTILINE)


def looks_like_trmph(head: bytes) -> bool:
    """Return whether the beginning of a file is TRMPH text.

    It is if it contains a game, or if it contains only comments and blank lines.

    Args:
        head: The first bytes of the file, decompressed; some kB are enough.
    """
    if not head or b"\0" in head:
        return False
    text = head.removeprefix(BOM_UTF8)
    return _GAME.search(text) is not None or not any(map(is_game_line, text.splitlines()))


def is_game_line(line: bytes) -> bool:
    """Return whether a line is neither blank nor a comment."""
    return bool(line.strip()) and not is_comment(line)


class TrmphReader(LineReader):
    """Reader of one TRMPH file: a :class:`hexdata.formats.source.SourceReader`.

    A game of m moves yields m + 1 positions. A line that is not a valid game counts as one record and is
    rejected with one of these reasons: "trmph-syntax", "no-moves", "trmph-cell", "repeated-move",
    "board-size" (an invalid size, or another size than the first valid game), "no-winner" (none is stated
    and the final board has no winning chain), "line-too-long" or "not-utf8".

    A stated winner is kept even if the final board has a winning chain of the other player.

    Args:
        path: The file, gzipped or plain.
        limits: Limits on the decompressed size and on the compression ratio.
        salvage: If True, a damaged file yields the complete lines before the damage instead of raising.
        part: Range of bytes to read of a text without gzip. Its lines have the numbers of the whole file, and
            its records are numbered from 0. Default None: the whole file.
    """

    format = "trmph"
    _winner_hint: ClassVar[str] = "b or r after the moves"

    def _read_game(self, text: str, game: GameRecord) -> None:
        parts = split_trmph(text)
        if not parts.moves:
            raise FormatError("a game without moves", code=Reason.NO_MOVES, expected="#13,a1b2c3 b")
        moves = parse_moves(parts.moves, parts.board_size)
        check_no_repeats(moves, parts.board_size)
        game.board_size, game.moves, game.winner = parts.board_size, moves, parts.winner
        self._spelling[_spelling(parts)] += 1


def _spelling(parts: TrmphLine) -> str:
    """Return the notation of a line, such as "#13,... b/r"."""
    prefix = "http://...#" if parts.url else "#"
    if parts.winner_text is None:
        return f"{prefix}{parts.board_size},..."
    return f"{prefix}{parts.board_size},... {'1/2' if parts.winner_text in '12' else 'b/r'}"


def write_trmph(
    target: str | Path | IO[str], games: Iterable[tuple[npt.NDArray[np.uint16], int | None]], board_size: int
) -> int:
    """Write games in the newer notation, ``#13,a1b2c3 b``, one per line.

    Args:
        target: Path, which is overwritten as UTF-8 text with LF line endings; or an open text file.
        games: Moves and winner of each game: cell indices uint16 (m,), and ``BLUE``, ``RED`` or None.
        board_size: Cells along an edge, the same for all games.

    Returns:
        The number of games written.
    """
    if isinstance(target, str | Path):
        with Path(target).open("w", encoding="utf-8", newline="\n") as file:
            return write_trmph(file, games, board_size)
    count = 0
    for moves, winner in games:
        ending = "" if winner is None else " r" if winner else " b"
        target.write(f"#{board_size},{format_moves(moves, board_size)}{ending}\n")
        count += 1
    return count
