"""Readers of texts of games: the parts that TRMPH, HexWorld and SGF have in common.

A reader of one of these formats returns :class:`GameRecord` objects. ``GameReader`` decides winners, rejects
games of another board size, and makes raw batches with all positions of the games.
"""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import (
    BLUE,
    MIN_SIZE,
    PASS,
    RED,
    cell_name,
    check_board_size,
    check_no_repeats,
    replay_packed,
    winner_of,
)
from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipFile, GunzipLimits
from hexdata.formats.run_header import FACT_NAMES, RunHeader
from hexdata.formats.source import BATCH_ROWS, SALVAGEABLE, FilePart, RawBatch, Rejection
from hexdata.schema import END_REASONS, SWAPS, raw_schema
from hexdata.storage import AnyPath, as_path, storage_of

__all__ = ["GAME_LIMITS", "MAX_LINE", "GameBuilder", "GameReader", "GameRecord", "LineReader", "is_comment"]

GAME_LIMITS: Final = GunzipLimits(decompressed_bytes=1 << 40, ratio=100, ratio_floor=4 << 20)
"""Limits for files of games. Real TRMPH games take about 120 bytes each and compress 2:1 to 3:1.

Ratio and floor are lower than for pickles, as every short invalid line takes as long to read as a game.
"""

MAX_LINE: Final = 1 << 16
"""Maximum length of a line in bytes. The longest game, 1,024 moves, takes 5 kB; a comment may follow it."""

_COMMENT: Final = re.compile(
    rb"#(?![ \t]*[0-9]*,[a-z]{1,2}[0-9])(?:[ \t][^\r]*|(?:" + FACT_NAMES + rb")[ \t]*[:=][^\r]*|)",
    re.IGNORECASE,
)
"""A comment: ``#`` alone, before a blank, or before the name of a fact. Moves after a size are none, nor are
lines that are not separated by a line feed: these are damaged games."""

_BUFFER: Final = 1 << 14
"""Bytes of the read buffer: at most ``MAX_LINE``, so that no blank line within it is too long."""


@dataclass(slots=True)
class GameRecord:
    """A game of a text, or a rejected record if ``reason`` is set."""

    number: int
    """Number for messages, from 1: of the line, counting all lines, or of the game."""
    line_idx: int
    """Number in ``line_idx``, from 1: of the line, counting those that are not blank, or of the game."""
    board_size: int = 0
    moves: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))
    """Cells (m,); ``PASS`` for a pass."""
    first_player: int = BLUE
    winner: int | None = None
    end_reason: str | None = None
    """One of ``schema.END_REASONS`` that the text states, or None."""
    swap: str | None = None
    """One of ``schema.SWAPS``, or None."""
    reason: Reason | None = None
    detail: str = ""

    @property
    def records(self) -> int:
        """Number of positions of the game; 1 for a rejected record."""
        return 1 if self.reason else len(self.moves) + 1

    def reject(self, error: FormatError, unit: str) -> None:
        """Reject the record.

        Args:
            error: The reason.
            unit: Unit of ``number``: "line" or "game".
        """
        self.reason, self.detail = error.code, f"{unit} {self.number}: {error}"


