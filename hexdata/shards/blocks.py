"""Blocks of positions: their fields, row operations, and conversion from Arrow tables.

Reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.arrays import NUMPY, Arrays
from hexdata.board import RED
from hexdata.errors import StoreError
from hexdata.fill import fill_to_policy
from hexdata.json_models import Model
from hexdata.policy import SparsePolicies
from hexdata.schema import (
    FULL_WEIGHT,
    MAX_TIER,
    NO_GAME,
    NO_MOVE,
    NO_PLY,
    NO_TIER,
    NO_VISITS,
    binary_matrix,
    board_bytes,
    board_size_of,
    is_target,
)

Block = dict[str, npt.NDArray[Any]]
"""A block of n positions: one array per field, with n as its leading dimension.

The fields of the k policies that are not one-hot differ: ``policy_row`` (k,) has the rows that have one, in
ascending order. The policies are sparse, as ``SPARSE_FIELDS``. Games in memory that change their policies
have dense ones instead, ``policy`` (k, cells); :func:`block_to_members` and :func:`members_to_block` convert
them.
"""

POLICY_FIELDS: Final = ("policy", "policy_row")
"""Fields with one entry per dense policy of the block, not one per position."""
SPARSE_FIELDS: Final = ("policy_row", "policy_count", "policy_cell", "policy_probability")
"""Members of policies in shards. The first two have one entry per policy, the others one per cell of a policy
whose probability is not 0."""
_NO_ROW_FIELDS: Final = frozenset((*POLICY_FIELDS, *SPARSE_FIELDS))


class Field(NamedTuple):
    """The dtype of a field, its lowest and highest value, and its number for null; None for none.

    A highest value of 0 or -1 counts from the number of cells.
    """

    dtype: str
    low: int | None = None
    high: float = 0
    null: float | None = None


# Far from the limits of int64, so that ids can be added to counts.
_MAX_ID: Final = (1 << 62) - 1
# An upper limit that refuses infinity.
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)
FIELDS: Final = {
    "board": Field("|u1"),
    "game_id": Field("<i8", 0, _MAX_ID, NO_GAME),
    "move": Field("<u2", 0, -1, NO_MOVE),
    "player_to_move": Field("|u1", 0, RED),
    "position_id": Field("<i8", 0, _MAX_ID),
    "position_in_game": Field("<u2", null=NO_PLY),
    "total_positions": Field("<u2", null=NO_PLY),
    "value": Field("<f4", 0, 1),
    "value_sample_tier": Field("|u1", 0, MAX_TIER, NO_TIER),
    "policy_row": Field("<u4"),
    "policy_count": Field("<u2", 0, 0),
    "policy_cell": Field("<u2", 0, -1),
    "policy_probability": Field("<f4", 0, _MAX_FLOAT32),
    "policy_weight": Field("<f4", 0, _MAX_FLOAT32, FULL_WEIGHT),
    "root_value": Field("<f4", 0, 1, np.nan),
    "visits": Field("<i4", 0, np.iinfo(np.int32).max, NO_VISITS),
    "weight": Field("<f4", 0, _MAX_FLOAT32, np.nan),
}
"""All fields of shards, in their order in the manifest, except those of extra columns."""
_EXTRA: Final = Field("<f8", null=np.nan)
_ALWAYS: Final = [name for name in FIELDS if name not in _NO_ROW_FIELDS and not is_target(name)]
SENTINELS: Final = {name: int(null) for name in _ALWAYS if (null := FIELDS[name].null) is not None}
"""Value that represents null, by field that every block has."""


def null_of(name: str) -> float:
    """Return the number in a field for null: one of ``SENTINELS``, ``FULL_WEIGHT``, -1 or NaN."""
    null = FIELDS.get(name, _EXTRA).null
    return np.nan if null is None else null


def null_rows(name: str, count: int) -> npt.NDArray[Any]:
    """Return ``count`` rows of an optional column, all null."""
    return np.full(count, null_of(name), FIELDS.get(name, _EXTRA).dtype)


class FieldSpec(Model, frozen=True):
    """One field of a block: its NumPy type string and its shape without the leading dimension."""

    dtype: str
    shape: tuple[int, ...]


def block_fields(board_size: int, with_policy: bool, targets: Sequence[str] = ()) -> dict[str, FieldSpec]:
    """Return the members of every block of a split by name.

    Args:
        board_size: Cells along an edge.
        with_policy: Whether the split contains any policy that is not one-hot, which adds ``SPARSE_FIELDS``.
        targets: Optional columns of the store, as listed in its manifest. Default: none.
    """
    names = [*_ALWAYS, *sorted(targets), *(SPARSE_FIELDS if with_policy else ())]
    fields = {name: FieldSpec(FIELDS.get(name, _EXTRA).dtype, ()) for name in names}
    return fields | {"board": FieldSpec("|u1", (board_bytes(board_size),))}


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


def row_fields(block: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of the fields with one row per position."""
    return sorted(block.keys() - _NO_ROW_FIELDS)


