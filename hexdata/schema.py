"""Arrow schemas of the store's tables, and their version.

Format readers return ``raw_schema``; the other four are schemas of stored tables. docs/format.md describes
each column for readers in other languages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA_VERSION: Final = 2
"""Version of the store's layout, recorded in every manifest. Readers refuse unknown versions."""

# The largest board has 676 cells, more than a byte can number.
POLICY_TYPE: Final = pa.list_(pa.struct([("cell", pa.uint16()), ("probability", pa.float32())]))
"""A policy that is not one-hot: its cells whose probability is not 0, ascending. See ``hexdata.policy``."""

TARGETS: Final = {
    "policy_weight": pa.float32(),
    "root_value": pa.float32(),
    "visits": pa.int32(),
    "weight": pa.float32(),
}
"""Columns of positions that only stores with results of a search have, with their types. ``policy_weight``
is 0 if the policy is not to be trained, and 1 where no source states it."""
FULL_WEIGHT: Final = 1.0
"""The ``policy_weight`` of a position for which no source states one."""
EXTRA_PREFIX: Final = "extra."
"""Prefix of the columns of other numbers that a source gives for each position. Their type is float64."""
MAX_EXTRAS: Final = 32
"""Maximum number of columns with ``EXTRA_PREFIX`` in a store."""
_EXTRA: Final = re.compile(r"extra\.[A-Za-z_][A-Za-z0-9_]{0,62}")

# In the order of bucket keys. The first, index 0 in SQL, is also the split of positions without a game.
SPLITS: Final = ("train", "val", "test")

KEPT_PREFIX: Final = "hexdata:"
"""Prefix of the keys in ``metadata`` that hold original values which the columns cannot represent.

``hexdata:value`` is the value in the source's convention. ``hexdata:player_to_move``,
``hexdata:position_in_game`` and ``hexdata:total_positions`` are the original values of columns that were
filled in. ``hexdata:game_id`` is a legacy id without a game.
"""
WINNERS: Final = ("BLUE", "RED")
"""The text of the column ``winner`` for each winner number of a raw batch."""
END_REASONS: Final = ("chain", "resigned", "time", "unknown")
"""How a game ended: with the winner's chain on the board, by resignation, on time, or unknown."""
SWAPS: Final = ("pieces", "sides")
"""How the second player swapped: by moving the stone to the mirrored cell, or by taking over its colour."""

MAX_TIER: Final = 3
"""The highest ``value_sample_tier``."""
# npy arrays have no nulls. Each of these values is outside the range of its column.
NO_MOVE: Final = 65535
"""Value in shards for a null ``move`` (uint16)."""
NO_PLY: Final = 65535
"""Value in shards for a null ``position_in_game`` or ``total_positions`` (uint16)."""
NO_TIER: Final = 255
"""Value in shards for a null ``value_sample_tier`` (uint8)."""
NO_GAME: Final = -1
"""Value in shards for a null ``game_id`` (int64)."""
NO_VISITS: Final = -1
"""Value in shards for a null ``visits`` (int32). Null floats of ``TARGETS`` and extra columns are NaN."""

_SQL_TYPES: Final = {
    pa.bool_(): "BOOLEAN",
    pa.date32(): "DATE",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.string(): "VARCHAR",
    pa.uint8(): "UTINYINT",
    pa.uint16(): "USMALLINT",
}


def board_bytes(board_size: int) -> int:
    """Return the number of bytes of a packed board: ceil(2·n·n / 8), which is 43 for n = 13."""
    return (2 * board_size * board_size + 7) // 8


def board_size_of(width: int) -> int:
    """Return n, given ``board_bytes(n)``: n² <= 4·width < (n + 1)² for every n above 1."""
    return math.isqrt(4 * width)


def binary_matrix(boards: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.uint8]:
    """Return a fixed-size binary column as uint8 (N, width), without a copy if it is one chunk."""
    array = boards.combine_chunks() if isinstance(boards, pa.ChunkedArray) else boards
    width = array.type.byte_width
    flat = np.frombuffer(array.buffers()[1] or b"", dtype=np.uint8)
    return flat[array.offset * width : (array.offset + len(array)) * width].reshape(-1, width)


def is_legacy_format(name: str) -> bool:
    """Return whether sources of a format contain examples of the legacy tool.

    Their values have the convention of the file, and they are written back unchanged. Readers of other
    formats give values in the convention of the store, and such sources are written back as dict examples.

    Args:
        name: Format of a source, such as "legacy-dicts" or "trmph".
    """
    return name.startswith("legacy-")


