"""A store of games with results of a search: a policy, a root value and visits in every position.

Run as ``search_store.py FOLDER [POSITIONS [CELLS]]`` to write such a store, with shards, to ``FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from hexdata.board import game_hash
from hexdata.export import ExportOptions, export_shards
from hexdata.fill import fill_to_packed, games_to_fill
from hexdata.policy import SparsePolicies
from hexdata.schema import games_schema, positions_schema, sources_schema
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.loader.game_stores import write_tables

N = 13
MOVES = 60
TARGETS = ("root_value", "visits")


def write_search_store(path: Path, positions: int = 200_000, cells: int = 20) -> Path:
    """Write a store with shards, and return its folder.

    Args:
        path: Folder of the store.
        positions: Approximate number of positions. Each game has 60 moves and 61 positions.
        cells: Number of cells of each policy. Final positions have none.
    """
    rng = np.random.default_rng(1)
    games = max(1, positions // (MOVES + 1))
    moves = np.argsort(rng.random((games, N * N)), axis=1)[:, :MOVES].astype(np.uint16)
    table = {
        "positions/part-000000.parquet": _positions(rng, moves, cells),
        "games/part-000000.parquet": _games(moves),
        "sources/part-000000.parquet": _sources(games),
    }
    write_tables(path, N, table, TARGETS)
    shuffle_store(path, ShuffleOptions())
    export_shards(path, ExportOptions(workers=1))
    return path


def _positions(rng: np.random.Generator, moves: np.ndarray, cells: int) -> pa.Table:
    count = len(moves) * (MOVES + 1)
    game, ply = np.divmod(np.arange(count), MOVES + 1)
    fill = games_to_fill(moves.reshape(-1), np.full(len(moves), MOVES), np.zeros(len(moves), np.uint8), N)
    board = fill_to_packed(fill, game, ply)
    has_policy = ply < MOVES
    searched = int(has_policy.sum())
    chosen = np.sort(np.argsort(rng.random((searched, N * N)), axis=1)[:, :cells], axis=1)
    visits = 1 + rng.integers(0, 100, chosen.shape)
    probabilities = (visits / visits.sum(axis=1, keepdims=True)).astype(np.float32)
    starts = np.arange(searched + 1) * cells
    policies = SparsePolicies(starts, chosen.reshape(-1).astype(np.uint16), probabilities.reshape(-1))
    columns = {
        "position_id": np.arange(count),
        "game_id": game,
        "position_in_game": ply,
        "total_positions": np.full(count, MOVES + 1),
        "board": pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(board.shape[1]), count, [None, pa.py_buffer(board.tobytes())]
        ),
        "move": pa.nulls(count, pa.uint16()),
        "policy": policies.to_arrow(has_policy),
        "value": (game % 2).astype(np.float32),
        "player_to_move": ply % 2,
        "value_sample_tier": pa.nulls(count, pa.uint8()),
        "winner": pa.nulls(count, pa.dictionary(pa.int8(), pa.string())),
        "metadata": pa.nulls(count, pa.string()),
        "root_value": rng.random(count, np.float32),
        "visits": rng.integers(1, 2_000, count),
    }
    schema = positions_schema(N, TARGETS)
    return pa.table(
        {field.name: pa.array(columns[field.name], field.type) for field in schema}, schema=schema
    )


def _games(moves: np.ndarray) -> pa.Table:
    total = MOVES + 1
    rows = [
        {
            "game_id": number,
            "source_id": 0,
            "total_positions": total,
            "positions": total,
            "first_player": 0,
            "moves": list(map(int, game)),
            "game_hash": game_hash(game, N, 0),
            "split": "train",
            "provenance": "metadata",
            "flags": [],
        }
        for number, game in enumerate(moves)
    ]
    return pa.Table.from_pylist(rows, schema=games_schema())


def _sources(games: int) -> pa.Table:
    total = games * (MOVES + 1)
    row = {
        "source_id": 0,
        "name": "search",
        "bytes": 0,
        "sha256": "0" * 64,
        "format": "trmph",
        "records": total,
        "positions": total,
        "games": games,
        "rejected": 0,
    }
    return pa.Table.from_pylist([row], schema=sources_schema())


if __name__ == "__main__":
    write_search_store(Path(sys.argv[1]), *map(int, sys.argv[2:]))
