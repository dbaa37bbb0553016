"""The positions of a table of games after equal ones were merged, as ``hexdata shuffle --merge`` does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.fill import remove_next_move
from hexdata.loader.game_table import GameTable, TableRows
from hexdata.loader.row_filter import RowSubset
from hexdata.loader.row_policies import find_ranges
from hexdata.policy import SparsePolicies
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, SPLITS
from hexdata.selection.merge import COUNT, MERGED_TARGETS, merge_positions
from hexdata.selection.tables import StoreTables
from hexdata.shards.blocks import Block, block_length, null_of
from hexdata.store import Store
from hexdata.store.session import duckdb_session

__all__ = ["MergedRows", "merge_rows"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]

_MEMORY: Final = 512 << 20
"""Memory limit of the queries in bytes."""
_BATCH_ROWS: Final = 1 << 16
_POLICY: Final = ("policy", "policy_row", "move")


class MergedRows:
    """The rows of a table of games without those that were merged into others: a ``RowSource``.

    Rows count the remaining positions in the order of the table. A copy shares the table.

    Args:
        table: All positions.
        kept: Rows of the table that remain.
        changed: Rows of the table into which others were merged, (M,), ascending.
        values: Merged columns by name, (M,): ``value``, ``move``, and all optional columns of the store and
            those of ``MERGED_TARGETS``.
        policies: The policy of each changed row, (M,): that of its only move, if it has one; without entries
            if it has none.
        root: Whether weights are square roots.
    """

    def __init__(
        self,
        table: GameTable,
        kept: RowSubset,
        changed: Int64Array,
        values: Block,
        policies: SparsePolicies,
        root: bool,
    ) -> None:
        self.table = table
        self.positions = len(kept)
        self._kept = kept
        self._changed = changed
        self._values = values
        self._policies = policies
        self._is_sparse = (np.diff(policies.starts) > 0) & (values["move"] == NO_MOVE)
        self._root = root

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the optional columns, sorted."""
        return tuple(sorted({*self.table.targets, *MERGED_TARGETS}))

    def bytes_per_row(self, members: Sequence[str]) -> int:
        """Return the approximate size of a gathered row in bytes."""
        return self.table.bytes_per_row(members)

    def wait_until_ready(self) -> None:
        """Return at once, because the table is in memory."""

    def gather(self, rows: Int64Array, members: Sequence[str]) -> TableRows:
        """Return members of rows (B,), as ``GameTable.gather`` does."""
        return TableRows(self.take(rows, members))

    def take(self, rows: Int64Array, members: Sequence[str]) -> Block:
        """Return members of rows (B,) as one block, in the order given."""
        rows = self._kept.rows(rows)
        block = self.table.take(rows, self._stored(members))
        at = np.minimum(np.searchsorted(self._changed, rows), max(len(self._changed) - 1, 0))
        hits = np.flatnonzero(self._changed[at] == rows) if len(self._changed) else np.empty(0, np.int64)
        slots = at[hits]
        self._add_targets(block, members, len(rows))
        for name, values in self._values.items():
            if name in block and name != "move":
                block[name][hits] = values[slots]
        if not set(_POLICY).isdisjoint(members) or "fill" in members:
            self._change_policies(block, members, hits, slots)
        return block

    def _stored(self, members: Sequence[str]) -> list[str]:
        """Return the members to read from the table."""
        stored = [name for name in members if name not in MERGED_TARGETS]
        own = "weight" in members and "weight" in self.table.targets
        return [*stored, "weight"] if own else stored

    def _add_targets(self, block: Block, members: Sequence[str], count: int) -> None:
        """Add the columns of positions that were not merged."""
        if COUNT in members:
            block[COUNT] = np.ones(count, np.float32)
        if "weight" in members:
            own = block.get("weight", np.ones(count, np.float32))
            own = np.where(np.isnan(own), np.float32(1), own)
            block["weight"] = np.sqrt(own) if self._root else own

    def _change_policies(
        self, block: Block, members: Sequence[str], hits: Int64Array, slots: Int64Array
    ) -> None:
        """Replace the moves and policies of merged rows: ``hits`` in the block, ``slots`` here."""
        if "fill" in block:
            block["fill"][hits] = remove_next_move(block["fill"][hits], block["ply"][hits])
        if "move" in block:
            block["move"][hits] = self._values["move"][slots]
        if "policy" not in members and "policy_row" not in members:
            return
        # A fill row cannot represent another move than that of its game, so every move becomes a policy.
        has_entries = np.diff(self._policies.starts)[slots] > 0
        chosen = np.flatnonzero(has_entries if "fill" in block else self._is_sparse[slots])
        own = np.setdiff1d(block.get("policy_row", np.empty(0, np.uint32)), hits).astype(np.int64)
        rows = np.concatenate([own, hits[chosen]])
        order = np.argsort(rows)
        if "policy" in members:
            joined = _join([_policies_of(block, own), self._policies.take(slots[chosen])]).take(order)
            block["policy_count"] = np.diff(joined.starts).astype(np.uint16)
            block["policy_cell"] = joined.cells.astype(np.uint16, copy=False)
            block["policy_probability"] = joined.probabilities
        block["policy_row"] = rows[order].astype(np.uint32)

    def scan(self, members: Sequence[str]) -> Iterator[Block]:
        """Yield labels and optional columns of all rows in order, and ``policy_row``."""
        stored = self._stored(members) or ["position_id"]
        first = start = 0
        for block in self.table.scan(stored):
            count = block_length(block)
            low, high = np.searchsorted(self._changed, (first, first + count))
            hits, slots = self._changed[low:high] - first, np.arange(low, high)
            policy = np.zeros(count, np.bool_)
            policy[block["policy_row"]] = True
            policy[hits] = self._is_sparse[slots]
            columns = {name: np.array(block[name]) for name in stored}
            self._add_targets(columns, members, count)
            for name, values in self._values.items():
                if name in columns:
                    columns[name][hits] = values[slots]
            stop = self._kept.count_below(first + count)
            chosen = self._kept.rows(np.arange(start, stop)) - first
            kept = {name: array[chosen] for name, array in columns.items() if name in members}
            yield {**kept, "policy_row": np.flatnonzero(policy[chosen]).astype(np.uint32)}
            first, start = first + count, stop


