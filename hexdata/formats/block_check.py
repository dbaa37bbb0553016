"""The one check of what stands in a block of positions, whoever reads it.

A digest shows that a file is the one that was published, not that its numbers are right. Every check is a
comparison over a whole array, which takes some nanoseconds per position. Reads no files.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.board import MAX_SIZE, MIN_SIZE, RED
from hexdata.errors import FormatError
from hexdata.formats.shard_manifest import FieldSpec
from hexdata.schema import MAX_TIER, NO_GAME, NO_MOVE, NO_TIER, board_bytes, board_size_of

__all__ = [
    "POLICY_FIELDS",
    "BadRow",
    "bad_values",
    "block_fields",
    "blocks_are_right",
    "check_block",
    "check_field",
    "find_bad_row",
]

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]

POLICY_FIELDS: Final = ("policy", "policy_row")
"""The fields that are as long as the block has dense policies, not positions."""

_MAX_ID: Final = (1 << 62) - 1
_ROWS: Final = 2048
"""Rows of several numbers that are compared at once, a multiple of 8: they fit into the processor's cache."""
_NUMBERS: Final = 1 << 14
"""Single numbers that are compared at once."""


class BadRow(NamedTuple):
    """The first row of an array that holds what no position has."""

    row: int
    found: str
    expected: str


def block_fields(board_size: int, with_policy: bool) -> dict[str, FieldSpec]:
    """Return the fields of every block of a split; ``with_policy`` where it holds any dense policy."""
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


# --- whole blocks -------------------------------------------------------------------------------------


def _shape_of(block: Mapping[str, Array], path: object, key: str) -> tuple[int, int]:
    """Return (rows, board size) of a block whose board size nobody has stated.

    Raises:
        FormatError: "broken-shard": it has no packed boards.
    """
    board = block.get("board")
    width = board.shape[1] if board is not None and board.ndim == 2 else 0
    size = board_size_of(width)
    if board is None or not MIN_SIZE <= size <= MAX_SIZE or board_bytes(size) != width:
        found = "no such member" if board is None else f"shape {board.shape}"
        raise bad_values(path, f"{key}.board.npy", found, "packed boards (rows, bytes of a board)")
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
    """Check that a block has the fields of one, and that each holds what positions can have.

    Args:
        block: arrays by field.
        path: of the shard, for messages.
        key: of the block, for messages.
        board_size: the n that boards must have; None takes it from the boards.
        rows: how many positions the block must have; None takes them from the boards.
        members: the fields it must have; None for all.

    Returns:
        The board size.

    Raises:
        FormatError: "broken-shard", naming the member, its first bad row, what stands there and what may.
    """
    if board_size is None or rows is None:
        found_rows, found_size = _shape_of(block, path, key)
        rows = found_rows if rows is None else rows
        board_size = found_size if board_size is None else board_size
    dense = not block.keys().isdisjoint(POLICY_FIELDS)
    fields = block_fields(board_size, with_policy=dense or not set(members or ()).isdisjoint(POLICY_FIELDS))
    wanted = fields.keys() if members is None else members
    if other := sorted(block.keys() ^ wanted):
        missing = other[0] in wanted
        found = "no such member" if missing else f"a member {other[0]}"
        raise bad_values(path, f"{key}.{other[0]}.npy", found, f"the fields {', '.join(sorted(wanted))}")
    policies = len(block["policy_row"]) if "policy_row" in block and block["policy_row"].ndim else 0
    for name, array in block.items():
        spec, length = fields[name], policies if name in POLICY_FIELDS else rows
        if array.dtype.str != spec.dtype or array.shape != (length, *spec.shape):
            raise bad_values(
                path,
                f"{key}.{name}.npy",
                f"{array.dtype.str} of shape {array.shape}",
                f"{spec.dtype} of shape {(length, *spec.shape)}",
            )
        check_field(name, array, board_size, rows, path, f"{key}.{name}.npy")
    return board_size


def check_field(name: str, array: Array, board_size: int, rows: int, path: object, member: str) -> None:
    """Check the values of one field of a block of ``rows`` positions, whose type and shape are right.

    Raises:
        FormatError: "broken-shard", naming the member and its first bad row.
    """
    bad = find_bad_row(name, array, board_size, rows)
    if bad is not None:
        raise bad_values(path, f"{member} row {bad.row}", bad.found, bad.expected)


def bad_values(path: object, record: str, found: object, expected: object) -> FormatError:
    """Return the error for a shard that is whole, and holds what no position has."""
    return FormatError(
        "the shard holds what no position has",
        code="broken-shard",
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint="Get the shard from where it was made once more, or run `hexdata verify` on its store.",
    )


# --- single fields ------------------------------------------------------------------------------------


