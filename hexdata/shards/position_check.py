"""Checks of the values of positions in Arrow tables, shared by all readers of a store. Reads no files."""

from __future__ import annotations

import json
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.errors import StoreError
from hexdata.formats.legacy.dialect import DIALECT_KEY
from hexdata.schema import NO_VISITS, board_size_of, is_target
from hexdata.shards.block_check import BadRow, find_bad_row
from hexdata.shards.blocks import SENTINELS, columns_to_block

__all__ = ["check_positions", "find_bad_position"]

_WINNERS: Final = ("BLUE", "RED")


def find_bad_position(rows: pa.Table | pa.RecordBatch, *, texts: bool = True) -> BadRow | None:
    """Return the first invalid value of the first invalid field; None if all values are valid.

    Args:
        rows: Rows of ``positions_schema``, with any targets; ``winner`` may be text instead of a dictionary.
        texts: Whether to check ``metadata`` too, for which each distinct text is parsed. Default True.
    """
    size = board_size_of(rows.schema.field("board").type.byte_width)
    targets = [name for name in rows.schema.names if is_target(name)]
    for name, null in (*SENTINELS.items(), *(("visits", NO_VISITS) for name in targets if name == "visits")):
        column = rows.column(name)
        if pc.max(column).as_py() == null if null > 0 else pc.min(column).as_py() == null:
            row = pc.index(column, pa.scalar(null, column.type)).as_py()
            return BadRow(row, f"{name} {null}", "null, for which shards have that number")
    for name in targets:
        column = rows.column(name)
        if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
            row = pc.index(pc.is_nan(column), pa.scalar(True)).as_py()
            return BadRow(row, f"{name} NaN", "null, for which shards have NaN")
    with_policy = rows.column("policy").null_count < rows.num_rows
    try:
        block = columns_to_block(rows, with_policy, targets)
    except StoreError as error:
        row = int(str(error.record).removeprefix("row ")) if error.record else 0
        return BadRow(row, f"{error.reason}: {error.found}", str(error.expected))
    for name, array in block.items():
        bad = find_bad_row(name, array, size)
        if bad is not None:
            row = int(block["policy_row"][bad.row]) if name == "policy" else bad.row
            return BadRow(row, f"{name} {bad.found}", bad.expected)
    for row, winner in _known(rows, "winner"):
        if winner not in _WINNERS:
            return BadRow(row, f"winner {winner!r}", "BLUE, RED or null")
    for row, text in _known(rows, "metadata") if texts else ():
        try:
            content = json.loads(text)
            fine = isinstance(content, dict) and isinstance(content.get(DIALECT_KEY, {}), dict)
        except (ValueError, RecursionError):
            fine = False
        if not fine:
            return BadRow(row, f"metadata {text[:80]!r}", "a JSON object or null")
    return None


def check_positions(batch: pa.RecordBatch, path: object, first: int, games: int) -> None:
    """Check the values of positions in a file of a store.

    Args:
        batch: Rows of ``positions_schema``.
        path: Path of the file, for messages.
        first: Index of the first row of the batch in the file.
        games: Number of games in the store.

    Raises:
        StoreError: A value is invalid, or a ``game_id`` is not of a game in the store.
    """
    bad = find_bad_position(batch)
    if bad is None:
        game = batch.column("game_id").fill_null(-1).to_numpy()
        if len(game) and game.max() >= games:
            row = int(np.flatnonzero(game >= games)[0])
            bad = BadRow(row, f"game_id {game[row]}", f"a game below {games} or null")
    if bad is not None:
        raise StoreError(
            "the table contains an invalid value",
            path=path,
            record=f"row {first + bad.row}",
            found=bad.found,
            expected=bad.expected,
            hint="Run `hexdata verify` to see what else is wrong; then convert the sources again.",
        )


def _known(rows: pa.Table | pa.RecordBatch, name: str) -> list[tuple[int, str]]:
    """Return the distinct texts of a column, each with the first row that contains it."""
    column = rows.column(name)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    indices, texts = column.indices.fill_null(-1).to_numpy(), column.dictionary.to_pylist()
    codes, firsts = np.unique(indices, return_index=True)
    return [
        (row, texts[code])
        for code, row in zip(codes.tolist(), firsts.tolist(), strict=True)
        if code >= 0 and texts[code] is not None
    ]
