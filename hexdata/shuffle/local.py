"""The local engine: DuckDB sorts what fits into the memory, piece by piece.

Phase 1 sorts each slice of the input into a run, phase 2 the runs' rows of each range of keys. What a
unit writes is a pure function of the store and the plan, so a repeated one writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hexdata.order import sort_key_sql
from hexdata.schema import SPLITS, positions_schema
from hexdata.shuffle.plan import Bucket, ShufflePlan, Slice
from hexdata.store.files import atomic_file
from hexdata.store.parquet import ROW_GROUP_ROWS
from hexdata.store.session import DuckDBPyConnection, path_list_sql, read_parquet_sql

__all__ = ["scatter", "sort_buckets", "split_sizes_sql", "varying_bytes_sql"]

BATCH_ROWS: Final = 32_768


def split_sizes_sql(positions: list[Path], games: list[Path]) -> str:
    """Return a query for the positions of each split: (index of ``SPLITS``, rows)."""
    return f"SELECT split, count(*) FROM ({_with_split_sql(positions, games)}) GROUP BY split"


def varying_bytes_sql(positions: list[Path]) -> str:
    """Return a query for the bytes that dense policies and ``extra`` take, from the files' footers."""
    return f"""
        SELECT coalesce(sum(if(path_in_schema = 'extra', total_uncompressed_size,
                               4 * (num_values - stats_null_count))), 0)::BIGINT
        FROM parquet_metadata({path_list_sql(positions)})
        WHERE path_in_schema = 'extra' OR starts_with(path_in_schema, 'policy')
    """


def _with_split_sql(positions: list[Path], games: list[Path]) -> str:
    """Return a query for the positions ``p.*`` with the ``split`` of their games, as index of ``SPLITS``.

    Only the games held out are joined: the others, and positions of no known game, train.
    """
    held_out = (
        f"SELECT game_id, split FROM {read_parquet_sql(games)} WHERE split <> '{SPLITS[0]}'"
        if games
        else "SELECT NULL::BIGINT AS game_id, NULL AS split WHERE false"
    )
    number = " ".join(f"WHEN '{name}' THEN {i}" for i, name in enumerate(SPLITS) if i)
    return f"""
        SELECT p.*, (CASE g.split {number} ELSE 0 END)::UTINYINT AS split
        FROM {read_parquet_sql(positions)} p LEFT JOIN ({held_out}) g USING (game_id)
    """


def scatter(
    con: DuckDBPyConnection,
    positions: list[Path],
    games: list[Path],
    plan: ShufflePlan,
    part: Slice,
    run: Path,
) -> int:
    """Phase 1: write one slice of the positions as a run, sorted by (split, key).

    A run's row groups are cut where the plan's ranges meet, so that phase 2 reads no row twice.

    Returns:
        The rows written.
    """
    query = f"""
        SELECT *, {sort_key_sql("position_id", plan.key)} AS sort_key
        FROM ({_with_split_sql(positions, games)})
        WHERE position_id >= {part.start} AND position_id < {part.stop}
        ORDER BY split, sort_key
    """
    schema = _keyed_schema(plan).append(pa.field("split", pa.uint8(), nullable=False))
    rows = 0
    with (
        atomic_file(run) as file,
        pq.ParquetWriter(file, schema, compression="lz4", use_dictionary=False) as writer,
    ):
        for table in _cut_by_range(_stream(con, query, schema), plan):
            writer.write_table(table, row_group_size=table.num_rows)
            rows += table.num_rows
    return rows


def sort_buckets(
    con: DuckDBPyConnection, runs: list[Path], plan: ShufflePlan, buckets: list[Bucket]
) -> Iterator[tuple[Bucket, Iterator[pa.Table]]]:
    """Phase 2: give consecutive buckets of one split, each with its rows of all runs in ascending key.

    DuckDB sorts one of the plan's ranges at a time, whether it holds many buckets or a part of one. The
    rows of a bucket, ``positions_schema``, must be taken before the next bucket is.
    """
    rows = _Ascending(_sorted_rows(con, runs, plan, buckets[0]))
    for bucket in buckets:
        yield bucket, rows.below(bucket.high)


def _sorted_rows(
    con: DuckDBPyConnection, runs: list[Path], plan: ShufflePlan, first: Bucket
) -> Iterator[pa.Table]:
    """Read the rows of a split in ascending key, from the bucket ``first`` on."""
    for low, high in plan.ranges(first.split):
        if high > first.low:
            query = f"""
                SELECT * EXCLUDE (split) FROM {read_parquet_sql(runs)}
                WHERE split = {SPLITS.index(first.split)}
                  AND sort_key BETWEEN {max(low, first.low)}::UBIGINT AND {high - 1}::UBIGINT
                ORDER BY sort_key
            """
            yield from _stream(con, query, _keyed_schema(plan))


class _Ascending:
    """A stream of rows in ascending key, to be taken up to one key after the other."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def below(self, high: int) -> Iterator[pa.Table]:
        """Give the rows that are left whose key is below ``high``, without it."""
        while (table := next(self._tables, None) if self._rest is None else self._rest) is not None:
            keys = table.column("sort_key").to_numpy()
            stop = int(np.searchsorted(keys, np.uint64(high - 1), side="right"))
            self._rest = table.slice(stop) if stop < table.num_rows else None
            yield table.slice(0, stop).drop_columns(["sort_key"])
            if self._rest is not None:
                return


def _keyed_schema(plan: ShufflePlan) -> pa.Schema:
    return positions_schema(plan.board_size).append(pa.field("sort_key", pa.uint64(), nullable=False))


def _stream(con: DuckDBPyConnection, query: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """Run a query and read its rows in batches of the schema given: DuckDB widens some of its types."""
    for batch in con.sql(query).to_arrow_reader(BATCH_ROWS):
        yield pa.Table.from_batches([batch]).select(schema.names).cast(schema)


def _cut_by_range(tables: Iterator[pa.Table], plan: ShufflePlan) -> Iterator[pa.Table]:
    """Cut a stream in ascending (split, key) where the plan's ranges meet, and into row groups."""
    pending: list[pa.Table] = []
    current = -1
    lows = {
        SPLITS.index(name): np.array([low for low, _ in plan.ranges(name)], dtype=np.uint64)
        for name in plan.rows
    }
    for table in tables:
        split = table.column("split").to_numpy()
        key = table.column("sort_key").to_numpy()
        number = np.empty(len(split), dtype=np.int64)
        for index, low in lows.items():
            own = split == index
            number[own] = (index << 32) + np.searchsorted(low, key[own], side="right")
        cuts = np.flatnonzero(np.diff(number, prepend=current))
        for start, stop in pairwise([0, *cuts, len(number)]):
            if start == stop:
                continue
            if pending and (number[start] != current or sum(map(len, pending)) >= ROW_GROUP_ROWS):
                yield pa.concat_tables(pending).combine_chunks()
                pending = []
            current = int(number[start])
            pending.append(table.slice(start, stop - start))
    if pending:
        yield pa.concat_tables(pending).combine_chunks()
