"""Merging of equal positions: one row for each distinct position up to symmetry.

Each position is brought into the canonical one of its four symmetric images. Positions with the same
canonical image in the same split are merged into the one with the lowest id, which keeps its orientation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import SYMMETRIES, Symmetry, pack_boards, symmetry_table, transform_planes, unpack_boards
from hexdata.errors import ConfigError
from hexdata.policy import SparsePolicies
from hexdata.schema import POLICY_TYPE, board_size_of, is_target, target_type
from hexdata.selection.tables import StoreTables
from hexdata.storage import AnyPath
from hexdata.store.parquet import regroup, write_parquet
from hexdata.store.session import DuckDBPyConnection, read_parquet_sql

__all__ = ["COUNT", "MERGED_TARGETS", "Merged", "canonical_images", "merge_positions"]

COUNT: Final = "extra.count"
"""Column with the number of positions that a row stands for."""
MERGED_TARGETS: Final = (COUNT, "weight")
"""Optional columns that merged positions have in addition to those of the store."""

_ROWS: Final = 65_536
"""Rows per step. Sums depend on it in the last bits, so it must not depend on the memory."""
_SWAPPED: Final = ("value", "root_value")
"""Columns that are replaced by 1 - x if the players are swapped."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Merged:
    """Result of :func:`merge_positions`.

    Attributes:
        sql: Query for the merged positions, with the columns of ``MERGED_TARGETS``.
        tables: The tables of the store with these columns.
        changes: SQL that reads a table of the changed positions by ``position_id``: the columns of merged
            rows, with ``extra.count`` 0 and nulls for positions that were merged into another one. Its
            ``weight`` is not a square root.
    """

    sql: str
    tables: StoreTables
    changes: str


