"""Blocks of positions: their fields, row operations, and conversion from Arrow tables.

Reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER, board_bytes, board_size_of
from hexdata.shards.manifest import FieldSpec

__all__ = [
    "POLICY_FIELDS",
    "SENTINELS",
    "Block",
    "block_fields",
    "block_length",
    "block_to_policy",
    "columns_to_block",
    "join_blocks",
    "row_fields",
    "slice_rows",
    "take_rows",
]

Block = dict[str, npt.NDArray[Any]]
"""A block of n positions: one array per field of :func:`block_fields`, with n as its leading dimension.

Two fields differ: ``policy`` (k, cells) holds the k dense policies of the block, and ``policy_row`` (k,) the
rows that have one, in ascending order.
"""

SENTINELS: Final[Mapping[str, int]] = {
    "game_id": NO_GAME,
    "move": NO_MOVE,
    "position_in_game": NO_PLY,
    "total_positions": NO_PLY,
    "value_sample_tier": NO_TIER,
}
"""Value that represents null, by field."""
POLICY_FIELDS: Final = ("policy", "policy_row")
"""Fields with one entry per dense policy of the block, not one per position."""


def block_fields(board_size: int, with_policy: bool) -> dict[str, FieldSpec]:
    """Return the fields of every block of a split by name.

    Args:
        board_size: Cells along an edge.
        with_policy: Whether the split contains any dense policy, which adds ``POLICY_FIELDS``.
    """
    fields = {
        "board": FieldSpec("|u1", (board_bytes(board_size),)),
        "game_id": FieldSpec("<i8", ()),
        "move": FieldSpec("<u2", ()),
        "player_to_move": FieldSpec("|u1", ()),
        "position_id": FieldSpec("<i8", ()),
        "position_in_game": FieldSpec("<u2", ()),
        "total_positions": FieldSpec("<u2", ()),
        "value": FieldSpec("<f4", ()),
        "value_sample_tier": FieldSpec("|u1", ()),
    }
    if with_policy:
        fields["policy"] = FieldSpec("<f4", (board_size * board_size,))
        fields["policy_row"] = FieldSpec("<u4", ())
    return fields


def block_length(block: Mapping[str, npt.NDArray[Any]]) -> int:
    """Return n, the number of positions in a block.

    Raises:
        ValueError: The fields differ in length.
    """
    lengths = {len(array) for name, array in block.items() if name not in POLICY_FIELDS}
    if len(lengths) != 1:
        raise ValueError(f"the fields of a block have different lengths: {sorted(lengths)}")
    return lengths.pop()


# --- rows ---------------------------------------------------------------------------------------------


def row_fields(block: Block) -> list[str]:
    """Return the sorted names of the fields with one row per position."""
    return sorted(block.keys() - set(POLICY_FIELDS))


def take_rows(block: Block, rows: npt.NDArray[np.integer[Any]]) -> Block:
    """Return a block with copies of the given rows.

    The fields of dense policies are left out if none of the rows has one.

    Args:
        block: Block of positions.
        rows: Row indices, int (k,), in any order; an index may repeat.
    """
    taken: Block = {name: block[name].take(rows, axis=0) for name in row_fields(block)}
    if "policy" in block:
        slots = np.full(block_length(block), -1, np.int64)
        slots[block["policy_row"]] = np.arange(len(block["policy_row"]))
        found = slots[rows]
        dense = np.flatnonzero(found >= 0)
        _add_policies(taken, block["policy"].take(found[dense], axis=0), dense)
    return taken


def slice_rows(block: Block, start: int, stop: int) -> Block:
    """Return a block of views on the rows [start, stop).

    The fields of dense policies are left out if none of the rows has one.
    """
    cut: Block = {name: block[name][start:stop] for name in row_fields(block)}
    if "policy" in block:
        first, last = np.searchsorted(block["policy_row"], (start, stop))
        _add_policies(cut, block["policy"][first:last], block["policy_row"][first:last] - np.uint32(start))
    return cut


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Concatenate blocks; return a single block unchanged.

    If any block has the fields of dense policies, the result has them too.

    Raises:
        StoreError: The blocks have different fields.
    """
    if len(blocks) == 1:
        return blocks[0]
    names = row_fields(blocks[0])
    for block in blocks:
        if row_fields(block) != names:
            raise StoreError("blocks have different fields", found=row_fields(block), expected=names)
    joined: Block = {name: np.concatenate([block[name] for block in blocks]) for name in names}
    if any("policy" in block for block in blocks):
        starts = np.cumsum([0, *(block_length(block) for block in blocks[:-1])])
        dense = [
            (block["policy"], block["policy_row"] + start)
            for block, start in zip(blocks, starts, strict=True)
            if "policy" in block
        ]
        joined["policy"] = np.concatenate([policy for policy, _ in dense])
        joined["policy_row"] = np.concatenate([rows for _, rows in dense]).astype(np.uint32)
    return joined


