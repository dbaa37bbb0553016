"""Extraction of the games of one file, as chunks, from the raw batches of a reader.

The games are grouped, named and checked. The whole file is held in memory. The caller opens the file, assigns
splits, and handles bad files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import BLUE, game_hash
from hexdata.errors import FormatError, Reason
from hexdata.games.convention import Convention, Votes, decide, votes_text
from hexdata.games.evidence import SourceEvidence, with_findings
from hexdata.games.find import EVIDENCE, GAMES, ROWS, Grouping, column, find_games, identity_hash
from hexdata.games.findings import (
    Finding,
    count_game_votes,
    find_positions,
    findings_without_game,
    flag_lists,
    flags_of,
    game_findings,
    with_played_moves,
)
from hexdata.games.labels import players_of
from hexdata.live.chunk import Chunk
from hexdata.schema import NO_TIER
from hexdata.shards.blocks import Block, columns_to_block, slice_rows
from hexdata.store.originals import convert_values

__all__ = ["FileGames", "extract_games", "extract_trmph_games"]

Array = npt.NDArray[Any]

_IDS: Final = ("origin", "file_idx", "line_idx")


@dataclass(frozen=True)
class FileGames:
    """Games of a file in file order, and the number of positions that belong to no known game."""

    chunks: list[Chunk]
    ungrouped: int


def extract_trmph_games(name: str, batches: Sequence[pa.RecordBatch], board_size: int) -> FileGames:
    """Return the games of a TRMPH file, as :func:`extract_games` would, in a fifth of the time.

    The reader computes the positions from the moves, so the only check left is whether the chain on the last
    board contradicts the winner.

    Args:
        name: Name of the file.
        batches: All batches of the file from ``TrmphReader``; not empty.
        board_size: Board size n.
    """
    table = pa.Table.from_batches(batches)
    lines = column(table, "line_idx", -1)
    bounds = np.append(np.flatnonzero(np.diff(lines, prepend=-1)), len(lines))
    flags = flags_of(_find_at_rows(table, bounds[1:] - 1, board_size).astype(np.uint32), "blue-is-0")
    moves = column(table, "move", 0).astype(np.uint16)
    winners = column(table, "winner", -1)[bounds[:-1]].tolist()
    codes = flag_lists(flags).to_pylist()
    chunks = []
    for index, (start, stop) in enumerate(pairwise(bounds.tolist())):
        own = moves[start : stop - 1]
        chunks.append(
            Chunk(
                board_size,
                name,
                index,
                game_hash(own, board_size),
                moves=own,
                value=float(winners[index]),
                flags=tuple(codes[index]),
            )
        )
    return FileGames(chunks, 0)


def _find_at_rows(table: pa.Table, rows: Array, board_size: int) -> npt.NDArray[np.uint16]:
    return find_positions(_single_batch(table.take(pa.array(rows))), board_size)


def extract_games(
    name: str,
    batches: Sequence[pa.RecordBatch],
    board_size: int,
    *,
    mixed: bool = False,
    sure_ids: bool = False,
    replayed: bool = False,
    convention: Convention | None = None,
    layout: Convention | None = None,
    default: Convention | None = None,
) -> FileGames:
    """Return the games of a file, found and checked as in ``convert``.

    Args:
        name: Name of the file.
        batches: All positions of the file, ``raw_schema(board_size)``, in record order; not empty.
        board_size: Board size n.
        mixed: True if the positions are from many files: only ids identify games, and an incomplete game is
            named by its id. Default False.
        sure_ids: True if each id belongs to one game. A legacy id may belong to several games; its positions
            are left out if they differ in length or winner of the game, or repeat a ply. Default False.
        replayed: Whether the reader made the boards from the moves; see ``game_findings``. Default False.
        convention: Value convention, if known. Default None.
        layout: Value convention with which the legacy tool wrote files of this layout. Default None.
        default: Value convention if nothing else determines it. Default None.

    Raises:
        FormatError: "value-sense": the values do not show whether 0 or 1 means that
            blue won; "shuffled-without-ids": the positions are mixed and have no ids.
    """
    evidence = SourceEvidence()
    raw = _single_batch(pa.Table.from_batches([with_findings(batch, board_size) for batch in batches]))
    evidence.add(raw)
    without_id = 0
    grouping: Grouping = evidence.grouping()
    if mixed:
        if not evidence.with_id:
            raise FormatError(
                "the positions are shuffled and have no game ids, so they cannot be grouped into games",
                code=Reason.SHUFFLED_WITHOUT_IDS,
                path=name,
                hint="Convert all files of this shuffle together.",
            )
        without_id = raw.num_rows - evidence.with_id
        raw = _group_by_id(raw)
        grouping = "ids"
    rows, games = _games(raw, board_size, grouping)
    tables = _Tables({"raw": raw, "rows": rows, "games": games})
    findings = game_findings([tables], replayed=replayed)
    if convention is None:
        ballots = (
            evidence.unflagged_votes if mixed else count_game_votes(findings, findings_without_game(tables))
        )
        convention = _convention(ballots, name, layout, default)
    flags = flags_of(findings, convention)
    table = _Positions.of(raw, rows, board_size, convention)
    chunks, left_out = table.chunks(name, games, flag_lists(flags).to_pylist(), mixed, sure_ids or not mixed)
    return FileGames(chunks, without_id + left_out + rows.column("game").null_count)


def _convention(
    ballots: Votes, name: str, layout: Convention | None, default: Convention | None
) -> Convention:
    decided = decide(ballots, layout, default)
    if decided is None:
        raise FormatError(
            "the value convention of the file cannot be determined",
            code=Reason.VALUE_SENSE,
            path=name,
            found=votes_text(ballots, layout),
            expected="almost all votes for the same convention",
            hint="If you know it, set value_convention.",
        )
    return decided.convention


def _single_batch(table: pa.Table) -> pa.RecordBatch:
    """Return a table as one batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def _group_by_id(raw: pa.RecordBatch) -> pa.RecordBatch:
    """Return the positions that have an id, grouped by id and sorted by ply."""
    origin = raw.column("origin").dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
    line, file, ply = (column(raw, key, -1) for key in ("line_idx", "file_idx", "position_in_game"))
    order = np.lexsort((ply, line, file, origin))
    return raw.take(pa.array(order[line[order] >= 0]))


