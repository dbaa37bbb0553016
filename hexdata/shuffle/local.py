"""The local engine: each unit of a plan is one DuckDB query and one atomic file.

Phase 1 sorts each slice of the input into a run, phase 2 merges the runs' rows of each bucket. A unit
is a pure function of its arguments, so a repeated one writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hexdata.order import sort_key_sql
from hexdata.schema import SPLITS, positions_schema
from hexdata.shuffle.plan import Bucket, ShufflePlan, Slice
from hexdata.store.files import FileFacts, atomic_file
from hexdata.store.parquet import ROW_GROUP_ROWS, write_parquet
from hexdata.store.session import DuckDBPyConnection, path_list_sql, read_parquet_sql

__all__ = ["scatter", "sort_bucket", "split_sizes_sql", "varying_bytes_sql"]

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

    A run's row groups are cut where buckets meet, so that phase 2 reads of each run just its bucket.

    Returns:
        The rows written.
    """
    query = f"""
        SELECT *, {sort_key_sql("position_id", plan.key)} AS sort_key
        FROM ({_with_split_sql(positions, games)})
        WHERE position_id >= {part.start} AND position_id < {part.stop}
        ORDER BY split, sort_key
    """
    schema = _run_schema(plan.board_size)
    rows = 0
    with (
        atomic_file(run) as file,
        pq.ParquetWriter(file, schema, compression="lz4", use_dictionary=False) as writer,
    ):
        for table in _by_bucket(_stream(con, query, schema), plan.buckets):
            writer.write_table(table, row_group_size=table.num_rows)
            rows += table.num_rows
    return rows


def sort_bucket(
    con: DuckDBPyConnection, runs: list[Path], plan: ShufflePlan, bucket: Bucket, path: Path
) -> FileFacts:
    """Phase 2: write one bucket, its rows of all runs in ascending key, a range of keys after the other."""
    schema = positions_schema(plan.board_size)
    queries = (
        f"""
        SELECT * EXCLUDE (split, sort_key) FROM {read_parquet_sql(runs)}
        WHERE split = {SPLITS.index(bucket.split)}
          AND sort_key >= {low}::UBIGINT AND sort_key <= {high - 1}::UBIGINT
        ORDER BY sort_key
        """
        for low, high in plan.ranges(bucket)
    )
    return write_parquet(path, schema, (table for query in queries for table in _stream(con, query, schema)))


def _run_schema(board_size: int) -> pa.Schema:
    return (
        positions_schema(board_size)
        .append(pa.field("sort_key", pa.uint64(), nullable=False))
        .append(pa.field("split", pa.uint8(), nullable=False))
    )


def _stream(con: DuckDBPyConnection, query: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """Run a query and read its rows in batches of the schema given: DuckDB widens some of its types."""
    for batch in con.sql(query).to_arrow_reader(BATCH_ROWS):
        yield pa.Table.from_batches([batch]).select(schema.names).cast(schema)


def _by_bucket(tables: Iterator[pa.Table], buckets: list[Bucket]) -> Iterator[pa.Table]:
    """Cut a stream in ascending (split, key) where buckets meet: one table a bucket that has rows."""
    pending: list[pa.Table] = []
    current = -1
    firsts = {split: [b for b in buckets if b.split == name] for split, name in enumerate(SPLITS)}
    lows = {s: np.array([b.low for b in own], dtype=np.uint64) for s, own in firsts.items()}
    offset = dict(zip(lows, np.cumsum([0, *(len(low) for low in lows.values())]), strict=False))
    for table in tables:
        split = table.column("split").to_numpy()
        key = table.column("sort_key").to_numpy()
        number = np.empty(len(split), dtype=np.int64)
        for s, low in lows.items():
            own = split == s
            number[own] = offset[s] + np.searchsorted(low, key[own], side="right") - 1
        cuts = np.flatnonzero(np.diff(number, prepend=current))
        for start, stop in zip([0, *cuts], [*cuts, len(number)], strict=True):
            if start == stop:
                continue
            if pending and (number[start] != current or sum(map(len, pending)) >= ROW_GROUP_ROWS):
                yield pa.concat_tables(pending).combine_chunks()
                pending = []
            current = int(number[start])
            pending.append(table.slice(start, stop - start))
    if pending:
        yield pa.concat_tables(pending).combine_chunks()
