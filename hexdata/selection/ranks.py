"""Exact order statistics of many groups at once, out of core: two passes and a histogram.

Never holds the keys of a group: only those that stand in a cell of the histogram in which one is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.store.session import DuckDBPyConnection

__all__ = ["cell_shifts", "keys_at", "segments"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

CELL_ROWS: Final = 256
"""Rows of a group that one cell of its histogram holds, if the keys are even."""
MOST_CELLS: Final = 1 << 18
"""Of all groups together, about; larger cells where this does not do."""
_BATCH_ROWS: Final = 1 << 16
_CELLS_NAME: Final = "cells_of_wanted_keys"


def cell_shifts(sizes: Int64Array, key_bits: int) -> npt.NDArray[np.uint8]:
    """Return, for groups of these sizes (G,), how far a key is shifted to give its cell.

    A larger group has more cells, so that few keys share one, and the cells of all groups stay few.
    """
    rows = max(CELL_ROWS, int(sizes.sum()) // MOST_CELLS)
    bits = np.ceil(np.log2(np.maximum(sizes / rows, 2))).astype(np.int64)
    return (key_bits - np.minimum(bits, key_bits)).astype(np.uint8)


def keys_at(con: DuckDBPyConnection, keyed: str, ranks: Sequence[Int64Array]) -> list[UInt64Array]:
    """Return the keys that stand at some ranks of their groups, if each group is sorted by key.

    The first pass counts the rows of each cell (group, key >> shift), which says in which cells the wanted
    ranks lie; the second reads the keys of those cells, sorted. Exact, whatever the keys; fast where they
    are even, so that few cells are read.

    Args:
        con: an open session.
        keyed: a query for rows (number INTEGER, key UBIGINT, shift UTINYINT): the group, counted from 0;
            the key, distinct within it; and the group's shift, from :func:`cell_shifts`.
        ranks: for each group the ranks wanted, ascending and below its size.

    Returns:
        For each group the keys at its ranks.
    """
    wanted = np.array([len(r) for r in ranks], dtype=np.int64)
    if not wanted.sum():
        return [np.empty(0, np.uint64) for _ in ranks]
    cells = con.sql(f"""
        SELECT number, key >> shift AS cell, count(*) AS count FROM ({keyed}) GROUP BY ALL ORDER BY ALL
    """).fetchnumpy()
    number, count = np.asarray(cells["number"]), np.asarray(cells["count"])
    before = np.cumsum(count) - count
    group_start = before[np.searchsorted(number, np.arange(len(ranks)))]
    place = np.concatenate(list(ranks)) + np.repeat(group_start, wanted)
    cell = np.searchsorted(before, place, side="right") - 1
    used, which = np.unique(cell, return_inverse=True)
    read_before = np.cumsum(count[used]) - count[used]
    table = pa.table({"number": number[used], "cell": np.asarray(cells["cell"])[used]})
    rows = read_before[which] + place - before[cell]
    keys = _take(_sorted_keys(con, keyed, table), rows)
    return np.split(keys, np.cumsum(wanted)[:-1])


def _sorted_keys(con: DuckDBPyConnection, keyed: str, cells: pa.Table) -> Iterator[UInt64Array]:
    """Give the keys of some cells in the order of (group, key), batch by batch."""
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
    """Return the elements at ``rows``, ascending, of what the batches are together."""
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
    """Cut ranges of keys at the cells, so that an equality can find the range of a key in a join.

    Range i goes from ``lows[i]`` up to, and without, the next one, the last one through ``last``; the first
    begins at 0. A key k lies in the one segment with cell = k >> shift and low <= k <= high.

    Args:
        lows: ascending, distinct, from 0 on (R,).
        last: the highest key.
        shift: from a key to its cell, at most 63.

    Returns:
        cell, low, high and the number of the range, each (S,), S <= R + number of cells.
    """
    cells = np.arange((last >> shift) + 1, dtype=np.uint64) << np.uint64(shift)
    low = np.unique(np.concatenate([cells, lows]))
    high = np.append(low[1:] - np.uint64(1), np.uint64(last))
    return low >> np.uint64(shift), low, high, np.searchsorted(lows, low, side="right") - 1
