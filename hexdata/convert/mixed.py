"""The games of already shuffled sources: a game's positions lie anywhere in the files of one shuffle.

Only ids in the metadata can tell them apart here; a position without one belongs to no known game.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import game_hash
from hexdata.convert.games import GAMES, ROWS, column
from hexdata.convert.spool import Spool, SpoolFacts, write_arrow
from hexdata.store.files import canonical_json

__all__ = ["collection_of", "resolve_collection"]

Array = npt.NDArray[Any]

PART_ROWS: Final = 2_000_000
"""Positions looked at together, at most about so many: 40 bytes each."""


def collection_of(facts: SpoolFacts, sha256: str) -> str:
    """Name the shuffle that a mixed source came from: files of one shuffle share their games."""
    stats = facts.header.get("shuffling_stats")
    if not isinstance(stats, dict) or "source_files" not in stats:
        return sha256
    shuffle = {key: stats.get(key) for key in ("num_buckets", "source_files")}
    return hashlib.sha256(canonical_json(shuffle)).hexdigest()


def resolve_collection(spools: Sequence[Spool], board_size: int) -> int:
    """Tell the games of one shuffle apart; write ``rows`` to each spool and ``games`` to the first.

    Positions with the same (origin, file_idx, line_idx) are one game if they agree on its length and
    winner and no ply stands twice; else these ids are no identity and the game is unknown. The ids are
    looked at in parts, so that memory does not grow with the collection.

    Returns:
        The number of games.
    """
    origins: dict[str | None, int] = {}
    rows = [_ids(spool, origins) for spool in spools]
    total = sum(len(ids) for ids in rows)
    parts = max(1, -(-total // PART_ROWS))
    numbers = [np.full(len(ids), -1, dtype=np.int32) for ids in rows]
    names = list(origins)
    count = 0
    with write_arrow(spools[0].folder / "games.arrow", GAMES) as writer:
        for part in range(parts):
            taken = [np.flatnonzero((ids[:, 2] >= 0) & (ids[:, 2] % parts == part)) for ids in rows]
            columns = [_columns(spool, at) for spool, at in zip(spools, taken, strict=True)]
            ids = np.concatenate([r[at] for r, at in zip(rows, taken, strict=True)])
            number, games = _games(ids, np.concatenate(columns), names, board_size)
            number[number >= 0] += count
            count += games.num_rows
            writer.write_table(games)
            for own, at, piece in zip(
                numbers, taken, np.split(number, np.cumsum([len(at) for at in taken])[:-1]), strict=True
            ):
                own[at] = piece
    for spool, own in zip(spools, numbers, strict=True):
        _write_rows(spool, own)
    return count


def _ids(spool: Spool, origins: dict[str | None, int]) -> Array:
    """Return (origin, file_idx, line_idx) of each position: int32 (N, 3), -1 for null."""
    pieces = []
    for batch in spool.batches("raw"):
        encoded = batch.column("origin").dictionary_encode()
        codes = [origins.setdefault(name, len(origins)) for name in encoded.dictionary.to_pylist()]
        table = np.array([*codes, origins.setdefault(None, len(origins))], dtype=np.int32)
        origin = table[encoded.indices.fill_null(len(codes)).to_numpy(zero_copy_only=False)]
        pieces.append(
            np.stack([origin, column(batch, "file_idx", -1), column(batch, "line_idx", -1)], axis=1)
        )
    return np.concatenate(pieces).astype(np.int32)


_COLUMNS: Final = ("position_in_game", "total_positions", "winner", "move")


def _columns(spool: Spool, rows: Array) -> Array:
    """Return ply, total, winner, move and value of some positions: float64 (len(rows), 5), -1 for null."""
    pieces, start = [], 0
    for batch in spool.batches("raw"):
        stop = start + batch.num_rows
        own = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
        columns = [*(column(batch, name, -1)[own] for name in _COLUMNS), column(batch, "value", np.nan)[own]]
        pieces.append(np.stack(columns, axis=1))
        start = stop
    return np.concatenate(pieces)


def _games(ids: Array, columns: Array, origins: list[str | None], board_size: int) -> tuple[Array, pa.Table]:
    """Number the games of some positions, in ascending id: int32 (N,), -1 if unknown; and ``GAMES``."""
    number = np.full(len(ids), -1, dtype=np.int32)
    listed: list[dict[str, Any]] = []
    order = np.lexsort((columns[:, 0], *ids.T[::-1]))
    bounds = np.flatnonzero(np.diff(ids[order], axis=0, prepend=-2, append=-2).any(axis=1))
    for start, stop in pairwise(bounds):
        rows = order[start:stop]
        game = _game(ids[rows[0]], columns[rows], origins, board_size)
        if game is not None:
            number[rows] = len(listed)
            listed.append(game)
    return number, pa.Table.from_pylist(listed, schema=GAMES)


def _game(key: Array, columns: Array, origins: list[str | None], board_size: int) -> dict[str, Any] | None:
    ply, total, winner, move, value = columns.T
    if (total != total[0]).any() or (winner != winner[0]).any() or (np.diff(ply) <= 0).any():
        return None
    whole = len(ply) == total[0] and (ply == np.arange(len(ply))).all() and (move[:-1] >= 0).all()
    moves = move[:-1].astype(np.uint16) if whole else None
    origin, file_idx, line_idx = origins[key[0]], int(key[1]), int(key[2])
    return {
        "file_idx": file_idx if file_idx >= 0 else None,
        "line_idx": line_idx,
        "origin": origin,
        "winner": int(winner[0]) if winner[0] >= 0 else None,
        "value": float(value[0]),
        "total_positions": int(total[0]) if total[0] >= 0 else None,
        "positions": len(ply),
        "first_player": 0 if whole else None,
        "moves": moves,
        "game_hash": _identity_hash(origin, file_idx, line_idx, board_size)
        if moves is None
        else game_hash(moves, board_size),
        "provenance": "metadata",
    }


def _identity_hash(origin: str | None, file_idx: int, line_idx: int, board_size: int) -> bytes:
    """Return 16 bytes for a game whose moves are not all at hand: the hash of its legacy identity."""
    identity = canonical_json([board_size, origin, file_idx, line_idx])
    return hashlib.sha256(b"hexdata identity " + identity).digest()[:16]


def _write_rows(spool: Spool, number: Array) -> None:
    """Write ``ROWS`` of a spool: the game of each position, its ply and length as the metadata has them."""
    with write_arrow(spool.folder / "rows.arrow", ROWS) as writer:
        start = 0
        for batch in spool.batches("raw"):
            own = number[start : start + batch.num_rows]
            columns = {
                "game": pa.array(own, mask=own < 0),
                "ply": batch.column("position_in_game"),
                "total": batch.column("total_positions"),
            }
            writer.write_table(pa.table(columns, schema=ROWS))
            start += batch.num_rows
