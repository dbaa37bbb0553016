"""Merging of equal positions: compared with a plain computation over random positions of a tiny board."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hexdata.board import SYMMETRIES, pack_boards, symmetry_table, transform_planes
from hexdata.errors import ConfigError
from hexdata.policy import SparsePolicies
from hexdata.schema import positions_schema, sql_columns
from hexdata.selection import merge
from hexdata.selection.tables import StoreTables
from hexdata.store.columns import view_columns
from hexdata.store.parquet import write_parquet
from hexdata.store.session import duckdb_session, read_parquet_sql

N, CELLS, ROWS = 3, 9, 1500
Row = dict[str, Any]
TARGETS = ("extra.t", "root_value", "visits", "weight")


class Positions:
    """Random positions with up to three stones, so that most occur several times up to symmetry."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.planes = np.zeros((ROWS, 2, N, N), np.uint8)
        for row in range(ROWS):
            for ply, cell in enumerate(random.permutation(CELLS)[: random.integers(0, 4)]):
                self.planes[row, ply % 2, cell // N, cell % N] = 1
        self.players = (self.planes.sum((1, 2, 3)) % 2).astype(np.uint8)
        self.split = random.integers(0, 3, ROWS).astype(np.uint8)
        self.kind = random.integers(0, 3, ROWS)
        """0: a move; 1: a policy; 2: neither."""
        self.move = random.integers(0, CELLS, ROWS).astype(np.uint16)
        self.policy = random.random((ROWS, CELLS)) * (random.random((ROWS, CELLS)) < 0.4)
        self.policy = self.policy.astype(np.float32)
        self.numbers = {
            "value": random.random(ROWS).astype(np.float32),
            "extra.t": random.random(ROWS),
            "root_value": random.random(ROWS).astype(np.float32),
            "visits": random.integers(0, 100, ROWS).astype(np.int32),
            "weight": random.random(ROWS).astype(np.float32),
        }
        self.null = {name: random.random(ROWS) < (0.3 * (name != "value")) for name in self.numbers}

    def table(self) -> pa.Table:
        boards = pack_boards(self.planes)
        schema = positions_schema(N, TARGETS)
        given = {
            "position_id": pa.array(np.arange(ROWS)),
            "board": pa.array([board.tobytes() for board in boards]),
            "move": pa.array(self.move, mask=self.kind != 0),
            "policy": SparsePolicies.from_dense(self.policy[self.kind == 1]).to_arrow(self.kind == 1),
            "player_to_move": pa.array(self.players),
            "winner": pa.array(["BLUE"] * ROWS),
            **{name: pa.array(self.numbers[name], mask=self.null[name]) for name in self.numbers},
        }
        columns = [given.get(f.name, pa.nulls(ROWS, pa.null())).cast(f.type) for f in schema]
        return pa.table(columns, schema=schema)

    def groups(self) -> list[list[tuple[int, int]]]:
        """Return the (row, symmetry to the canonical image) of each group of equal positions."""
        groups = defaultdict(list)
        for row in range(ROWS):
            images = []
            for symmetry in SYMMETRIES:
                planes = transform_planes(self.planes[row : row + 1], symmetry)
                board = pack_boards(np.ascontiguousarray(planes))[0].tobytes()
                images.append((board, int(self.players[row] ^ (symmetry >= 2)), int(symmetry)))
            board, player, symmetry = min(images)
            groups[self.split[row], board, player].append((row, symmetry))
        return list(groups.values())

    def mean(self, name: str, group: list[tuple[int, int]], swaps: bool) -> float | None:
        own = group[0][1] >= 2
        given = [
            abs((swaps and symmetry >= 2) - float(self.numbers[name][row]))
            for row, symmetry in group
            if not self.null[name][row]
        ]
        return abs((swaps and own) - sum(given) / len(given)) if given else None

    def mean_policy(self, group: list[tuple[int, int]]) -> np.ndarray:
        table, total, count = symmetry_table(N), np.zeros(CELLS), 0
        for row, symmetry in group:
            policy = np.eye(CELLS)[self.move[row]] if self.kind[row] == 0 else self.policy[row].astype(float)
            if self.kind[row] == 2 or not policy.sum():
                continue
            total[table[symmetry]] += policy / policy.sum()
            count += 1
        return total[table[group[0][1]]] / max(count, 1)


def merged(
    positions: Positions, folder: Path, weight: str = "count", threads: int = 2
) -> list[dict[str, Any]]:
    stored, splits = folder / "positions.parquet", folder / "splits.parquet"
    table = positions.table()
    write_parquet(stored, table.schema, [table])
    of_split = pa.table({"position_id": np.arange(ROWS), "split_index": positions.split})
    write_parquet(splits, of_split.schema, [of_split])
    sql = read_parquet_sql([stored])
    columns = sql_columns(table.schema)
    tables = StoreTables(sql, "", "", columns, view_columns(table.schema), ((stored, ROWS),))
    rows = f"SELECT * FROM {sql} p JOIN {read_parquet_sql([splits])} s USING (position_id)"
    with duckdb_session(memory=100 << 20, threads=threads) as con:
        result = merge.merge_positions(con, tables, rows, weight, folder)
        columns = ", ".join(f'"{name}"' for name in result.tables.position_columns)
        return (
            con.sql(f"SELECT {columns} FROM ({result.sql}) ORDER BY position_id").to_arrow_table().to_pylist()
        )


def test_merged_rows_are_those_of_a_plain_computation(tmp_path: Path):
    positions = Positions(1)
    rows = {row["position_id"]: row for row in merged(positions, tmp_path)}
    groups = positions.groups()
    assert sorted(rows) == sorted(group[0][0] for group in groups)
    assert sum(row["extra.count"] for row in rows.values()) == ROWS
    several = [group for group in groups if len(group) > 1]
    assert len(several) > 100
    for group in several:
        row = rows[group[0][0]]
        assert row["extra.count"] == len(group)
        for name, swaps in (("value", True), ("root_value", True), ("extra.t", False)):
            assert row[name] == pytest.approx(positions.mean(name, group, swaps), abs=1e-6)
        visits = [positions.numbers["visits"][i] for i, _ in group if not positions.null["visits"][i]]
        assert row["visits"] == (sum(visits) if visits else None)
        weights = [1 if positions.null["weight"][i] else positions.numbers["weight"][i] for i, _ in group]
        assert row["weight"] == pytest.approx(float(sum(map(float, weights))), rel=1e-6)
        policy = np.zeros(CELLS)
        if row["move"] is not None:
            assert row["policy"] is None
            policy[row["move"]] = 1
        for entry in row["policy"] or ():
            policy[entry["cell"]] = entry["probability"]
        assert policy == pytest.approx(positions.mean_policy(group), abs=1e-6)
        same_value = row["value"] == positions.numbers["value"][group[0][0]]
        assert row["winner"] == ("BLUE" if same_value else None)


def test_single_positions_keep_their_columns(tmp_path: Path):
    positions = Positions(2)
    stored = positions.table().to_pylist()
    rows = {row["position_id"]: row for row in merged(positions, tmp_path)}
    singles = [group[0][0] for group in positions.groups() if len(group) == 1]
    assert singles
    for index in singles:
        weight = 1.0 if stored[index]["weight"] is None else stored[index]["weight"]
        assert rows[index] == stored[index] | {"extra.count": 1.0, "weight": weight}


def test_the_result_depends_neither_on_threads_nor_on_the_weight(tmp_path: Path):
    positions = Positions(3)
    results = []
    for number, (weight, threads) in enumerate([("count", 1), ("count", 2), ("root", 2)]):
        (tmp_path / str(number)).mkdir()
        results.append(merged(positions, tmp_path / str(number), weight, threads))
    assert results[0] == results[1]
    for row, root in zip(results[1], results[2], strict=True):
        assert root.pop("weight") == pytest.approx(row.pop("weight") ** 0.5)
        assert row == root


@pytest.mark.parametrize("name", ["extra.count", "extra.COUNT"])
def test_a_store_with_a_column_of_the_count_is_refused(tmp_path: Path, name: str):
    tables = StoreTables("", "", "", {name: "DOUBLE"}, (), ())
    with duckdb_session(memory=100 << 20, threads=1) as con, pytest.raises(ConfigError, match=name):
        merge.merge_positions(con, tables, "", "count", tmp_path)


@pytest.mark.parametrize("rows", [1, 7])
def test_groups_may_be_longer_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int):
    positions = Positions(4)
    whole = merged(positions, tmp_path)
    monkeypatch.setattr(merge, "_ROWS", rows)
    stepped = merged(positions, tmp_path)
    assert [approximately(row) for row in stepped] == whole


def approximately(row: Row) -> Row:
    """Return a row whose numbers equal those of another row that was summed in other steps."""
    policy = row["policy"] and [
        {"cell": entry["cell"], "probability": pytest.approx(entry["probability"], abs=1e-6)}
        for entry in row["policy"]
    ]
    numbers = {name: pytest.approx(x, rel=1e-6) for name, x in row.items() if isinstance(x, float)}
    return row | numbers | {"policy": policy}
