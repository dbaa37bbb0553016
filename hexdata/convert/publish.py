"""The second pass over one source: from its spool to its parts of the store, ids and sense decided."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import player_to_move, unpack_boards
from hexdata.convert.games import GAMES, ROWS, board_matrix, column
from hexdata.convert.sense import Sense
from hexdata.convert.spool import Spool
from hexdata.schema import games_schema, positions_schema
from hexdata.store.files import FileFacts
from hexdata.store.parquet import write_parquet

__all__ = ["WINNERS", "Assignment", "publish_games", "publish_positions", "split_of"]

WINNERS: Final = ("BLUE", "RED")


@dataclass(frozen=True)
class Assignment:
    """What the run decided for one source."""

    source_id: int
    board_size: int
    first_position: int
    first_game: int
    """Store id of the game that the spool counts as 0."""
    sense: Sense
    val: float
    test: float


def publish_positions(spool: Spool, path: Path, assigned: Assignment) -> FileFacts:
    """Write the positions part of one source: ``positions_schema``, in record order."""
    schema = positions_schema(assigned.board_size)
    return write_parquet(path, schema, _positions(spool, assigned, schema))


def _positions(spool: Spool, assigned: Assignment, schema: pa.Schema) -> Iterator[pa.Table]:
    rows = spool.table("rows", ROWS)
    done = 0
    for raw in spool.batches("raw"):
        row = rows.slice(done, raw.num_rows).combine_chunks()
        value = column(raw, "value", np.nan)
        stored, extra = _stored_value(value, assigned.sense, raw.column("extra"))
        columns = {
            "position_id": pa.array(assigned.first_position + np.arange(done, done + raw.num_rows)),
            "game_id": pc.add(row.column("game").cast(pa.int64()), assigned.first_game),
            "position_in_game": row.column("ply"),
            "total_positions": row.column("total"),
            "board": raw.column("board"),
            "move": raw.column("move"),
            "policy": raw.column("policy"),
            "value": pa.array(stored),
            "player_to_move": _player(raw, row, assigned.board_size),
            "value_sample_tier": raw.column("value_sample_tier"),
            "winner": pa.DictionaryArray.from_arrays(
                raw.column("winner").cast(pa.int8()), pa.array(WINNERS, pa.string())
            ),
            "extra": extra,
        }
        done += raw.num_rows
        yield pa.table(columns, schema=schema)


def _stored_value(
    value: npt.NDArray[np.float64], sense: Sense, extra: pa.Array
) -> tuple[npt.NDArray[np.float32], pa.Array]:
    """Turn values to the store's sense, 0.0 where blue won.

    A value that float32 cannot hold exactly keeps its source's digits in ``extra``, as ``value``.
    """
    stored = (value if sense == "blue-is-0" else 1.0 - value).astype(np.float32)
    back = stored.astype(np.float64)
    inexact = np.flatnonzero((back if sense == "blue-is-0" else 1.0 - back) != value)
    if not len(inexact):
        return stored, extra
    texts = extra.to_pylist()
    for row in inexact:
        texts[row] = json.dumps(
            {**json.loads(texts[row] or "{}"), "value": float(value[row])}, sort_keys=True
        )
    return stored, pa.array(texts, pa.string())


def _player(raw: pa.RecordBatch, row: pa.Table, board_size: int) -> pa.Array:
    """Return who moves: as the source says, else by the ply, else by the stones."""
    known = pc.coalesce(raw.column("player_to_move"), pc.bit_wise_and(row.column("ply"), 1).cast(pa.uint8()))
    known = known.combine_chunks() if isinstance(known, pa.ChunkedArray) else known
    if known.null_count:
        stones = unpack_boards(board_matrix(raw.column("board")), board_size, np.uint8).sum(axis=(2, 3))
        known = pc.coalesce(known, pa.array(player_to_move(stones[:, 0], stones[:, 1])))
    return known


def publish_games(
    spool: Spool, path: Path, assigned: Assignment, duplicate_of: npt.NDArray[np.int64]
) -> FileFacts:
    """Write the games part of one source: ``games_schema``.

    Args:
        spool: of the source.
        path: of the part.
        assigned: what the run decided.
        duplicate_of: int64, one a game of the spool: the first game with its hash, -1 for itself.
    """
    games = spool.table("games", GAMES)
    count = games.num_rows
    hashes = games.column("game_hash").to_pylist()
    columns = {
        "game_id": pa.array(assigned.first_game + np.arange(count)),
        "source_id": pa.array(np.full(count, assigned.source_id, np.int32)),
        "winner": pa.array(_winners(games, assigned.sense), pa.string()),
        "duplicate_of": pa.array(duplicate_of, mask=duplicate_of < 0),
        "split": pa.array([split_of(h, assigned.val, assigned.test) for h in hashes], pa.string()),
    }
    schema = games_schema()
    columns |= {name: games.column(name) for name in schema.names if name not in columns}
    return write_parquet(path, schema, [pa.table(columns, schema=schema)])


def _winners(games: pa.Table, sense: Sense) -> list[str | None]:
    """Return each game's winner: as its metadata names it, else as its value says."""
    named = column(games, "winner", -1)
    value = column(games, "value", np.nan)
    won = np.where(value == 0.0, 0, np.where(value == 1.0, 1, -1))
    by_value = won if sense == "blue-is-0" else np.where(won >= 0, 1 - won, -1)
    winner = np.where(named >= 0, named, by_value)
    return [WINNERS[w] if w >= 0 else None for w in winner]


def split_of(game_hash: bytes, val: float, test: float) -> str:
    """Return the split of a game: a function of its hash alone, so it stays when files are added.

    The first 8 bytes of the hash, as a fraction of 2^64, are below ``test`` for test, below
    ``test + val`` for val, and train otherwise.
    """
    place = int.from_bytes(game_hash[:8], "big") / 2**64
    return "test" if place < test else "val" if place < test + val else "train"
