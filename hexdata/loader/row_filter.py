"""Selection of the rows of a split by condition, by game or by policy.

The selection is computed once, from labels and optional columns, and from the games of the store if a
condition names their columns or duplicates are left out. Boards and policies are not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import ConfigError
from hexdata.loader.game_table import GameTable
from hexdata.loader.options import SplitOptions
from hexdata.schema import EXTRA_PREFIX, NO_GAME, NO_MOVE, SPLITS, is_target
from hexdata.selection.expression import check_condition, check_expression, explain_failures
from hexdata.selection.select import duplicates_sql
from hexdata.selection.tables import GAME_COLUMNS, StoreTables
from hexdata.shards.blocks import SENTINELS, null_of
from hexdata.store import Store
from hexdata.store.integrity import require_intact
from hexdata.store.session import duckdb_session

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
Rows = npt.NDArray[np.signedinteger[Any]]
"""Ascending rows of a split, of which some may occur several times. They take four bytes each."""

_ROWS: Final = 1 << 18
"""Number of rows that are numbered together."""
_LOW_BITS: Final = 16
# Columns that shards and tables of games both have, so that a condition means the same in every mode.
_LABELS: Final = {
    **dict.fromkeys((*SENTINELS, "player_to_move", "position_id"), "BIGINT"),
    "value": "FLOAT",
}
"""SQL type of each label of ``where`` and ``weights``. Signed, so that ``position_in_game -
total_positions`` is valid."""
_TARGETS: Final = {"policy_weight": "FLOAT", "root_value": "FLOAT", "visits": "BIGINT", "weight": "FLOAT"}
"""SQL type of each optional column. The columns ``extra.NAME``, DOUBLE, are the fields of a struct."""
_STRUCT: Final = EXTRA_PREFIX.removesuffix(".")
_NUMBERS: Final = ("BIGINT", "DECIMAL", "DOUBLE", "FLOAT", "HUGEINT", "INTEGER", "SMALLINT", "TINYINT", "U")
"""Beginnings of the names of DuckDB's types of numbers."""
# The query gets some rows at a time; the limit also covers the columns of games that it names.
_MEMORY: Final = 256 << 20
"""Memory limit of the query in bytes."""


def join_rows(parts: Iterable[Int64Array], positions: int) -> Rows:
    """Return ascending rows of a split with this number of positions as one array."""
    # A selection may be as long as the split, so 4 bytes per row are used where they suffice.
    dtype = np.int32 if positions < 1 << 31 else np.int64
    return np.concatenate([np.empty(0, dtype), *(part.astype(dtype) for part in parts)])


def digest_of_rows(rows: Rows) -> str:
    """Return the SHA-256 of rows, as 64 hexadecimal digits.

    It is that of the number of rows below each multiple of 2^16 up to the last row, and of the low 16 bits
    of each row.
    """
    # Two bytes per row are hashed, and the same ones for rows of 32 and of 64 bits.
    groups = (int(rows[-1]) >> _LOW_BITS) + 2 if len(rows) else 2
    starts = np.searchsorted(rows, np.arange(groups, dtype=np.int64) << _LOW_BITS)
    digest = hashlib.sha256(starts.astype("<i8").data)
    digest.update(rows.astype("<u2").data)
    return digest.hexdigest()