class GameBuilder:
    """Collects the moves of one game in the store's convention: blue connects top to bottom.

    A swap of sides changes nothing on the board. A swap of pieces replaces the first stone (r, c) by one of
    the other player at (c, r): the game is the one that this player begins with (c, r).

    Args:
        board_size: Cells along an edge.

    Raises:
        FormatError: "board-size", if the size is out of range.
    """

    def __init__(self, board_size: int) -> None:
        self.board_size = check_board_size(board_size)
        self.moves: list[int] = []
        self.first_player = BLUE
        self.swap: str | None = None
        self.winner: int | None = None
        self.end_reason: str | None = None
        self._ended = False

    @property
    def player(self) -> int:
        """The player to move: ``BLUE`` or ``RED``."""
        return (self.first_player + len(self.moves)) % 2

    def play(self, cell: int) -> None:
        """Add a move.

        Raises:
            FormatError: "move-order", if the game has ended.
        """
        self._check_not_ended(cell_name(cell, self.board_size))
        self.moves.append(cell)

    def skip(self) -> None:
        """Add a pass.

        Raises:
            FormatError: "move-order", if the game has ended, or has more passes than cells.
        """
        self._check_not_ended("a pass")
        self.moves.append(PASS)
        if self.moves.count(PASS) > self.board_size**2:
            raise _order_error("more passes than cells", f"{len(self.moves):,} moves", "fewer passes")

    def swap_players(self, kind: str) -> None:
        """Add a swap.

        Args:
            kind: "pieces" or "sides".

        Raises:
            FormatError: "move-order", if exactly one stone does not precede it.
        """
        self._check_not_ended("a swap")
        if len(self.moves) != 1 or self.moves[0] == PASS or self.swap is not None:
            raise _order_error(
                "a swap that is not the second move",
                f"a swap after {len(self.moves)} moves",
                "one stone before",
            )
        self.swap = kind
        if kind == "pieces":
            row, column = divmod(self.moves[0], self.board_size)
            self.moves[0] = column * self.board_size + row
            self.first_player = 1 - self.first_player

    def end(self, loser: int, end_reason: str) -> None:
        """End the game before the board decides it.

        Args:
            loser: ``BLUE`` or ``RED``.
            end_reason: One of ``schema.END_REASONS``.

        Raises:
            FormatError: "move-order", if the game has already ended.
        """
        self._check_not_ended("a second end")
        self.winner, self.end_reason = 1 - loser, end_reason
        self._ended = True

    def write_to(self, game: GameRecord) -> None:
        """Set the fields of a record.

        Raises:
            FormatError: "no-moves", if no stone was played; "repeated-move".
        """
        cells = np.array(self.moves, dtype=np.uint16)
        if not (cells != PASS).any():
            raise FormatError("a game without moves", code=Reason.NO_MOVES, expected="at least one stone")
        check_no_repeats(cells[cells != PASS], self.board_size)
        game.board_size, game.moves, game.first_player = self.board_size, cells, self.first_player
        game.winner, game.end_reason, game.swap = self.winner, self.end_reason, self.swap

    def _check_not_ended(self, found: str) -> None:
        if self._ended:
            raise _order_error("a move after the end of the game", found, "nothing after a resignation")


def _order_error(reason: str, found: str, expected: str) -> FormatError:
    return FormatError(reason, code=Reason.MOVE_ORDER, found=found, expected=expected)


class _FirstBytes(io.RawIOBase):
    """The first bytes of a file.

    Args:
        file: The file, which is closed together with this object.
        count: Maximum number of bytes to read.
    """

    def __init__(self, file: io.BufferedReader, count: int) -> None:
        self._file = file
        self._left = count

    def readable(self) -> bool:
        """Return True, as ``io.RawIOBase`` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read up to ``len(buffer)`` bytes into a writable buffer and return their number."""
        count = self._file.readinto(memoryview(buffer).cast("B")[: self._left])
        self._left -= count
        return count

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._file.close()


