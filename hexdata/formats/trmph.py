"""Reader and writer of TRMPH text, one game per line.

The reader accepts plain and gzipped text and converts each line to the positions of its game, or to a
rejection with a reason. It repairs no data. The writer produces plain text.
"""

from __future__ import annotations

import io
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import (
    BLUE,
    MIN_SIZE,
    RED,
    TrmphLine,
    check_no_repeats,
    format_moves,
    parse_moves,
    replay_packed,
    split_trmph,
    winner_of,
)
from hexdata.errors import FormatError, Reason
from hexdata.fill import fill_to_stones, games_to_fill, never_filled
from hexdata.formats.gunzip import GunzipFile, GunzipLimits
from hexdata.formats.run_header import RunHeader
from hexdata.formats.source import BATCH_ROWS, SALVAGEABLE, FilePart, RawBatch, Rejection
from hexdata.schema import raw_schema
from hexdata.storage import AnyPath, as_path, storage_of

__all__ = ["DEFAULT_LIMITS", "TrmphReader", "is_game_line", "looks_like_trmph", "write_trmph"]

DEFAULT_LIMITS: Final = GunzipLimits(decompressed_bytes=1 << 40, ratio=100, ratio_floor=4 << 20)
"""Limits for TRMPH files. Real games take about 120 bytes each and compress 2:1 to 3:1.

Ratio and floor are lower than for pickles, as every short invalid line takes as long to read as a game.
"""

_MAX_LINE: Final = 1 << 16
"""Maximum length of a line in bytes. The longest game, 676 moves, takes 2 kB; a comment may follow it."""

_BUFFER: Final = 1 << 14
"""Bytes of the read buffer: at most ``_MAX_LINE``, so that no blank line within it is too long."""

_COMMENT: Final = re.compile(rb"#(?![0-9]+,)")
_GAME: Final = re.compile(rb"^[ \t]*(?:https?://[^\s#]*)?#[0-9]{1,3},(?:[a-z][0-9]|\s|$)", re.MULTILINE)


def looks_like_trmph(head: bytes) -> bool:
    """Return whether the beginning of a file is TRMPH text.

    It is if it contains a game, or if it contains only comments and blank lines.

    Args:
        head: The first bytes of the file, decompressed; some kB are enough.
    """
    if not head or b"\0" in head:
        return False
    text = head.removeprefix(BOM_UTF8)
    return _GAME.search(text) is not None or all(
        not line or line.startswith(b"#") for line in map(bytes.strip, text.splitlines())
    )


def is_game_line(line: bytes) -> bool:
    """Return whether a line is neither blank nor a comment."""
    return bool(line.strip()) and not _COMMENT.match(line.strip())


@dataclass(slots=True)
class _Line:
    """A line that is neither blank nor a comment: a game, or a rejected line if ``reason`` is set."""

    number: int
    """Line number, counting all lines from 1, as in an editor."""
    line_idx: int
    """Line number, counting the lines that are not blank from 1, as in the legacy tool."""
    board_size: int = 0
    moves: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))
    winner: int | None = None
    reason: Reason | None = None
    detail: str = ""

    @property
    def records(self) -> int:
        """Number of positions of the game; 1 for a rejected line."""
        return 1 if self.reason else len(self.moves) + 1

    def reject(self, error: FormatError) -> None:
        self.reason, self.detail = error.code, f"line {self.number}: {error}"


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