def _add_policies(block: Block, policies: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
    """Add dense policies (k, cells) for the ascending rows (k,) to a block; do nothing if k is 0."""
    if len(rows):
        block["policy"] = policies
        block["policy_row"] = rows.astype(np.uint32, copy=False)


# --- Arrow tables and policies ------------------------------------------------------------------------


def columns_to_block(table: pa.Table | pa.RecordBatch, with_policy: bool) -> Block:
    """Convert rows of ``schema.positions_schema`` into one block. Nulls become the values in ``SENTINELS``.

    Args:
        table: The rows.
        with_policy: Whether the block gets the fields ``policy`` and ``policy_row``.

    Raises:
        StoreError: A column without a sentinel contains nulls, or the length of a dense policy is not the
            number of cells.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    board_size = board_size_of(table.schema.field("board").type.byte_width)
    block: Block = {}
    for name, spec in block_fields(board_size, with_policy=False).items():
        column = table.column(name)
        if name in SENTINELS:
            column = column.fill_null(SENTINELS[name])
        elif column.null_count:
            raise StoreError(f"column {name} contains {column.null_count} nulls", expected="none")
        values = _binary_to_bytes(column) if name == "board" else column.to_numpy()
        block[name] = values.astype(spec.dtype, copy=False)
    if with_policy:
        block |= _dense_policies(table.column("policy"), board_size * board_size)
    return block


def _binary_to_bytes(column: pa.ChunkedArray) -> npt.NDArray[np.uint8]:
    """Return a fixed-size-binary column without nulls as uint8 (rows, width)."""
    width = column.type.byte_width
    chunks = [
        np.frombuffer(chunk.buffers()[1], np.uint8, len(chunk) * width, chunk.offset * width)
        for chunk in column.chunks
        if len(chunk)
    ]
    joined = chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])
    return joined.reshape(-1, width)


def _dense_policies(column: pa.ChunkedArray, cells: int) -> Block:
    rows = np.flatnonzero(column.is_valid().to_numpy())
    dense = column.drop_null()
    lengths = dense.combine_chunks().value_lengths().to_numpy()
    if (lengths != cells).any():
        wrong = int(np.flatnonzero(lengths != cells)[0])
        raise StoreError(
            "a dense policy does not cover the board",
            record=f"row {rows[wrong]}",
            found=f"{lengths[wrong]} numbers",
            expected=cells,
        )
    numbers = dense.combine_chunks().flatten()
    if numbers.null_count:
        wrong = int(np.flatnonzero(numbers.is_null().to_numpy(zero_copy_only=False))[0])
        raise StoreError(
            "a dense policy contains a null",
            record=f"row {rows[wrong // cells]}",
            found=f"null for cell {wrong % cells}",
            expected="a number",
        )
    return {
        "policy": numbers.to_numpy().astype("<f4", copy=False).reshape(-1, cells),
        "policy_row": rows.astype("<u4"),
    }


def block_to_policy(block: Mapping[str, npt.NDArray[Any]], cells: int) -> npt.NDArray[np.float32]:
    """Return the policies of all positions of a block as float32 (n, cells).

    A position without a dense policy gets a one-hot policy at its ``move``; a final position gets zeros.

    Args:
        block: The block.
        cells: Number of cells of the board.
    """
    move = block["move"]
    policy = np.zeros((len(move), cells), np.float32)
    has_move = np.flatnonzero(move != NO_MOVE)
    policy[has_move, move[has_move]] = 1.0
    if "policy" in block:
        policy[block["policy_row"]] = block["policy"]
    return policy