def is_target(name: str) -> bool:
    """Return whether ``name`` is a possible optional column: one of ``TARGETS``, or ``extra.NAME``.

    NAME has at most 63 ASCII letters, digits and underscores, and does not begin with a digit.
    """
    return name in TARGETS or _EXTRA.fullmatch(name) is not None


def target_type(name: str) -> pa.DataType:
    """Return the Arrow type of an optional column of positions."""
    return TARGETS.get(name, pa.float64())


def raw_schema(board_size: int, targets: Sequence[str] = ()) -> pa.Schema:
    """Return the schema of format readers: one row per example, with the values of the source file.

    ``record`` is the index of the example in the file, rejected ones included. ``value`` and ``root_value``
    are float64 because legacy values are Python floats, in the convention of the source. ``file_idx``,
    ``line_idx`` are the legacy ``game_id``. ``origin`` is the raw file named in the metadata (``source_file``
    or ``original_source``). ``winner`` is 0 for blue and 1 for red. ``metadata`` is JSON text of other
    metadata. ``end_reason`` (one of ``END_REASONS``) and ``swap`` (one of ``SWAPS``) concern the game and are
    equal in all its positions.

    Args:
        board_size: N.
        targets: Optional columns that the source has: names for which ``is_target`` is true.
    """
    return pa.schema(
        [
            pa.field("record", pa.int64(), nullable=False),
            pa.field("board", pa.binary(board_bytes(board_size)), nullable=False),
            pa.field("move", pa.uint16()),
            pa.field("policy", POLICY_TYPE),
            pa.field("value", pa.float64()),
            pa.field("player_to_move", pa.uint8()),
            pa.field("file_idx", pa.int32()),
            pa.field("line_idx", pa.int32()),
            pa.field("position_in_game", pa.uint16()),
            pa.field("total_positions", pa.uint16()),
            pa.field("value_sample_tier", pa.uint8()),
            pa.field("winner", pa.uint8()),
            pa.field("end_reason", pa.dictionary(pa.int8(), pa.string())),
            pa.field("swap", pa.dictionary(pa.int8(), pa.string())),
            pa.field("origin", pa.dictionary(pa.int32(), pa.string())),
            pa.field("metadata", pa.string()),
            *(
                pa.field(name, pa.float64() if name == "root_value" else target_type(name))
                for name in sorted(targets)
            ),
        ]
    )


def positions_schema(board_size: int, targets: Sequence[str] = ()) -> pa.Schema:
    """Return the schema of positions: one row per training example, in input order.

    Args:
        board_size: N.
        targets: Optional columns that the store has, as listed in its manifest.
    """
    return pa.schema(
        [
            pa.field("position_id", pa.int64(), nullable=False),
            pa.field("game_id", pa.int64()),
            pa.field("position_in_game", pa.uint16()),
            pa.field("total_positions", pa.uint16()),
            pa.field("board", pa.binary(board_bytes(board_size)), nullable=False),
            pa.field("move", pa.uint16()),
            pa.field("policy", POLICY_TYPE),
            pa.field("value", pa.float32(), nullable=False),
            pa.field("player_to_move", pa.uint8(), nullable=False),
            pa.field("value_sample_tier", pa.uint8()),
            pa.field("winner", pa.dictionary(pa.int8(), pa.string())),
            pa.field("metadata", pa.string()),
            *(pa.field(name, target_type(name)) for name in sorted(targets)),
        ]
    )


def games_schema() -> pa.Schema:
    """Return the schema of games: one row per game; ``moves`` is null if the game is incomplete."""
    return pa.schema(
        [
            pa.field("game_id", pa.int64(), nullable=False),
            pa.field("source_id", pa.int32(), nullable=False),
            pa.field("file_idx", pa.int32()),
            pa.field("line_idx", pa.int32()),
            pa.field("origin", pa.string()),
            pa.field("winner", pa.string()),
            pa.field("end_reason", pa.string()),
            pa.field("swap", pa.string()),
            pa.field("total_positions", pa.uint16()),
            pa.field("positions", pa.int64(), nullable=False),
            pa.field("first_player", pa.uint8()),
            pa.field("moves", pa.list_(pa.uint16())),
            pa.field("game_hash", pa.binary(16), nullable=False),
            pa.field("duplicate_of", pa.int64()),
            pa.field("split", pa.string(), nullable=False),
            pa.field("provenance", pa.string(), nullable=False),
            pa.field("flags", pa.list_(pa.string())),
        ]
    )