def find_bad_row(name: str, array: Array, board_size: int, rows: int | None = None) -> BadRow | None:
    """Return the first row of a field that holds what no position has; None if there is none.

    Args:
        name: of the field.
        array: its values, in the dtype and the shape that :func:`block_fields` gives.
        board_size: n.
        rows: positions of the block, if the array is a whole one: ids must then be unique in it, and
            ``policy_row`` below it. None for any positions.
    """
    if not len(array):
        return None
    if name == "policy_row":
        return None if rows is None else _find_bad_policy_row(array, rows)
    step = _NUMBERS if array.ndim == 1 else _ROWS
    for start in range(0, len(array), step):
        part = array[start : start + step]
        if not _is_right(name, part, board_size):
            row = int(np.flatnonzero(_find_wrong(name, part, board_size))[0])
            return BadRow(start + row, *_explain(name, part[row], board_size))
    return _find_repeated(array) if name == "position_id" and rows is not None else None


def blocks_are_right(name: str, blocks: Sequence[Array], board_size: int, rows: int) -> bool:
    """Return whether :func:`find_bad_row` finds nothing in a field of any of several blocks.

    Args:
        name: of the field.
        blocks: its values in each block, in the dtype and the shape that :func:`block_fields` gives.
        board_size: n.
        rows: positions of every block.
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
    """What the values of a field may be, both ends included, or what stands for null."""

    low: int
    high: float
    null: int | None = None


_RANGES: Final = {
    "game_id": _Range(0, _MAX_ID, NO_GAME),
    "player_to_move": _Range(0, RED),
    "policy": _Range(0, float(np.finfo(np.float32).max)),
    "position_id": _Range(0, _MAX_ID),
    "value": _Range(0, 1),
    "value_sample_tier": _Range(0, MAX_TIER, NO_TIER),
}
"""By field; any ``position_in_game`` and ``total_positions`` is one that a source can state."""


def _range_of(name: str, n: int) -> _Range | None:
    """Return what a field may hold; None for the board and for what may hold anything."""
    return _Range(0, n * n - 1, NO_MOVE) if name == "move" else _RANGES.get(name)


def _is_right(name: str, values: Array, n: int) -> bool:
    """Return whether all values of a field are what a position can have."""
    if name == "board":
        return not _overlaps(values, n).max() and not (values[:, -1] & _padding(n)).any()
    allowed = _range_of(name, n)
    if allowed is None:
        return True
    low, high = allowed.low, allowed.high
    if (
        allowed.null is not None and allowed.null > 0
    ):  # the highest number of its type: adding 1 makes it 0, and one comparison is enough
        return bool((values + values.dtype.type(1)).max() <= high + 1)
    if allowed.null is not None:
        low = min(low, allowed.null)
    return bool(values.min() >= low and values.max() <= high)  # of NaNs, neither holds


def _find_wrong(name: str, values: Array, n: int) -> BoolArray:
    """Return which rows of a field hold what no position has."""
    if name == "board":
        overlaps = _overlaps(values, n).view(np.uint8).reshape(-1, values.shape[1])[: len(values)]
        in_boards: BoolArray = overlaps.any(axis=1) | (values[:, -1] & _padding(n) != 0)
        return in_boards
    allowed = _range_of(name, n)
    assert allowed is not None
    right = (values >= allowed.low) & (values <= allowed.high)
    if allowed.null is not None:
        right |= values == allowed.null
    wrong: BoolArray = np.logical_not(right.reshape(len(right), -1).all(axis=1))
    return wrong


def _explain(name: str, value: Any, n: int) -> tuple[str, str]:
    """Return what stands in a row, and what may."""
    if name == "board":
        return (
            f"the board {value.tobytes().hex()}",
            "no cell both blue and red, and zeros after the last cell",
        )
    if name == "policy":
        cell = int(np.flatnonzero(_find_wrong(name, value, n))[0])
        return f"{value[cell]} for cell {cell}", "finite numbers from 0 up"
    allowed = _range_of(name, n)
    assert allowed is not None
    null = "" if allowed.null is None else f", or {allowed.null} for none"
    return str(value), f"a number from {allowed.low} to {allowed.high}{null}"


Words = npt.NDArray[np.uint64]


@functools.lru_cache(maxsize=4)
def _masks(n: int) -> tuple[Words, Words]:
    """Return the bits of the blue planes in ``_ROWS`` packed boards, as :func:`_overlaps` uses them.

    The first has those that come from the same byte of the red plane once that is moved, the second those
    that come from the byte after it.
    """
    whole, shift = divmod(n * n, 8)
    blue = np.zeros(board_bytes(n), np.uint8)
    blue[:whole] = 0xFF
    blue[whole] = 0xFF00 >> shift & 0xFF
    low = np.uint8((1 << shift) - 1)
    same, after = (np.tile(blue & bits, _ROWS).view(np.uint64) for bits in (~low, low))
    return same, after


def _overlaps(boards: Array, n: int) -> Words:
    """Return the bits of the cells that are blue and red in up to ``_ROWS`` packed boards, row after row.

    The red planes are moved onto the blue ones, eight bytes at a time over all rows at once. Bits that a
    shift takes across a byte's border are masked out.
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
    """Return the bits of a packed board's last byte that are of no cell."""
    return np.uint8((1 << -2 * n * n % 8) - 1)