class GameReader(ABC):
    """Reader of a file of games: a :class:`hexdata.formats.source.SourceReader`.

    A game of m moves yields m + 1 positions; a pass is a move whose position has neither move nor policy. A
    record that is not a valid game counts as one record and is rejected. A stated winner is kept even if the
    final board has a winning chain of the other player. A game without one is rejected as "no-winner" unless
    the final board has a winning chain.

    Args:
        path: The file, gzipped or plain.
        limits: Limits on the decompressed size and on the compression ratio.
        salvage: If True, a damaged file yields the complete games before the damage instead of raising.
        part: Range of bytes to read of a text without gzip. Default None: the whole file.
    """

    format: str
    targets: tuple[str, ...] = ()
    unit: ClassVar[str] = "line"
    """Unit of ``GameRecord.number``, for messages."""
    _winner_hint: ClassVar[str]
    """Examples of a stated winner, for messages."""

    def __init__(
        self,
        path: str | AnyPath,
        *,
        limits: GunzipLimits = GAME_LIMITS,
        salvage: bool = False,
        part: FilePart | None = None,
    ) -> None:
        self.path = as_path(path)
        self.board_size: int | None = None if part is None else part.board_size
        self._start = 0 if part is None else part.start
        self.damage: FormatError | None = None
        self._salvage = salvage
        self._counts = Counter(winners_from_chain=0, bytes_between_games=0)
        self._run = RunHeader()
        self.header: dict[str, object] = {"counts": self._counts}
        raw = storage_of(self.path).open()
        if part is not None:
            raw = io.BufferedReader(_FirstBytes(raw, part.stop))
        file = GunzipFile(raw, limits, salvage=salvage)
        self._file = io.BufferedReader(file, _BUFFER)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @abstractmethod
    def _games(self) -> Iterator[GameRecord]:
        """Yield the games and rejected records of the file in order."""

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once, from front to back, in memory that does not grow with the file.

        All positions of a game are in the same batch. The board size is unknown before the first valid game:
        batches before it contain only rejections and have the schema of the smallest board.

        Yields:
            The records of the file in order, at most ``BATCH_ROWS`` per batch.

        Raises:
            FormatError: "corrupt-gzip", if the gzip stream is damaged or ends early and the file was not
                opened for salvage; "limit-size" or "limit-ratio".
        """
        record = 0
        for games in self._chunks():
            self._decide_winners(games)
            self._reject_other_sizes(games)
            batch = _batch(games, record, self.board_size or MIN_SIZE)
            record += batch.records
            yield batch
        self.header |= self._run.as_json()

    def _chunks(self) -> Iterator[list[GameRecord]]:
        """Yield the games in groups of at most ``BATCH_ROWS`` records."""
        chunk: list[GameRecord] = []
        records = 0
        for game in self._games():
            if records + game.records > BATCH_ROWS:
                yield chunk
                chunk, records = [], 0
            chunk.append(game)
            records += game.records
        if chunk:
            yield chunk

    def _handle_damage(self, error: FormatError) -> None:
        """Store the error in ``damage`` if the file is opened for salvage and is damaged; else raise it."""
        if error.code not in SALVAGEABLE:
            raise error.at(self.path)
        damage = FormatError(
            "the gzip stream is corrupt or ends early",
            code=Reason.CORRUPT_GZIP,
            path=self.path,
            record=error.record,
            found=error.found,
            hint=error.hint,
        )
        if not self._salvage:
            raise damage from error
        self.damage = damage

    def _decide_winners(self, read: list[GameRecord]) -> None:
        """Set the winner of games that state none from the winning chain on the final board.

        Hex has no draws, so a game without a chain is unfinished and is rejected.
        """
        undecided = [game for game in read if not game.reason and game.winner is None]
        for size in sorted({game.board_size for game in undecided}):
            games = [game for game in undecided if game.board_size == size]
            for game, winner in zip(games, _chain_winners(games, size).tolist(), strict=True):
                if winner in (BLUE, RED):
                    game.winner = winner
                    self._counts["winners_from_chain"] += 1
                else:
                    game.reject(
                        FormatError(
                            "no winner is stated and the final board has no winning chain",
                            code=Reason.NO_WINNER,
                            found=f"{len(game.moves)} moves",
                            expected=self._winner_hint,
                        ),
                        self.unit,
                    )

    def _reject_other_sizes(self, read: list[GameRecord]) -> None:
        for game in read:
            if game.reason:
                continue
            self.board_size = self.board_size or game.board_size
            if game.board_size != self.board_size:
                game.reject(
                    FormatError(
                        "another board size than the file's first game",
                        code=Reason.BOARD_SIZE,
                        found=game.board_size,
                        expected=self.board_size,
                    ),
                    self.unit,
                )


def is_comment(line: bytes) -> bool:
    """Return whether a line is a comment: ``# text``, ``#`` alone, or a fact of the run such as ``#seed: 1``.

    Any other line that is not blank is a record, which is rejected if it is no game.
    """
    return _COMMENT.fullmatch(line.strip()) is not None


class LineReader(GameReader):
    """Reader of a file with one game per line, blank lines, and comment lines as of :func:`is_comment`.

    Comment lines that state facts of the run, such as ``# Model: x``, are in ``header`` under "run",
    "run_changes" and "run_unread", as ``RunHeader.as_json`` describes.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._spelling: Counter[str] = Counter()
        self._counts["comments"] = 0
        self.header = {"spelling": self._spelling, "counts": self._counts}

    @abstractmethod
    def _read_game(self, text: str, game: GameRecord) -> None:
        """Read the game of a line.

        Raises:
            FormatError: The line is rejected.
        """

    def _games(self) -> Iterator[GameRecord]:
        before, filled = self._skip_to_start()
        lines = enumerate(self._filled_lines(before), start=filled + 1)
        for line_idx, (number, line, is_comment_line) in lines:
            if is_comment_line:
                self._counts["comments"] += 1
                self._run.read_comment(line)
                continue
            game = GameRecord(number, line_idx)
            self._run.begin_game()
            try:
                self._read_game(_text(line), game)
            except FormatError as error:
                game.reject(error, self.unit)
            yield game

    def _skip_to_start(self) -> tuple[int, int]:
        """Skip the bytes before the part; return their number of lines, and of lines that are not blank.

        Comment lines are read, as the last header holds for the games that follow.
        """
        number = filled = 0
        left = self._start
        within = False  # in a line too long to be read at once
        while left and (line := self._file.readline(min(left, MAX_LINE + 1))):
            left -= len(line)
            if not within:
                text = line.removeprefix(BOM_UTF8) if number == 0 else line
                filled += len(line) > MAX_LINE or not (not text or text.isspace())
                if is_comment(text):
                    self._run.read_comment(text)
            within = not line.endswith(b"\n")
            number += not within
        return number, filled

    def _filled_lines(self, number: int) -> Iterator[tuple[int, bytes, bool]]:
        """Yield each line that is not blank: its number, its first bytes, and whether it is a comment.

        Args:
            number: Number of lines before.
        """
        try:
            while line := self._file.readline(MAX_LINE + 1):
                number += 1
                size = len(line)
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)  # some editors write a byte order mark
                is_record = False
                if (not line or line.isspace()) and len(line) <= MAX_LINE:
                    blank = self._blank_lines()
                    number += blank.count(b"\n")
                    size += len(blank)
                else:
                    is_record = not is_comment(line)
                    yield number, line, not is_record
                while len(line) > MAX_LINE and not line.endswith(b"\n"):
                    line = self._file.readline(MAX_LINE + 1)
                    size += len(line)
                if not is_record:
                    self._counts["bytes_between_games"] += size
        except FormatError as error:
            self._handle_damage(error)

    def _blank_lines(self) -> bytes:
        """Return all blank lines in the read buffer at once."""
        ahead = self._file.peek()
        blank = ahead[: len(ahead) - len(ahead.lstrip())]
        return self._file.read(blank.rfind(b"\n") + 1)