def canonical_images(
    boards: npt.NDArray[np.uint8], players: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the canonical image of each position, and the symmetry that leads to it.

    Of the four images (packed board, then player to move as one byte), it is the one whose bytes sort first.
    If several images are equal, the symmetry with the lowest number is returned.

    Args:
        boards: Packed boards, uint8 (N, width).
        players: Player to move, uint8 (N,).

    Returns:
        (images uint8 (N, width + 1), symmetries uint8 (N,)). Each symmetry is its own inverse.
    """
    n = board_size_of(boards.shape[1])
    planes = unpack_boards(boards, n, np.uint8)
    best = np.column_stack([boards, players])
    found = np.zeros(len(boards), np.uint8)
    for symmetry in SYMMETRIES[1:]:
        image = np.column_stack(
            [
                pack_boards(np.ascontiguousarray(transform_planes(planes, symmetry))),
                players ^ np.uint8(symmetry >= Symmetry.LONG_DIAGONAL),
            ]
        )
        differs = image != best
        first = differs.argmax(axis=1)
        rows = np.arange(len(best))
        lower = image[rows, first] < best[rows, first]  # equal images do not differ at column 0 either
        best[lower] = image[lower]
        found[lower] = symmetry
    return best, found


def merge_positions(
    con: DuckDBPyConnection, tables: StoreTables, rows: str, weight: str, folder: AnyPath
) -> Merged:
    """Merge the positions of ``rows`` that are equal up to symmetry, within each split.

    A merged row has the columns of the position with the lowest id, except: ``value`` and ``root_value`` are
    means; ``move`` and ``policy`` are the mean of the policies of all its positions that have one, each with
    the sum 1; ``visits`` is a sum; ``extra.count`` is the number of positions; ``weight`` is the sum of their
    weights (1 where there is none), or its square root; other extra columns are means; and ``winner`` is null
    if the mean value differs from the value of that position.

    Args:
        con: Open DuckDB session.
        tables: Tables of the store.
        rows: Query for the positions, with ``split_index``.
        weight: ``"count"`` or ``"root"``.
        folder: Folder for the lookup tables that the resulting query reads.

    Raises:
        ConfigError: The store has a column ``extra.count`` already, in upper or lower case.
    """
    targets = [name for name in tables.position_columns if is_target(name)]
    taken = next((name for name in targets if name.lower() == COUNT), None)
    if taken is not None:
        raise ConfigError(
            f"merge cannot be used with this store, because its sources have a column {taken}",
            expected=f"no column {COUNT} in upper or lower case, which is the number of merged positions",
        )
    keyed = _write_keys(con, rows, targets, folder / "merge-keys.parquet")
    unsorted = _write_groups(con, keyed, targets, folder / "merge-groups.parquet")
    merged = _write_sorted(con, unsorted, folder / "merged.parquet")
    return Merged(
        _merged_sql(rows, targets, weight, merged),
        replace(
            tables.with_lookup(merged, "position_id"),
            position_columns={**tables.position_columns, COUNT: "DOUBLE", "weight": "FLOAT"},
        ),
        merged,
    )


def _merged_sql(rows: str, targets: Sequence[str], weight: str, merged: str) -> str:
    taken = ("value", "move", "policy", *(name for name in targets if name not in MERGED_TARGETS))
    replaced = [f'CASE WHEN m.merged THEN m."{name}" ELSE p."{name}" END AS "{name}"' for name in taken]
    replaced.append("CASE WHEN m.merged AND m.value <> p.value THEN NULL ELSE p.winner END AS winner")
    own = ("coalesce(p.weight, 1)" if "weight" in targets else "1") + "::DOUBLE"
    total = f"CASE WHEN m.merged THEN m.weight ELSE {own} END"
    added = ", ".join(f'"{name}"' for name in MERGED_TARGETS if name in targets)
    return f"""
        SELECT p.* {f"EXCLUDE ({added})" if added else ""} REPLACE ({", ".join(replaced)}),
               coalesce(m."{COUNT}", 1)::DOUBLE AS "{COUNT}",
               ({f"sqrt({total})" if weight == "root" else total})::FLOAT AS weight
        FROM ({rows}) p LEFT JOIN (SELECT *, true AS merged FROM {merged}) m USING (position_id)
        WHERE m.merged IS NULL OR m."{COUNT}" > 0
    """


# --- keys ---------------------------------------------------------------------------------------------


def _key_schema(width: int, targets: Sequence[str]) -> pa.Schema:
    return pa.schema(
        [
            ("position_id", pa.int64()),
            ("split_index", pa.uint8()),
            ("image", pa.binary(width)),
            ("symmetry", pa.uint8()),
            ("value", pa.float32()),
            ("move", pa.uint16()),
            ("policy", POLICY_TYPE),
            *((name, target_type(name)) for name in targets),
        ]
    )


def _write_keys(con: DuckDBPyConnection, rows: str, targets: Sequence[str], path: AnyPath) -> str:
    """Write the canonical image of each position and what is merged of it; return the SQL that reads them."""
    quoted = "".join(f', "{name}"' for name in targets)
    columns = f"position_id, split_index, board, player_to_move, value, move, policy{quoted}"
    reader = con.sql(f"SELECT {columns} FROM ({rows})").to_arrow_reader(_ROWS)
    first = next(reader, None)
    width = 0 if first is None else len(first.column("board")[0].as_py())
    schema = _key_schema(width + 1, targets)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in (first, *reader) if first is not None else ():
            if batch.num_rows:
                yield _with_image(batch, schema, width)

    write_parquet(path, schema, batches())
    return read_parquet_sql([path.resolve()])


def _with_image(batch: pa.RecordBatch, schema: pa.Schema, width: int) -> pa.RecordBatch:
    boards = _bytes_of(batch.column("board"), width)
    players = batch.column("player_to_move").to_numpy().astype(np.uint8)
    images, symmetries = canonical_images(boards, players)
    stored = {name: batch.column(name) for name in schema.names if name not in ("image", "symmetry")}
    stored["image"] = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width + 1), len(images), [None, pa.py_buffer(np.ascontiguousarray(images))]
    )
    stored["symmetry"] = pa.array(symmetries)
    return pa.RecordBatch.from_arrays([stored[f.name].cast(f.type) for f in schema], schema=schema)


def _bytes_of(column: pa.Array, width: int) -> npt.NDArray[np.uint8]:
    """Return a binary column without nulls, all of whose values have ``width`` bytes, as (rows, width)."""
    fixed = column.cast(pa.binary()).cast(pa.binary(width))
    data = np.frombuffer(fixed.buffers()[1], np.uint8, len(fixed) * width, fixed.offset * width)
    return data.reshape(-1, width)


# --- groups -------------------------------------------------------------------------------------------


@dataclass
class _Groups:
    """Sums over groups of equal positions, in the canonical orientation. A single position is a group too."""

    split: npt.NDArray[np.uint8]
    image: npt.NDArray[np.uint8]
    """(G, width)."""
    position_id: Ints
    """Lowest id of the group."""
    symmetry: npt.NDArray[np.uint8]
    """Symmetry of the position with this id."""
    count: Ints
    sums: dict[str, Floats]
    """Sum of each averaged or summed column over the positions that have a value, by name."""
    counts: dict[str, Ints]
    """Number of positions that have a value, by name; ``"policy"`` too."""
    owner: Ints
    """Group of each policy entry, ascending."""
    cell: Ints
    """Cell of each entry; ascending within a group."""
    share: Floats
    """Sum of the probabilities of each entry."""

    def __len__(self) -> int:
        return len(self.position_id)


def _write_groups(con: DuckDBPyConnection, keyed: str, targets: Sequence[str], path: AnyPath) -> str:
    """Write a row for each group of several positions, and one with the count 0 for each other position."""
    repeated = f"SELECT hash(image) AS image_hash FROM {keyed} GROUP BY ALL HAVING count(*) > 1"
    query = f"""
        SELECT k.* FROM {keyed} k SEMI JOIN ({repeated}) r ON hash(k.image) = r.image_hash
        ORDER BY split_index, image, position_id
    """
    reader = con.sql(query).to_arrow_reader(_ROWS)
    schema = _merged_schema(targets)

    def batches() -> Iterator[pa.RecordBatch]:
        carried: _Groups | None = None
        for table in regroup(reader, reader.schema, _ROWS):
            carried, finished, others = _fold(carried, _single_positions(table, targets))
            yield _merged_rows(finished, schema)
            yield _dropped_rows(others, schema)
        if carried is not None:
            yield _merged_rows(carried, schema)

    write_parquet(path, schema, batches())
    return read_parquet_sql([path.resolve()])


def _dropped_rows(position_ids: Ints, schema: pa.Schema) -> pa.RecordBatch:
    given = {"position_id": pa.array(position_ids), COUNT: pa.array(np.zeros(len(position_ids)))}
    columns = [given.get(f.name, pa.nulls(len(position_ids), f.type)) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _single_positions(table: pa.Table, targets: Sequence[str]) -> _Groups:
    """Return sorted positions as groups of one position each, in the canonical orientation."""
    images = table.column("image").combine_chunks()
    width = len(images[0].as_py())
    symmetry = table.column("symmetry").to_numpy()
    swapped = symmetry >= Symmetry.LONG_DIAGONAL
    rows = table.num_rows
    sums, counts = {}, {}
    for name in ("value", *targets):
        column = table.column(name)
        number = column.cast(pa.float64()).to_numpy().copy()
        if name in _SWAPPED:
            number = np.where(swapped, 1 - number, number)
        given = ~np.isnan(number)
        number[~given] = 0.0
        sums[name], counts[name] = number, given.astype(np.int64)
    weights = sums.get("weight", np.zeros(rows))
    sums["weight"] = np.where(counts["weight"] > 0, weights, 1.0) if "weight" in counts else weights + 1
    counts["weight"] = np.ones(rows, np.int64)
    owner, cell, share = _policy_entries(table, symmetry, board_size_of(width - 1))
    counts["policy"] = np.bincount(np.unique(owner), minlength=rows)
    return _Groups(
        table.column("split_index").to_numpy(),
        _bytes_of(images, width),
        table.column("position_id").to_numpy(),
        symmetry,
        np.ones(rows, np.int64),
        sums,
        counts,
        owner,
        cell,
        share,
    )


def _policy_entries(
    table: pa.Table, symmetry: npt.NDArray[np.uint8], board_size: int
) -> tuple[Ints, Ints, Floats]:
    """Return row, canonical cell and probability of each policy entry; policies have the sum 1.

    Policies whose sum is 0 have no entries.
    """
    cells = board_size * board_size
    move = table.column("move")
    played = np.flatnonzero(move.is_valid().to_numpy())
    rows, policies = SparsePolicies.from_arrow(table.column("policy"), cells)
    lengths = np.diff(policies.starts)
    shares = policies.probabilities.astype(np.float64)
    index = np.repeat(np.arange(len(rows)), lengths)
    totals = np.bincount(index, shares, len(rows))
    usable = totals[index] > 0
    owner = np.concatenate([played, rows[index[usable]]])
    cell = np.concatenate([move.drop_null().to_numpy().astype(np.int64), policies.cells[usable]])
    share = np.concatenate([np.ones(len(played)), shares[usable] / totals[index[usable]]])
    cell = symmetry_table(board_size)[symmetry[owner], cell].astype(np.int64)
    order = np.lexsort((cell, owner))
    return owner[order].astype(np.int64), cell[order], share[order]


def _fold(carried: _Groups | None, single: _Groups) -> tuple[_Groups, _Groups, Ints]:
    """Merge neighbouring equal groups.

    Returns:
        The last group, which may continue; all groups before it; and the ids of the positions of ``single``
        that are not the first of their group.
    """
    parts = single if carried is None else _joined(carried, single)
    begins = np.ones(len(parts), bool)
    begins[1:] = (parts.split[1:] != parts.split[:-1]) | (parts.image[1:] != parts.image[:-1]).any(axis=1)
    others = parts.position_id[~begins]
    starts = np.flatnonzero(begins)
    group = np.cumsum(begins) - 1
    cells = board_size_of(parts.image.shape[1] - 1) ** 2
    entries, place = np.unique(group[parts.owner] * cells + parts.cell, return_inverse=True)
    merged = _Groups(
        parts.split[starts],
        parts.image[starts],
        parts.position_id[starts],
        parts.symmetry[starts],
        np.add.reduceat(parts.count, starts),
        {name: np.add.reduceat(values, starts) for name, values in parts.sums.items()},
        {name: np.add.reduceat(values, starts) for name, values in parts.counts.items()},
        entries // cells,
        entries % cells,
        np.bincount(place, parts.share, len(entries)).astype(np.float64),
    )
    last = len(merged) - 1
    return _sliced(merged, last, last + 1), _sliced(merged, 0, last), others


def _joined(one: _Groups, other: _Groups) -> _Groups:
    def both(name: str) -> Any:
        return np.concatenate([getattr(one, name), getattr(other, name)])

    return _Groups(
        both("split"),
        both("image"),
        both("position_id"),
        both("symmetry"),
        both("count"),
        {name: np.concatenate([one.sums[name], values]) for name, values in other.sums.items()},
        {name: np.concatenate([one.counts[name], values]) for name, values in other.counts.items()},
        np.concatenate([one.owner, other.owner + len(one)]),
        both("cell"),
        both("share"),
    )


def _sliced(groups: _Groups, start: int, stop: int) -> _Groups:
    low, high = np.searchsorted(groups.owner, (start, stop))
    return _Groups(
        groups.split[start:stop],
        groups.image[start:stop],
        groups.position_id[start:stop],
        groups.symmetry[start:stop],
        groups.count[start:stop],
        {name: values[start:stop] for name, values in groups.sums.items()},
        {name: values[start:stop] for name, values in groups.counts.items()},
        groups.owner[low:high] - start,
        groups.cell[low:high],
        groups.share[low:high],
    )


# --- merged rows --------------------------------------------------------------------------------------


def _merged_schema(targets: Sequence[str]) -> pa.Schema:
    names = sorted({*targets, *MERGED_TARGETS})
    return pa.schema(
        [
            ("position_id", pa.int64()),
            ("value", pa.float32()),
            ("move", pa.uint16()),
            ("policy", POLICY_TYPE),
            *((name, pa.float64() if name == "weight" else target_type(name)) for name in names),
        ]
    )


def _merged_rows(groups: _Groups, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of all groups of several positions, in the orientation of their first position."""
    several = np.flatnonzero(groups.count > 1)
    board_size = board_size_of(groups.image.shape[1] - 1)
    swapped = groups.symmetry >= Symmetry.LONG_DIAGONAL
    columns: dict[str, pa.Array] = {"position_id": pa.array(groups.position_id[several])}
    for name, sums in groups.sums.items():
        number, given = sums, groups.counts[name]
        if name == "visits":
            number = np.minimum(sums, np.iinfo(np.int32).max)
        elif name != "weight":
            number = sums / np.maximum(given, 1)
            if name in _SWAPPED:
                number = np.where(swapped, 1 - number, number)
        array = pa.array(number[several], mask=given[several] == 0)
        columns[name] = array.cast(schema.field(name).type, safe=False)
    columns[COUNT] = pa.array(groups.count[several].astype(np.float64))
    columns["move"], columns["policy"] = _policies(groups, several, board_size)
    return pa.RecordBatch.from_arrays([columns[f.name] for f in schema], schema=schema)


def _policies(groups: _Groups, several: Ints, board_size: int) -> tuple[pa.Array, pa.Array]:
    """Return the moves of the groups ``several`` with one cell, and the sparse policies of the others."""
    cell = symmetry_table(board_size)[groups.symmetry[groups.owner], groups.cell]
    order = np.lexsort((cell, groups.owner))
    cell, owner = cell[order], groups.owner[order]
    share = (groups.share[order] / groups.counts["policy"][owner]).astype(np.float32)
    kept = share > 0
    cell, owner, share = cell[kept], owner[kept], share[kept]
    lengths = np.bincount(owner, minlength=len(groups))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    moved, spread = lengths == 1, lengths > 1
    move = np.zeros(len(groups), np.uint16)
    move[moved] = cell[starts[:-1][moved]]
    policies = SparsePolicies(starts, cell, share).take(several[spread[several]])
    return pa.array(move[several], mask=~moved[several]), policies.to_arrow(spread[several])


def _write_sorted(con: DuckDBPyConnection, rows: str, path: AnyPath) -> str:
    """Write the rows sorted by position id, so that a range of ids is read from few row groups."""
    reader = con.sql(f"SELECT * FROM {rows} ORDER BY position_id").to_arrow_reader(_ROWS)
    write_parquet(path, reader.schema, reader)
    return read_parquet_sql([path.resolve()])