def _policies_of(block: Block, rows: Int64Array) -> SparsePolicies:
    """Return the sparse policies of some rows of a block."""
    if "policy_row" not in block or not len(rows):
        return SparsePolicies(np.zeros(1, np.int64), np.empty(0, np.uint16), np.empty(0, np.float32))
    starts = np.concatenate([[0], np.cumsum(block["policy_count"], dtype=np.int64)])
    given = SparsePolicies(starts, block["policy_cell"], block["policy_probability"])
    return given.take(np.searchsorted(block["policy_row"], rows))


def _join(parts: Sequence[SparsePolicies]) -> SparsePolicies:
    lengths = np.concatenate([np.diff(part.starts) for part in parts])
    return SparsePolicies(
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        np.concatenate([part.cells for part in parts]),
        np.concatenate([part.probabilities for part in parts]),
    )


def merge_rows(store: Store, table: GameTable, split: str, weight: str) -> MergedRows:
    """Merge the equal positions of a split.

    Args:
        store: The store of the table.
        table: The positions of the split.
        split: The split.
        weight: "count" or "root", as for ``SelectionOptions.merge_weight``.

    Raises:
        StoreError: A position of the store is not in the table, or a file is damaged.
        ConfigError: The store has a column ``extra.count``.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hexdata-merge-", ignore_cleanup_errors=True) as name,
        duckdb_session(memory=_MEMORY, threads=2, spill=Path(name), store=store.path) as con,
    ):
        folder = Path(name)
        tables = StoreTables.of(store).with_lookup_tables(con, (), folder)
        rows = f"SELECT * FROM ({tables.rows_sql()}) WHERE split_index = {SPLITS.index(split)}"
        merged = merge_positions(con, tables, rows, weight, folder)
        query = f"""
            SELECT p.game_id, p.position_in_game, m.*
            FROM {merged.changes} m JOIN {tables.positions} p USING (position_id) ORDER BY position_id
        """
        reader = con.sql(query).to_arrow_reader(_BATCH_ROWS)
        keep = np.ones(table.positions, np.bool_)
        changed: list[Int64Array] = [np.empty(0, np.int64)]
        parts: list[pa.RecordBatch] = []
        for batch in reader:
            found = table.find_rows(
                batch["game_id"].fill_null(NO_GAME).to_numpy(),
                batch["position_in_game"].fill_null(NO_PLY).to_numpy(),
                batch["position_id"].to_numpy(),
            )
            if (found < 0).any():
                raise StoreError("the store has changed while the loader was made", path=store.path)
            is_kept = batch[COUNT].to_numpy() > 0
            keep[found[~is_kept]] = False
            changed.append(found[is_kept])
            parts.append(batch.filter(pa.array(is_kept)))
    rows_changed = np.concatenate(changed)
    order = np.argsort(rows_changed)
    groups = pa.Table.from_batches(parts, reader.schema).take(pa.array(order))
    move = groups["move"].fill_null(NO_MOVE).to_numpy()
    values: Block = {"move": move}
    for column in ("value", *sorted({*table.targets, *MERGED_TARGETS})):
        values[column] = groups[column].fill_null(null_of(column)).to_numpy()
    if weight == "root":
        values["weight"] = np.sqrt(values["weight"])
    policies = _with_moves(*SparsePolicies.from_arrow(groups["policy"], table.board_size**2), move)
    subset = RowSubset([np.flatnonzero(keep)])
    return MergedRows(table, subset, rows_changed[order], values, policies, weight == "root")


def _with_moves(rows: Int64Array, policies: SparsePolicies, move: Array) -> SparsePolicies:
    """Return a policy for each of M rows: those of ``rows``, and one-hot policies of the moves (M,)."""
    moved = np.flatnonzero(move != NO_MOVE)
    lengths = np.zeros(len(move), np.int64)
    lengths[rows], lengths[moved] = np.diff(policies.starts), 1
    starts = np.concatenate([[0], np.cumsum(lengths)])
    cells = np.empty(starts[-1], np.uint16)
    probabilities = np.ones(starts[-1], np.float32)
    cells[starts[moved]] = move[moved]
    entries = find_ranges(starts[rows], lengths[rows])
    cells[entries], probabilities[entries] = policies.cells, policies.probabilities
    return SparsePolicies(starts, cells, probabilities)
