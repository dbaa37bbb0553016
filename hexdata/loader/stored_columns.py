"""Columns of positions that are read from a store only while an SQL expression over them is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import BudgetError, StoreError
from hexdata.pool import available_memory
from hexdata.schema import NO_GAME, NO_PLY, positions_schema
from hexdata.shards.block_check import find_bad_row
from hexdata.shards.blocks import block_fields, null_of
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.parquet import read_checked

__all__ = ["FindRows", "StoredColumns", "open_unchanged", "table_digest"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]
FindRows = Callable[[Int64Array, Array, Int64Array], Int64Array]
"""Returns the rows of positions, given their game ids (-1 for none), plies and position ids; -1 for positions
outside the table."""

_TABLES: Final = ("games", "positions")
_MEMORY_SHARE: Final = 0.8
"""Share of the available memory that columns may take."""


def table_digest(store: Store, files: Sequence[int] | None = None) -> str:
    """Return the digest that identifies the positions and games of a store.

    Args:
        store: The store.
        files: Numbers of files of games and of positions, to identify those that the store had before further
            ones were added (default None: all files).
    """
    return store.manifest.digest(*_TABLES, first=files)


def table_files(store: Store) -> list[int]:
    """Return the numbers of files of games and of positions."""
    return [len(store.manifest.files_in(table)) for table in _TABLES]


def open_unchanged(path: AnyPath, digest: str) -> Store:
    """Open a store whose positions and games are still those with a digest.

    Raises:
        StoreError: The store has changed, or it cannot be opened.
    """
    store = Store.open(path)
    if table_digest(store) != digest:
        raise StoreError(
            "the store has changed since the loader was made",
            path=path,
            found=f"digest {table_digest(store)}",
            expected=digest,
            hint="Make a new loader.",
        )
    return store


@dataclass(frozen=True)
class StoredColumns:
    """The columns of the positions of a store. Picklable.

    Attributes:
        path: Location of the store.
        digest: Its digest, from :func:`table_digest`.
        targets: Names of its optional columns.
    """

    path: AnyPath
    digest: str
    targets: tuple[str, ...]

    def read(self, names: Sequence[str], rows: int, find_rows: FindRows) -> dict[str, Array]:
        """Read columns, with the dtypes of shards and the numbers of ``null_of`` for null.

        Args:
            names: Names of the columns: optional ones, or ``value_sample_tier``.
            rows: Number of rows of the table.
            find_rows: Returns the rows of positions.

        Returns:
            Each column by name, (rows,).

        Raises:
            StoreError: The store has changed, a file is missing or damaged, or a value is invalid.
            BudgetError: The columns do not fit into the available memory.
        """
        if not names:
            return {}
        store = open_unchanged(self.path, self.digest)
        board_size = store.manifest.board_size
        assert board_size is not None
        fields = block_fields(board_size, with_policy=False, targets=self.targets)
        dtypes = {name: np.dtype(fields[name].dtype) for name in names}
        _require_memory(rows * (1 + sum(dtype.itemsize for dtype in dtypes.values())), names)
        found = {name: np.empty(rows, dtype) for name, dtype in dtypes.items()}
        was_read = np.zeros(rows, np.bool_)
        schema = positions_schema(board_size, self.targets)
        schema = pa.schema(
            [schema.field(name) for name in ("position_id", "game_id", "position_in_game", *names)]
        )
        for name, facts in store.manifest.files_in("positions").items():
            path = store.path / name
            for batch in read_checked(path, schema, facts):
                number = find_rows(
                    _numbers(batch, "game_id", NO_GAME),
                    _numbers(batch, "position_in_game", NO_PLY),
                    _numbers(batch, "position_id", -1),
                )
                inside = np.flatnonzero(number >= 0)
                number = number[inside]
                was_read[number] = True
                for column, array in found.items():
                    values = _numbers(batch, column, null_of(column))[inside]
                    bad = find_bad_row(column, values, board_size)
                    if bad is not None:
                        raise _invalid(path, f"column {column}", bad.found, bad.expected)
                    array[number] = values
        if not was_read.all():
            count = int(np.count_nonzero(was_read))
            raise _invalid(self.path, "positions", f"{count:,} of the positions of the loader", f"{rows:,}")
        return found


def _require_memory(needed: int, names: Sequence[str]) -> None:
    memory = int(available_memory() * _MEMORY_SHARE)
    if needed > memory:
        raise BudgetError.of_memory(
            "the columns of where or weights do not fit into the available memory",
            found=memory,
            expected=needed,
            hint=f"Use fewer of the columns {', '.join(names)}; or load shards with mode='exact'.",
        )


def _numbers(batch: pa.RecordBatch, name: str, null: float) -> Array:
    column = batch.column(name)
    if column.null_count:
        column = column.fill_null(null)
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def _invalid(path: AnyPath, record: str, found: str, expected: str) -> StoreError:
    return StoreError(
        "the table contains an invalid value",
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint="Run `hexdata verify` to see what else is wrong; then convert the sources again.",
    )
