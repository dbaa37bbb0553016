"""The preparation of a shuffle: selects the rows, plans the work and measures its cost. Writes no rows."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from hexdata.engine import LOCAL
from hexdata.engine.protocol import Machines
from hexdata.errors import StoreError
from hexdata.order import ORDER_VERSION, sort_key
from hexdata.retry import repeats_on_disk
from hexdata.schema import positions_schema
from hexdata.selection import ALL_GAMES, Placement, Selection, select
from hexdata.shuffle.layout import (
    BASE_MEMORY,
    ShuffleLayout,
    ThreadLimits,
    bucket_counts,
    make_layout,
    make_limits,
    row_bytes,
)
from hexdata.shuffle.options import ShuffleOptions
from hexdata.shuffle.runs import RUN_FORMAT, as_run, encode_run
from hexdata.storage import AnyPath, client_memory
from hexdata.store import Store
from hexdata.store.parquet import ROW_GROUP_ROWS, encode_parquet
from hexdata.store.session import DuckDBPyConnection, duckdb_session, path_list_sql, read_parquet_sql

__all__ = ["Prepared", "RowCost", "is_same_shuffle", "prepare", "with_seed"]

SELECT_SHARE: Final = 0.8
"""Fraction of the memory, without the fixed part, that DuckDB may use while rows are selected."""
SAMPLE_IDS: Final = 1 << 18
"""Positions processed before a shuffle to measure its cost; fewer if memory is short."""
SAMPLE_STEP: Final = 4
"""Only every fourth of them is sorted and encoded: adjacent rows of a game compress unusually well."""


@dataclass(frozen=True)
class RowCost:
    """Costs of a row, measured with one thread on a sample of the store's rows.

    Attributes:
        run_bytes: Bytes on disk of a row in a run.
        bucket_bytes: Bytes on disk of a row in a bucket.
        scatter_seconds: Seconds to scatter one position of the store, averaged over all ids.
        sort_seconds: Seconds to sort and encode a row.
    """

    run_bytes: float
    bucket_bytes: float
    scatter_seconds: float
    sort_seconds: float


@dataclass(frozen=True)
class Prepared:
    """The result of the preparation.

    Attributes:
        selection: Selected rows.
        placement: Destination of each row.
        buckets: Number of buckets by split.
        limits: ThreadLimits of a thread.
        layout: Slices and units under these limits.
        cost: Measured costs of a row.
        lineage: Entry of the stage for the manifest.
        seconds: Seconds spent on counting the rows.
        machines: Number of machines, each with these limits.
        threads_per_task: Number of threads of a task that sorts a group of units from an object store: all
            threads of a machine, or fewer if machines differ.
    """

    selection: Selection
    placement: Placement
    buckets: dict[str, int]
    limits: ThreadLimits
    layout: ShuffleLayout
    cost: RowCost
    lineage: dict[str, Any]
    seconds: float
    machines: int
    threads_per_task: int = 1

    @property
    def sort_tasks(self) -> int:
        """Number of tasks of ``threads_per_task`` threads that run at a time on all machines together."""
        return self.machines * (self.limits.threads // self.threads_per_task)

    @property
    def ledger_plan(self) -> dict[str, Any]:
        """The plan under which the ledger's units are made. Units of another run format are not reused."""
        return {"runs": RUN_FORMAT, **self.lineage}


def with_seed(store: Store, options: ShuffleOptions) -> ShuffleOptions:
    """Return the options with a seed: if they have none, that of the store's shuffle, or 0 without one."""
    if options.seed is not None:
        return options
    return replace(options, seed=store.manifest.stages.get("shuffle", {"seed": 0})["seed"])


def is_same_shuffle(store: Store, options: ShuffleOptions) -> bool:
    """Return whether the manifest lists a shuffle with these options; its files may be damaged."""
    done = store.manifest.stages.get("shuffle")
    if done is None:
        return False
    requested = _requested_lineage(store, options) | {"buckets": bucket_counts(options, done["splits"])}
    return bool(done | requested == done)


