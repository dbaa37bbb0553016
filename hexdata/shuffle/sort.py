"""The sort of a shuffle, in passes over ranges of buckets.

A pass is one query: it reads the selected positions, keeps those of its buckets and sorts them by split,
bucket and sort key. DuckDB spills what exceeds its memory, some 100 bytes a position. The sorted rows are
streamed into the bucket files, each of which gets its final name when it is complete. So an interrupted
shuffle repeats only the buckets without a file, and more passes need less temporary disk space. Each further
pass costs one more reading of all positions, 0.2 microseconds a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.json_models import Count
from hexdata.schema import SPLITS, WINNERS, positions_schema
from hexdata.shards.block_check import find_bad_position
from hexdata.shuffle.plan import SortLimits
from hexdata.storage import AnyPath
from hexdata.storage.errors import VERIFY_HINT
from hexdata.store.files import FileFacts
from hexdata.store.parquet import write_parquet
from hexdata.store.session import DuckDBPyConnection, duckdb_session, in_thread

_BATCH_ROWS: Final = 1 << 14
_BATCH_BYTES: Final = 4_000_000
"""Maximum rows and bytes per batch from DuckDB: each thread makes some outside DuckDB's limit."""
_AHEAD: Final = 4
"""Batches that are read and checked while a row group of others is written.

On two cores, 9.3 million rows take 6.8 s in place of 7.8 s with 2, and 97 million rows 87 s with 8 and 92 s
with 2. More would take memory where rows are wide.
"""


