"""Exact order statistics of many groups, computed out of core in two passes over a histogram.

Only the keys of the histogram cells that contain a requested rank are read into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.store.session import DuckDBPyConnection

__all__ = ["cell_shifts", "keys_at_ranks", "segments"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

CELL_ROWS: Final = 256
"""Expected number of rows per histogram cell if keys are uniformly distributed."""
MAX_CELLS: Final = 1 << 18
"""Approximate maximum number of cells of all groups together; cells grow to respect it."""
_BATCH_ROWS: Final = 1 << 16
_CELLS_NAME: Final = "cells_of_wanted_keys"


def cell_shifts(sizes: Int64Array, key_bits: int) -> npt.NDArray[np.uint8]:
    """Return the number of bits (G,) by which a key is shifted right to give its cell, for each group.

    Larger groups have more cells, so that each cell contains few keys.

    Args:
        sizes: Number of rows of each group (G,).
        key_bits: Number of bits of a key.
    """
    rows = max(CELL_ROWS, int(sizes.sum()) // MAX_CELLS)
    bits = np.ceil(np.log2(np.maximum(sizes / rows, 2))).astype(np.int64)
    return (key_bits - np.minimum(bits, key_bits)).astype(np.uint8)


def keys_at_ranks(con: DuckDBPyConnection, keyed: str, ranks: Sequence[Int64Array]) -> list[UInt64Array]:
    """Return the keys at the given ranks of each group, where a group is sorted by key.

    The first pass counts the rows of each cell (group, key >> shift), which determines the cells that contain
    the ranks. The second pass reads the keys of those cells in order. The result is exact for any keys; the
    second pass reads few keys if they are uniformly distributed.

    Args:
        con: Open DuckDB session.
        keyed: Query for rows (number INTEGER, key UBIGINT, shift UTINYINT): the index of the group, the key
            (unique within the group) and the group's shift from :func:`cell_shifts`.
        ranks: Requested ranks of each group, ascending, from 0 to its size - 1.

    Returns:
        The keys at the requested ranks, one array per group.
    """
    rank_counts = np.array([len(r) for r in ranks], dtype=np.int64)
    if not rank_counts.sum():
        return [np.empty(0, np.uint64) for _ in ranks]
    cells = con.sql(f"""
        SELECT number, key >> shift AS cell, count(*) AS count FROM ({keyed}) GROUP BY ALL ORDER BY ALL
    """).fetchnumpy()
    number, count = np.asarray(cells["number"]), np.asarray(cells["count"])
    before = np.cumsum(count) - count
    group_start = before[np.searchsorted(number, np.arange(len(ranks)))]
    row_index = np.concatenate(list(ranks)) + np.repeat(group_start, rank_counts)
    cell = np.searchsorted(before, row_index, side="right") - 1
    used, which = np.unique(cell, return_inverse=True)
    read_before = np.cumsum(count[used]) - count[used]
    table = pa.table({"number": number[used], "cell": np.asarray(cells["cell"])[used]})
    rows = read_before[which] + row_index - before[cell]
    keys = _take(_sorted_keys(con, keyed, table), rows)
    return np.split(keys, np.cumsum(rank_counts)[:-1])


def _sorted_keys(con: DuckDBPyConnection, keyed: str, cells: pa.Table) -> Iterator[UInt64Array]:
    """Yield the keys of the given cells in the order of (group, key), batch by batch."""
    con.register(_CELLS_NAME, cells)
    try:
        query = f"""
            SELECT key FROM (SELECT number, key, key >> shift AS cell FROM ({keyed}))
            SEMI JOIN {_CELLS_NAME} USING (number, cell) ORDER BY number, key
        """
        for batch in con.sql(query).to_arrow_reader(_BATCH_ROWS):
            yield batch.column(0).to_numpy()
    finally:
        con.unregister(_CELLS_NAME)


def _take(batches: Iterator[UInt64Array], rows: Int64Array) -> UInt64Array:
    """Return the elements at the ascending indices ``rows`` of the concatenated batches."""
    taken: list[npt.NDArray[Any]] = []
    start = done = 0
    for batch in batches:
        stop = int(np.searchsorted(rows, start + len(batch)))
        taken.append(batch[rows[done:stop] - start])
        start, done = start + len(batch), stop
    return np.concatenate(taken)


def segments(
    lows: UInt64Array, last: int, shift: int
) -> tuple[UInt64Array, UInt64Array, UInt64Array, Int64Array]:
    """Split ranges of keys at cell boundaries, so that a join by cell finds the range of a key.

    Range i is ``lows[i] <= key < lows[i + 1]``; the last range ends at ``last``, inclusive. A key k is in the
    one segment with cell = k >> shift and low <= k <= high.

    Args:
        lows: Lowest keys of the ranges, ascending and unique, the first one 0 (R,).
        last: The highest key.
        shift: Number of bits by which a key is shifted to give its cell, at most 63.

    Returns:
        The cell, low key, high key and index of the range of each segment, four arrays (S,) with
        S <= R + number of cells.
    """
    cells = np.arange((last >> shift) + 1, dtype=np.uint64) << np.uint64(shift)
    low = np.unique(np.concatenate([cells, lows]))
    high = np.append(low[1:] - np.uint64(1), np.uint64(last))
    return low >> np.uint64(shift), low, high, np.searchsorted(lows, low, side="right") - 1
