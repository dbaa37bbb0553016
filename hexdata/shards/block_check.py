"""Checks of the fields and values of a block of positions, shared by all readers of shards.

A digest proves that a file was not altered, not that its values are valid. Every check compares whole arrays
and takes some nanoseconds per position. Reads no files.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.board import MAX_SIZE, MIN_SIZE, RED
from hexdata.errors import FormatError, Reason
from hexdata.schema import (
    MAX_TIER,
    NO_GAME,
    NO_MOVE,
    NO_TIER,
    NO_VISITS,
    SCHEMA_VERSION,
    board_bytes,
    board_size_of,
    is_target,
)
from hexdata.shards.blocks import POLICY_FIELDS, SPARSE_FIELDS, block_fields

__all__ = [
    "BadRow",
    "are_blocks_valid",
    "check_block",
    "check_field",
    "check_policies",
    "find_bad_policy",
    "find_bad_row",
    "invalid_values_error",
]

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]

_MAX_ID: Final = (1 << 62) - 1
_ROWS: Final = 2048
"""Number of rows of several numbers compared at once: they fit into the CPU cache. A multiple of 8."""
_NUMBERS: Final = 1 << 14
"""Number of single values compared at once."""


class BadRow(NamedTuple):
    """The first row of an array with an invalid value, the value found, and the values allowed."""

    row: int
    found: str
    expected: str


# --- whole blocks -------------------------------------------------------------------------------------


def _shape_of(block: Mapping[str, Array], path: object, key: str) -> tuple[int, int]:
    """Return (rows, board size) of a block, taken from the shape of its boards.

    Raises:
        FormatError: "broken-shard": The block has no packed boards.
    """
    board = block.get("board")
    width = board.shape[1] if board is not None and board.ndim == 2 else 0
    size = board_size_of(width)
    if board is None or not MIN_SIZE <= size <= MAX_SIZE or board_bytes(size) != width:
        found = "no such member" if board is None else f"shape {board.shape}"
        raise invalid_values_error(path, f"{key}.board.npy", found, "packed boards (rows, bytes of a board)")
    return len(board), size


def check_block(
    block: Mapping[str, Array],
    path: object,
    key: str,
    *,
    board_size: int | None = None,
    rows: int | None = None,
    members: Collection[str] | None = None,
) -> int:
    """Check that a block has the right members, dtypes and shapes, and that every value is valid.

    Args:
        block: Arrays by member, as read from a shard of any schema version.
        path: Path of the shard, for messages.
        key: Key of the block, for messages.
        board_size: Expected board size in cells along an edge. None derives it from the boards.
        rows: Expected number of positions. None derives it from the boards.
        members: Names of the expected members; None for those that every block has, and the optional ones
            that this block has.

    Returns:
        The board size.

    Raises:
        FormatError: "broken-shard"; names the member, its first invalid row, the value found and the values
            allowed.
    """
    if board_size is None or rows is None:
        found_rows, found_size = _shape_of(block, path, key)
        rows = found_rows if rows is None else rows
        board_size = found_size if board_size is None else board_size
    names = {*block, *(members or ())}
    fields = block_fields(
        board_size,
        with_policy=not names.isdisjoint((*POLICY_FIELDS, *SPARSE_FIELDS)),
        targets=[name for name in names if is_target(name)],
        schema_version=1 if "policy" in names else SCHEMA_VERSION,
    )
    wanted = fields.keys() if members is None else members
    if other := sorted(block.keys() ^ wanted):
        missing = other[0] in wanted
        found = "no such member" if missing else f"a member {other[0]}"
        raise invalid_values_error(
            path, f"{key}.{other[0]}.npy", found, f"the fields {', '.join(sorted(wanted))}"
        )
    lengths = _member_lengths(block)
    for name, array in block.items():
        spec, length = fields[name], lengths.get(name, rows)
        if array.dtype.str != spec.dtype or array.shape != (length, *spec.shape):
            raise invalid_values_error(
                path,
                f"{key}.{name}.npy",
                f"{array.dtype.str} of shape {array.shape}",
                f"{spec.dtype} of shape {(length, *spec.shape)}",
            )
    for name, array in block.items():
        check_field(name, array, board_size, rows, path, f"{key}.{name}.npy")
    if "policy_cell" in block and "policy_count" in block:
        check_policies(block["policy_count"], block["policy_cell"], path, key)
    return board_size


def _member_lengths(block: Mapping[str, Array]) -> dict[str, int]:
    """Return the lengths of the members whose length is not the number of positions."""
    policies = len(block["policy_row"]) if "policy_row" in block and block["policy_row"].ndim else 0
    lengths = dict.fromkeys((*POLICY_FIELDS, "policy_count"), policies)
    if "policy_count" in block:
        cells = int(block["policy_count"].sum(dtype=np.int64))
        lengths |= {"policy_cell": cells, "policy_probability": cells}
    return lengths


def check_policies(counts: Array, cells: Array, path: object, key: str) -> None:
    """Check that the cells of each policy of a block ascend. Their number must be right already.

    Args:
        counts: The member ``policy_count``.
        cells: The member ``policy_cell``.
        path: Path of the shard, for messages.
        key: Key of the block, for messages.

    Raises:
        FormatError: "broken-shard"; names the first row of ``policy_cell`` that does not ascend.
    """
    bad = find_bad_policy(counts, cells)
    if bad is not None:
        raise invalid_values_error(path, f"{key}.policy_cell.npy row {bad.row}", bad.found, bad.expected)


def check_field(name: str, array: Array, board_size: int, rows: int, path: object, member: str) -> None:
    """Check the values of one field of a block. Its dtype and shape must be right already.

    Args:
        name: Name of the field.
        array: Values of the field.
        board_size: Cells along an edge.
        rows: Number of positions in the block.
        path: Path of the shard, for messages.
        member: Name of the member, for messages.

    Raises:
        FormatError: "broken-shard"; names the member and its first invalid row.
    """
    bad = find_bad_row(name, array, board_size, rows)
    if bad is not None:
        raise invalid_values_error(path, f"{member} row {bad.row}", bad.found, bad.expected)


def invalid_values_error(path: object, record: str, found: object, expected: object) -> FormatError:
    """Return the error for a shard that is complete but contains invalid values.

    Args:
        path: Path of the shard.
        record: Name of the member, with the row if there is one.
        found: The value found.
        expected: The values allowed.
    """
    return FormatError(
        "the shard contains invalid data",
        code=Reason.BROKEN_SHARD,
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint="Copy the shard again from where it was exported, or run `hexdata verify` on its store.",
    )


# --- single fields ------------------------------------------------------------------------------------


def find_bad_row(name: str, array: Array, board_size: int, rows: int | None = None) -> BadRow | None:
    """Return the first row of a field with an invalid value; None if all are valid.

    Args:
        name: Name of the field.
        array: Values, in the dtype and shape of :func:`block_fields`.
        board_size: Cells along an edge.
        rows: Number of positions in the block, if ``array`` is the field of a whole block: position ids must
            then be unique and ``policy_row`` below ``rows``. None if the positions are arbitrary.
    """
    if not len(array):
        return None
    if name == "policy_row":
        return None if rows is None else _find_bad_policy_row(array, rows)
    step = _NUMBERS if array.ndim == 1 else _ROWS
    for start in range(0, len(array), step):
        part = array[start : start + step]
        if not _are_valid(name, part, board_size):
            row = int(np.flatnonzero(_find_invalid(name, part, board_size))[0])
            return BadRow(start + row, *_explain(name, part[row], board_size))
    return _find_repeated(array) if name == "position_id" and rows is not None else None


def find_bad_policy(counts: Array, cells: Array) -> BadRow | None:
    """Return the first cell of a policy that is not above the cell before it; None if all ascend.

    Args:
        counts: Number of cells of each policy, uint16 (k,).
        cells: The cells of all policies, uint16 (sum of ``counts``,).
    """
    if len(cells) < 2:
        return None
    follows = cells[1:] > cells[:-1]
    firsts = np.cumsum(counts[:-1], dtype=np.int64)
    follows[firsts[(firsts > 0) & (firsts < len(cells))] - 1] = True
    if follows.all():
        return None
    row = 1 + int(np.flatnonzero(~follows)[0])
    return BadRow(row, f"cell {cells[row]} after {cells[row - 1]}", "ascending cells within each policy")


def are_blocks_valid(name: str, blocks: Sequence[Array], board_size: int, rows: int) -> bool:
    """Return whether the values of one field are valid in all of several blocks.

    Args:
        name: Name of the field.
        blocks: Values of the field in each block, in the dtype and shape of :func:`block_fields`.
        board_size: Cells along an edge.
        rows: Number of positions in every block.
    """
    if name == "policy_row":
        return all(_find_bad_policy_row(array, rows) is None for array in blocks if len(array))
    values = np.concatenate(blocks)
    if find_bad_row(name, values, board_size) is not None:
        return False
    if name != "position_id":
        return True
    if len(values) != rows * len(blocks):
        return all(_find_repeated(array) is None for array in blocks)
    ordered = np.sort(values.reshape(-1, rows), axis=1)
    return bool((ordered[:, 1:] != ordered[:, :-1]).all())


def _find_bad_policy_row(array: Array, rows: int) -> BadRow | None:
    if int(array[-1]) < rows and bool((array[1:] > array[:-1]).all()):
        return None
    wrong = (array >= rows) | (np.diff(array.astype(np.int64), prepend=-1) <= 0)
    row = int(np.flatnonzero(wrong)[0])
    before = f" after {array[row - 1]}" if row else ""
    return BadRow(row, f"row {array[row]}{before}", f"strictly ascending rows below {rows}")


def _find_repeated(ids: Array) -> BadRow | None:
    ordered = np.sort(ids)
    if bool((ordered[1:] != ordered[:-1]).all()):
        return None
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    row = int(order[1:][ordered[1:] == ordered[:-1]].min())
    return BadRow(
        row, f"{ids[row]} again, as in row {int(np.flatnonzero(ids == ids[row])[0])}", "each id once"
    )


class _Range(NamedTuple):
    """Allowed values of a field: ``low`` to ``high``, both included, or ``null``."""

    low: int
    high: float
    null: float | None = None


_LARGEST_FLOAT32: Final = float(np.finfo(np.float32).max)
_RANGES: Final = {
    "game_id": _Range(0, _MAX_ID, NO_GAME),
    "player_to_move": _Range(0, RED),
    "policy": _Range(0, _LARGEST_FLOAT32),
    "policy_probability": _Range(0, _LARGEST_FLOAT32),
    "position_id": _Range(0, _MAX_ID),
    "root_value": _Range(0, 1, np.nan),
    "value": _Range(0, 1),
    "value_sample_tier": _Range(0, MAX_TIER, NO_TIER),
    "visits": _Range(0, np.iinfo(np.int32).max, NO_VISITS),
    "weight": _Range(0, _LARGEST_FLOAT32, np.nan),
}
"""Allowed values by field. ``position_in_game``, ``total_positions`` and extra columns allow every value of
their type."""


def _range_of(name: str, n: int) -> _Range | None:
    """Return the allowed values of a field; None for the board and for fields that allow any value."""
    if name == "policy_count":
        return _Range(0, n * n)
    if name == "policy_cell":
        return _Range(0, n * n - 1)
    return _Range(0, n * n - 1, NO_MOVE) if name == "move" else _RANGES.get(name)


def _are_valid(name: str, values: Array, n: int) -> bool:
    """Return whether all values of a field are valid."""
    if name == "board":
        return not _overlaps(values, n).max() and not (values[:, -1] & _padding(n)).any()
    allowed = _range_of(name, n)
    if allowed is None:
        return True
    low, high = allowed.low, allowed.high
    if allowed.null is not None and np.isnan(allowed.null):
        # fmin and fmax ignore NaN, unless all values are NaN.
        return not (np.fmin.reduce(values) < low or np.fmax.reduce(values) > high)
    if (
        allowed.null is not None and allowed.null > 0
    ):  # null is the highest number of the type: adding 1 wraps it to 0, so one comparison is enough
        return bool((values + values.dtype.type(1)).max() <= high + 1)
    if allowed.null is not None:
        low = min(low, int(allowed.null))
    return bool(values.min() >= low and values.max() <= high)  # both are False for NaN


def _find_invalid(name: str, values: Array, n: int) -> BoolArray:
    """Return which rows of a field have an invalid value, bool (rows,)."""
    if name == "board":
        overlaps = _overlaps(values, n).view(np.uint8).reshape(-1, values.shape[1])[: len(values)]
        in_boards: BoolArray = overlaps.any(axis=1) | (values[:, -1] & _padding(n) != 0)
        return in_boards
    allowed = _range_of(name, n)
    assert allowed is not None
    right = (values >= allowed.low) & (values <= allowed.high)
    if allowed.null is not None:
        right |= np.isnan(values) if np.isnan(allowed.null) else values == allowed.null
    wrong: BoolArray = np.logical_not(right.reshape(len(right), -1).all(axis=1))
    return wrong


def _explain(name: str, value: Any, n: int) -> tuple[str, str]:
    """Return the value of a row and the values allowed, as texts for a message."""
    if name == "board":
        return (
            f"the board {value.tobytes().hex()}",
            "no cell both blue and red, and zeros after the last cell",
        )
    if name == "policy":
        cell = int(np.flatnonzero(_find_invalid(name, value, n))[0])
        return f"{value[cell]} for cell {cell}", "finite numbers from 0 up"
    allowed = _range_of(name, n)
    assert allowed is not None
    null = (
        "" if allowed.null is None else f", or {'NaN' if np.isnan(allowed.null) else allowed.null} for none"
    )
    return str(value), f"a number from {allowed.low} to {allowed.high}{null}"


Words = npt.NDArray[np.uint64]


@functools.lru_cache(maxsize=4)
def _masks(n: int) -> tuple[Words, Words]:
    """Return two masks over ``_ROWS`` packed boards that select bits of the blue planes.

    :func:`_overlaps` shifts the red planes onto the blue ones. The first mask selects the bits that are
    compared with bits of the same shifted byte, the second those compared with bits of the byte after it.
    """
    whole, shift = divmod(n * n, 8)
    blue = np.zeros(board_bytes(n), np.uint8)
    blue[:whole] = 0xFF
    blue[whole] = 0xFF00 >> shift & 0xFF
    low = np.uint8((1 << shift) - 1)
    same, after = (np.tile(blue & bits, _ROWS).view(np.uint64) for bits in (~low, low))
    return same, after


def _overlaps(boards: Array, n: int) -> Words:
    """Return the bits of the cells that are both blue and red in up to ``_ROWS`` packed boards.

    The red planes of all rows are shifted onto the blue ones, eight bytes at a time. Bits that cross a byte
    boundary in the shift are masked out.
    """
    width, (whole, shift) = board_bytes(n), divmod(n * n, 8)
    size = -(-len(boards) // 8) * 8 * width
    data = np.zeros(size + whole + 1, np.uint8)
    data[: boards.size] = boards.reshape(-1)
    same, after = _masks(n)
    both: Words = np.left_shift(data[whole : whole + size].view(np.uint64), np.uint64(shift))
    both &= same[: size // 8]
    if shift:
        low = np.right_shift(data[whole + 1 :].view(np.uint64), np.uint64(8 - shift))
        low &= after[: size // 8]
        both |= low
    both &= data[:size].view(np.uint64)
    return both


def _padding(n: int) -> np.uint8:
    """Return the padding bits in the last byte of a packed board, which belong to no cell."""
    return np.uint8((1 << -2 * n * n % 8) - 1)