def sources_schema() -> pa.Schema:
    """Return the schema of sources: one row per input file; records = positions + rejected."""
    return pa.schema(
        [
            pa.field("source_id", pa.int32(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("bytes", pa.int64(), nullable=False),
            pa.field("sha256", pa.string(), nullable=False),
            pa.field("format", pa.string(), nullable=False),
            pa.field("value_sense", pa.string()),
            pa.field("value_sense_evidence", pa.string()),
            pa.field("records", pa.int64(), nullable=False),
            pa.field("positions", pa.int64(), nullable=False),
            pa.field("games", pa.int64(), nullable=False),
            pa.field("rejected", pa.int64(), nullable=False),
            pa.field("model", pa.string()),
            pa.field("simulations", pa.int64()),
            pa.field("temperature", pa.float64()),
            pa.field("seed", pa.int64()),
            pa.field("commit", pa.string()),
            pa.field("date", pa.date32()),
            pa.field("header", pa.string()),
            pa.field("notes", pa.string()),
            pa.field("flags", pa.string()),
            pa.field("salvaged", pa.bool_()),
        ]
    )


def rejected_schema() -> pa.Schema:
    """Return the schema of rejected records; ``record`` is null if a whole file is rejected."""
    return pa.schema(
        [
            pa.field("source_id", pa.int32(), nullable=False),
            pa.field("record", pa.int64()),
            pa.field("reason", pa.string(), nullable=False),
            pa.field("detail", pa.string(), nullable=False),
        ]
    )


def table_schema(table: str, board_size: int | None, targets: Sequence[str] = ()) -> pa.Schema:
    """Return the schema of the Parquet files of a folder of a store.

    Args:
        table: "positions", "shuffled", "games", "sources" or "rejected".
        board_size: n; None in a store without positions.
        targets: Optional columns of positions, as listed in the store's manifest.
    """
    if table in ("positions", "shuffled"):
        return positions_schema(board_size or 0, targets)
    return {"games": games_schema, "sources": sources_schema, "rejected": rejected_schema}[table]()


def sql_columns(schema: pa.Schema) -> dict[str, str]:
    """Return DuckDB's types of the columns of a schema, by name."""
    return {field.name: _sql_type(field.type) for field in schema}


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_struct(kind):
        inner = ", ".join(f'"{field.name}" {_sql_type(field.type)}' for field in kind)
        return f"STRUCT({inner})"
    if pa.types.is_list(kind):
        return f"{_sql_type(kind.value_type)}[]"
    if pa.types.is_dictionary(kind):
        return _sql_type(kind.value_type)
    return "BLOB" if pa.types.is_fixed_size_binary(kind) else _SQL_TYPES[kind]


class ViewColumn(NamedTuple):
    """A column of a view."""

    type: str
    """DuckDB's type."""
    sql: str
    """Expression over the columns of ``positions_schema``."""


def view_columns(positions: pa.Schema) -> dict[str, ViewColumn]:
    """Return the columns of positions that queries and expressions use, by name.

    The columns of ``TARGETS`` always exist. Without a number in the store, ``policy_weight`` is 1 and the
    others are NULL. The columns ``extra.NAME`` are the fields of one struct ``extra``, which a store without
    them does not have.

    Args:
        positions: ``positions_schema`` of the store.
    """
    types = sql_columns(positions)
    columns = {name: ViewColumn(kind, f'"{name}"') for name, kind in types.items() if not is_target(name)}
    for name, kind in sql_columns(pa.schema(TARGETS.items())).items():
        sql = f'"{name}"' if name in types else f"NULL::{kind}"
        columns[name] = ViewColumn(kind, f"coalesce({sql}, 1)" if name == "policy_weight" else sql)
    # A struct, since SQL reads extra.NAME as a field: a column of that name would need quotes.
    extras = {name.removeprefix(EXTRA_PREFIX): kind for name, kind in types.items() if "." in name}
    if extras:
        kinds = ", ".join(f'"{name}" {kind}' for name, kind in extras.items())
        values = ", ".join(f'"{name}" := "{EXTRA_PREFIX}{name}"' for name in extras)
        columns["extra"] = ViewColumn(f"STRUCT({kinds})", f"struct_pack({values})")
    return columns