def _requested_lineage(store: Store, options: ShuffleOptions) -> dict[str, Any]:
    return {
        "seed": with_seed(store, options).seed,
        "order_version": ORDER_VERSION,
        "choices": options.non_default(),
        "of": store.input_digest("shuffle"),
    }


@repeats_on_disk
def prepare(
    store: Store,
    options: ShuffleOptions,
    folder: AnyPath,
    spill: Path | None,
    machines: Machines | None = None,
) -> Prepared:
    """Select the rows, plan the shuffle and measure its cost.

    Args:
        store: Store to shuffle.
        options: Options of the shuffle.
        folder: Folder for small tables that the placement reads; they are not removed.
        spill: Folder for DuckDB's temporary files; None for the system's temporary folder.
        machines: Machines that will do the work; None for this machine (default).

    Raises:
        StoreError: The store contains no positions.
        ConfigError: An option cannot be used with this store.
        BudgetError: The memory is too small for rows of this width.
    """
    options = with_seed(store, options)
    assert options.seed is not None
    positions, n, targets = store.files("positions"), store.manifest.board_size, store.manifest.targets
    if not positions or n is None:
        raise StoreError(
            "the store contains no positions", path=store.path, hint="Run `hexdata convert` first."
        )
    machines = machines or LOCAL.machines
    start = time.perf_counter()
    total = store.manifest.counts["positions"]
    memory = int((options.memory - BASE_MEMORY) * SELECT_SHARE)
    with duckdb_session(memory=memory, threads=1, spill=spill, store=store.path) as con:
        varying, game_ranges = _read_footers(con, positions)
    widest = row_bytes(n, varying.widest, targets)
    client = client_memory(store.path)
    limits = make_limits(
        options, total, row_bytes(n, varying.mean(total), targets), widest, machines, client=client
    )
    with duckdb_session(memory=memory, threads=limits.threads, spill=spill, store=store.path) as con:
        selection = select(store, options, options.seed, con, folder)
        targets = selection.targets
        chosen = row_bytes(n, varying.mean(sum(selection.rows.values())), targets)
        limits = make_limits(options, total, chosen, widest, machines, client=client)
        buckets = bucket_counts(options, selection.rows)
        placement = replace(selection.assign_buckets(buckets, con, folder), game_ranges=game_ranges)
    seconds = time.perf_counter() - start
    by_key = options.assign == "position" and options.stratify_by is None
    layout = make_layout(total, selection.rows, buckets, limits, by_key=by_key, machines=machines.count)
    with duckdb_session(
        memory=limits.duckdb_memory, threads=1, spill=spill, store=store.path, build_right=True
    ) as con:
        ids = min(total, SAMPLE_IDS, max(limits.chunk_rows // 2, 1))
        cost = _measure_cost(
            con, placement, layout, range((total - ids) // 2, (total + ids) // 2), selection.key, n, targets
        )
    lineage = {
        **_requested_lineage(store, options),
        "positions": sum(selection.rows.values()),
        "rejected": 0,
        "left_out": selection.left_out,
        "targets": list(selection.targets),
        "splits": selection.rows,
        "buckets": buckets,
    }
    threads_per_task = machines.cores_per_task(limits.threads, options.memory // limits.threads)
    return Prepared(
        selection=selection,
        placement=placement,
        buckets=buckets,
        limits=limits,
        layout=layout,
        cost=cost,
        lineage=lineage,
        seconds=seconds,
        machines=machines.count,
        threads_per_task=threads_per_task,
    )


@dataclass(frozen=True)
class _Varying:
    """Memory of the columns of varying size: policies and ``metadata``.

    Attributes:
        all: Bytes of all rows together.
        widest: Average bytes of a row in the row group with the widest rows.
    """

    all: int
    widest: float

    def mean(self, rows: int) -> float:
        """Return the maximum average bytes of a selected row. A small selection may have only wide rows."""
        return min(self.all / rows, self.widest)


def _read_footers(con: DuckDBPyConnection, positions: list[AnyPath]) -> tuple[_Varying, tuple[range, ...]]:
    """Measure the columns of varying size, and find a range with all game ids of each file.

    Policies are measured from the files' footers. A cell of a policy takes six bytes: three for each of its
    two numbers. Footers do not suffice for texts, which are read, because a file stores repeated texts once.
    """
    footers = f"""
        SELECT file_name, row_group_id, any_value(row_group_num_rows) AS rows,
               coalesce(sum(num_values - stats_null_count) FILTER (path_in_schema = 'metadata'), 0) AS texts,
               3 * coalesce(sum(num_values - stats_null_count)
                            FILTER (starts_with(path_in_schema, 'policy')), 0) AS bytes,
               min(TRY_CAST(stats_min_value AS BIGINT)) FILTER (path_in_schema = 'game_id') AS low,
               max(TRY_CAST(stats_max_value AS BIGINT)) FILTER (path_in_schema = 'game_id') AS high,
               any_value(stats_null_count = num_values) FILTER (path_in_schema = 'game_id') AS no_games
        FROM parquet_metadata({path_list_sql(positions)}) GROUP BY ALL
    """
    files = con.sql(f"""
        SELECT file_name, sum(texts)::BIGINT, sum(bytes)::BIGINT, max(bytes / rows),
               coalesce(min(low), 0), coalesce(max(high) + 1, 0),
               bool_and(coalesce(low <= high OR no_games, false))
        FROM ({footers}) GROUP BY file_name
    """).fetchall()
    ranges = {name: range(low, high) if known else ALL_GAMES for name, *_, low, high, known in files}
    game_ranges = tuple(ranges.get(str(path), ALL_GAMES) for path in positions)
    texts, policies = (sum(file[column] for file in files) for column in (1, 2))
    widest = max(file[3] for file in files)
    if not texts:
        return _Varying(policies, widest), game_ranges
    found, widest_text = con.sql(f"""
        SELECT sum(bytes)::BIGINT, max(bytes / rows)
        FROM (SELECT coalesce(sum(strlen(metadata)), 0) AS bytes, count(*) AS rows
              FROM {read_parquet_sql(positions, row_location=True)}
              GROUP BY filename, file_row_number // {ROW_GROUP_ROWS})
    """).fetchall()[0]
    return _Varying(policies + found, widest + widest_text), game_ranges


def _measure_cost(
    con: DuckDBPyConnection,
    placement: Placement,
    layout: ShuffleLayout,
    ids: range,
    key: int,
    n: int,
    targets: tuple[str, ...],
) -> RowCost:
    """Scatter, sort and encode the positions of these ids in memory, and return the measured costs."""
    begin = time.perf_counter()
    query = placement.slice_sql(ids.start, ids.stop)
    batches = list(con.sql(query).to_arrow_reader(min(len(ids), ROW_GROUP_ROWS)))
    if not batches:  # the selection excludes all of them
        return RowCost(0.0, 0.0, (time.perf_counter() - begin) / len(ids), 0.0)
    table = pa.Table.from_batches(batches)
    run, bucket = io.BytesIO(), io.BytesIO()
    unit = layout.unit_numbers(*(table.column(name).to_numpy() for name in ("split", "bucket", "sort_key")))
    encode_run(run, as_run(table, n, targets), unit)
    scattered = time.perf_counter()
    schema = positions_schema(n, targets)
    order = np.argsort(sort_key(table.column("position_id").to_numpy(), key))[::SAMPLE_STEP]
    rows = encode_parquet(bucket, schema, [table.select(schema.names).take(pa.array(order)).cast(schema)])
    return RowCost(
        run_bytes=len(run.getvalue()) / len(table),
        bucket_bytes=len(bucket.getvalue()) / rows,
        scatter_seconds=(scattered - begin) / len(ids),
        sort_seconds=(time.perf_counter() - scattered) / rows,
    )
