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
from hexdata.convert.games import ROWS, binary_matrix, column
from hexdata.convert.sense import Sense
from hexdata.convert.spool import Spool, spooled_schema
from hexdata.formats import BATCH_ROWS
from hexdata.schema import games_schema, positions_schema
from hexdata.store.files import FileFacts
from hexdata.store.parquet import regroup, write_parquet

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
    done = 0
    for raw, row in _with_rows(spool, assigned.board_size):
        value = column(raw, "value", np.nan)
        stored = _in_sense(value, assigned.sense).astype(np.float32)
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
            "extra": _extra(raw, row, value, _in_sense(stored.astype(np.float64), assigned.sense)),
        }
        done += raw.num_rows
        yield pa.table(columns, schema=schema)


def _with_rows(spool: Spool, board_size: int) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Read the positions of a spool side by side with their ``ROWS``, ``BATCH_ROWS`` at a time."""
    raw = regroup(spool.batches("raw"), spooled_schema(board_size), BATCH_ROWS)
    rows = regroup(spool.batches("rows"), ROWS, BATCH_ROWS)
    for tables in zip(raw, rows, strict=True):
        batches = [table.to_batches()[0] for table in tables]
        yield batches[0], batches[1]


def _in_sense(value: npt.NDArray[np.float64], sense: Sense) -> npt.NDArray[np.float64]:
    """Turn values from the store's sense, 0.0 where blue won, to a source's, or back."""
    return value if sense == "blue-is-0" else 1.0 - value


def _extra(
    raw: pa.RecordBatch, row: pa.RecordBatch, value: npt.NDArray[np.float64], stored: npt.NDArray[np.float64]
) -> pa.Array:
    """Return ``extra``, with what the other columns cannot hold added under keys of our own.

    ``hexdata:value``: a value that float32 does not hold exactly, in the source's sense.
    ``hexdata:game_id``: a legacy id that turned out to be no identity, so that there is no game.
    """
    kept: dict[int, dict[str, object]] = {}
    for i in np.flatnonzero(stored != value).tolist():
        kept.setdefault(i, {})["hexdata:value"] = float(value[i])
    file_idx, line_idx = column(raw, "file_idx", -1), column(raw, "line_idx", -1)
    for i in np.flatnonzero((line_idx >= 0) & (column(row, "game", -1) < 0)).tolist():
        kept.setdefault(i, {})["hexdata:game_id"] = [int(file_idx[i]), int(line_idx[i])]
    extra = raw.column("extra")
    if not kept:
        return extra
    texts = extra.to_pylist()
    for i, more in kept.items():
        texts[i] = json.dumps({**json.loads(texts[i] or "{}"), **more}, separators=(",", ":"), sort_keys=True)
    return pa.array(texts, pa.string())


def _player(raw: pa.RecordBatch, row: pa.RecordBatch, board_size: int) -> pa.Array:
    """Return who moves: as the source says, else by the game's boards, the ply, the stones."""
    by_ply = pc.bit_wise_and(row.column("ply"), 1).cast(pa.uint8())
    known = pc.coalesce(raw.column("player_to_move"), row.column("player"), by_ply)
    if known.null_count:
        stones = unpack_boards(binary_matrix(raw.column("board")), board_size, np.uint8).sum(axis=(2, 3))
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
    schema = games_schema()
    return write_parquet(path, schema, _games(spool, assigned, duplicate_of, schema))


def _games(
    spool: Spool, assigned: Assignment, duplicate_of: npt.NDArray[np.int64], schema: pa.Schema
) -> Iterator[pa.Table]:
    done = 0
    for games in spool.batches("games"):
        count = games.num_rows
        copies = duplicate_of[done : done + count]
        hashes = games.column("game_hash").to_pylist()
        columns = {
            "game_id": pa.array(assigned.first_game + np.arange(done, done + count)),
            "source_id": pa.array(np.full(count, assigned.source_id, np.int32)),
            "winner": pa.array(_winners(games, assigned.sense), pa.string()),
            "duplicate_of": pa.array(copies, mask=copies < 0),
            "split": pa.array([split_of(h, assigned.val, assigned.test) for h in hashes], pa.string()),
        }
        columns |= {name: games.column(name) for name in schema.names if name not in columns}
        done += count
        yield pa.table(columns, schema=schema)


def _winners(games: pa.RecordBatch, sense: Sense) -> list[str | None]:
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
