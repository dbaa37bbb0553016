"""Comparison of shards with the positions of a store whose buckets were removed. Sorts no positions.

A *part* has the rows of one shard that are from one bucket. The keys of its rows must ascend, and its rows
must be the positions of the store that belong to the bucket and whose keys are at least the first key of the
part and below that of the next part. Both sides are compared by their number of rows and by the sum of the
digests of their rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.order import derive_key, sort_key
from hexdata.shards.blocks import Block, row_fields
from hexdata.store.session import DuckDBPyConnection

__all__ = [
    "Part",
    "PlacedRows",
    "UInt64Array",
    "are_sorted",
    "divide_shard",
    "find_different",
    "read_part_rows",
    "read_placed",
    "row_digests",
]

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

_BATCH_ROWS: Final = 16_384
_PURPOSE: Final = "row digest"
_WORD: Final = 8


class Part(NamedTuple):
    """The rows of a shard that are from one bucket, or a bucket without rows."""

    shard: int
    """Number of the shard within its split."""
    bucket: int
    first_key: int
    rows: int
    total: int
    """Sum of the digests of the rows, modulo 2^64."""


class PlacedRows(NamedTuple):
    """Positions of the store with their places."""

    rows: pa.Table
    split: Int64Array
    """Index of the split of each row in ``SPLITS``."""
    bucket: Int64Array


def row_digests(fields: Block) -> UInt64Array:
    """Return a digest of each row, uint64 (rows,): of the names, types, shapes and bytes of its fields.

    Args:
        fields: A block with dense policies, or the fields of samples with a policy in each row. At least one
            row.
    """
    is_block = "policy_row" in fields
    names = row_fields(fields) if is_block else sorted(fields)
    arrays = [fields[name] for name in names]
    specs = [f"{name} {array.dtype.str} {array.shape[1:]}" for name, array in zip(names, arrays, strict=True)]
    digests = np.full(len(arrays[0]), derive_key(0, _PURPOSE, *specs), np.uint64)
    digests = _add_bytes(digests, arrays)
    if is_block and len(fields["policy_row"]):
        rows = fields["policy_row"]
        digests[rows] = _add_bytes(digests[rows], [fields["policy"]])
    return digests


def _add_bytes(digests: UInt64Array, arrays: Sequence[npt.NDArray[np.generic]]) -> UInt64Array:
    """Return digests of rows together with the bytes of their arrays."""
    rows = len(digests)
    parts = [np.ascontiguousarray(array).reshape(rows, -1).view(np.uint8) for array in arrays]
    width = sum(part.shape[1] for part in parts)
    data = np.zeros((rows, -(-width // _WORD) * _WORD), np.uint8)
    np.concatenate(parts, axis=1, out=data[:, :width])
    key = derive_key(0, _PURPOSE)
    for word in data.view(np.uint64).T:
        digests = sort_key(digests ^ word, key)
    return digests


def divide_shard(
    number: int, start: int, keys: UInt64Array, digests: UInt64Array, bucket_rows: Sequence[int]
) -> list[Part]:
    """Divide the rows of a shard into parts. Buckets without rows become empty parts.

    Args:
        number: Number of the shard within its split.
        start: Number of rows of the split before the shard.
        keys: Sort keys of the rows.
        digests: Digests of the rows.
        bucket_rows: Number of rows of each bucket of the split.

    Returns:
        The parts, in the order of the rows.
    """
    parts, stop, end = [], start + len(keys), 0
    for bucket, rows in enumerate(bucket_rows):
        begin, end = end, end + rows
        first, last = max(begin, start), min(end, stop)
        if first < last:
            piece = slice(first - start, last - start)
            total = int(digests[piece].sum(dtype=np.uint64))
            parts.append(Part(number, bucket, int(keys[piece.start]), last - first, total))
        elif not rows and start <= begin <= stop:
            parts.append(Part(number, bucket, 0, 0, 0))
    return parts


def are_sorted(keys: UInt64Array, parts: Sequence[Part]) -> bool:
    """Return whether the keys of a shard ascend strictly within each of its parts."""
    follows = keys[1:] > keys[:-1]
    starts = np.cumsum([part.rows for part in parts])[:-1]
    follows[starts[(starts > 0) & (starts < len(keys))] - 1] = True
    return bool(follows.all())


def find_different(
    parts: Mapping[int, Sequence[Part]], placed: Iterator[tuple[PlacedRows, UInt64Array, UInt64Array]]
) -> tuple[int, int] | None:
    """Compare parts with all positions of the store.

    Args:
        parts: The parts of each split, an index into ``SPLITS``, in the order of the shards. They cover all
            buckets.
        placed: All positions of the store in any order, with their sort keys and digests. Each split has as
            many as the parts.

    Returns:
        The split and the number of the first shard with other rows; None if all are equal.
    """
    if not any(parts.values()):
        return None
    every = [(split, part) for split in sorted(parts) for part in parts[split]]
    places = [(split, part.bucket) for split, part in every]
    first_of = {place: index for index, place in reversed(list(enumerate(places)))}
    last_of = {place: index for index, place in enumerate(places)}
    shape = 1 + max(parts), 1 + max(bucket for _, bucket in places)
    low, high = np.zeros((2, *shape), np.int64)
    for (split, bucket), index in first_of.items():
        low[split, bucket], high[split, bucket] = index, last_of[split, bucket]
    first_keys = np.array([part.first_key for _, part in every], np.uint64)
    rows, totals = np.zeros(len(every), np.int64), np.zeros(len(every), np.uint64)
    for batch, keys, digests in placed:
        begin, end = low[batch.split, batch.bucket], high[batch.split, batch.bucket]
        while (begin < end).any():
            middle = (begin + end + 1) // 2
            is_after = first_keys[middle] <= keys
            begin, end = np.where(is_after, middle, begin), np.where(is_after, end, middle - 1)
        rows += np.bincount(begin, minlength=len(every))
        np.add.at(totals, begin, digests)
    for index, (split, part) in enumerate(every):
        if (part.rows, part.total) != (rows[index], totals[index]):
            return split, part.shard
    return None


def read_placed(con: DuckDBPyConnection, query: str, schema: pa.Schema) -> Iterator[PlacedRows]:
    """Yield all selected positions of a store with their places, in no particular order.

    Args:
        con: The session of the query.
        query: Query for the positions with the bucket of each.
        schema: Columns of the rows.
    """
    names = ", ".join(f'"{name}"' for name in schema.names)
    placed = f"SELECT {names}, split::BIGINT, bucket::BIGINT FROM ({query})"
    for batch in con.sql(placed).to_arrow_reader(_BATCH_ROWS):
        if batch.num_rows:
            *columns, split, bucket = batch.columns
            rows = pa.Table.from_arrays(columns, names=schema.names).cast(schema)
            yield PlacedRows(rows, split.to_numpy(), bucket.to_numpy())


def read_part_rows(
    con: DuckDBPyConnection,
    query: str,
    schema: pa.Schema,
    split: int,
    parts: Sequence[Part],
    shard: int,
) -> Iterator[pa.RecordBatch]:
    """Yield the positions of the store that belong to one shard, in their order.

    Args:
        con: The session of the query.
        query: Query for the positions with the bucket of each.
        schema: Columns of the rows.
        split: Index of the split in ``SPLITS``.
        parts: All parts of the split.
        shard: Number of the shard.
    """
    conditions = []
    before: int | None = None
    for part, after in itertools.zip_longest(parts, parts[1:]):
        if part.shard == shard:
            condition = f"bucket = {part.bucket}"
            if part.bucket == before:
                condition += f" AND sort_key >= {part.first_key}"
            if after is not None and after.bucket == part.bucket:
                condition += f" AND sort_key < {after.first_key}"
            conditions.append(f"({condition})")
        before = part.bucket
    names = ", ".join(f'"{name}"' for name in schema.names)
    count = sum(part.rows for part in parts if part.shard == shard)
    rows = con.sql(f"""
        SELECT {names} FROM ({query}) WHERE split = {split} AND ({" OR ".join(conditions)})
        ORDER BY bucket, sort_key LIMIT {count + 1}
    """)
    for batch in rows.to_arrow_reader(_BATCH_ROWS):
        yield from pa.Table.from_batches([batch]).cast(schema).to_batches()
