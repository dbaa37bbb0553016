"""A large converted store of legal games, written directly, which is faster than converting sources.

Run as ``python -m tests.benchmarks.large_store FOLDER [POSITIONS]`` (default: 97 million positions).

Each game is a game of the demo whose later moves are in another order, those of blue and those of red among
themselves. The last move stays, so such a game is legal and complete: only the last move completes a chain.
One game in a hundred is a copy of the game before it and is marked as a duplicate.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import game_hashes
from hexdata.demo.games import DemoGame, make_games
from hexdata.fill import fill_to_packed, games_to_fill
from hexdata.schema import games_schema, positions_schema, rejected_schema, sources_schema
from hexdata.store.files import FileFacts
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet

N = 13
SEED = 11
BASES = 8_000
"""Number of games of the demo."""
GAMES = 2_000
"""Number of games of each source."""
MOST_FIRST_MOVES = 12
"""Maximum number of first moves that stay as they are."""
DUPLICATE = 100
REJECTED = 5
"""Number of rejected records of each source."""
SPLITS = np.array(["train"] * 18 + ["val", "test"])
FLAGS = {"no-chain": 0.02, "value-not-constant": 0.001}
"""Share of the games with each flag."""
PROCESSES = 2

Facts = dict[str, tuple[FileFacts, int]]


def write_large_store(path: Path, positions: int = 97_000_000) -> Path:
    """Write a converted store of at least ``positions`` positions, and return its folder."""
    bases = list(make_games(BASES, SEED, N))
    lengths = np.array([len(game.moves) + 1 for game in bases])
    per_source = [int(lengths[chosen_bases(number)].sum()) for number in range(-(-BASES // GAMES))]
    counts: list[int] = []
    while sum(counts) < positions:
        counts.append(per_source[len(counts) % len(per_source)])
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    manifest = Manifest(board_size=N)
    manifest.counts = dict.fromkeys(("sources", "games", "positions", "rejected"), 0)
    with ProcessPoolExecutor(PROCESSES) as pool:
        for facts in pool.map(write_source, repeat(path), range(len(counts)), starts, repeat(bases)):
            for name, (file, rows) in facts.items():
                manifest.files[name] = file
                manifest.counts[name.split("/")[0]] += rows
    table = pa.Table.from_pylist(
        [source_row(number, count) for number, count in enumerate(counts)], sources_schema()
    )
    manifest.files["sources/part-000000.parquet"] = write_parquet(
        path / "sources/part-000000.parquet", table.schema, [table]
    )
    manifest.counts["sources"] = len(table)
    kept, rejected = manifest.counts["positions"], manifest.counts["rejected"]
    manifest.stages["convert"] = {
        "val": 0.05,
        "test": 0.05,
        "records": kept + rejected,
        "positions": kept,
        "rejected": rejected,
    }
    manifest.save(path)
    return path


def chosen_bases(number: int) -> npt.NDArray[np.intp]:
    """Return the games of the demo from which a source is made; a copy has that of the game before it."""
    chosen = (np.arange(GAMES) + number * GAMES) % BASES
    chosen[DUPLICATE - 1 :: DUPLICATE] = chosen[DUPLICATE - 2 :: DUPLICATE]
    return chosen


def write_source(path: Path, number: int, start: int, bases: list[DemoGame]) -> Facts:
    """Write the tables of one source, and return the facts of each file and its number of rows."""
    rng = np.random.default_rng([SEED, number])
    chosen = chosen_bases(number)
    games = [reorder(bases[index].moves, rng) for index in chosen]
    earlier = np.full(GAMES, -1)
    earlier[DUPLICATE - 1 :: DUPLICATE] = number * GAMES + np.arange(GAMES)[DUPLICATE - 2 :: DUPLICATE]
    winners = np.array([bases[index].winner for index in chosen])
    for copy in np.flatnonzero(earlier >= 0).tolist():
        games[copy] = games[copy - 1]
    tables = {
        "games": games_table(rng, number, games, winners, earlier),
        "positions": positions_table(rng, number, start, games, winners),
        "rejected": rejected_table(number),
    }
    facts = {}
    for name, table in tables.items():
        file = f"{name}/part-{number:06d}.parquet"
        facts[file] = write_parquet(path / file, table.schema, [table]), len(table)
    return facts


def reorder(moves: npt.NDArray[np.uint16], rng: np.random.Generator) -> npt.NDArray[np.uint16]:
    """Return the moves of a game in another order that leads to the same final board."""
    moves = moves.copy()
    first = int(rng.integers(0, min(MOST_FIRST_MOVES, len(moves))))
    for parity in range(2):
        own = np.arange(first, len(moves) - 1)
        own = own[own % 2 == parity]
        moves[own] = moves[rng.permutation(own)]
    return moves


def games_table(
    rng: np.random.Generator,
    number: int,
    games: list[npt.NDArray[np.uint16]],
    winners: npt.NDArray[np.int64],
    earlier: npt.NDArray[np.int64],
) -> pa.Table:
    lengths = np.array([len(moves) for moves in games])
    hashes = game_hashes(np.concatenate(games), lengths, N, np.zeros(GAMES, np.int64))
    splits = SPLITS[rng.integers(0, len(SPLITS), GAMES)]
    splits[DUPLICATE - 1 :: DUPLICATE] = splits[DUPLICATE - 2 :: DUPLICATE]
    drawn = rng.random(GAMES)
    first_game = number * GAMES
    rows = [
        {
            "game_id": first_game + index,
            "source_id": number,
            "line_idx": index,
            "winner": ("BLUE", "RED")[winners[index]],
            "total_positions": len(moves) + 1,
            "positions": len(moves) + 1,
            "first_player": 0,
            "moves": moves,
            "game_hash": hashes[index],
            "duplicate_of": None if earlier[index] < 0 else int(earlier[index]),
            "split": str(splits[index]),
            "provenance": "metadata",
            "flags": [
                *(["duplicate-exact"] if earlier[index] >= 0 else []),
                *(flag for flag, share in FLAGS.items() if drawn[index] < share),
            ],
        }
        for index, moves in enumerate(games)
    ]
    return pa.Table.from_pylist(rows, schema=games_schema())


def positions_table(
    rng: np.random.Generator,
    number: int,
    start: int,
    games: list[npt.NDArray[np.uint16]],
    winners: npt.NDArray[np.int64],
) -> pa.Table:
    lengths = np.array([len(moves) for moves in games])
    totals = lengths + 1
    count = int(totals.sum())
    game = np.repeat(np.arange(GAMES), totals)
    ply = np.arange(count) - np.repeat(np.cumsum(totals) - totals, totals)
    fill = games_to_fill(np.concatenate(games), lengths, np.zeros(GAMES, np.uint8), N)
    board = fill_to_packed(fill, game, ply)
    final = ply == lengths[game]
    moves = np.zeros(count, np.uint16)
    moves[~final] = np.concatenate(games)
    names = pa.array(["BLUE", "RED"])
    columns = {
        "position_id": np.arange(start, start + count),
        "game_id": game + number * GAMES,
        "position_in_game": ply,
        "total_positions": totals[game],
        "board": pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(board.shape[1]), count, [None, pa.py_buffer(board.tobytes())]
        ),
        "move": pa.array(moves, mask=final),
        "policy": pa.nulls(count, positions_schema(N).field("policy").type),
        "value": winners[game].astype(np.float32),
        "player_to_move": ply % 2,
        "value_sample_tier": np.minimum(ply // 20, 3),
        "winner": pa.DictionaryArray.from_arrays(winners[game].astype(np.int8), names),
        "metadata": pa.nulls(count, pa.string()),
    }
    schema = positions_schema(N)
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for field in schema
        for column in (columns[field.name],)
    ]
    return pa.Table.from_arrays(
        [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)], schema=schema
    )


def rejected_table(number: int) -> pa.Table:
    rows = [
        {
            "source_id": number,
            "record": index,
            "reason": ("board-overlap", "metadata-value")[index % 2],
            "detail": f"record {index} of source {number}",
        }
        for index in range(REJECTED)
    ]
    return pa.Table.from_pylist(rows, schema=rejected_schema())


def source_row(number: int, positions: int) -> dict[str, object]:
    return {
        "source_id": number,
        "name": f"games/source-{number:06d}.trmph",
        "bytes": 0,
        "sha256": f"{number:064x}",
        "format": "trmph",
        "records": positions + REJECTED,
        "positions": positions,
        "games": GAMES,
        "rejected": REJECTED,
    }


if __name__ == "__main__":
    write_large_store(Path(sys.argv[1]), *map(int, sys.argv[2:]))
