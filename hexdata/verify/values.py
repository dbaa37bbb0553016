"""The values of the store's positions and games: what no position or game has is named. Only reads."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.errors import VerifyError
from hexdata.formats.block_check import find_bad_row
from hexdata.formats.shards import SENTINELS, columns_to_block
from hexdata.remote import AnyPath
from hexdata.schema import SPLITS, positions_schema
from hexdata.store import Store
from hexdata.store.parquet import open_parquet
from hexdata.store.session import duckdb_session, read_parquet_sql
from hexdata.verify.options import VerifyOptions

__all__ = ["check_game_values", "check_position_values"]

_HINT: Final = "Make the store again from its sources."
_WINNERS: Final = ("BLUE", "RED")


def check_position_values(store: Store) -> str:
    """Every position has a board, a move, a policy, a value and labels that a position can have."""
    size = store.manifest.board_size
    if size is None:
        return "none"
    schema = positions_schema(size)
    count = 0
    for path in store.files("positions"):
        row = 0
        with open_parquet(path) as file:
            for batch in file.iter_batches(columns=schema.names):
                _check_batch(path, row, batch, size)
                row += batch.num_rows
        count += row
    return f"{count:,} positions have values that positions can have"


def _check_batch(path: AnyPath, first: int, batch: pa.RecordBatch, size: int) -> None:
    for name, null in SENTINELS.items():
        stated = pc.equal(batch.column(name), null).fill_null(False).to_numpy(zero_copy_only=False)
        if stated.any():
            row = first + int(np.flatnonzero(stated)[0])
            raise _wrong(path, f"row {row}", f"{name} {null}", "null, for which shards have that number")
    block = columns_to_block(batch, with_policy=batch.column("policy").null_count < batch.num_rows)
    for name, array in block.items():
        bad = find_bad_row(name, array, size)
        if bad is not None:
            at = int(block["policy_row"][bad.row]) if name == "policy" else bad.row
            raise _wrong(path, f"row {first + at}", f"{name} {bad.found}", bad.expected)
    for row, winner in _known(batch, "winner"):
        if winner not in _WINNERS:
            raise _wrong(path, f"row {first + row}", f"winner {winner!r}", "BLUE, RED or null")
    for row, extra in _known(batch, "extra"):
        try:
            fine = isinstance(json.loads(extra), dict)
        except (ValueError, RecursionError):
            fine = False
        if not fine:
            raise _wrong(path, f"row {first + row}", f"extra {extra[:80]!r}", "a JSON object or null")


def _known(batch: pa.RecordBatch, name: str) -> list[tuple[int, str]]:
    """Return the rows that are not null with their texts; of a dictionary column, one row for each text."""
    column = batch.column(name)
    if isinstance(column, pa.DictionaryArray):
        indices = column.indices.fill_null(-1).to_numpy()
        texts = column.dictionary.to_pylist()
        return [
            (int(np.flatnonzero(indices == code)[0]), texts[code]) for code in np.unique(indices) if code >= 0
        ]
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    return list(zip(rows.tolist(), column.drop_null().to_pylist(), strict=True))


def _wrong(path: AnyPath, record: str, found: object, expected: object) -> VerifyError:
    return VerifyError(
        "the table holds what no position has",
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint=_HINT,
    )


def check_game_values(store: Store, options: VerifyOptions) -> str:
    """Every game has a split, moves, players and duplicates that a game can have."""
    files, size = store.files("games"), store.manifest.board_size
    if not files or size is None:
        return "none"
    games, splits = read_parquet_sql(files), ", ".join(f"'{split}'" for split in SPLITS)
    rules = {
        "split": (f"split NOT IN ({splits})", " or ".join(SPLITS)),
        "winner": ("winner NOT IN ('BLUE', 'RED')", "BLUE, RED or null"),
        "first_player": ("first_player > 1", "0 for blue or 1 for red"),
        "positions": ("positions < 1", "1 or more"),
        "moves": (
            f"""list_max(moves) >= {size * size} OR (len(moves) <> len(list_distinct(moves))
                AND NOT coalesce(list_contains(flags, 'repeated-move'), false))""",
            f"cells below {size * size}, each once unless the game has the flag repeated-move",
        ),
    }
    with duckdb_session(**options.share(store.path)._asdict(), place=store.path) as con:
        for name, (rule, expected) in rules.items():
            found = con.sql(f"SELECT game_id, {name} FROM {games} WHERE {rule} LIMIT 1").fetchall()
            if found:
                raise _wrong_game(store, found[0], name, expected)
        found = con.sql(f"""
            SELECT g.game_id, g.duplicate_of FROM {games} g LEFT JOIN {games} d ON d.game_id = g.duplicate_of
            WHERE g.duplicate_of IS NOT NULL AND (d.game_id IS NULL OR d.game_id >= g.game_id
                OR d.duplicate_of IS NOT NULL OR d.game_hash <> g.game_hash) LIMIT 1""").fetchall()
        if found:
            expected = "the first game of the same game_hash, or null if it is this one"
            raise _wrong_game(store, found[0], "duplicate_of", expected)
    return f"{store.manifest.counts['games']:,} games have values that games can have"


def _wrong_game(store: Store, row: tuple[Any, ...], name: str, expected: str) -> VerifyError:
    return VerifyError(
        "the table holds what no game has",
        path=store.path / "games",
        record=f"game {row[0]}",
        found=f"{name} {row[1]}",
        expected=expected,
        hint=_HINT,
    )