def select_rows(source: GameTable, options: SplitOptions) -> Rows | None:
    """Return the rows selected by ``where``, ``dedup``, ``newest`` and ``final_policy="skip"``; None for all.

    ``dedup`` compares the games with positions that ``where`` selects, as the shuffle does. ``newest`` does
    not count the games that ``dedup`` leaves out, but those that ``where`` leaves out.

    Args:
        source: The rows of the split.
        options: Options of the loader.

    Raises:
        ConfigError: ``where`` is not a condition on the columns of a position and its game or fails for one,
            or no row is selected, or games are needed and there is no store.
        StoreError: A column that must be read from a store is damaged, or the store has changed.
        BudgetError: Such a column does not fit into memory.
    """
    if not options.selecting:
        return None
    selected = np.ones(source.positions, np.bool_)
    if options.where is not None:  # first, since it may be invalid and the others read the whole split
        for own, values in evaluate_labels(source, "where", options.where, is_condition=True):
            selected[own] = values
    duplicates = np.empty(0, np.int64)
    # After `where`, as in the shuffle: a game without selected
    # positions does not make another one a duplicate.
    if options.dedup != "none":
        duplicates = _find_duplicates(source, selected, options.dedup)
        for own, block in source.scan(("game_id",)):
            selected[own] &= ~np.isin(block["game_id"], duplicates)
    if options.newest is not None:
        left = np.setdiff1d(_game_ids(source), [NO_GAME, *duplicates])[-options.newest :]
        # Every id from the lowest of the newest on is one of them; -1, for unknown games, is below.
        lowest = left[0] if len(left) else np.iinfo(np.int64).max
        for own, block in source.scan(("game_id",)):
            selected[own] &= block["game_id"] >= lowest
    if options.final_policy == "skip":
        for own, block in source.scan(("move", "policy_row")):
            has_policy = block["move"] != NO_MOVE
            if "policy_row" in block:
                has_policy[block["policy_row"]] = True
            selected[own] &= has_policy
    if not selected.any():
        found = ", ".join(f"{name}={value!r}" for name, value in options.selecting.items())
        raise ConfigError(f"the options select no position of {options.split}", found=found)
    starts = range(0, len(selected), _ROWS)  # together, they would be numbers of 64 bits at first
    parts = (np.flatnonzero(selected[start : start + _ROWS]) + start for start in starts)
    return join_rows(parts, source.positions)


def _game_ids(source: GameTable, selected: BoolArray | None = None) -> Int64Array:
    """Return the ids of the games of the selected rows (default None: of all rows), ascending."""
    found = [np.empty(0, np.int64)]
    for own, block in source.scan(("game_id",)):
        ids = block["game_id"]
        # Arrow finds distinct ids by hashing; np.unique would sort every row.
        found.append(pa.array(ids if selected is None else ids[selected[own]]).unique().to_numpy())
    return np.unique(np.concatenate(found))


def _find_duplicates(source: GameTable, selected: BoolArray, kind: str) -> Int64Array:
    """Return the ids of the games that ``dedup`` leaves out, of the games of the selected rows."""
    store = _require_store(source, "dedup", kind)
    present = _game_ids(source, selected)
    with duckdb_session(memory=_MEMORY, threads=1, store=store.path) as con:
        con.register("present", pa.table({"game_id": present}))
        found = con.sql(duplicates_sql(StoreTables.of(store), kind, "FROM present")).fetchnumpy()
    duplicates: Int64Array = found["game_id"]
    return duplicates


