"""Reconstruction of games from shuffled sources, where a game's positions are spread over all files.

This module uses the ids in the metadata. ``chains`` finds the games of positions without an id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import game_hash
from hexdata.convert.inputs import SourceFile
from hexdata.convert.spool import Spool, SpoolFacts, write_arrow
from hexdata.games.convention import Convention
from hexdata.games.find import GAMES, ROWS, binary_matrix, column, identity_hash, played_moves
from hexdata.schema import NO_MOVE

__all__ = ["KATAHEX", "collection_key", "resolve_collection"]

Array = npt.NDArray[Any]

KATAHEX: Final = "katahex"
"""Format of files in which a game has several positions of one turn, and side positions."""

PART_ROWS: Final = 1_000_000
"""Approximate number of positions that are loaded together, at about 200 bytes and a board each."""

COLUMNS: Final = ("position_in_game", "total_positions", "winner", "move", "player_to_move", "value")
_MOVE: Final = COLUMNS.index("move")
IDS: Final = ("origin", "file_idx", "line_idx")


def collection_key(file: SourceFile, facts: SpoolFacts, convention: Convention | None) -> str:
    """Return a key of the collection of a shuffled source. Games are shared within a collection only.

    Files of one shuffle are in one folder, have the same number of buckets, and list the same source files
    in any order. Sources without any id form one collection per value convention, because their games are
    found by the boards. A file with ids that lists no source files is a collection by itself. All files of
    KataHex are one collection.

    Args:
        file: The source, with its digest.
        facts: Facts of the source.
        convention: Value convention of the source.
    """
    if not facts.with_id:
        return f"no ids, {convention}"
    if facts.format == KATAHEX:  # its ids are random numbers, equal only for positions of the same game
        return KATAHEX
    stats = facts.header.get("shuffling_stats")
    if not isinstance(stats, dict) or not isinstance(stats.get("source_files"), list):
        return file.sha256
    folder = str(PurePosixPath(file.name).parent)
    shuffle = [folder, stats.get("num_buckets"), sorted(map(str, stats["source_files"]))]
    return hashlib.sha256(json.dumps(shuffle).encode("ascii")).hexdigest()


def resolve_collection(
    spools: Sequence[Spool], with_id: int, board_size: int, *, side_positions: bool = False
) -> int:
    """Find the games of one shuffle by their ids; write ``rows`` to each spool and ``games`` to the first.

    Positions with the same (origin, file_idx, line_idx) are one game if they agree on its length and
    winner, and no ply occurs twice. Otherwise the id does not identify a game, and the game is unknown.

    Args:
        spools: The spools of all files of the shuffle.
        with_id: Number of their positions that have a ``line_idx``. They are processed in parts of about
            ``PART_ROWS`` positions. Memory also grows by 6 bytes per position of the shuffle.
        board_size: N.
        side_positions: If True, a ply may occur several times, and positions without a ply and a winner
            belong to the game, too. Default False.

    Returns:
        The number of games.
    """
    origins: dict[str | None, int] = {}
    sizes = [sum(batch.num_rows for batch in spool.batches("raw", ["record"])) for spool in spools]
    numbers = [np.full(size, -1, np.int32) for size in sizes]
    played = [np.full(size, NO_MOVE, np.uint16) for size in sizes]
    parts = -(-with_id // PART_ROWS)
    count = 0
    with write_arrow(spools[0].folder / "games.arrow", GAMES) as writer:
        for part in range(parts):
            selected = [_read_part(spool, part, parts, origins) for spool in spools]
            ids, columns, boards = (np.concatenate([piece[i] for piece in selected]) for i in (1, 2, 3))
            number, move, games = _games(ids, columns, boards, list(origins), board_size, side_positions)
            number[number >= 0] += count
            count += games.num_rows
            writer.write_table(games)
            ends = np.cumsum([len(piece[0]) for piece in selected])[:-1]
            pieces = zip(selected, np.split(number, ends), np.split(move, ends), strict=True)
            for index, ((rows, *_), own_number, own_move) in enumerate(pieces):
                numbers[index][rows], played[index][rows] = own_number, own_move
    for spool, spool_numbers, spool_played in zip(spools, numbers, played, strict=True):
        _write_rows(spool, spool_numbers, spool_played)
    return count


def _read_part(
    spool: Spool, part: int, parts: int, origins: dict[str | None, int]
) -> tuple[Array, Array, Array, Array]:
    """Return the N positions of a spool whose ``line_idx`` modulo ``parts`` is ``part``.

    Args:
        spool: The spool to read.
        part: Number of the part, from 0.
        parts: Number of parts.
        origins: Number of each origin; new origins are added.

    Returns:
        Their rows, (N,); their ``IDS``, int64 (N, 3), with the number of the origin; their ``COLUMNS``,
        float64 (N, 6); and their packed boards, (N, width). Nulls are -1.
    """
    pieces = []
    start = 0
    for batch in spool.batches("raw", (*IDS, *COLUMNS, "board")):
        line_idx = column(batch, "line_idx", -1)
        rows = np.flatnonzero((line_idx >= 0) & (line_idx % parts == part))
        selected = batch.take(pa.array(rows))
        encoded = selected.column("origin").dictionary_encode()
        codes = [origins.setdefault(name, len(origins)) for name in encoded.dictionary.to_pylist()]
        table = np.array([*codes, origins.setdefault(None, len(origins))])
        origin = table[encoded.indices.fill_null(len(codes)).to_numpy(zero_copy_only=False)]
        ids = np.stack([origin, column(selected, "file_idx", -1), column(selected, "line_idx", -1)], axis=1)
        columns = np.stack([column(selected, name, -1).astype(np.float64) for name in COLUMNS], axis=1)
        pieces.append((rows + start, ids, columns, binary_matrix(selected.column("board"))))
        start += batch.num_rows
    rows, ids, columns, boards = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    return rows, ids, columns, boards


def _games(
    ids: Array,
    columns: Array,
    boards: npt.NDArray[np.uint8],
    origins: list[str | None],
    board_size: int,
    side_positions: bool,
) -> tuple[Array, npt.NDArray[np.uint16], pa.Table]:
    """Number the games of positions in ascending id.

    A move is that between the boards of two positions of a game with consecutive plies, where one stone was
    placed; otherwise it is the stated one. Side positions keep the stated one.

    Returns:
        The game of each position, int32 (N,), -1 if unknown; the move that was played, uint16 (N,),
        ``NO_MOVE`` if unknown; and the games, with the schema ``GAMES``.
    """
    number = np.full(len(ids), -1, dtype=np.int32)
    listed: list[dict[str, Any]] = []
    order = np.lexsort((columns[:, 0], *ids.T[::-1]))
    move = columns[:, _MOVE].copy()
    if len(ids) and not side_positions:
        before, after = order[:-1], order[1:]
        _, cell = played_moves(boards[order], move[order].astype(np.int64), board_size)
        follows = (ids[before] == ids[after]).all(axis=1) & (columns[after, 0] == columns[before, 0] + 1)
        found = before[follows & (cell >= 0)]
        move[found] = cell[follows & (cell >= 0)]
    columns = columns.copy()
    columns[:, _MOVE] = move
    bounds = np.flatnonzero(np.diff(ids[order], axis=0, prepend=-2, append=-2).any(axis=1))
    for start, stop in pairwise(bounds):
        rows = order[start:stop]
        own = columns[rows]
        if side_positions:
            own = _main_line(own)
        game = _game(ids[rows[0]], own, origins, board_size)
        if game is not None:
            number[rows] = len(listed)
            listed.append({**game, "positions": len(rows)})
    played = np.where((number >= 0) & (move >= 0), move, NO_MOVE).astype(np.uint16)
    return number, played, pa.Table.from_pylist(listed, schema=GAMES)


def _main_line(columns: Array) -> Array:
    """Return the positions of a game, one per ply; the first one, if none has a ply.

    Args:
        columns: ``COLUMNS`` of the game in ascending ply, (m, 6).
    """
    ply = columns[:, 0]
    is_main = (ply >= 0) & (np.diff(ply, prepend=-1) > 0)
    return columns[is_main] if is_main.any() else columns[:1]


def _game(key: Array, columns: Array, origins: list[str | None], board_size: int) -> dict[str, Any] | None:
    ply, total, winner, move, player, value = columns.T
    if (total != total[0]).any() or (winner != winner[0]).any() or (np.diff(ply) <= 0).any():
        return None
    whole = len(ply) == total[0] and (ply == np.arange(len(ply))).all() and (move[:-1] >= 0).all()
    moves = move[:-1].astype(np.uint16) if whole else None
    first_player = int(max(player[0], 0))  # blue, unless the first position states red
    origin, file_idx, line_idx = origins[key[0]], int(key[1]), int(key[2])
    return {
        "file_idx": file_idx if file_idx >= 0 else None,
        "line_idx": line_idx,
        "origin": origin,
        "winner": int(winner[0]) if winner[0] >= 0 else None,
        "value": float(value[0]),
        "total_positions": int(total[0]) if total[0] >= 0 else None,
        "positions": len(ply),
        "first_player": first_player if whole else None,
        "moves": moves,
        "game_hash": identity_hash(origin, file_idx, line_idx, board_size)
        if moves is None
        else game_hash(moves, board_size, first_player),
        "provenance": "metadata",
    }


def _write_rows(spool: Spool, number: Array, played: npt.NDArray[np.uint16]) -> None:
    """Write ``rows`` of a spool: game and move of each position, and ply and length from the metadata."""
    with write_arrow(spool.folder / "rows.arrow", ROWS) as writer:
        start = 0
        for batch in spool.batches("raw", ["position_in_game", "total_positions"]):
            game, move = (array[start : start + batch.num_rows] for array in (number, played))
            columns = {
                "game": pa.array(game, mask=game < 0),
                "ply": batch.column("position_in_game"),
                "total": batch.column("total_positions"),
                "player": pa.nulls(len(game), pa.uint8()),
                "move": pa.array(move, mask=move == NO_MOVE),
            }
            writer.write_table(pa.table(columns, schema=ROWS))
            start += batch.num_rows
