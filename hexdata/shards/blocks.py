"""Blocks of positions: their fields, row operations, and conversion from Arrow tables.

Reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.policy import SparsePolicies
from hexdata.schema import (
    NO_GAME,
    NO_MOVE,
    NO_PLY,
    NO_TIER,
    NO_VISITS,
    SCHEMA_VERSION,
    board_bytes,
    board_size_of,
    is_target,
    target_type,
)
from hexdata.shards.manifest import FieldSpec

__all__ = [
    "POLICY_FIELDS",
    "SENTINELS",
    "SPARSE_FIELDS",
    "Block",
    "block_fields",
    "block_length",
    "block_to_members",
    "block_to_policy",
    "columns_to_block",
    "fields_of_members",
    "join_blocks",
    "members_of_fields",
    "members_to_block",
    "members_to_policies",
    "null_of",
    "policies_to_members",
    "row_fields",
    "slice_rows",
    "take_rows",
]

Block = dict[str, npt.NDArray[Any]]
"""A block of n positions: one array per field, with n as its leading dimension.

The fields of the k policies that are not one-hot differ: ``policy_row`` (k,) has the rows that have one, in
ascending order, and ``policy`` (k, cells) the policies. Shards, and blocks read from them, have sparse
policies instead, the fields ``SPARSE_FIELDS``; :func:`block_to_members` and :func:`members_to_block` convert
them.
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
"""Fields with one entry per dense policy of the block, not one per position. They are also the members of
dense policies in shards of schema version 1."""
SPARSE_FIELDS: Final = ("policy_row", "policy_count", "policy_cell", "policy_probability")
"""Members of policies in shards. The first two have one entry per policy, the others one per cell of a policy
whose probability is not 0."""
_NO_ROW_FIELDS: Final = frozenset((*POLICY_FIELDS, *SPARSE_FIELDS))
_MEMBER_DTYPES: Final = {pa.float32(): "<f4", pa.float64(): "<f8", pa.int32(): "<i4"}


def null_of(name: str) -> float:
    """Return the number that represents null in a field that may be null: one of ``SENTINELS``, or NaN."""
    return SENTINELS.get(name, NO_VISITS if name == "visits" else np.nan)


def block_fields(
    board_size: int,
    with_policy: bool,
    targets: Sequence[str] = (),
    schema_version: int = SCHEMA_VERSION,
) -> dict[str, FieldSpec]:
    """Return the members of every block of a split by name.

    Args:
        board_size: Cells along an edge.
        with_policy: Whether the split contains any dense policy, which adds ``SPARSE_FIELDS``.
        targets: Optional columns of the store, as listed in its manifest. Default: none.
        schema_version: Version of the shards. Policies of version 1 are dense: they add ``POLICY_FIELDS``.
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
    fields |= {name: FieldSpec(_MEMBER_DTYPES[target_type(name)], ()) for name in sorted(targets)}
    if with_policy:
        fields["policy_row"] = FieldSpec("<u4", ())
        if schema_version == 1:
            fields["policy"] = FieldSpec("<f4", (board_size * board_size,))
        else:
            fields["policy_count"] = FieldSpec("<u2", ())
            fields["policy_cell"] = FieldSpec("<u2", ())
            fields["policy_probability"] = FieldSpec("<f4", ())
    return fields


def fields_of_members(members: Collection[str]) -> list[str]:
    """Return the sorted fields of the blocks that are made of these members."""
    fields = set(members)
    if "policy_cell" in fields:
        fields = fields - set(SPARSE_FIELDS) | set(POLICY_FIELDS)
    return sorted(fields)


def members_of_fields(fields: Collection[str], stored: Collection[str]) -> list[str]:
    """Return the sorted members of shards from which fields of blocks are made.

    Args:
        fields: Names of the fields.
        stored: Names of all members.
    """
    needed = set(fields)
    if "policy" in needed and "policy" not in stored:
        needed = needed - {"policy"} | set(SPARSE_FIELDS)
    return sorted(needed)


def block_length(block: Mapping[str, npt.NDArray[Any]]) -> int:
    """Return n, the number of positions in a block.

    Raises:
        ValueError: The fields differ in length.
    """
    lengths = {len(array) for name, array in block.items() if name not in _NO_ROW_FIELDS}
    if len(lengths) != 1:
        raise ValueError(f"the fields of a block have different lengths: {sorted(lengths)}")
    return lengths.pop()


# --- rows ---------------------------------------------------------------------------------------------


def row_fields(block: Block) -> list[str]:
    """Return the sorted names of the fields with one row per position."""
    return sorted(block.keys() - _NO_ROW_FIELDS)


def take_rows(block: Block, rows: npt.NDArray[np.integer[Any]]) -> Block:
    """Return a block with copies of the given rows.

    The fields of dense policies are left out if none of the rows has one; those of sparse policies remain.

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
    if "policy_cell" in block:
        slots = np.full(block_length(block), -1, np.int64)
        slots[block["policy_row"]] = np.arange(len(block["policy_row"]))
        found = slots[rows]
        chosen = np.flatnonzero(found >= 0)
        taken |= policies_to_members(members_to_policies(block).take(found[chosen]), chosen)
    return taken