class SortedBucket(FileFacts, frozen=True):
    """Rows, size and digest of a bucket, and the number of its rows that have a policy."""

    policies: Count


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
        # One number for both, so that consecutive buckets are a range in SQL.
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
        limits: DuckDB's memory and threads.
        spill: Folder for DuckDB's temporary files; None for the system's temporary folder.
    """

    store: AnyPath
    target: AnyPath
    query: str
    board_size: int
    targets: tuple[str, ...]
    limits: SortLimits
    spill: Path | None

    def write(self, buckets: Sequence[Bucket]) -> Iterator[tuple[str, SortedBucket]]:
        """Write buckets in one pass; yield the name of each and its facts.

        Args:
            buckets: The buckets, in ascending order. Those without rows become files without rows.

        Raises:
            StoreError: A position is invalid, or a file of the store is damaged.
            BudgetError: The memory is too small.
        """
        schema = positions_schema(self.board_size, self.targets)
        with self.reading(buckets) as tables:
            # The groups share one stream: the rows of a bucket have to be written before the next group
            # begins.
            groups = groupby(tables, key=itemgetter(0))
            key, rows = next(groups, (None, iter(())))
            for bucket in buckets:
                found: Iterator[tuple[int, pa.Table]] = rows if key == bucket.key else iter(())
                policies: list[int] = []
                counted = _count_policies(found, policies)
                # Without ``replace``, a process that has lost its lock cannot overwrite a bucket of another
                # one.
                facts = write_parquet(self.target / bucket.name, schema, counted, replace=False)
                if key == bucket.key:
                    key, rows = next(groups, (None, iter(())))
                yield bucket.name, SortedBucket(facts.rows, facts.bytes, facts.sha256, sum(policies))

    @contextmanager
    def reading(self, buckets: Sequence[Bucket]) -> Iterator[Iterator[tuple[int, pa.Table]]]:
        """Sort the rows of buckets in one pass. Errors of the context are translated as those of the sort.

        Args:
            buckets: The buckets, in ascending order.

        Yields:
            The rows in order, in tables, each with the key of its bucket.

        Raises:
            StoreError: A position is invalid, or a file of the store is damaged.
            BudgetError: The memory is too small.
        """
        memory, threads = self.limits.memory, self.limits.threads
        with (
            duckdb_session(memory=memory, threads=threads, spill=self.spill, store=self.store) as con,
            # After an error, the thread has to end before the session that it uses.
            closing(in_thread(con, self._sorted(con, buckets), _AHEAD)) as tables,
        ):
            yield tables

    def _sorted(self, con: DuckDBPyConnection, buckets: Sequence[Bucket]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the sorted rows of buckets, cut where the bucket changes."""
        schema = positions_schema(self.board_size, self.targets)
        keyed = f"SELECT *, (split::BIGINT << 32) + bucket AS bucket_key FROM ({self.query})"
        batch_rows = max(min(_BATCH_ROWS, _BATCH_BYTES // self.limits.row), 1)
        for condition in self._conditions(con, keyed, buckets):
            # Only what is written, since each column of the sort takes time and temporary disk space. A text
            # of the winner takes 16 bytes, and an ENUM one; all invalid winners are the third of its values.
            winners = (*WINNERS, "neither")
            winner = f"if(winner IN {WINNERS} OR winner IS NULL, winner, 'neither')::ENUM {winners} AS winner"
            query = f"""
                SELECT * EXCLUDE (split, bucket, sort_key) REPLACE ({winner})
                FROM ({keyed}) WHERE {condition} ORDER BY bucket_key, sort_key
            """
            for batch in con.sql(query).to_arrow_reader(batch_rows):
                yield from _cut(batch, schema)

    def _conditions(self, con: DuckDBPyConnection, keyed: str, buckets: Sequence[Bucket]) -> Iterator[str]:
        """Yield the SQL conditions of the queries of a pass, whose results follow each other in its order."""
        most = self.limits.most_rows
        if most is None or len(buckets) > 1:
            # Ranges, since a list of up to 100,000 numbers would be compared with every position.
            keys = np.array([bucket.key for bucket in buckets], np.int64)
            ranges = np.split(keys, np.flatnonzero(np.diff(keys) != 1) + 1)
            yield " OR ".join(f"bucket_key BETWEEN {part[0]} AND {part[-1]}" for part in ranges)
            return
        # The keys are uniformly distributed, so equal ranges of them have about equally many rows.
        of_bucket = f"bucket_key = {buckets[0].key}"
        ((rows, low, high),) = con.sql(f"""
            SELECT count(*), min(sort_key), max(sort_key) FROM ({keyed}) WHERE {of_bucket}
        """).fetchall()
        if rows:
            parts = -(-rows // most)
            bounds = [low + (high + 1 - low) * number // parts for number in range(parts + 1)]
            for first, after in pairwise(bounds):
                yield f"{of_bucket} AND sort_key BETWEEN {first} AND {after - 1}"


def _cut(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[tuple[int, pa.Table]]:
    """Check a batch of sorted rows; yield the rows of each of its buckets with the key of the bucket."""
    table = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
    # The digests of the buckets would make an invalid position look intact, so none is written.
    bad = find_bad_position(table, texts=False)
    if bad is not None:
        raise StoreError(
            "the store contains an invalid position",
            record=f"position {table['position_id'][bad.row]}",
            found=bad.found,
            expected=bad.expected,
            hint=VERIFY_HINT,
        )
    keys = batch["bucket_key"].to_numpy()
    # A batch may end one bucket and begin others.
    cuts = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    for start, stop in pairwise(cuts):
        if stop > start:
            yield int(keys[start]), table.slice(start, stop - start)


def write_part(sort: Sort, buckets: Sequence[Bucket]) -> list[tuple[str, SortedBucket]]:
    """Write buckets in one pass, in a process of its own; see :meth:`Sort.write`."""
    return list(sort.write(buckets))


def divide(buckets: Sequence[Bucket], passes: int) -> list[list[Bucket]]:
    """Divide buckets into as many parts as passes, or fewer if there are fewer buckets."""
    bounds = [len(buckets) * number // passes for number in range(passes + 1)]
    return [list(buckets[start:stop]) for start, stop in pairwise(bounds) if stop > start]


def _count_policies(rows: Iterator[tuple[int, pa.Table]], counts: list[int]) -> Iterator[pa.Table]:
    """Yield the rows of a bucket, and append the number of those with a policy to ``counts``."""
    for _, table in rows:
        counts.append(table.num_rows - table["policy"].null_count)
        yield table
