"""Selection of the rows of a split by condition, by game or by policy.

The selection is computed once, from labels and optional columns; boards and policies are not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import ConfigError
from hexdata.loader.options import LoaderOptions
from hexdata.loader.row_source import RowSource
from hexdata.schema import EXTRA_PREFIX, NO_GAME, NO_MOVE, is_target
from hexdata.selection.expression import Expression, check_condition, check_expression, explain_failures
from hexdata.shards.blocks import SENTINELS, Block, null_of
from hexdata.store.session import DuckDBPyConnection, duckdb_session

__all__ = ["LOW_BITS", "RowSubset", "evaluate_labels", "select_rows"]

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

LOW_BITS: Final = 16
"""Number of bits of a row that a ``RowSubset`` stores for each row."""
_LABELS: Final = {
    **dict.fromkeys((*SENTINELS, "player_to_move", "position_id"), "BIGINT"),
    "value": "FLOAT",
}
"""SQL type of each label of ``where`` and ``weights``. Signed, so that ``position_in_game -
total_positions`` is valid."""
_TARGETS: Final = {"root_value": "FLOAT", "visits": "BIGINT", "weight": "FLOAT"}
"""SQL type of each optional column. The columns ``extra.NAME``, DOUBLE, are the fields of a struct."""
_STRUCT: Final = EXTRA_PREFIX.removesuffix(".")
_OTHER_COLUMNS: Final = ("policy", "board", "metadata", "winner")
"""Columns of positions that a loader does not evaluate."""
_HINTS: Final = dict.fromkeys(
    _OTHER_COLUMNS,
    "A loader does not evaluate it; `hexdata shuffle --where` selects by policy, metadata and winner.",
)
_NUMBERS: Final = ("BIGINT", "DECIMAL", "DOUBLE", "FLOAT", "HUGEINT", "INTEGER", "SMALLINT", "TINYINT", "U")
"""Beginnings of the names of DuckDB's types of numbers."""
_MEMORY: Final = 256 << 20
"""Memory limit of the query in bytes."""


class RowSubset:
    """Ascending rows of a split, stored in two bytes each. A row may occur several times.

    It stores the low 16 bits of each row, and the number of rows below each multiple of 2^16.

    Args:
        rows: Arrays of ascending rows, in order.

    Attributes:
        low: Low 16 bits of each row, uint16.
        starts: Index of the first row of each 2^16 rows of the split, int64; the last number is the length.
    """

    def __init__(self, rows: Iterable[Int64Array]) -> None:
        low: list[npt.NDArray[np.uint16]] = [np.empty(0, np.uint16)]
        counts = np.zeros(1, np.int64)
        for array in rows:
            low.append(array.astype(np.uint16))
            higher = np.bincount(array >> LOW_BITS, minlength=len(counts))
            higher[: len(counts)] += counts
            counts = higher
        self.low = np.concatenate(low)
        self.starts = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return len(self.low)

    def rows(self, indices: Int64Array) -> Int64Array:
        """Return the rows at the given indices of the subset."""
        higher = np.searchsorted(self.starts, indices, side="right") - 1
        return (higher << LOW_BITS) + self.low[indices]

    @property
    def digest(self) -> str:
        """SHA-256 of the rows, as 64 hexadecimal digits."""
        digest = hashlib.sha256(self.starts.astype("<i8").data)
        digest.update(self.low.astype("<u2", copy=False).data)
        return digest.hexdigest()


def select_rows(source: RowSource, options: LoaderOptions) -> RowSubset | None:
    """Return the rows selected by ``where``, ``newest`` and ``final_policy="skip"``, or None for all rows.

    Each of the three is applied to the whole split: ``newest`` also counts games that ``where`` leaves out.

    Args:
        source: The rows of the split.
        options: Options of the loader.

    Raises:
        ConfigError: ``where`` is not a condition on the labels and optional columns of a position or fails
            for one, or no row is selected.
        StoreError: A column that must be read from a store is damaged, or the store has changed.
        BudgetError: Such a column does not fit into memory.
    """
    skips_finals = options.batch.final_policy == "skip"
    if options.where is None and options.newest is None and not skips_finals:
        return None
    masks: list[Iterator[BoolArray]] = []
    if options.where is not None:  # first, since it may be invalid and the others read the whole split
        masks.append(_matches(source, options.where))
    if options.newest is not None:
        masks.append(_in_newest_games(source, options.newest))
    if skips_finals:
        masks.append(_has_policy(source))
    subset = RowSubset(_combine_masks(masks))
    if not len(subset):
        given = {"where": options.where, "newest": options.newest, "final_policy": options.batch.final_policy}
        raise ConfigError(
            f"the options select no position of {options.split}",
            found=", ".join(f"{name}={value!r}" for name, value in given.items()),
        )
    return subset


def _combine_masks(masks: list[Iterator[BoolArray]]) -> Iterator[Int64Array]:
    """Yield, for some rows at a time, the rows that all masks select."""
    start = 0
    for shard_masks in zip(*masks, strict=True):
        selected = np.logical_and.reduce(shard_masks)
        yield np.flatnonzero(selected) + start
        start += len(selected)


def _has_policy(source: RowSource) -> Iterator[BoolArray]:
    """Yield, for some rows at a time, which positions have a policy, one-hot or dense."""
    for block in source.scan(("move",)):
        mask = block["move"] != NO_MOVE
        mask[block["policy_row"]] = True
        yield mask