def _games(raw: pa.RecordBatch, board_size: int, grouping: Grouping) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the tables ``ROWS`` and ``GAMES`` of all positions."""
    found = list(find_games([raw.select(EVIDENCE)], board_size, grouping))
    rows = pa.concat_tables([ROWS.empty_table(), *(rows for rows, _ in found)])
    games = pa.concat_tables([GAMES.empty_table(), *(games for _, games in found)])
    return _single_batch(rows), _single_batch(games)


@dataclass(frozen=True)
class _Tables:
    """Tables in memory, with the interface of a spool."""

    tables: dict[str, pa.RecordBatch]

    def batches(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        batch = self.tables[table]
        yield batch.select(columns) if columns else batch


@dataclass(frozen=True)
class _Positions:
    """Positions of known games as columns (N,), grouped by game and sorted by ply."""

    board_size: int
    raw: pa.RecordBatch
    game: Array
    ply: Array
    total: Array
    player: Array
    value: npt.NDArray[np.float32]

    @classmethod
    def of(
        cls, raw: pa.RecordBatch, rows: pa.RecordBatch, board_size: int, convention: Convention
    ) -> _Positions:
        game, ply = column(rows, "game", -1), column(rows, "ply", -1)
        order = np.lexsort((ply, game))
        order = order[game[order] >= 0]
        taken = pa.array(order)
        rows = rows.take(taken)
        raw = with_played_moves(raw.take(taken), rows)
        player = players_of(raw, rows, board_size).to_numpy(zero_copy_only=False)
        value = convert_values(column(raw, "value", np.nan), convention).astype(np.float32)
        return cls(board_size, raw, game[order], ply[order], column(rows, "total", -1), player, value)

    def chunks(
        self, name: str, games: pa.RecordBatch, codes: list[list[str]], mixed: bool, sure_ids: bool
    ) -> tuple[list[Chunk], int]:
        """Return the games as chunks, and the number of positions whose ids do not identify a game."""
        bounds = np.searchsorted(self.game, np.arange(games.num_rows + 1))
        as_moves = self._as_moves(games, bounds)
        moves = column(self.raw, "move", 0).astype(np.uint16)
        tiers = column(self.raw, "value_sample_tier", NO_TIER).astype(np.uint8)
        hashes = games.column("game_hash").to_pylist()
        complete = games.column("moves").is_valid().to_pylist()
        winners = column(self.raw, "winner", -1)
        blocks = self._blocks(bounds, ~as_moves)
        chunks: list[Chunk] = []
        left_out = 0
        for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
            if not (sure_ids or self._is_one_game(start, stop, winners[start:stop])):
                left_out += stop - start
                continue
            content: dict[str, Any] = {"block": blocks.get(number)}
            if as_moves[number]:
                own = tiers[start:stop]
                content = {
                    "moves": moves[start : stop - 1],
                    "value": float(self.value[start]),
                    "tiers": own if (own != NO_TIER).any() else None,
                }
            identity = hashes[number]
            if mixed and not complete[number]:
                identity = self._identity_hash(start)
            flags = tuple(codes[number])
            chunks.append(Chunk(self.board_size, name, len(chunks), identity, flags=flags, **content))
        return chunks, left_out

    def _as_moves(self, games: pa.RecordBatch, bounds: Array) -> npt.NDArray[np.bool_]:
        """Return which games are fully described by their moves and one value: bool (G,)."""
        if not games.num_rows:
            return np.zeros(0, np.bool_)
        starts, sizes = bounds[:-1], np.diff(bounds)
        last = self.ply + 1 == self.total
        occupied = column(self.raw, "findings", 0) & int(Finding.OCCUPIED_MOVE) != 0
        plain = (self.player == self.ply & 1) & (self.total == np.repeat(sizes, sizes)) & ~occupied
        plain &= self.value == np.repeat(self.value[starts], sizes)
        plain &= self.raw.column("move").is_null().to_numpy(zero_copy_only=False) == last
        plain &= self.raw.column("policy").is_null().to_numpy(zero_copy_only=False)
        whole = games.column("moves").is_valid().to_numpy(zero_copy_only=False)
        blue_starts = (column(games, "first_player", -1) == BLUE) | (sizes == 1)
        as_moves: npt.NDArray[np.bool_] = whole & blue_starts & np.logical_and.reduceat(plain, starts)
        return as_moves

    def _blocks(self, bounds: Array, selected: npt.NDArray[np.bool_]) -> dict[int, Block]:
        """Return the blocks of the selected games, by game number."""
        if not selected.any():
            return {}
        sizes = np.diff(bounds)
        rows = np.flatnonzero(np.repeat(selected, sizes))
        raw = self.raw.take(pa.array(rows))
        unused = pa.array(np.zeros(len(rows), np.int64))
        ply, total = self.ply[rows], self.total[rows]
        columns = {
            "board": raw.column("board"),
            "game_id": unused,
            "move": raw.column("move"),
            "player_to_move": pa.array(self.player[rows]),
            "policy": raw.column("policy"),
            "position_id": unused,
            "position_in_game": pa.array(ply, mask=ply < 0),
            "total_positions": pa.array(total, mask=total < 0),
            "value": pa.array(self.value[rows]),
            "value_sample_tier": raw.column("value_sample_tier"),
        }
        dense = raw.column("policy").null_count < len(rows)
        block = columns_to_block(pa.table(columns), with_policy=dense)
        numbers = np.flatnonzero(selected).tolist()
        block_bounds = np.append(0, np.cumsum(sizes[selected])).tolist()
        return {
            number: slice_rows(block, start, stop)
            for number, (start, stop) in zip(numbers, pairwise(block_bounds), strict=True)
        }

    def _is_one_game(self, start: int, stop: int, winner: Array) -> bool:
        """Return whether the positions of one id agree on length and winner of the game and repeat no ply."""
        same = (self.total[start:stop] == self.total[start]).all() and (winner == winner[0]).all()
        return bool(same and (np.diff(self.ply[start:stop]) > 0).all())

    def _identity_hash(self, row: int) -> bytes:
        origin, file_idx, line_idx = (self.raw.column(name)[row].as_py() for name in _IDS)
        return identity_hash(origin, file_idx, line_idx, self.board_size)
