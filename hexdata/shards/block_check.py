"""Checks of the fields and values of positions, shared by all readers of shards and stores.

A digest proves that a file was not altered, not that its values are valid. Every check compares whole arrays
and takes some nanoseconds per position. Reads no files.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import StoreError
from hexdata.formats.legacy.dialect import DIALECT_KEY
from hexdata.schema import WINNERS, board_bytes, board_size_of, is_target
from hexdata.shards.blocks import FIELDS, SENTINELS, SPARSE_FIELDS, block_fields, columns_to_block, null_of
from hexdata.shards.manifest import broken_shard

Array = npt.NDArray[Any]
BoolArray = npt.NDArray[np.bool_]

_ROWS: Final = 1 << 12
"""Number of rows compared at once: their boards fit into the CPU cache."""
_NONE: Final = np.empty(0, np.uint32)
_INVALID: Final = "the shard contains invalid data"


class BadRow(NamedTuple):
    """The first row of an array with an invalid value, the value found, and the values allowed."""

    row: int
    found: str
    expected: str
    field: str = ""
    """Name of the array, if several are checked."""


# --- blocks -------------------------------------------------------------------------------------------


def check_block(
    block: Mapping[str, Array], path: object, key: str, values: Iterable[str] | None = None
) -> int:
    """Check that a block has the members, dtypes and shapes of some board size, and valid values.

    Args:
        block: Arrays by member, as read from a shard. Optional columns and policies may be missing.
        path: Path of the shard, for messages.
        key: Key of the block, for messages.
        values: Names of the members whose values are checked; None for all (default).

    Returns:
        The board size.

    Raises:
        FormatError: "broken-shard"; names the member, its first invalid row, the value found and the values
            allowed.
    """
    board = block.get("board", _NONE)
    width = board.shape[1] if board.ndim == 2 else 0
    board_size = board_size_of(width)
    if not MIN_SIZE <= board_size <= MAX_SIZE or board_bytes(board_size) != width:
        record, expected = f"{key}.board.npy", "packed boards (rows, bytes of a board)"
        raise broken_shard(_INVALID, path, record, f"shape {board.shape}", expected)
    with_policy = not block.keys().isdisjoint(SPARSE_FIELDS)
    fields = block_fields(board_size, with_policy, targets=list(filter(is_target, block)))
    if other := sorted(block.keys() ^ fields.keys()):
        record, found = f"{key}.{other[0]}.npy", f"the fields {', '.join(sorted(block))}"
        raise broken_shard(_INVALID, path, record, found, f"the fields {', '.join(sorted(fields))}")
    # The members of policies have one entry per policy, or one per cell of a policy.
    policies = block.get("policy_row", _NONE).size
    cells = int(block.get("policy_count", _NONE).sum(dtype=np.int64))
    lengths = dict(zip(SPARSE_FIELDS, (policies, policies, cells, cells), strict=True))
    for name, array in block.items():
        spec = fields[name]
        shape = (lengths.get(name, len(board)), *spec.shape)
        if array.dtype.str != spec.dtype or array.shape != shape:
            found, expected = f"{array.dtype.str} of shape {array.shape}", f"{spec.dtype} of shape {shape}"
            raise broken_shard(_INVALID, path, f"{key}.{name}.npy", found, expected)
    # Dtypes and shapes of all members are compared above; values only of those that are used.
    if (bad := find_bad_value(block, board_size, len(board), values)) is not None:
        raise broken_shard(_INVALID, path, f"{key}.{bad.field}.npy row {bad.row}", bad.found, bad.expected)
    return board_size


def find_bad_value(
    block: Mapping[str, Array], board_size: int, rows: int | None = None, names: Iterable[str] | None = None
) -> BadRow | None:
    """Return the first invalid value of the first field with one; None if all are valid.

    Args:
        block: Fields in the dtypes and shapes of :func:`block_fields`.
        board_size: Cells along an edge.
        rows: As for :func:`find_bad_row`.
        names: Fields to check; None for all (default).
    """
    for name in block if names is None else names:
        bad = find_bad_row(name, block[name], board_size, rows)
        if bad is None and name == "policy_cell":
            counts, cells = block["policy_count"], block[name]
            wrong = np.zeros(len(cells), np.bool_)
            wrong[1:] = cells[1:] <= cells[:-1]
            firsts = np.cumsum(counts[:-1], dtype=np.int64)
            # The first cell of each policy may be below the last one of the policy before.
            wrong[firsts[firsts < len(cells)]] = False
            bad = _first(wrong, cells, "ascending cells within each policy")
        if bad is not None:
            return bad._replace(field=name)
    return None


def find_bad_row(name: str, array: Array, board_size: int, rows: int | None = None) -> BadRow | None:
    """Return the first row of a field with an invalid value; None if all are valid.

    Args:
        name: Name of the field.
        array: Values, in the dtype and shape of :func:`block_fields`.
        board_size: Cells along an edge.
        rows: Number of positions in the block, if ``array`` is the field of a whole block: position ids must
            then be unique and ``policy_row`` below ``rows``. None if the positions are arbitrary.
    """
    if name != "board" and (bad := _find_outside(name, array, board_size)) is not None:
        return bad
    for start in range(0, len(array) if name == "board" else 0, _ROWS):
        bad = _find_bad_board(array[start : start + _ROWS], board_size)
        if bad is not None:
            return bad._replace(row=start + bad.row)
    if rows is not None and name == "policy_row":
        # int64, because a difference of unsigned numbers wraps and is never negative.
        wrong = (array >= rows) | (np.diff(array.astype(np.int64), prepend=-1) <= 0)
        return _first(wrong, array, f"strictly ascending rows below {rows}")
    if rows is not None and name == "position_id":
        # Sorting finds a repetition; the unsorted array then tells its row. Fewer bytes take less time.
        ordered = np.sort(array.astype(np.min_scalar_type(array.max(initial=0))))
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(repeated):
            row = int(np.flatnonzero(array == repeated[0])[1])
            return BadRow(row, f"{array[row]} again", "each id once")
    return None


def _first(wrong: BoolArray, values: Array, expected: str) -> BadRow | None:
    """Return the first value (N,) that is wrong, with its row; None if none is."""
    if not wrong.any():
        return None
    row = int(np.argmax(wrong))
    return BadRow(row, str(values[row]), expected)


def _find_outside(name: str, values: Array, n: int) -> BadRow | None:
    """Return the first number that its field does not allow; None if all are allowed."""
    _, low, high, null = FIELDS.get(name, (None, None, 0, None))
    if low is None:
        return None
    # Limits of cells depend on the board, see Field.
    high = high if high > 0 else n * n + high
    # Most fields need no arrays of booleans. NaN is not within the limits.
    if not len(values) or (values.max() <= high and values.min() >= low):
        return None
    right = (values >= low) & (values <= high)
    if null is not None:
        right |= np.isnan(values) if np.isnan(null) else values == null
    of_null = "" if null is None else f", or {null} for none"
    return _first(~right, values, f"a number from {low} to {high}{of_null}")


def _find_bad_board(boards: Array, n: int) -> BadRow | None:
    """Return the first of at most ``_ROWS`` packed boards with a cell both blue and red, or other bits set.

    The red planes of all rows are shifted onto the blue ones, which takes a third of the time of unpacking
    the bits.
    """
    data = boards.reshape(-1)
    blue, unused = _masks(n)[:, : data.size]
    # The bits of a red byte are in two bytes of the board. Behind the last board there are zeros.
    whole, shift = divmod(n * n, 8)
    wrong = np.zeros_like(data)
    # A product, since NumPy shifts bytes to the left one by one, which takes ten times as long.
    wrong[: data.size - whole] = data[whole:] * np.uint8(1 << shift)
    wrong[: data.size - whole - 1] |= data[whole + 1 :] >> (8 - shift)
    wrong &= blue
    wrong |= unused
    wrong &= data
    if not wrong.any():
        return None
    row = int(np.argmax(wrong != 0)) // boards.shape[1]
    expected = "no cell both blue and red, and zeros after the last cell"
    return BadRow(row, f"the board {boards[row].tobytes().hex()}", expected)


@functools.lru_cache(maxsize=4)
def _masks(n: int) -> npt.NDArray[np.uint8]:
    """Return masks over ``_ROWS`` packed boards: of the blue planes, and of the bits after the last cell."""
    bits = np.zeros((2, 8 * board_bytes(n)), np.uint8)
    bits[0, : n * n] = 1
    bits[1, 2 * n * n :] = 1
    return np.tile(np.packbits(bits, axis=1), _ROWS)


# --- positions in tables ------------------------------------------------------------------------------


def find_bad_position(rows: pa.Table | pa.RecordBatch, *, texts: bool = True) -> BadRow | None:
    """Return the first invalid value of the first invalid field; None if all values are valid.

    Args:
        rows: Rows of ``positions_schema``, with any targets; ``winner`` may be text instead of a dictionary.
        texts: Whether to check ``metadata`` too, for which each distinct text is parsed. Default True.
    """
    size = board_size_of(rows.schema.field("board").type.byte_width)
    targets = [name for name in rows.schema.names if is_target(name)]
    for name in (*SENTINELS, *targets):
        column, null = rows.column(name), null_of(name)
        is_float = pa.types.is_floating(column.type)
        is_null = pc.is_nan(column) if is_float else pc.equal(column, pa.scalar(null, column.type))
        # Such a number in the table would become null in shards, and differ from the store without notice.
        if (row := pc.index(is_null, pa.scalar(True)).as_py()) >= 0:
            return BadRow(row, f"{name} {column[row]}", "null, for which shards have that number")
    try:
        block = columns_to_block(rows, rows.column("policy").null_count < rows.num_rows, targets)
    except StoreError as error:
        row = int(str(error.record).removeprefix("row ")) if error.record else 0
        return BadRow(row, f"{error.reason}: {error.found}", str(error.expected))
    names = [name for name in block if name not in SPARSE_FIELDS]  # policies are checked when converted
    if (bad := find_bad_value(block, size, names=names)) is not None:
        return bad._replace(found=f"{bad.field} {bad.found}")
    checks = [("winner", WINNERS.__contains__, "BLUE, RED or null")]
    if texts:
        checks.append(("metadata", _is_object, "a JSON object or null"))
    for name, is_valid, expected in checks:
        # Distinct texts only: a column of millions of rows has two winners.
        for text in rows.column(name).unique().to_pylist():
            if text is not None and not is_valid(text):
                row = pc.index(rows.column(name).cast(pa.string()), text).as_py()
                return BadRow(row, f"{name} {text[:80]!r}", expected)
    return None


def _is_object(text: Any) -> bool:
    """Return whether a text of ``metadata`` is a JSON object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # the latter for texts with deep nesting
        return False
    return isinstance(content, dict) and isinstance(content.get(DIALECT_KEY, {}), dict)


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
        bad = _first(game >= games, game, f"a game_id below {games} or null")
    if bad is not None:
        raise invalid_table(path, f"row {first + bad.row}", bad.found, bad.expected)


def invalid_table(path: object, record: str, found: object, expected: str) -> StoreError:
    """Return the error for a table of a store with an invalid value."""
    reason = "the table contains an invalid value"
    hint = "Run `hexdata verify` to see what else is wrong; then convert the sources again."
    return StoreError(reason, path=path, record=record, found=found, expected=expected, hint=hint)