def _in_newest_games(source: RowSource, games: int) -> Iterator[BoolArray]:
    """Yield, for some rows at a time, which positions belong to the ``games`` games with the highest ids.

    Positions of unknown games are not selected.
    """
    newest = np.empty(0, np.int64)
    for block in source.scan(("game_id",)):
        ids = block["game_id"]
        if len(newest) == games:
            ids = ids[ids > newest[0]]
        newest = np.unique(np.concatenate([newest, ids[ids != NO_GAME]]))[-games:]
    for block in source.scan(("game_id",)):
        # Every id from the lowest of the newest on is one of them; -1, for unknown games, is below.
        yield block["game_id"] >= (newest[0] if len(newest) else np.iinfo(np.int64).max)


def _matches(source: RowSource, where: str) -> Iterator[BoolArray]:
    """Yield, for some rows at a time, which positions satisfy ``where``; null counts as false. Only the
    columns in it are read.
    """
    with duckdb_session(memory=_MEMORY, threads=1) as con:
        predicate = check_condition("where", _check(con, "where", where, source))
        columns = _columns_in(predicate, source)
        for block in source.scan(columns):
            mask = np.zeros(len(block[columns[0]]), np.bool_)
            with explain_failures(predicate):
                found = _query(
                    con, {name: block[name] for name in columns}, "SELECT _row", f"WHERE {predicate.sql}"
                )
            mask[found["_row"]] = True
            yield mask


def evaluate_labels(source: RowSource, option: str, text: str) -> Iterator[npt.NDArray[np.float64]]:
    """Yield, for some rows at a time, the value of an SQL expression over labels and optional columns; NaN
    for null.

    Args:
        source: The rows of the split.
        option: Name of the option that the expression was given for.
        text: The expression. Only the columns in it are read.

    Raises:
        ConfigError: It is not a number that depends only on these columns of a position, or it fails for one.
        StoreError: A column that must be read from a store is damaged, or the store has changed.
        BudgetError: Such a column does not fit into memory.
    """
    with duckdb_session(memory=_MEMORY, threads=1) as con:
        expression = _check(con, option, text, source)
        if not expression.type.startswith(_NUMBERS):
            raise ConfigError(
                f"{option} is not a number",
                found=f"{expression.type} from {text}",
                expected="an expression such as CASE WHEN value_sample_tier = 0 THEN 2 ELSE 0.5 END",
            )
        columns = _columns_in(expression, source)
        for block in source.scan(columns):
            values = np.full(len(block[columns[0]]), np.nan)
            select = f"SELECT _row, {expression.sql}::DOUBLE AS value"
            with explain_failures(expression):
                found = _query(con, {name: block[name] for name in columns}, select)
            values[found["_row"]] = np.ma.filled(found["value"], np.nan)
            yield values


def _check(con: DuckDBPyConnection, option: str, text: str, source: RowSource) -> Expression:
    """Parse an expression and check that it depends only on labels and optional columns of a position.

    Raises:
        ConfigError: It is not such an expression.
    """
    types = _LABELS | {name: kind for name, kind in _TARGETS.items() if name in source.targets}
    extras = [f'"{name.removeprefix(EXTRA_PREFIX)}" DOUBLE' for name in _extras(source.targets)]
    if extras:
        types[_STRUCT] = f"STRUCT({', '.join(extras)})"
    return check_expression(con, option, text, types, _HINTS)


def _columns_in(expression: Expression, source: RowSource) -> list[str]:
    """Return the columns that an expression needs, at least one."""
    names = set(expression.names)
    if _STRUCT in names:
        names = names - {_STRUCT} | set(_extras(source.targets))
    return sorted(names) or ["position_id"]


def _extras(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(EXTRA_PREFIX)]


def _query(con: DuckDBPyConnection, block: Block, select: str, where: str = "") -> dict[str, Any]:
    """Return the columns of a query over columns and ``_row``, the index of each position."""
    rows = len(next(iter(block.values())))
    arrays = {name: _to_arrow(name, array) for name, array in block.items()}
    con.register("labels", pa.table({"_row": pa.array(np.arange(rows)), **arrays}))
    found: dict[str, Any] = con.execute(
        f"{select} FROM (SELECT {', '.join(['_row', *_columns_sql(block)])} FROM labels) {where}"
    ).fetchnumpy()
    return found


def _to_arrow(name: str, array: npt.NDArray[Any]) -> pa.Array:
    """Return a column with nulls instead of the numbers that represent null in shards."""
    if name not in SENTINELS and not is_target(name):
        return pa.array(array)
    null = null_of(name)
    return pa.array(array, mask=np.isnan(array) if np.isnan(null) else array == null)


def _columns_sql(names: Mapping[str, Any]) -> list[str]:
    """Return the SQL of columns. The columns ``extra.NAME`` become one struct."""
    types = _LABELS | _TARGETS
    columns = [f'"{name}"::{types[name]} AS "{name}"' for name in names if name in types]
    fields = ", ".join(f'"{name.removeprefix(EXTRA_PREFIX)}" := "{name}"' for name in _extras(names))
    return [*columns, f"struct_pack({fields}) AS {_STRUCT}"] if fields else columns
