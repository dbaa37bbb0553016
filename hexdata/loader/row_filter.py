"""Selection of the rows of a split by condition, by game or by policy.

The selection is computed once, from labels and optional columns, and from the games of the store if a
condition names their columns or duplicates are left out. Boards and policies are not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import ConfigError
from hexdata.loader.options import LoaderOptions
from hexdata.loader.row_source import RowSource
from hexdata.schema import EXTRA_PREFIX, NO_GAME, NO_MOVE, SPLITS, is_target
from hexdata.selection.dedup import duplicates_sql
from hexdata.selection.expression import Expression, check_condition, check_expression, explain_failures
from hexdata.selection.tables import GAME_COLUMNS, StoreTables
from hexdata.shards.blocks import SENTINELS, null_of
from hexdata.store import Store
from hexdata.store.integrity import require_intact
from hexdata.store.session import DuckDBPyConnection, duckdb_session

__all__ = ["LOW_BITS", "OpenStore", "RowSubset", "evaluate_labels", "select_rows"]

OpenStore = Callable[[], Store | None]
"""Returns the store of the games of a split; None if the split was read from shards without a store."""

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


def select_rows(
    source: RowSource, options: LoaderOptions, open_store: OpenStore | None = None
) -> RowSubset | None:
    """Return the rows selected by ``where``, ``dedup``, ``newest`` and ``final_policy="skip"``; None for all.

    ``dedup`` compares the games with positions that ``where`` selects, as the shuffle does. ``newest`` does
    not count the games that ``dedup`` leaves out, but those that ``where`` leaves out.

    Args:
        source: The rows of the split.
        options: Options of the loader.
        open_store: Opens the store of the games (default: there is none).

    Raises:
        ConfigError: ``where`` is not a condition on the columns of a position and its game or fails for one,
            or no row is selected, or games are needed and there is no store.
        StoreError: A column that must be read from a store is damaged, or the store has changed.
        BudgetError: Such a column does not fit into memory.
    """
    skips_finals = options.batch.final_policy == "skip"
    if options.where is None and options.dedup == "none" and options.newest is None and not skips_finals:
        return None
    masks: list[Iterable[BoolArray]] = []
    if options.where is not None:  # first, since it may be invalid and the others read the whole split
        masks.append(evaluate_labels(source, "where", options.where, open_store, is_condition=True))
    duplicates = np.empty(0, np.int64)
    if options.dedup != "none":
        masks = [list(mask) for mask in masks]
        duplicates = _find_duplicates(source, masks, options.dedup, open_store)
        masks.append(~np.isin(block["game_id"], duplicates) for block in source.scan(("game_id",)))
    if options.newest is not None:
        masks.append(_in_newest_games(source, options.newest, duplicates))
    if skips_finals:
        masks.append(_has_policy(source))
    subset = RowSubset(_combine_masks(masks))
    if not len(subset):
        given = {name: getattr(options, name) for name in ("where", "dedup", "newest")}
        given["final_policy"] = options.batch.final_policy
        raise ConfigError(
            f"the options select no position of {options.split}",
            found=", ".join(f"{name}={value!r}" for name, value in given.items()),
        )
    return subset


def _combine_masks(masks: list[Iterable[BoolArray]]) -> Iterator[Int64Array]:
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


def _find_duplicates(
    source: RowSource, masks: Iterable[Iterable[BoolArray]], kind: str, open_store: OpenStore | None
) -> Int64Array:
    """Return the ids of the games that ``dedup`` leaves out, ascending.

    Args:
        source: The rows of the split.
        masks: Masks of the rows whose games are compared.
        kind: "exact" or "symmetric".
        open_store: Opens the store of the games.
    """
    store = _require_store(open_store, "dedup", kind)
    present = np.empty(0, np.int64)
    for block, *selected in zip(source.scan(("game_id",)), *masks, strict=True):
        ids = block["game_id"]
        present = np.union1d(present, ids[np.logical_and.reduce(selected)] if selected else ids)
    with duckdb_session(memory=_MEMORY, threads=1, store=store.path) as con:
        con.register("present", pa.table({"game_id": present}))
        found = con.sql(duplicates_sql(StoreTables.of(store), kind, "FROM present")).fetchnumpy()
    duplicates: Int64Array = found["game_id"]
    return duplicates


def _in_newest_games(source: RowSource, games: int, left_out: Int64Array) -> Iterator[BoolArray]:
    """Yield, for some rows at a time, which positions belong to the ``games`` games with the highest ids.

    The games ``left_out`` are not counted. Positions of unknown games are not selected.
    """
    newest = np.empty(0, np.int64)
    for block in source.scan(("game_id",)):
        ids = block["game_id"]
        if len(newest) == games:
            ids = ids[ids > newest[0]]
        ids = ids[(ids != NO_GAME) & ~np.isin(ids, left_out)]
        newest = np.unique(np.concatenate([newest, ids]))[-games:]
    for block in source.scan(("game_id",)):
        # Every id from the lowest of the newest on is one of them; -1, for unknown games, is below.
        yield block["game_id"] >= (newest[0] if len(newest) else np.iinfo(np.int64).max)


def evaluate_labels(
    source: RowSource,
    option: str,
    text: str,
    open_store: OpenStore | None,
    subset: RowSubset | None = None,
    *,
    is_condition: bool = False,
) -> Iterator[npt.NDArray[Any]]:
    """Yield, for some rows at a time, the value of an SQL expression over the columns of a position and its
    game: bool, False for null, for a condition; otherwise float64, NaN for null.

    Args:
        source: The rows of the split.
        option: Name of the option that the expression was given for.
        text: The expression. Only the columns in it are read.
        open_store: Opens the store of the games; None if there is none.
        subset: The rows for which it is evaluated (default None: all rows).
        is_condition: Whether the expression must be a condition instead of a number (default False).

    Raises:
        ConfigError: It is not such an expression, it does not depend only on these columns, or it fails for a
            position; or it contains a column of games and there is no store.
        StoreError: A column that must be read from a store is damaged, or the store has changed.
        BudgetError: Such a column does not fit into memory.
    """
    with duckdb_session(memory=_MEMORY, threads=1) as con:
        expression = _check(con, option, text, source)
    if is_condition:
        check_condition(option, expression)
    elif not expression.type.startswith(_NUMBERS):
        raise ConfigError(
            f"{option} is not a number",
            found=f"{expression.type} from {text}",
            expected="an expression such as CASE WHEN value_sample_tier = 0 THEN 2 ELSE 0.5 END",
        )
    kind, null = ("BOOLEAN", False) if is_condition else ("DOUBLE", np.nan)
    columns = _columns_in(expression, source)
    of_games = sorted(expression.columns & GAME_COLUMNS.keys())
    store = _require_store(open_store, option, ", ".join(of_games)) if of_games else None
    with duckdb_session(memory=_MEMORY, threads=1, store=store.path if store else None) as con:
        rows = f"SELECT {', '.join(['_row', *_columns_sql(columns)])} FROM labels"
        if store:
            con.execute(f"CREATE TABLE games AS {StoreTables.of(store).games_sql(of_games)}")
            # A position without a game is in the training split.
            split = f"REPLACE (coalesce(split, '{SPLITS[0]}') AS split)" if "split" in of_games else ""
            rows = f"SELECT * {split} FROM ({rows}) LEFT JOIN games ON game_id = of_game"
        start = done = 0
        for block in source.scan(columns):
            count = len(block[columns[0]])
            chosen = np.arange(count)
            if subset is not None:
                selected = subset.rows(np.arange(done, min(done + count, len(subset)))) - start
                chosen = selected[: np.searchsorted(selected, count)]
            start, done = start + count, done + len(chosen)
            arrays = {name: _to_arrow(name, block[name][chosen]) for name in columns}
            values = np.full(len(chosen), null)
            con.register("labels", pa.table({"_row": pa.array(np.arange(len(values))), **arrays}))
            with explain_failures(expression):
                query = f"SELECT _row, {expression.sql}::{kind} AS value FROM ({rows})"
                found: dict[str, Any] = con.execute(query).fetchnumpy()
            values[found["_row"]] = np.ma.filled(found["value"], null)
            yield values


def _require_store(open_store: OpenStore | None, option: str, found: str) -> Store:
    """Return the store of the games, after a check of their files.

    Raises:
        ConfigError: There is no store.
        StoreError: A file is damaged, or the store has changed.
    """
    store = open_store() if open_store else None
    if store is None:
        raise ConfigError(
            "the shards do not contain the games of the store",
            found=f"{option} with {found}",
            expected="the folder of a store with these shards, or mode='games'",
        )
    require_intact(store, ("games", "sources"))
    return store


def _check(con: DuckDBPyConnection, option: str, text: str, source: RowSource) -> Expression:
    """Parse an expression and check that it depends only on columns of a position and its game.

    Raises:
        ConfigError: It is not such an expression.
    """
    types = GAME_COLUMNS | _LABELS | {name: kind for name, kind in _TARGETS.items() if name in source.targets}
    extras = [f'"{name.removeprefix(EXTRA_PREFIX)}" DOUBLE' for name in _extras(source.targets)]
    if extras:
        types[_STRUCT] = f"STRUCT({', '.join(extras)})"
    return check_expression(con, option, text, types, _HINTS)


def _columns_in(expression: Expression, source: RowSource) -> list[str]:
    """Return the columns of the source that an expression needs, at least one."""
    names = set(expression.names)
    if _STRUCT in names:
        names = names - {_STRUCT} | set(_extras(source.targets))
    if names & GAME_COLUMNS.keys():
        names = names - GAME_COLUMNS.keys() | {"game_id"}
    return sorted(names) or ["position_id"]


def _extras(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(EXTRA_PREFIX)]


def _to_arrow(name: str, array: npt.NDArray[Any]) -> pa.Array:
    """Return a column with nulls instead of the numbers that represent null in shards."""
    if name not in SENTINELS and not is_target(name):
        return pa.array(array)
    null = null_of(name)
    return pa.array(array, mask=np.isnan(array) if np.isnan(null) else array == null)


def _columns_sql(names: Sequence[str]) -> list[str]:
    """Return the SQL of columns. The columns ``extra.NAME`` become one struct."""
    types = _LABELS | _TARGETS
    columns = [f'"{name}"::{types[name]} AS "{name}"' for name in names if name in types]
    fields = ", ".join(f'"{name.removeprefix(EXTRA_PREFIX)}" := "{name}"' for name in _extras(names))
    return [*columns, f"struct_pack({fields}) AS {_STRUCT}"] if fields else columns