class TrmphReader:
    """Reader of one TRMPH file: a :class:`hexdata.formats.source.SourceReader`.

    A game of m moves yields m + 1 positions. A line that is not a valid game counts as one record and is
    rejected with one of these reasons: "trmph-syntax", "no-moves", "trmph-cell", "repeated-move",
    "board-size" (an invalid size, or another size than the first valid game), "no-winner" (none is stated
    and the final board has no winning chain), "line-too-long" or "not-utf8".

    A stated winner is kept even if the final board has a winning chain of the other player.

    Comment lines that state facts of the run, such as ``# Model: x``, are in ``header`` under "run" and
    "run_changes", as ``RunHeader.as_json`` describes.

    Args:
        path: The file, gzipped or plain.
        limits: Limits on the decompressed size and on the compression ratio.
        salvage: If True, a damaged file yields the complete lines before the damage instead of raising.
        part: Range of bytes to read of a text without gzip. Its lines have the numbers of the whole file, and
            its records are numbered from 0. Default None: the whole file.
    """

    format: str = "trmph"
    targets: tuple[str, ...] = ()

    def __init__(
        self,
        path: str | AnyPath,
        *,
        limits: GunzipLimits = DEFAULT_LIMITS,
        salvage: bool = False,
        part: FilePart | None = None,
    ) -> None:
        self.path = as_path(path)
        self.board_size: int | None = None if part is None else part.board_size
        self._start = 0 if part is None else part.start
        self.damage: FormatError | None = None
        self._salvage = salvage
        self._spelling: Counter[str] = Counter()
        self._counts = Counter(comments=0, winners_from_chain=0)
        self._run = RunHeader()
        self.header: dict[str, object] = {"spelling": self._spelling, "counts": self._counts}
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
        for lines in self._chunks():
            self._decide_winners(lines)
            self._reject_other_sizes(lines)
            batch = _batch(lines, record, self.board_size or MIN_SIZE)
            record += batch.records
            yield batch
        self.header |= self._run.as_json()

    def _chunks(self) -> Iterator[list[_Line]]:
        """Yield the lines in groups of at most ``BATCH_ROWS`` records."""
        chunk: list[_Line] = []
        records = 0
        for line in self._lines():
            if records + line.records > BATCH_ROWS:
                yield chunk
                chunk, records = [], 0
            chunk.append(line)
            records += line.records
        if chunk:
            yield chunk

    def _lines(self) -> Iterator[_Line]:
        before, filled = self._skip_to_start()
        for line_idx, (number, line) in enumerate(self._filled_lines(before), start=filled + 1):
            if _COMMENT.match(line.strip()):
                self._counts["comments"] += 1
                self._run.read_comment(line)
                continue
            game = _Line(number, line_idx)
            self._run.begin_game()
            try:
                self._read_game(line, game)
            except FormatError as error:
                game.reject(error)
            yield game

    def _skip_to_start(self) -> tuple[int, int]:
        """Skip the bytes before the part; return their number of lines, and of lines that are not blank.

        Comment lines are read, as the last header holds for the games that follow.
        """
        number = filled = 0
        left = self._start
        within = False  # in a line too long to be read at once
        while left and (line := self._file.readline(min(left, _MAX_LINE + 1))):
            left -= len(line)
            if not within:
                text = line.removeprefix(BOM_UTF8) if number == 0 else line
                filled += len(line) > _MAX_LINE or not (not text or text.isspace())
                if _COMMENT.match(text.strip()):
                    self._run.read_comment(text)
            within = not line.endswith(b"\n")
            number += not within
        return number, filled

    def _filled_lines(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield number and bytes of each line that is not blank; only the beginning of lines too long.

        Args:
            number: Number of lines before.
        """
        try:
            while line := self._file.readline(_MAX_LINE + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(BOM_UTF8)  # some editors write a byte order mark
                if (not line or line.isspace()) and len(line) <= _MAX_LINE:
                    number += self._skip_blank_lines()
                    continue
                yield number, line
                while len(line) > _MAX_LINE and not line.endswith(b"\n"):
                    line = self._file.readline(_MAX_LINE + 1)
        except FormatError as error:
            self._handle_damage(error)

    def _skip_blank_lines(self) -> int:
        """Skip all blank lines in the read buffer at once, and return their number."""
        ahead = self._file.peek()
        blank = ahead[: len(ahead) - len(ahead.lstrip())]
        return self._file.read(blank.rfind(b"\n") + 1).count(b"\n")

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

    def _read_game(self, line: bytes, game: _Line) -> None:
        if len(line) > _MAX_LINE:
            raise FormatError(
                "the line is too long",
                code=Reason.LINE_TOO_LONG,
                expected=f"at most {_MAX_LINE:,} bytes",
            )
        try:
            parts = split_trmph(line.decode())
        except UnicodeDecodeError as error:
            raise FormatError("not UTF-8 text", code=Reason.NOT_UTF8, found=str(error)) from error
        if not parts.moves:
            raise FormatError("a game without moves", code=Reason.NO_MOVES, expected="#13,a1b2c3 b")
        moves = parse_moves(parts.moves, parts.board_size)
        check_no_repeats(moves, parts.board_size)
        game.board_size, game.moves, game.winner = parts.board_size, moves, parts.winner
        self._spelling[_spelling(parts)] += 1

    def _decide_winners(self, lines: list[_Line]) -> None:
        """Set the winner of games that state none from the winning chain on the final board.

        Hex has no draws, so a game without a chain is unfinished and is rejected.
        """
        undecided = [line for line in lines if not line.reason and line.winner is None]
        for size in sorted({line.board_size for line in undecided}):
            games = [line for line in undecided if line.board_size == size]
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
                            expected="b or r after the moves",
                        )
                    )

    def _reject_other_sizes(self, lines: list[_Line]) -> None:
        for line in lines:
            if line.reason:
                continue
            self.board_size = self.board_size or line.board_size
            if line.board_size != self.board_size:
                line.reject(
                    FormatError(
                        "another board size than the file's first game",
                        code=Reason.BOARD_SIZE,
                        found=line.board_size,
                        expected=self.board_size,
                    )
                )


def _spelling(parts: TrmphLine) -> str:
    """Return the notation of a line, such as "#13,... b/r"."""
    prefix = "http://...#" if parts.url else "#"
    if parts.winner_text is None:
        return f"{prefix}{parts.board_size},..."
    return f"{prefix}{parts.board_size},... {'1/2' if parts.winner_text in '12' else 'b/r'}"


def _flatten(games: Sequence[_Line]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """Return the concatenated moves of all games, and the number of moves of each."""
    moves = [np.empty(0, np.uint16), *(game.moves for game in games)]
    return np.concatenate(moves), np.array([len(game.moves) for game in games], dtype=np.int64)


def _chain_winners(games: Sequence[_Line], n: int) -> npt.NDArray[np.int8]:
    moves, lengths = _flatten(games)
    fill = games_to_fill(moves, lengths, np.zeros_like(lengths), n)
    final_ply = np.full(len(fill), never_filled(fill.dtype), fill.dtype)
    return winner_of(fill_to_stones(fill, final_ply).reshape(-1, 2, n, n))


def _batch(lines: list[_Line], record: int, n: int) -> RawBatch:
    """Return a batch of the lines, whose records are numbered from ``record`` on."""
    counts = np.array([line.records for line in lines], dtype=np.int64)
    firsts = record + np.cumsum(counts) - counts
    is_game = np.array([not line.reason for line in lines])
    rejected = [
        Rejection(first, line.reason, line.detail)
        for first, line in zip(firsts.tolist(), lines, strict=True)
        if line.reason
    ]
    return RawBatch(_positions([line for line in lines if not line.reason], firsts[is_game], n), rejected)


def _positions(games: list[_Line], first_records: npt.NDArray[np.int64], n: int) -> pa.RecordBatch:
    """Return every position of the games as ``raw_schema(n)``.

    Args:
        games: The games, in order.
        first_records: Record number of the first position of each game, (len(games),).
        n: Cells along an edge.
    """
    moves, lengths = _flatten(games)
    totals = lengths + 1
    rows = int(totals.sum())
    boards = replay_packed(moves, lengths, n)
    ply = np.arange(rows) - np.repeat(np.cumsum(totals) - totals, totals)
    is_final = ply == np.repeat(lengths, totals)
    next_move = np.zeros(rows, dtype=np.uint16)
    next_move[~is_final] = moves
    winner = np.repeat(np.array([game.winner for game in games], dtype=np.uint8), totals)
    columns = {
        "record": np.repeat(first_records, totals) + ply,
        "board": pa.Array.from_buffers(pa.binary(boards.shape[1]), rows, [None, pa.py_buffer(boards)]),
        "move": pa.array(next_move, mask=is_final),
        "value": winner.astype(np.float64),
        "player_to_move": (ply % 2).astype(np.uint8),
        "line_idx": np.repeat(np.array([game.line_idx for game in games], dtype=np.int32), totals),
        "position_in_game": ply.astype(np.uint16),
        "total_positions": np.repeat(totals, totals).astype(np.uint16),
        "winner": winner,
    }
    schema = raw_schema(n)
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


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
