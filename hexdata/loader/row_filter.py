"""Selection of the rows of a split by condition, by game or by policy.

The selection is computed once, from labels; boards are not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import ConfigError
from hexdata.loader.options import LoaderOptions
from hexdata.loader.row_source import RowSource
from hexdata.schema import NO_GAME, NO_MOVE
from hexdata.selection.expression import Expression, check_condition, check_expression, explain_failures
from hexdata.shards.blocks import SENTINELS, Block
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
"""SQL type of each column of ``where`` and ``weights``. Signed, so that ``position_in_game -
total_positions`` is valid."""
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
        ConfigError: ``where`` is not a condition on the labels of a position or fails for one, or no row is
            selected.
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
    """Yield, for some rows at a time, which positions satisfy ``where``. Only the labels in it are read."""
    with duckdb_session(memory=_MEMORY, threads=1) as con:
        predicate = _read_predicate(con, where)
        labels = sorted(predicate.columns) or ["position_id"]
        for block in source.scan(labels):
            with explain_failures(predicate):
                mask = _evaluate(con, {name: block[name] for name in labels}, predicate)
            yield mask


def evaluate_labels(source: RowSource, option: str, text: str) -> Iterator[npt.NDArray[np.float64]]:
    """Yield, for some rows at a time, the value of an SQL expression over the labels; NaN for null.

    Args:
        source: The rows of the split.
        option: Name of the option that the expression was given for.
        text: The expression. Only the labels in it are read.

    Raises:
        ConfigError: It is not a number that depends only on the labels of a position, or it fails for one.
    """
    with duckdb_session(memory=_MEMORY, threads=1) as con:
        expression = check_expression(con, option, text, _LABELS)
        if not expression.type.startswith(_NUMBERS):
            raise ConfigError(
                f"{option} is not a number",
                found=f"{expression.type} from {text}",
                expected="an expression such as CASE WHEN value_sample_tier = 0 THEN 2 ELSE 0.5 END",
            )
        labels = sorted(expression.columns) or ["position_id"]
        for block in source.scan(labels):
            values = np.full(len(block[labels[0]]), np.nan)
            select = f"SELECT _row, {expression.sql}::DOUBLE AS value"
            with explain_failures(expression):
                found = _query(con, {name: block[name] for name in labels}, select)
            values[found["_row"]] = np.ma.filled(found["value"], np.nan)
            yield values


def _read_predicate(con: DuckDBPyConnection, where: str) -> Expression:
    """Parse ``where`` and check that it depends only on the labels of a position.

    Raises:
        ConfigError: It is not such a condition.
    """
    return check_condition("where", check_expression(con, "where", where, _LABELS))


def _evaluate(con: DuckDBPyConnection, labels: Block, predicate: Expression) -> BoolArray:
    """Return which positions satisfy the condition. Null counts as false."""
    mask = np.zeros(len(next(iter(labels.values()))), np.bool_)
    mask[_query(con, labels, "SELECT _row", f"WHERE {predicate.sql}")["_row"]] = True
    return mask


def _query(con: DuckDBPyConnection, labels: Block, select: str, where: str = "") -> dict[str, Any]:
    """Return the columns of a query over labels and ``_row``, the index of each position."""
    rows = len(next(iter(labels.values())))
    arrays = {name: pa.array(array) for name, array in labels.items()}
    con.register("labels", pa.table({"_row": pa.array(np.arange(rows)), **arrays}))
    columns = ", ".join(_column_sql(name) for name in labels)
    found: dict[str, Any] = con.execute(
        f"{select} FROM (SELECT _row, {columns} FROM labels) {where}"
    ).fetchnumpy()
    return found


def _column_sql(name: str) -> str:
    """Return the SQL of a label, with sentinels replaced by null."""
    value = f"nullif({name}, {SENTINELS[name]})" if name in SENTINELS else name
    return f"({value})::{_LABELS[name]} AS {name}"
