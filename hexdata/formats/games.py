"""Games of a source: the record that each reader of games returns, and the batches that are made of them.

A reader of TRMPH, HexWorld, SGF or another format of games returns :class:`GameRecord` objects.
``GameReader`` decides winners, rejects games of another board size, and makes raw batches with all positions
of the games.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import BLUE, MIN_SIZE, PASS, check_board_size, check_no_repeats, replay_packed, winner_of
from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipFile, GunzipLimits, text_of
from hexdata.formats.source import BATCH_ROWS, FilePart, FileReader, RawBatch, Rejection, raw_batch
from hexdata.policy import SparsePolicies
from hexdata.schema import END_REASONS, FULL_WEIGHT, SWAPS
from hexdata.storage import AnyPath, storage_of

_MAX_WHOLE: Final = 128 << 20
"""Maximum size of a text that is no lines, and is read as a whole: 100,000 games in SGF."""


@dataclass(slots=True)
class GameRecord:
    """A game of a source, or a rejected record if ``reason`` is set.

    A reader sets ``board_size``, ``moves`` and ``winner``; or it calls :meth:`begin`, the methods that add
    moves, and :meth:`finish`. They give the game in the store's convention: blue connects top to bottom. A
    swap of sides changes nothing on the board. A swap of pieces replaces the first stone (r, c) by one of the
    other player at (c, r): the game is the one that this player begins with (c, r).
    """

    number: int
    """Number for messages, from 1: of the line, counting all lines, or of the game."""
    line_idx: int
    """Number in ``line_idx``, from 1: of the line, counting those that are not blank, or of the game."""
    board_size: int = 0
    played: list[int] = field(default_factory=list)
    """Cells of the moves so far, ``PASS`` for a pass; until :meth:`finish`."""
    moves: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))
    """Cells (m,); ``PASS`` for a pass."""
    first_player: int = BLUE
    setup: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    """Cells of the stones on the board before the first move: blue ones, red ones."""
    first_ply: int = 0
    """``position_in_game`` of the first position, not 0 after stones that were set up."""
    winner: int | None = None
    end_reason: str | None = None
    """One of ``schema.END_REASONS`` that the text states, or None."""
    swap: str | None = None
    """One of ``schema.SWAPS``, or None."""
    weights: npt.NDArray[np.float32] | None = None
    """Weight of the policy of each move, (m,), if the source states it."""
    policies: SparsePolicies | None = None
    """Policies of the moves, if the source has them."""
    has_policy: npt.NDArray[np.bool_] | None = None
    """Whether each move has one of ``policies``, (m,). None: no move."""
    root_values: npt.NDArray[np.float64] | None = None
    """Chance of red at each move according to the search, (m,), NaN where unknown, if the source has them."""
    metadata: list[str | None] | None = None
    """JSON text of each position, (m + 1,), if the source has them."""
    reason: Reason | None = None
    detail: str = ""
    other_size: int | None = None
    """Its board size, if it is rejected for it."""

    @property
    def records(self) -> int:
        """Number of positions of the game; 1 for a rejected record."""
        return 1 if self.reason else len(self.moves) + 1

    def reject(self, error: FormatError, unit: str) -> None:
        """Reject the record; ``unit`` is that of ``number``: "line" or "game"."""
        self.reason, self.detail = error.code, f"{unit} {self.number}: {error}"
        if error.code == Reason.BOARD_SIZE and isinstance(error.found, int):
            self.other_size = error.found

    def begin(self, board_size: int, blue: Sequence[int] = (), red: Sequence[int] = ()) -> None:
        """Begin the game.

        Args:
            board_size: Cells along an edge.
            blue: Cells of blue stones that were set up.
            red: The same for red.

        Raises:
            FormatError: "board-size", if the size is out of range; "setup-stones", if a cell has two stones.
        """
        self.board_size, self.setup = check_board_size(board_size), ([*blue], [*red])
        if len({*blue, *red}) < len(blue) + len(red):
            raise FormatError("a cell with two stones that were set up", Reason.SETUP_STONES)

    @property
    def player(self) -> int:
        """The player to move: ``BLUE`` or ``RED``."""
        return (self.first_player + len(self.played)) % 2

    def play(self, cell: int) -> None:
        """Add a move, or a pass if ``cell`` is ``PASS``.

        Raises:
            FormatError: "move-order", if the game has ended, or has more passes than cells; "trmph-cell".
        """
        self._check_not_ended()
        self.played.append(cell)
        if cell != PASS and not 0 <= cell < self.board_size**2:
            raise FormatError(f"no cell of a board of size {self.board_size}", Reason.TRMPH_CELL, cell)
        # Each pass is one more position with a board, so without a limit a small file could make millions.
        if cell == PASS and self.played.count(PASS) > self.board_size**2:
            raise FormatError("more passes than cells", Reason.MOVE_ORDER)

    def swap_players(self, kind: str) -> None:
        """Add a swap of "pieces" or "sides".

        Raises:
            FormatError: "move-order", if exactly one stone does not precede it.
        """
        self._check_not_ended()
        if len(self.played) != 1 or self.played[0] == PASS or self.swap is not None or any(self.setup):
            raise FormatError("a swap that is not the second move", Reason.MOVE_ORDER)
        self.swap = kind
        if kind == "pieces":
            self.played[0] = mirrored(self.played[0], self.board_size)
            self.first_player = 1 - self.first_player

    def end(self, loser: int, end_reason: str) -> None:
        """End the game before the board decides it, for one of ``schema.END_REASONS``.

        Raises:
            FormatError: "move-order", if the game has already ended.
        """
        self._check_not_ended()
        self.winner, self.end_reason = 1 - loser, end_reason

    def _check_not_ended(self) -> None:
        if self.winner is not None:
            raise FormatError("a move after the end of the game", Reason.MOVE_ORDER)

    def finish(self) -> None:
        """Set ``moves`` and ``first_ply``.

        Raises:
            FormatError: "no-moves", if there is no stone; "repeated-move".
        """
        blue, red = self.setup
        self.moves = np.array(self.played, dtype=np.uint16)
        stones = np.concatenate([blue, red, self.moves[self.moves != PASS]])
        if not len(stones):
            raise FormatError("a game without moves", Reason.NO_MOVES, expected="at least one stone")
        check_no_repeats(stones.astype(np.uint16), self.board_size)
        if blue or red:
            # The ply at which blue, who begins, can have these stones: the players move in turn or pass.
            self.first_ply = max(2 * len(blue) - 1, 2 * len(red))
            # One more pass if that would be the ply of the other player.
            self.first_ply += (self.first_ply + self.first_player) % 2


def mirrored(cell: int, n: int) -> int:
    """Return the image of a cell (r, c) under the reflection in the long diagonal, (c, r)."""
    return cell % n * n + cell // n


def is_utf8(text: bytes) -> bool:
    """Return whether a text is in UTF-8."""
    return text.isascii() or text.decode(errors="ignore").encode() == text


class GameReader(FileReader):
    """Reader of a file of games: a :class:`hexdata.formats.source.SourceReader`.

    A game of m moves yields m + 1 positions; a pass is a move whose position has neither move nor policy. A
    record that is not a valid game counts as one record and is rejected. A stated winner is kept even if the
    final board has a winning chain of the other player. A game without one is rejected as "no-winner" unless
    the final board has a winning chain.

    Args:
        path: The file, gzipped or plain.
        salvage: If True, a damaged file yields the complete games before the damage instead of raising.
        part: Range of bytes to read of a text without gzip. Default None: the whole file.
    """

    limits: ClassVar[GunzipLimits] = GunzipLimits(decompressed_bytes=1 << 40, ratio=100, ratio_floor=4 << 20)
    """Real TRMPH games take about 120 bytes each and compress 2:1 to 3:1. Ratio and floor are lower than for
    pickles, as every short invalid line takes as long to read as a game."""
    unit: ClassVar[str] = "line"
    """Unit of ``GameRecord.number``, for messages."""
    winner_hint: ClassVar[str] = "a stated winner, or a winning chain"
    """Examples of a stated winner, for messages."""
    states_size: ClassVar[bool] = True
    """Whether games state their board size. Otherwise only their winning chains show it."""

    def __init__(self, path: str | AnyPath, *, salvage: bool = False, part: FilePart | None = None) -> None:
        super().__init__(path, salvage=salvage)
        self.board_size = None if part is None else part.board_size
        self._part = part
        # A Counter takes several times as long to make, which small files would notice.
        self._counts: dict[str, int] = defaultdict(int, winners_from_chain=0, bytes_between_games=0)
        self.header = {"counts": self._counts}
        self.content: bytes | None = None
        """All bytes of the file, a text without gzip, if they are known: opening a small file once more costs
        as much as reading its games."""

    @cached_property
    def _stream(self) -> Any:
        """The file, without gzip."""
        if self.content is not None:
            return io.BytesIO(self.content)
        file = GunzipFile(storage_of(self.path).open(), self.limits, salvage=self._salvage)
        return self._opened.enter_context(file)

    def _read_whole(self) -> bytes:
        """Return the text as a whole; if a damaged one is salvaged, the part before the damage.

        Raises:
            FormatError: "limit-size", if it is too large; or the damage.
        """
        data = bytearray()
        try:
            text = text_of(self._stream)
            while len(data) <= _MAX_WHOLE and (piece := text.read1()):
                data += piece
        except FormatError as error:
            self._stop_at(error)
        if len(data) > _MAX_WHOLE:
            raise FormatError(f"more than {_MAX_WHOLE:,} bytes", Reason.LIMIT_SIZE, path=self.path)
        return bytes(data)

    def _games(self) -> Iterator[GameRecord]:
        """Yield the games and rejected records of the file in order."""
        raise NotImplementedError

    def _read_game(self, content: Any, game: GameRecord) -> None:
        """Set the fields of a game.

        Raises:
            FormatError: The game is rejected.
        """
        raise NotImplementedError

    def _game(self, content: Any, number: int, line_idx: int) -> GameRecord:
        """Return a game, or a rejected record if :meth:`_read_game` raises."""
        game = GameRecord(number, line_idx)
        try:
            self._read_game(content, game)
        except FormatError as error:
            game.reject(error, self.unit)
        return game

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once, from front to back, in memory that does not grow with the file.

        All positions of a game are in the same batch. The board size is unknown before the first valid game:
        batches before it contain only rejections and have the schema of the smallest board.

        Yields:
            The records of the file in order, at most ``BATCH_ROWS`` per batch.

        Raises:
            FormatError: "corrupt-gzip" or "truncated", if the gzip stream is damaged or ends early and the
                file was not opened for salvage; "limit-size" or "limit-ratio".
        """
        first, games, records = 0, list[GameRecord](), 0
        for game in self._games():
            # A game has at most 2,049 positions (1,024 moves, as many passes), so it fits into a batch.
            if records + game.records > BATCH_ROWS:
                yield self._batch(games, first)
                # Games that are rejected only now are one record, not as many as they had positions.
                first, games, records = first + sum(each.records for each in games), [], 0
            games.append(game)
            records += game.records
        if games:
            yield self._batch(games, first)

    def _batch(self, games: list[GameRecord], record: int) -> RawBatch:
        """Return games, with their winners, as a batch whose first record has a number."""
        # What other faults games of other sizes have does not matter.
        if self._is_size_selected and self.states_size:
            self._reject_other_sizes(games)
        # Hex has no draws: a game without a stated winner is unfinished unless its final board has a chain.
        undecided = [game for game in games if not game.reason and game.winner is None]
        for size in {game.board_size for game in undecided}:
            same = [game for game in undecided if game.board_size == size]
            for game, winner in zip(same, chain_winners(same, size).tolist(), strict=True):
                game.winner = winner
                if winner < 0:
                    found = "no winner is stated and no chain wins"
                    game.reject(FormatError(found, Reason.NO_WINNER, None, self.winner_hint), self.unit)
                self._counts["winners_from_chain"] += winner >= 0
        self._reject_other_sizes(games)
        numbered, rejected = [], []
        for game in games:
            if game.reason:
                rejected.append(Rejection(record, game.reason, game.detail, game.other_size))
            else:
                numbered.append((record, game))
            record += game.records
        return GameBatch(numbered, rejected, self.board_size or MIN_SIZE, self.targets)

    def _reject_other_sizes(self, games: list[GameRecord]) -> None:
        reason = "another board size than the selected one, or than the first game of the file"
        for game in games:
            if not game.reason and game.board_size != (self.board_size or game.board_size):
                error = FormatError(reason, Reason.BOARD_SIZE, game.board_size, self.board_size)
                game.reject(error, self.unit)
            elif not game.reason:
                self.board_size = game.board_size

    def _note(self, name: str, count: int) -> None:
        """Count what a game has that was not read as it is written, for the notes on the source."""
        if count:
            self._counts[name] += count


