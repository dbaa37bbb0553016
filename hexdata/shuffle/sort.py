"""The sort of a shuffle, in passes over ranges of buckets.

A pass is one query: it reads the selected positions, keeps those of its buckets and sorts them by split,
bucket and sort key. DuckDB spills what exceeds its memory, some 100 bytes a position. The sorted rows are
streamed into the bucket files, each of which gets its final name when it is complete. So an interrupted
shuffle repeats only the buckets without a file, and more passes need less temporary disk space. Each further
pass costs one more reading of all positions, 0.2 microseconds a position.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.schema import SPLITS, positions_schema
from hexdata.shards.position_check import find_bad_position
from hexdata.storage import AnyPath
from hexdata.store.files import FileFacts
from hexdata.store.parquet import write_parquet
from hexdata.store.session import duckdb_session
from hexdata.strict_json import Count

__all__ = ["Bucket", "Sort", "SortedBucket", "write_part"]

_BATCH_ROWS: Final = 1 << 14
"""Rows per batch from DuckDB: few, so that batches of wide rows take little memory."""


@dataclass(frozen=True)
class SortedBucket(FileFacts):
    """Rows, size and digest of a bucket, and the number of its rows that have a policy.

    This number is None if an earlier shuffle wrote the bucket.
    """

    policies: Count | None = None


@dataclass(frozen=True)
class Bucket:
    """A file of the result."""

    split: str
    index: int

    @property
    def name(self) -> str:
        """Path of the file, relative to the store."""
        return f"shuffled/{self.split}/bucket-{self.index:06d}.parquet"

    @property
    def key(self) -> int:
        """Number that ascends with split and index."""
        return (SPLITS.index(self.split) << 32) + self.index


@dataclass(frozen=True)
class Sort:
    """What all passes of a shuffle have in common.

    Attributes:
        store: The store.
        target: Folder in which the buckets are written, with their names in the store.
        query: Query for the selected positions, with the columns split, bucket and sort_key.
        board_size: Board size n.
        targets: Optional columns of the positions.
        memory: Memory limit of DuckDB in bytes.
        threads: Number of DuckDB's threads.
        spill: Folder for DuckDB's temporary files; None for the system's temporary folder.
    """

    store: AnyPath
    target: AnyPath
    query: str
    board_size: int
    targets: tuple[str, ...]
    memory: int
    threads: int
    spill: Path | None

    def write(self, buckets: Sequence[Bucket]) -> Iterator[tuple[str, SortedBucket, float]]:
        """Write buckets in one pass; yield the name of each, its facts and the seconds since the one before.

        Args:
            buckets: The buckets, in ascending order. Those without rows become files without rows.

        Raises:
            StoreError: A position is invalid, or a file of the store is damaged.
            BudgetError: The memory is too small.
        """
        schema = positions_schema(self.board_size, self.targets)
        start = time.perf_counter()
        with duckdb_session(
            memory=self.memory, threads=self.threads, spill=self.spill, store=self.store
        ) as con:
            query = f"""
                SELECT * FROM (SELECT *, (split::BIGINT << 32) + bucket AS bucket_key FROM ({self.query}))
                WHERE {_condition(buckets)}
                ORDER BY bucket_key, sort_key
            """
            pieces = _pieces(con.sql(query).to_arrow_reader(_BATCH_ROWS), schema)
            groups = groupby(pieces, key=itemgetter(0))
            key, rows = next(groups, (None, iter(())))
            for bucket in buckets:
                found: Iterator[tuple[int, pa.Table]] = rows if key == bucket.key else iter(())
                counted = _CountedRows(table for _, table in found)
                facts = write_parquet(self.target / bucket.name, schema, counted, replace=False)
                if key == bucket.key:
                    key, rows = next(groups, (None, iter(())))
                end = time.perf_counter()
                written = SortedBucket(facts.rows, facts.bytes, facts.sha256, counted.policies)
                yield bucket.name, written, end - start
                start = end


def write_part(sort: Sort, buckets: Sequence[Bucket]) -> list[tuple[str, SortedBucket, float]]:
    """Write buckets in one pass, in a process of its own; see :meth:`Sort.write`."""
    return list(sort.write(buckets))


def _condition(buckets: Sequence[Bucket]) -> str:
    """Return the SQL condition for the keys of buckets, one comparison for each range of them."""
    keys = np.array([bucket.key for bucket in buckets], np.int64)
    ranges = np.split(keys, np.flatnonzero(np.diff(keys) != 1) + 1)
    return " OR ".join(f"bucket_key BETWEEN {part[0]} AND {part[-1]}" for part in ranges)


def _pieces(batches: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[tuple[int, pa.Table]]:
    """Cut sorted rows where the bucket changes; yield the key of the bucket and its next rows."""
    for batch in batches:
        table = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
        bad = find_bad_position(table, texts=False)
        if bad is not None:
            raise StoreError(
                "the store contains an invalid position",
                record=f"position {table['position_id'][bad.row]}",
                found=bad.found,
                expected=bad.expected,
                hint="Run `hexdata verify` to find the damaged file.",
            )
        keys = batch["bucket_key"].to_numpy()
        cuts = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
        for start, stop in pairwise(cuts):
            if stop > start:
                yield int(keys[start]), table.slice(start, stop - start)


class _CountedRows:
    """The rows of a bucket; counts those with a policy."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self.policies = 0

    def __iter__(self) -> Iterator[pa.Table]:
        for table in self._tables:
            self.policies += table.num_rows - table["policy"].null_count
            yield table
