"""What comes before a shuffle: the rows that take part, the plan, and what it will cost. Writes no row."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.order import ORDER_VERSION, sort_key
from hexdata.schema import positions_schema
from hexdata.selection import Placement, Selection, select
from hexdata.shuffle.options import ShuffleOptions
from hexdata.shuffle.plan import (
    BASE_MEMORY,
    DUCKDB_LEAST,
    Layout,
    Limits,
    bucket_counts,
    make_layout,
    make_limits,
    row_bytes,
)
from hexdata.shuffle.runs import as_run, encode_run
from hexdata.store import Store
from hexdata.store.parquet import encode_parquet
from hexdata.store.session import DuckDBPyConnection, duckdb_session, path_list_sql

__all__ = ["Cost", "Prepared", "is_done", "prepare"]

SELECT_SHARE: Final = 0.8
"""Part of the memory, less what is always held, that DuckDB may fill while rows are selected."""
SAMPLE_IDS: Final = 1 << 18
"""Positions that are tried before a shuffle, to know what it will cost."""
SAMPLE_STEP: Final = 4
"""Of these every fourth is sorted and encoded: neighbours of one game compress better than a shuffle does."""


@dataclass(frozen=True)
class Cost:
    """What a row costs, tried on some of the store's own rows with one thread.

    Attributes:
        run_bytes: on disk, of a row in a run.
        bucket_bytes: on disk, of a row in a bucket.
        scatter_seconds: to scatter the position of one id.
        sort_seconds: to sort and encode a row.
    """

    run_bytes: float
    bucket_bytes: float
    scatter_seconds: float
    sort_seconds: float


@dataclass(frozen=True)
class Prepared:
    """All that is known before anything is written.

    Attributes:
        selection: the rows that take part.
        placement: where they go.
        buckets: by split.
        limits: what a thread may hold.
        layout: slices and units, as these limits have it.
        cost: of a row.
        lineage: as the manifest will have it.
        seconds: that it took to count the rows.
    """

    selection: Selection
    placement: Placement
    buckets: dict[str, int]
    limits: Limits
    layout: Layout
    cost: Cost
    lineage: dict[str, Any]
    seconds: float


def is_done(store: Store, options: ShuffleOptions) -> bool:
    """Say whether the store holds the very shuffle that is asked for."""
    done = store.manifest.stages.get("shuffle")
    if done is None or not store.intact("shuffled"):
        return False
    asked = _asked(store, options) | {"buckets": bucket_counts(options, done["splits"])}
    return bool(done | asked == done)


def _asked(store: Store, options: ShuffleOptions) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "order_version": ORDER_VERSION,
        "choices": options.asked(),
        "of": store.made_of("shuffle"),
    }


def prepare(store: Store, options: ShuffleOptions, folder: Path, spill: Path | None) -> Prepared:
    """Carry out the choices, plan the shuffle and try what it costs.

    Args:
        store: to shuffle.
        options: what is asked for.
        folder: where small tables may be left that the placement reads.
        spill: where DuckDB may spill; None for the system's temporary folder.

    Raises:
        StoreError: the store holds no position.
        BudgetError: the memory is too small for rows so wide.
    """
    positions, n = store.files("positions"), store.manifest.board_size
    if not positions or n is None:
        raise StoreError(
            "this store holds no positions", path=store.path, cure="Convert some sources into it first."
        )
    start = time.perf_counter()
    total = store.manifest.counts["positions"]
    with duckdb_session(memory=DUCKDB_LEAST, threads=1, spill=spill) as con:
        varying = con.sql(_varying_bytes_sql(positions)).fetchall()[0][0]
    limits = make_limits(options, row_bytes(n, total, varying))
    memory = int((options.memory - BASE_MEMORY) * SELECT_SHARE)
    with duckdb_session(memory=memory, threads=limits.threads, spill=spill) as con:
        selection = select(store, options, options.seed, con, folder)
        buckets = bucket_counts(options, selection.rows)
        placement = selection.place(buckets, con, folder)
    seconds = time.perf_counter() - start
    by_key = options.assign == "position" and options.stratify_by is None
    layout = make_layout(total, selection.rows, buckets, limits, by_key=by_key)
    with duckdb_session(memory=limits.duckdb_memory, threads=1, spill=spill) as con:
        cost = _try_out(con, placement, layout, selection.key, n)
    lineage = {
        **_asked(store, options),
        "positions": sum(selection.rows.values()),
        "rejected": 0,
        "left_out": selection.left_out,
        "splits": selection.rows,
        "buckets": buckets,
    }
    return Prepared(selection, placement, buckets, limits, layout, cost, lineage, seconds)


def _varying_bytes_sql(positions: list[Path]) -> str:
    """Return a query for the bytes that dense policies and ``extra`` take, from the files' footers."""
    return f"""
        SELECT coalesce(sum(if(path_in_schema = 'extra', total_uncompressed_size,
                               4 * (num_values - stats_null_count))), 0)::BIGINT
        FROM parquet_metadata({path_list_sql(positions)})
        WHERE path_in_schema = 'extra' OR starts_with(path_in_schema, 'policy')
    """


def _try_out(con: DuckDBPyConnection, placement: Placement, layout: Layout, key: int, n: int) -> Cost:
    """Scatter, sort and encode some rows from the middle of the store, in memory."""
    ids = min(layout.positions, SAMPLE_IDS)
    first = (layout.positions - ids) // 2
    begin = time.perf_counter()
    batches = list(con.sql(placement.rows_sql(first, first + ids)).to_arrow_reader(ids))
    if not batches:  # a choice has left out all of them
        return Cost(0.0, 0.0, (time.perf_counter() - begin) / ids, 0.0)
    table = pa.Table.from_batches(batches)
    run, bucket = io.BytesIO(), io.BytesIO()
    unit = layout.unit_numbers(*(table.column(name).to_numpy() for name in ("split", "bucket", "sort_key")))
    encode_run(run, as_run(table, n), unit)
    scattered = time.perf_counter()
    schema = positions_schema(n)
    order = np.argsort(sort_key(table.column("position_id").to_numpy(), key))[::SAMPLE_STEP]
    rows = encode_parquet(bucket, schema, [table.select(schema.names).take(pa.array(order)).cast(schema)])
    return Cost(
        run_bytes=len(run.getvalue()) / len(table),
        bucket_bytes=len(bucket.getvalue()) / rows,
        scatter_seconds=(scattered - begin) / ids,
        sort_seconds=(time.perf_counter() - scattered) / rows,
    )