# Positions


def _setups(games: Sequence[GameRecord], n: int) -> npt.NDArray[np.uint8]:
    """Return the stones before the first move of each game, uint8 (G, 2·n·n)."""
    stones = np.zeros((len(games), 2 * n * n), dtype=np.uint8)
    for row, game in zip(stones, games, strict=True):
        blue, red = game.setup
        row[[*blue, *(n * n + cell for cell in red)]] = 1
    return stones


def chain_winners(games: Sequence[GameRecord], n: int) -> npt.NDArray[np.int8]:
    """Return the winner that each final board shows: int8 (G,), -1 for none."""
    # Cells do not repeat within a game, so all its stones can be placed at once, in any order.
    stones = _setups(games, n)
    for row, game in zip(stones, games, strict=True):
        players = (np.arange(len(game.moves)) + game.first_player) % 2
        row[(players * n * n + game.moves)[game.moves != PASS]] = 1
    return winner_of(stones.reshape(-1, 2, n, n))


class GameBatch(RawBatch):
    """A batch of games. Its positions are made when they are read, those of joined batches at once.

    A small file has few games, and the steps that make positions cost the same for any number of games.

    Args:
        games: The games, in order, each with the record number of its first position.
        rejected: The rejected records.
        board_size: N.
        targets: Optional columns: "policy_weight" if the games have weights, "root_value" if they have these.
    """

    games: Sequence[tuple[int, GameRecord]]
    shape: tuple[int, tuple[str, ...]]

    def __init__(self, games: object, rejected: object, board_size: int, targets: tuple[str, ...]) -> None:
        # The dataclass is frozen, and its field ``positions`` is computed.
        self.__dict__.update(games=games, rejected=rejected, shape=(board_size, targets))

    @cached_property
    def rows(self) -> int:
        """Number of positions."""
        return sum(game.records for _, game in self.games)

    def stated(self, column: str) -> int:  # noqa: ARG002
        """Return the number of positions: all have a game and a ply."""
        return self.rows

    @property
    def nbytes(self) -> int:
        """Size of the positions in bytes, approximately: 150 each, and 6 per cell of a policy."""
        return 150 * self.rows + 6 * sum(len(game.policies.cells) for _, game in self.games if game.policies)

    @staticmethod
    def join(batches: Sequence[RawBatch]) -> pa.RecordBatch:
        """Return the positions of batches with the same board size and targets."""
        listed = [batch for batch in batches if isinstance(batch, GameBatch)]
        if len(listed) < len(batches):  # some positions were rejected
            return RawBatch.join(batches)
        return GameBatch([game for each in listed for game in each.games], [], *listed[-1].shape).positions

    @cached_property
    def positions(self) -> pa.RecordBatch:
        """Every position of the games as ``raw_schema(board_size, targets)``."""
        games, (n, targets) = [game for _, game in self.games], self.shape
        lengths = np.array([len(game.moves) for game in games], np.int64)
        # Each list begins with an empty part, as NumPy concatenates no empty list.
        moves = np.concatenate([np.empty(0, np.uint16), *(game.moves for game in games)])
        totals = lengths + 1
        # One row per position: a game of m moves has m + 1 of them, and the last one has no move.
        ply = np.arange(totals.sum()) - np.repeat(np.cumsum(totals) - totals, totals)
        is_final = ply == np.repeat(lengths, totals)

        def spread(numbers: Iterable[Any]) -> npt.NDArray[np.int64]:
            """Return a number of each game for all its positions."""
            return np.repeat(np.fromiter(numbers, np.int64, len(games)), totals)

        def texts(possible: Sequence[str], found: Iterable[str | None]) -> pa.DictionaryArray:
            """Return texts with the same dictionary in every batch, as Arrow files require."""
            index = spread(possible.index(text) if text else -1 for text in found)
            indices = pa.array(index, pa.int8(), mask=index < 0)
            return pa.DictionaryArray.from_arrays(indices, pa.array(possible, pa.string()))

        def of_moves(empty: Any, parts: Sequence[Any]) -> npt.NDArray[Any] | None:
            """Return values of the moves for all positions, None if no game has them."""
            if all(part is None for part in parts):
                return None
            values = np.full(len(ply), empty, parts[0].dtype)
            values[~is_final] = np.concatenate(parts)
            return values

        # The boards follow from the moves, in addition to stones that were set up.
        first_player = np.array([game.first_player for game in games], np.int64)
        boards = replay_packed(moves, lengths, n, first_player)
        if any(any(game.setup) for game in games):
            boards |= np.repeat(np.packbits(_setups(games, n), axis=1), totals, axis=0)
        next_move = np.full(len(ply), PASS, np.uint16)
        next_move[~is_final] = moves
        winner, before = spread(game.winner for game in games), spread(game.first_ply for game in games)
        policy = of_moves(False, [game.has_policy for game in games])
        if policy is not None:
            given = SparsePolicies.join([game.policies for game in games if game.policies is not None])
            policy = given.to_arrow(policy)
        root_value = of_moves(np.nan, [game.root_values for game in games])
        metadata = None
        if any(game.metadata is not None for game in games):
            metadata = [text for game in games for text in game.metadata or [None] * game.records]
        columns = {
            "record": spread(record for record, _ in self.games) + ply,
            # A pass is a move in the game, but null in the table, which has cells only.
            "move": pa.array(next_move, mask=next_move == PASS),
            # The numbers of the players are the values of the store: 0 if blue wins.
            "value": winner.astype(np.float64),
            "player_to_move": (ply + np.repeat(first_player, totals)) % 2,
            "line_idx": spread(game.line_idx for game in games),
            "position_in_game": before + ply,
            "total_positions": before + np.repeat(totals, totals),
            "winner": winner,
            "end_reason": texts(END_REASONS, [game.end_reason for game in games]),
            "swap": texts(SWAPS, [game.swap for game in games]),
            "policy": policy,
            "policy_weight": of_moves(FULL_WEIGHT, [game.weights for game in games]),
            "root_value": None if root_value is None else pa.array(root_value, from_pandas=True),
            "metadata": metadata,
        }
        return raw_batch(n, targets, boards, columns)