def take_rows(block: Block, rows: npt.NDArray[np.integer[Any]]) -> Block:
    """Return a block with copies of the given rows.

    The fields of policies, which may only be dense, are left out if none of the rows has one.

    Args:
        block: Block of positions.
        rows: Row indices, int (k,), in any order; an index may repeat.
    """
    # Rows of policies are ascending and few, so they are found by search and taken separately.
    taken: Block = {name: block[name].take(rows, axis=0) for name in row_fields(block)}
    if "policy" in block:
        has_policy = np.isin(rows, block["policy_row"])
        if has_policy.any():
            found = np.searchsorted(block["policy_row"], rows[has_policy])
            taken["policy"] = block["policy"][found]
            taken["policy_row"] = np.flatnonzero(has_policy).astype("<u4")
    return taken


def slice_rows(block: Block, start: int, stop: int) -> Block:
    """Return a block of views on the rows [start, stop); rows of policies are copied.

    The fields of dense policies are left out if none of the rows has one; those of sparse policies remain.
    """
    cut: Block = {name: block[name][start:stop] for name in row_fields(block)}
    if "policy_row" not in block:
        return cut
    # uint32 as the rows: searchsorted would convert the whole array to another dtype.
    first, last = np.searchsorted(block["policy_row"], np.array((start, stop), np.uint32))
    if "policy" in block and first == last:
        return cut
    cut["policy_row"] = block["policy_row"][first:last] - np.uint32(start)
    if "policy" in block:
        cut["policy"] = block["policy"][first:last]
    if "policy_cell" in block:
        # The entries of policies have no offsets of their own; counts are
        # summed in 64 bits, since uint16 would wrap.
        begin = int(block["policy_count"][:first].sum(dtype=np.int64))
        cut["policy_count"] = block["policy_count"][first:last]
        end = begin + int(cut["policy_count"].sum(dtype=np.int64))
        cut |= {name: block[name][begin:end] for name in SPARSE_FIELDS[2:]}
    return cut


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Concatenate blocks; return a single block unchanged.

    If any block has the fields of policies, or an optional column, the result has them too: an optional
    column of a block that lacks it is null.

    Raises:
        StoreError: The blocks have different fields.
    """
    if len(blocks) == 1:
        return blocks[0]
    # A part of a store without masks has no ``policy_weight``, whose null is the full weight.
    if targets := {*filter(is_target, set().union(*blocks))}:
        absent = [{name: null_rows(name, block_length(b)) for name in targets - b.keys()} for b in blocks]
        blocks = [block | nulls for block, nulls in zip(blocks, absent, strict=True)]
    names = blocks[0].keys() - _NO_ROW_FIELDS
    for block in blocks:
        if (found := block.keys() - _NO_ROW_FIELDS) != names:
            raise StoreError("blocks have different fields", found=sorted(found), expected=sorted(names))
    joined: Block = {name: np.concatenate([block[name] for block in blocks]) for name in sorted(names)}
    if not any("policy_row" in block for block in blocks):
        return joined
    starts = np.cumsum([0, *(block_length(block) for block in blocks[:-1])])
    parts = [(block, start) for block, start in zip(blocks, starts, strict=True) if "policy_row" in block]
    # Rows count from the beginning of their block, and now from that of the first one.
    joined["policy_row"] = np.concatenate([b["policy_row"] + start for b, start in parts]).astype("<u4")
    for name in parts[0][0].keys() & {"policy", *SPARSE_FIELDS[1:]}:
        joined[name] = np.concatenate([block[name] for block, _ in parts])
    return joined


# --- Arrow tables and policies ------------------------------------------------------------------------


def columns_to_block(
    table: pa.Table | pa.RecordBatch, with_policy: bool, targets: Sequence[str] = ()
) -> Block:
    """Convert rows of ``schema.positions_schema`` into one block. Nulls become the numbers of
    :func:`null_of`.

    Args:
        table: The rows.
        with_policy: Whether the block gets ``SPARSE_FIELDS``.
        targets: Optional columns of the table that the block gets. Default: none.

    Raises:
        StoreError: A column that may not be null contains nulls, or a policy is not valid.
    """
    board_size = board_size_of(table.schema.field("board").type.byte_width)
    block: Block = {}
    for name, spec in block_fields(board_size, with_policy=False, targets=targets).items():
        column = table.column(name)
        if (name in SENTINELS or is_target(name)) and column.null_count:
            column = column.fill_null(null_of(name))
        if column.null_count:
            raise StoreError(f"column {name} contains {column.null_count} nulls", expected="none")
        values = binary_matrix(column) if name == "board" else column.to_numpy()
        block[name] = values.astype(spec.dtype, copy=False)
    if with_policy:
        rows, policies = SparsePolicies.from_arrow(table.column("policy"), board_size**2)
        # Shards leave out cells of probability 0, except -0.0, whose bits are not zeros.
        kept = policies.probabilities.view(np.uint32) != 0
        starts = np.concatenate([[0], np.cumsum(kept)])[policies.starts]
        policies = SparsePolicies(starts, policies.cells[kept], policies.probabilities[kept])
        block |= _policies_to_members(policies, rows)
    return block


def block_to_members(block: Block) -> Block:
    """Return a block with sparse policies, as in shards."""
    if "policy" not in block:
        return block
    sparse = _policies_to_members(SparsePolicies.from_dense(block["policy"]), block["policy_row"])
    return {name: block[name] for name in row_fields(block)} | sparse


def members_to_block(members: Block, cells: int) -> Block:
    """Return a block with dense policies.

    Args:
        members: A block with sparse policies, or none.
        cells: Number of cells of the board.
    """
    if "policy_cell" not in members:
        return members
    dense = {"policy": members_to_policies(members).to_dense(cells), "policy_row": members["policy_row"]}
    return {name: members[name] for name in row_fields(members)} | dense


def _policies_to_members(policies: SparsePolicies, rows: npt.NDArray[np.integer[Any]]) -> Block:
    """Return ``SPARSE_FIELDS`` of the policies (k,) of ascending rows (k,)."""
    return {
        "policy_row": rows.astype("<u4", copy=False),
        "policy_count": np.diff(policies.starts).astype("<u2"),
        "policy_cell": policies.cells,
        "policy_probability": policies.probabilities,
    }


def members_to_policies(members: Mapping[str, npt.NDArray[Any]]) -> SparsePolicies:
    """Return the sparse policies of members; ``policy_row`` has the row of each."""
    starts = np.concatenate([[0], np.cumsum(members["policy_count"], dtype=np.int64)])
    return SparsePolicies(starts, members["policy_cell"], members["policy_probability"])


def block_to_policy(block: Mapping[str, Any], cells: int, ops: Arrays = NUMPY) -> Any:
    """Return the policies of all positions of a block as float32 (n, cells).

    A position without a policy gets a one-hot policy at its next move; a final position gets zeros.

    Args:
        block: The block, with sparse policies or none, and with ``move``, or fill rows and their plies.
        cells: Number of cells of the board.
        ops: Operations of the library of the arrays (default NumPy).
    """
    move, rows = block.get("move"), block.get("policy_row", ())
    length = len(block["fill"] if move is None else move)
    if len(rows) == length and length:  # no position has a one-hot policy
        policy = ops.full((length, cells), 0, "float32")
    elif move is None:
        policy = fill_to_policy(block["fill"], block["ply"], ops)
    else:
        policy = ops.full((length, cells), 0, "float32")
        has_move = move != NO_MOVE
        chosen = ops.arange(0, length) * cells + ops.xp.where(has_move, move, 0)
        policy.reshape(-1)[chosen] = ops.cast(has_move, "float32")
    if "policy_cell" in block and len(rows):
        rows = ops.cast(rows, "int64")
        # Rows with a policy of their own may have got a one-hot policy above.
        policy[rows] = 0
        starts = ops.repeat(rows * cells, block["policy_count"])
        policy.reshape(-1)[starts + block["policy_cell"]] = block["policy_probability"]
    return policy