def _text(line: bytes) -> str:
    if len(line) > MAX_LINE:
        raise FormatError(
            "the line is too long", code=Reason.LINE_TOO_LONG, expected=f"at most {MAX_LINE:,} bytes"
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise FormatError("not UTF-8 text", code=Reason.NOT_UTF8, found=str(error)) from error


def _flatten(games: Sequence[GameRecord]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """Return the concatenated moves of all games, and the number of moves of each."""
    moves = [np.empty(0, np.uint16), *(game.moves for game in games)]
    return np.concatenate(moves), np.array([len(game.moves) for game in games], dtype=np.int64)


def _chain_winners(games: Sequence[GameRecord], n: int) -> npt.NDArray[np.int8]:
    """Return the winner that each final board shows: int8 (G,), -1 for none."""
    moves, lengths = _flatten(games)
    first = np.array([game.first_player for game in games])
    ply = np.arange(len(moves)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    stones = np.zeros((len(games), 2, n * n), dtype=np.uint8)
    game = np.repeat(np.arange(len(games)), lengths)
    played = moves != PASS
    stones[game[played], ((ply + np.repeat(first, lengths)) % 2)[played], moves[played]] = 1
    return winner_of(stones.reshape(-1, 2, n, n))


def _batch(games: list[GameRecord], record: int, n: int) -> RawBatch:
    """Return a batch of the games, whose records are numbered from ``record`` on."""
    counts = np.array([game.records for game in games], dtype=np.int64)
    firsts = record + np.cumsum(counts) - counts
    is_game = np.array([not game.reason for game in games])
    rejected = [
        Rejection(first, game.reason, game.detail)
        for first, game in zip(firsts.tolist(), games, strict=True)
        if game.reason
    ]
    return RawBatch(_positions([game for game in games if not game.reason], firsts[is_game], n), rejected)


def _positions(games: list[GameRecord], first_records: npt.NDArray[np.int64], n: int) -> pa.RecordBatch:
    """Return every position of the games as ``raw_schema(n)``.

    Args:
        games: The games, in order.
        first_records: Record number of the first position of each game, (len(games),).
        n: Cells along an edge.
    """
    moves, lengths = _flatten(games)
    totals = lengths + 1
    rows = int(totals.sum())
    first = np.array([game.first_player for game in games], dtype=np.int64)
    boards = replay_packed(moves, lengths, n, first)
    ply = np.arange(rows) - np.repeat(np.cumsum(totals) - totals, totals)
    is_final = ply == np.repeat(lengths, totals)
    next_move = np.full(rows, PASS, dtype=np.uint16)
    next_move[~is_final] = moves
    winner = np.repeat(np.array([game.winner for game in games], dtype=np.uint8), totals)
    columns = {
        "record": np.repeat(first_records, totals) + ply,
        "board": pa.Array.from_buffers(pa.binary(boards.shape[1]), rows, [None, pa.py_buffer(boards)]),
        "move": pa.array(next_move, mask=next_move == PASS),
        "value": winner.astype(np.float64),
        "player_to_move": ((ply + np.repeat(first, totals)) % 2).astype(np.uint8),
        "line_idx": np.repeat(np.array([game.line_idx for game in games], dtype=np.int32), totals),
        "position_in_game": ply.astype(np.uint16),
        "total_positions": np.repeat(totals, totals).astype(np.uint16),
        "winner": winner,
        "end_reason": _texts([game.end_reason for game in games], END_REASONS, totals),
        "swap": _texts([game.swap for game in games], SWAPS, totals),
    }
    schema = raw_schema(n)
    arrays = [
        _array(columns[field.name], field.type) if field.name in columns else pa.nulls(rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.DictionaryArray) else pa.array(values, kind)


def _texts(
    texts: Sequence[str | None], possible: Sequence[str], totals: npt.NDArray[np.int64]
) -> pa.DictionaryArray:
    """Return a text per position, with the same dictionary in every batch, as Arrow files require."""
    index = np.array([-1 if text is None else possible.index(text) for text in texts], dtype=np.int8)
    indices = np.repeat(index, totals)
    return pa.DictionaryArray.from_arrays(
        pa.array(indices, mask=indices < 0), pa.array(possible, pa.string())
    )
