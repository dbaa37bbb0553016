"""Stores of games written by hand, and a comparison of games mode with exact mode."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hexdata.board import game_hash, pack_boards, replay
from hexdata.errors import ConfigError
from hexdata.fill import fill_to_move, fill_to_stones
from hexdata.loader import Loader
from hexdata.policy import SparsePolicies
from hexdata.schema import SPLITS, games_schema, positions_schema, rejected_schema, sources_schema
from hexdata.shards.blocks import block_fields, columns_to_block
from hexdata.shards.format import ShardWriter
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from hexdata.store import Store
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import ParquetRows, read_rows, write_parquet

Row = dict[str, Any]
"""One row of a table."""
Array = npt.NDArray[Any]

ALL_FIELDS = (
    *("board", "policy", "policy_mask", "move", "value", "value_weight", "position_id", "game_id"),
    *("player_to_move", "value_sample_tier", "position_in_game", "total_positions"),
)
_BLOCK_SIZE = 64
_SHARD_SIZE = 512
COMPARED: tuple[dict[str, Any], ...] = (
    {"planes": 3},
    {"symmetry": True, "seed": 3, "tier_probability": (0.1, 0.3, 0.5, 0.9)},
    {"symmetry": True, "planes": 3, "board": "uint8", "final_policy": "uniform"},
    {"board": "packed"},
    {"board": "packed", "symmetry": True, "planes": 3},
    {"board": "float16", "final_policy": "uniform"},
    {"board": "uint8", "final_policy": "skip"},
    {"where": "value_sample_tier = 3 or position_in_game < 5 or game_id is null"},
    {"where": "move < 12 and value > 0.2", "final_policy": "skip"},
    {"newest": 3},
    {"board": "fill", "symmetry": True},
    {"board": "fill", "planes": 3, "fields": ("board", "policy", "position_id")},
    {"fields": ("policy", "value", "position_id")},
    {"fields": ("value", "move", "position_id"), "symmetry": True},
)
"""Options with which the modes are compared."""
SEARCHED = ("extra.limits", "extra.temperature", "root_value", "visits", "weight")
"""Optional columns of the stores with results of a search."""
FEW = tuple(COMPARED[i] for i in (0, 1, 6, 10))
"""Some of them, for the content of unusual stores."""


# --- stores -------------------------------------------------------------------------------------------


def game_row(game_id: int, moves: Sequence[int], n: int, first_player: int = 0, **changes: Any) -> Row:
    """Return a row of the table games with all moves."""
    total = len(moves) + 1
    row = {
        "game_id": game_id,
        "source_id": 0,
        "total_positions": total,
        "positions": total,
        "first_player": first_player,
        "moves": [int(move) for move in moves],
        "game_hash": game_hash(np.array(moves, np.uint16), n, first_player)
        if len(set(moves)) == len(moves)
        else hashlib.sha256(bytes([game_id % 256])).digest()[:16],
        "split": "train",
        "provenance": "metadata",
        "flags": [],
    }
    return {**row, **changes}


def position_rows(game: Row, n: int, value: float = 1.0, **changes: Any) -> list[Row]:
    """Return the rows of the table positions that follow from a game; their ids are set by the writer."""
    moves, first_player = game["moves"], game["first_player"] or 0
    packed = pack_boards(replay(np.array(moves, np.uint16), n, first_player))
    return [
        {
            "game_id": game["game_id"],
            "position_in_game": ply,
            "total_positions": len(packed),
            "board": board.tobytes(),
            "move": moves[ply] if ply < len(moves) else None,
            "policy": None,
            "value": value,
            "player_to_move": (ply + first_player) % 2,
            "value_sample_tier": None if game["game_id"] % 5 == 4 else ply // 3 % 4,
            **changes,
        }
        for ply, board in enumerate(packed)
    ]


def sample_games(count: int, n: int, seed: int = 0) -> list[Row]:
    """Return rows of games of random length in all splits; one in three is begun by red."""
    rng = np.random.default_rng(seed)
    splits = rng.choice(SPLITS, count, p=(0.7, 0.2, 0.1))
    return [
        game_row(
            number,
            rng.permutation(n * n)[: int(rng.integers(0, n * n + 1))].tolist(),
            n,
            int(number % 3 == 2),
            split=str(splits[number]),
        )
        for number in range(count)
    ]


def add_search(rows: Iterable[Row], n: int, seed: int = 0) -> None:
    """Add results of a search to rows of positions: policies to most, and ``SEARCHED``, sometimes null."""
    rng = np.random.default_rng(seed)
    for row in rows:
        if rng.random() < 0.8:
            policy = np.zeros(n * n, np.float32)
            cells = rng.permutation(n * n)[: int(rng.integers(0, n + 3))]
            policy[cells] = rng.random(len(cells), np.float32)
            if rng.random() < 0.1:
                policy[:2] = -0.0
            row["policy"] = policy.tolist()
        numbers = {
            "root_value": float(rng.choice([0.0, 0.25, 1.0, rng.random(dtype=np.float32)])),
            "visits": int(rng.choice([0, 1, 800, 2**31 - 1])),
            "weight": float(rng.random(dtype=np.float32)),
            "extra.temperature": float(rng.standard_normal()),
            "extra.limits": float(rng.choice([1e300, -np.inf, 5e-324, -0.0, 0.1, np.nan])),
        }
        row.update({name: None if rng.random() < 0.2 else number for name, number in numbers.items()})


def write_store(
    path: Path,
    n: int,
    games: Iterable[Row],
    parts: Sequence[Sequence[Row]],
    formats: Sequence[str] | str = "trmph",
    *,
    targets: Sequence[str] = (),
) -> Path:
    """Write a converted store.

    Args:
        path: Folder of the store.
        n: Board size.
        games: Rows of the table games.
        parts: Rows of each part of the table positions. Rows without a position id are numbered. Policies
            are dense lists, or lists of entries. A value that a row lacks is null.
        formats: Format of each source, or of all.
        targets: Optional columns of the store (default: none).
    """
    kinds = [formats] * len(parts) if isinstance(formats, str) else formats
    sources = [
        {
            "source_id": number,
            "name": f"source-{number}",
            "bytes": 0,
            "sha256": f"{number:064x}",
            "format": kind,
        }
        | {"records": len(rows), "positions": len(rows), "games": 0, "rejected": 0}
        for number, (rows, kind) in enumerate(zip(parts, kinds, strict=True))
    ]
    tables = {
        "games/part-000000.parquet": pa.Table.from_pylist(list(games), schema=games_schema()),
        "sources/part-000000.parquet": pa.Table.from_pylist(sources, schema=sources_schema()),
        "rejected/part-000000.parquet": pa.Table.from_pylist([], schema=rejected_schema()),
    }
    count = 0
    for number, rows in enumerate(parts):
        numbered = [{"position_id": count + index, **row} for index, row in enumerate(rows)]
        count += len(rows)
        for row in numbered:
            if row["policy"] and isinstance(row["policy"][0], float):
                sparse = SparsePolicies.from_dense(np.array([row["policy"]], np.float32))
                entries = zip(sparse.cells.tolist(), sparse.probabilities.tolist(), strict=True)
                row["policy"] = [{"cell": cell, "probability": value} for cell, value in entries]
        if rows:  # otherwise the source is in the part before
            table = pa.Table.from_pylist(numbered, schema=positions_schema(n, targets))
            tables[f"positions/part-{number:06d}.parquet"] = table
    manifest = Manifest(board_size=n, targets=tuple(sorted(targets)))
    manifest.counts = dict.fromkeys(("sources", "games", "positions", "rejected"), 0)
    for name, table in tables.items():
        manifest.files[name] = write_parquet(path / name, table.schema, [table])
        manifest.counts[name.split("/")[0]] += table.num_rows
    manifest.stages["convert"] = {
        "val": 0.0,
        "test": 0.0,
        "records": count,
        "positions": count,
        "rejected": 0,
    }
    manifest.save(path)
    return path


def write_shards(store: Path, folder: Path) -> Path:
    """Write the positions of a store as shards, in the order of the store; return the folder.

    Shuffle and export would refuse some of the contents that loaders must agree about.
    """
    opened = Store.open(store)
    n, targets = opened.manifest.board_size, opened.manifest.targets
    assert n is not None
    games = pa.concat_tables(pq.read_table(path) for path in opened.files("games"))
    splits = dict(zip(games["game_id"].to_pylist(), games["split"].to_pylist(), strict=True))
    schema = positions_schema(n, targets)
    files = [
        ParquetRows.of([(store / name, facts.rows)])
        for name, facts in opened.manifest.files_in("positions").items()
    ]
    table = pa.concat_tables(pa.Table.from_batches(read_rows(file, schema), schema) for file in files)
    own = np.array([splits.get(game, "train") for game in table["game_id"].to_pylist()])
    folder.mkdir()
    entries: dict[str, list[ShardEntry]] = {split: [] for split in SPLITS}
    for split, shards in entries.items():
        rows = table.filter(pa.array(own == split))
        for start in range(0, len(rows), _SHARD_SIZE):
            path = folder / f"{split}-{len(shards):06d}.tar"
            with path.open("wb") as file:
                writer = ShardWriter(file)
                for first in range(start, min(start + _SHARD_SIZE, len(rows)), _BLOCK_SIZE):
                    block = columns_to_block(rows.slice(first, _BLOCK_SIZE), True, targets)
                    writer.write_block(first // _BLOCK_SIZE, block)
                writer.close()
            shards.append(writer.entry(path.name, hashlib.sha256(path.read_bytes()).hexdigest()))
    manifest = ShardManifest(
        board_size=n,
        block_size=_BLOCK_SIZE,
        shard_size=_SHARD_SIZE,
        seed=0,
        fields=block_fields(n, with_policy=True, targets=targets),
        splits=entries,
    )
    (folder / "manifest.json").write_bytes(manifest.dumps())
    return folder


# --- comparison ---------------------------------------------------------------------------------------


def contents(loader: Loader) -> dict[str, Array]:
    """Return the arrays of an epoch, in ascending order of position id."""
    batches = list(loader)
    if not batches:
        return {}
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    order = np.argsort(joined["position_id"], kind="stable")
    return {name: array[order] for name, array in joined.items()}


def assert_modes_agree(
    store: Path, shards: Path, options: Iterable[Mapping[str, Any]] = COMPARED, **common: Any
) -> list[Loader]:
    """Compare every field of every position in games and in exact mode, in all splits.

    Fill rows of one position are not unique, so their stones and moves are compared.

    Args:
        store: The store.
        shards: Its positions as shards.
        options: Options with which the modes are compared.
        common: Options of all comparisons.

    Returns:
        The loaders in games mode.
    """
    loaders, entries = [], load_manifest(make_source(shards)).splits
    for split, each in itertools.product(SPLITS, options):
        merged = {"fields": ALL_FIELDS, "batch_size": 70, **each, **common, "split": split}
        found: list[Loader | None] = []
        for path, mode in ((store, "games"), (shards, "exact")):
            try:
                # Shards without positions say nothing about the fields of the store.
                has_data = entries[split] or path is store
                found.append(Loader(path, mode=mode, **merged) if has_data else None)
            except ConfigError as error:
                if not re.search("select no position|split has no positions", str(error)):
                    raise
                found.append(None)
        ours, plain = found
        assert (ours is None) == (plain is None), (split, each)
        if ours is None or plain is None:
            continue
        theirs = _with_stones(contents(plain))
        for name, array in _with_stones(contents(ours)).items():
            expected, where = theirs.pop(name), f"{split} {each}: {name}"
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape), where
            if array.tobytes() != expected.tobytes():
                np.testing.assert_array_equal(array, expected, err_msg=where)
                raise AssertionError(f"{where}: equal numbers, but other bits")
        assert not theirs
        loaders.append(ours)
    return loaders


def _with_stones(batch: dict[str, Array]) -> dict[str, Array]:
    """Return a batch with the stones and next moves in place of fill rows."""
    if "ply" not in batch:
        return batch
    fill, ply = batch.pop("board"), batch.pop("ply")
    return {**batch, "stones": fill_to_stones(fill, ply), "next": fill_to_move(fill, ply)}