def slice_rows(block: Block, start: int, stop: int) -> Block:
    """Return a block of views on the rows [start, stop).

    The fields of dense policies are left out if none of the rows has one; those of sparse policies remain.
    """
    cut: Block = {name: block[name][start:stop] for name in row_fields(block)}
    if "policy" in block:
        first, last = np.searchsorted(block["policy_row"], (start, stop))
        _add_policies(cut, block["policy"][first:last], block["policy_row"][first:last] - np.uint32(start))
    if "policy_cell" in block:
        first, last = np.searchsorted(block["policy_row"], (start, stop))
        begin = int(block["policy_count"][:first].sum(dtype=np.int64))
        end = begin + int(block["policy_count"][first:last].sum(dtype=np.int64))
        cut["policy_row"] = block["policy_row"][first:last] - np.uint32(start)
        cut["policy_count"] = block["policy_count"][first:last]
        cut |= {name: block[name][begin:end] for name in SPARSE_FIELDS[2:]}
    return cut


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Concatenate blocks; return a single block unchanged.

    If any block has the fields of policies, the result has them too.

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
    if any("policy_cell" in block for block in blocks):
        starts = np.cumsum([0, *(block_length(block) for block in blocks[:-1])])
        sparse = [
            (block, start) for block, start in zip(blocks, starts, strict=True) if "policy_cell" in block
        ]
        rows = [block["policy_row"] + start for block, start in sparse]
        joined["policy_row"] = np.concatenate(rows).astype(np.uint32)
        joined |= {name: np.concatenate([block[name] for block, _ in sparse]) for name in SPARSE_FIELDS[1:]}
    return joined


def _add_policies(block: Block, policies: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
    """Add dense policies (k, cells) for the ascending rows (k,) to a block; do nothing if k is 0."""
    if len(rows):
        block["policy"] = policies
        block["policy_row"] = rows.astype(np.uint32, copy=False)


# --- Arrow tables and policies ------------------------------------------------------------------------


def columns_to_block(
    table: pa.Table | pa.RecordBatch, with_policy: bool, targets: Sequence[str] = ()
) -> Block:
    """Convert rows of ``schema.positions_schema`` into one block. Nulls become the numbers of
    :func:`null_of`.

    Args:
        table: The rows. Policies may also be dense lists, as in stores of schema version 1.
        with_policy: Whether the block gets the fields ``policy`` and ``policy_row``.
        targets: Optional columns that the block gets. All numbers are null if the table lacks the column.
            Default: none.

    Raises:
        StoreError: A column that may not be null contains nulls, or a policy is not valid.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    board_size = board_size_of(table.schema.field("board").type.byte_width)
    block: Block = {}
    for name, spec in block_fields(board_size, with_policy=False, targets=targets).items():
        if is_target(name) and name not in table.column_names:
            block[name] = np.full(table.num_rows, null_of(name), spec.dtype)
            continue
        column = table.column(name)
        if name in SENTINELS or is_target(name):
            column = column.fill_null(null_of(name)) if column.null_count else column
        elif column.null_count:
            raise StoreError(f"column {name} contains {column.null_count} nulls", expected="none")
        values = _binary_to_bytes(column) if name == "board" else column.to_numpy()
        block[name] = values.astype(spec.dtype, copy=False)
    if with_policy:
        rows, policies = SparsePolicies.from_arrow(table.column("policy"), board_size**2)
        block["policy"] = policies.to_dense(board_size**2)
        block["policy_row"] = rows.astype("<u4")
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


def block_to_members(block: Block) -> Block:
    """Return the members of a block in shards: those of :func:`block_fields`, with sparse policies."""
    if "policy" not in block:
        return block
    policies = SparsePolicies.from_dense(block["policy"])
    sparse = policies_to_members(policies, block["policy_row"])
    return {name: block[name] for name in row_fields(block)} | sparse


def members_to_block(members: Block, cells: int) -> Block:
    """Return the block of members read from a shard, which ``check_block`` has accepted.

    Args:
        members: The members. Dense policies, as in shards of schema version 1, remain as they are.
        cells: Number of cells of the board.
    """
    if "policy_cell" not in members:
        return members
    return {name: members[name] for name in row_fields(members)} | {
        "policy": members_to_policies(members).to_dense(cells),
        "policy_row": members["policy_row"],
    }


def policies_to_members(policies: SparsePolicies, rows: npt.NDArray[np.integer[Any]]) -> Block:
    """Return ``SPARSE_FIELDS`` of the policies (k,) of ascending rows (k,)."""
    return {
        "policy_row": rows.astype("<u4", copy=False),
        "policy_count": np.diff(policies.starts).astype("<u2"),
        "policy_cell": policies.cells,
        "policy_probability": policies.probabilities,
    }


def members_to_policies(members: Mapping[str, npt.NDArray[Any]]) -> SparsePolicies:
    """Return the sparse policies of members; ``policy_row`` has the row of each."""
    starts = np.zeros(len(members["policy_count"]) + 1, np.int64)
    np.cumsum(members["policy_count"], out=starts[1:])
    return SparsePolicies(starts, members["policy_cell"], members["policy_probability"])


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
    if "policy_cell" in block:
        rows = block["policy_row"].astype(np.int64)
        policy[rows[move[rows] != NO_MOVE]] = 0
        starts = np.repeat(rows * cells, block["policy_count"])
        policy.reshape(-1)[starts + block["policy_cell"]] = block["policy_probability"]
    return policy