def evaluate_labels(
    source: GameTable, option: str, text: str, subset: Rows | None = None, *, is_condition: bool = False
) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
    """Yield, for some rows at a time, the value of an SQL expression over the columns of a position and its
    game: bool, False for null, for a condition; otherwise float64, NaN for null.

    Args:
        source: The rows of the split.
        option: Name of the option that the expression was given for.
        text: The expression. Only the columns in it are read.
        subset: The rows for which it is evaluated (default None: all rows).
        is_condition: Whether the expression must be a condition instead of a number (default False).

    Yields:
        Which of these rows, counted among the rows of ``subset``; and their values.

    Raises:
        ConfigError: It is not such an expression, it does not depend only on these columns, or it fails for a
            position; or it contains a column of games and there is no store.
        StoreError: A column that must be read from a store is damaged, or the store has changed.
        BudgetError: Such a column does not fit into memory.
    """
    types = GAME_COLUMNS | _LABELS | {name: kind for name, kind in _TARGETS.items() if name in source.targets}
    extras = [f'"{name.removeprefix(EXTRA_PREFIX)}" DOUBLE' for name in _extras(source.targets)]
    if extras:
        types[_STRUCT] = f"STRUCT({', '.join(extras)})"
    # Checked without a store: invalid text is reported before anything is read.
    with duckdb_session(memory=_MEMORY, threads=1) as con:
        expression = check_expression(con, option, text, types)
    if is_condition:
        check_condition(expression)
    elif not expression.type.startswith(_NUMBERS):
        raise ConfigError(f"{option} is not a number", found=f"{expression.type} from {text}")
    kind, null = ("BOOLEAN", False) if is_condition else ("DOUBLE", np.nan)
    names = set(expression.names)
    of_games = sorted(expression.columns & GAME_COLUMNS.keys())
    needed = names - GAME_COLUMNS.keys() - {_STRUCT}
    needed |= set(_extras(source.targets)) if _STRUCT in names else set()
    needed |= {"game_id"} if of_games else set()
    # A constant such as TRUE needs no column, but the table needs rows.
    columns = sorted(needed) or ["position_id"]
    store = _require_store(source, option, ", ".join(of_games)) if of_games else None
    with duckdb_session(memory=_MEMORY, threads=1, store=store.path if store else None) as con:
        rows = f"SELECT {', '.join(['_row', *_columns_sql(columns)])} FROM labels"
        if store:
            # Once for all rows: a view would read the files of games again for each piece.
            con.execute(f"CREATE TABLE games AS {StoreTables.of(store).games_sql(of_games)}")
            # A position without a game is in the training split.
            split = f"REPLACE (coalesce(split, '{SPLITS[0]}') AS split)" if "split" in of_games else ""
            rows = f"SELECT * {split} FROM ({rows}) LEFT JOIN games ON game_id = of_game"
        done = 0
        for own, block in source.scan(columns):
            # The part of the subset within these rows; both ascend, so it
            # continues where the part before ended.
            if subset is not None:
                last = min(done + own.stop - own.start, len(subset))
                chosen = subset[done:last] - own.start
                chosen = chosen[: np.searchsorted(chosen, own.stop - own.start)]
                block, own = {name: block[name][chosen] for name in columns}, slice(done, done + len(chosen))
                done = own.stop
            # The join may return rows in any order, so each carries its number.
            arrays = {name: _to_arrow(name, block[name]) for name in columns}
            values = np.full(own.stop - own.start, null)
            con.register("labels", pa.table({"_row": pa.array(np.arange(len(values))), **arrays}))
            with explain_failures(expression):
                query = f"SELECT _row, {expression.sql}::{kind} AS value FROM ({rows})"
                found: dict[str, Any] = con.execute(query).fetchnumpy()
            values[found["_row"]] = np.ma.filled(found["value"], null)
            yield own, values


def _require_store(source: GameTable, option: str, found: str) -> Store:
    """Return the store of the games, after a check of their files.

    Raises:
        ConfigError: There is no store.
        StoreError: A file is damaged, or the store has changed.
    """
    store = source.open_store() if source.open_store else None
    if store is None:
        raise ConfigError("the shards do not contain the games of the store", found=f"{option} with {found}")
    # DuckDB reads these files, and does not compare them with their digests.
    require_intact(store, ("games", "sources"))
    return store


def _extras(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(EXTRA_PREFIX)]


def _to_arrow(name: str, array: npt.NDArray[Any]) -> pa.Array:
    """Return a column with nulls instead of the numbers that represent null in shards."""
    if name == "policy_weight" or (name not in SENTINELS and not is_target(name)):
        return pa.array(array)  # never null
    null = null_of(name)
    return pa.array(array, mask=np.isnan(array) if np.isnan(null) else array == null)


def _columns_sql(names: Sequence[str]) -> list[str]:
    """Return the SQL of columns. The columns ``extra.NAME`` become one struct."""
    types = _LABELS | _TARGETS
    columns = [f'"{name}"::{types[name]} AS "{name}"' for name in names if name in types]
    fields = ", ".join(f'"{name.removeprefix(EXTRA_PREFIX)}" := "{name}"' for name in _extras(names))
    return [*columns, f"struct_pack({fields}) AS {_STRUCT}"] if fields else columns
