"""Optional columns of positions: from the numbers of legacy examples, and from readers that give them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.convert.targets import choose_targets
from hexdata.errors import InputError
from hexdata.formats import RawBatch
from hexdata.formats.trmph import TrmphReader
from hexdata.schema import MAX_EXTRAS, is_target, raw_schema
from hexdata.store import Store
from hexdata.verify.roundtrip import check_round_trip


def columns_of(store, source: int = 0) -> dict[str, list[Any]]:
    """Return the optional columns of the part of a source, by name."""
    table = pq.read_table(store.path / f"positions/part-{source:06d}.parquet")
    return {name: table[name].to_pylist() for name in table.column_names if is_target(name)}


def notes_of(store, name: str) -> list[str]:
    return json.loads(store.source(name)["notes"] or "[]")


def with_numbers(make, **numbers) -> list[dict[str, Any]]:
    """Return the examples of two games with numbers beside the board: a list, or one number for all."""
    examples = [example for game in make.dicts(make.games(2)) for example in game]
    for row, example in enumerate(examples):
        for name, value in numbers.items():
            example[name] = value[row % len(value)] if isinstance(value, list) else value
    return examples


@pytest.mark.parametrize("beside", [True, False])
def test_results_of_a_search_become_columns(make, convert, beside):
    examples = with_numbers(make, root_value=[0.25, None, 1], visits=[800, 3.0], temperature=[0.5, None])
    if not beside:
        for example in examples:
            example["metadata"] |= {
                name: example.pop(name) for name in ("root_value", "visits", "temperature")
            }
    path = make.write("a.pkl.gz", examples)
    store = convert(path)
    rows = range(len(examples))
    assert columns_of(store) == {
        "extra.temperature": [(0.5, None)[row % 2] for row in rows],
        "root_value": [(0.25, None, 1.0)[row % 3] for row in rows],
        "visits": [(800, 3)[row % 2] for row in rows],
    }
    assert Store.open(store.path).manifest.targets == ("extra.temperature", "root_value", "visits")
    assert notes_of(store, "a.pkl.gz") == []
    assert [result.ok for result in check_round_trip(store.path, [path])] == [True]


def test_the_root_value_has_the_convention_of_the_store(make, convert):
    examples = with_numbers(make, root_value=0.25)
    for example in examples:
        example["value"] = 1.0 - example["value"]
    store = convert(make.write("a.pkl.gz", examples))
    assert store.source("a.pkl.gz")["value_sense"] == "blue-is-1"
    assert set(columns_of(store)["root_value"]) == {0.75}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(("root_value", [0.5, value]) for value in (-0.125, 1.5, float("inf"))),
        *(("visits", [1, value]) for value in (-1, 0.5, 1 << 31)),
        *(("weight", [1, value]) for value in (-1, 1e39, float("inf"))),
    ],
)
def test_numbers_out_of_range_become_another_column(make, convert, name, values):
    store = convert(make.write("a.pkl.gz", with_numbers(make, **{name: values})))
    columns = columns_of(store)
    assert list(columns) == [f"extra.{name}"]
    assert columns[f"extra.{name}"][:2] == values
    (note,) = notes_of(store, "a.pkl.gz")
    assert note.startswith(f"{name} is the column extra.{name}")


def test_nan_is_null_in_a_column_and_is_restored(make, convert):
    examples = with_numbers(make, root_value=[float("nan"), 0.5])
    for example in examples[2:]:  # each example needs its own scalar, as a pickle refers to shared ones
        example["root_value"] = np.float32(example["root_value"])
    path = make.write("a.pkl.gz", examples)
    store = convert(path)
    assert columns_of(store)["root_value"][:4] == [None, 0.5] * 2
    assert [result.ok for result in check_round_trip(store.path, [path])] == [True]


def test_numbers_that_cannot_be_columns_stay_in_the_metadata(make, convert):
    examples = with_numbers(make, sometimes=1, Name=1, name=2, twice=3)
    examples[0]["metadata"] |= {"sometimes": "x", "large": (1 << 60) + 1, "flag": True, "a b": 1, "twice": 4}
    del examples[0]["sometimes"]
    path = make.write("a.pkl.gz", examples)
    store = convert(path)
    assert list(columns_of(store)) == ["extra.Name"]
    (note,) = notes_of(store, "a.pkl.gz")
    for text in (
        "numbers kept in the metadata only:",
        "a b (the name is not one of a column)",
        "large (numbers that float64 cannot hold)",
        "name (the name differs from extra.Name only in case)",
        "sometimes (not all values are numbers)",
        "twice (stated twice in an example)",
    ):
        assert text in note
    assert "flag" not in note
    assert [result.ok for result in check_round_trip(store.path, [path])] == [True]


def test_a_second_run_adds_columns_and_keeps_the_old_parts(make, convert):
    first = convert(make.write("a/a.pkl.gz", with_numbers(make, visits=5, Alpha=1)))
    part = (first.path / "positions/part-000000.parquet").read_bytes()
    examples = [example | {"weight": 0.5, "alpha": 2} for example in make.dicts(make.games(1, start=7))[0]]
    store = convert(make.write("b/b.pkl.gz", examples))
    assert (store.path / "positions/part-000000.parquet").read_bytes() == part
    assert Store.open(store.path).manifest.targets == ("extra.Alpha", "visits", "weight")
    assert list(columns_of(store, 1)) == ["weight"]
    (note,) = notes_of(store, "b.pkl.gz")
    assert "alpha (the name differs from extra.Alpha of the store only in case)" in note
    third = convert(make.write("c/c.pkl.gz", *make.dicts(make.games(1, start=9))))
    assert columns_of(third, 2) == {}
    assert Store.open(store.path).manifest.targets == ("extra.Alpha", "visits", "weight")


def test_a_store_has_at_most_the_maximum_of_columns(make, convert):
    numbers = {f"n{index:02d}": index for index in range(MAX_EXTRAS + 2)}
    store = convert(make.write("a.pkl.gz", with_numbers(make, **numbers)))
    assert len(columns_of(store)) == MAX_EXTRAS
    (note,) = notes_of(store, "a.pkl.gz")
    assert f"n{MAX_EXTRAS} (" in note
    assert f"n{MAX_EXTRAS + 1} (" in note


def test_columns_of_a_store_are_chosen_in_the_order_of_its_sources():
    chosen, left_out, store = choose_targets(
        ["extra.a"], [["extra.A", "extra.b", "visits"], ["extra.B", "extra.a"]]
    )
    assert chosen == [["extra.b", "visits"], ["extra.a"]]
    assert [list(others) for others in left_out] == [["A"], ["B"]]
    assert store == ["extra.a", "extra.b", "visits"]


# Readers with optional columns


class SearchReader(TrmphReader):
    """Reader of TRMPH files that adds columns: ``values`` in a cycle, -2 for null."""

    targets: tuple[str, ...] = ("extra.depth", "root_value", "visits")
    values: tuple[float, ...] = (0.0, 0.25, -2, 1.0)

    def batches(self) -> Iterator[RawBatch]:
        for batch in super().batches():
            rows = batch.positions
            given = np.resize(self.values, len(rows))
            schema = raw_schema(self.board_size or 3, self.targets)
            columns = dict(zip(rows.schema.names, rows.columns, strict=True))
            for name in self.targets:
                scaled = given * (100 if name == "visits" else 1)
                columns[name] = pa.array(scaled, mask=given == -2).cast(schema.field(name).type)
            columns["end_reason"] = pa.array(["resigned"] * len(rows)).cast(schema.field("end_reason").type)
            columns["swap"] = pa.array(["sides"] * len(rows)).cast(schema.field("swap").type)
            yield RawBatch(pa.record_batch([columns[f.name] for f in schema], schema=schema), batch.rejected)


@pytest.fixture
def reader(monkeypatch) -> type[SearchReader]:
    """Let ``convert`` read TRMPH files with a new subclass of ``SearchReader`` and return it."""
    changed = type("Changed", (SearchReader,), {})
    monkeypatch.setattr("hexdata.convert.spool.open_source", lambda path, **options: changed(path, **options))
    return changed


def test_columns_of_a_reader_are_stored(tmp_path, reader):
    (tmp_path / "a.trmph").write_text("#3,a1b1a2b2a3 b\n#3,a1b1 r\n")
    convert_sources(tmp_path / "a.trmph", tmp_path / "store", ConvertOptions(workers=1))
    table = pq.read_table(tmp_path / "store/positions/part-000000.parquet")
    assert table["root_value"].to_pylist() == [0.0, 0.25, None, 1.0, 0.0, 0.25, None, 1.0, 0.0]
    assert table["visits"].to_pylist()[:4] == [0, 25, None, 100]
    assert table["extra.depth"].to_pylist()[:4] == [0.0, 0.25, None, 1.0]
    games = pq.read_table(tmp_path / "store/games/part-000000.parquet")
    assert games["end_reason"].to_pylist() == ["chain", "resigned"]
    assert games["swap"].to_pylist() == ["sides"] * 2


def test_positions_with_an_invalid_number_of_a_reader_are_rejected(tmp_path, reader):
    reader.values = (0.5, 1.5, float("nan"), -0.5)
    reader.targets = ("root_value", "weight")
    (tmp_path / "a.trmph").write_text("#3,a1b1a2b2a3 b\n")
    result = convert_sources(
        tmp_path / "a.trmph", tmp_path / "store", ConvertOptions(workers=1, max_reject_rate=1)
    )
    assert (result.positions, result.reasons) == (2, {"target-range": 4})
    rejected = pq.read_table(tmp_path / "store/rejected/part-000000.parquet").to_pylist()
    assert [row["record"] for row in rejected] == [1, 2, 3, 5]
    assert rejected[0]["detail"] == "root_value: found 1.5; expected a number from 0 to 1"


@pytest.mark.parametrize("targets", [("visits", "visits"), ("depth",), ("extra.a", "extra.A")])
def test_a_reader_with_invalid_columns_fails(tmp_path, reader, targets):
    reader.targets = targets
    (tmp_path / "a.trmph").write_text("#3,a1b1a2b2a3 b\n")
    result = convert_sources(
        tmp_path / "a.trmph", tmp_path / "store", ConvertOptions(workers=1, max_reject_rate=1)
    )
    assert list(result.reasons) == ["reader-error"]


def test_a_column_of_a_reader_that_the_store_cannot_have_is_refused(tmp_path, make, convert, reader):
    reader.targets = ("extra.Depth",)
    for name, case in (("a", "extra.depth"), ("b", "extra.Depth")):
        reader.targets = (case,)
        (tmp_path / f"{name}.trmph").write_text(f"#3,a1{name}3b1a2c1c2 b\n")
        if name == "a":
            convert_sources(tmp_path / "a.trmph", tmp_path / "store", ConvertOptions(workers=1))
    with pytest.raises(InputError, match=r"Depth: the name differs from extra\.depth"):
        convert_sources(tmp_path / "b.trmph", tmp_path / "store", ConvertOptions(workers=1))


# Games


def test_the_end_of_a_game_is_its_chain_or_unknown(make, convert):
    one, two = make.dicts(make.games(2))
    store = convert(make.write("a.pkl.gz", [*one, *two[:-1]]))
    assert [game["end_reason"] for game in store.games()] == ["chain", "unknown"]
    assert [game["swap"] for game in store.games()] == [None, None]


def test_a_chain_of_the_other_player_is_not_the_end(make, convert):
    games = make.dicts(make.games(8))
    for example in games[0]:
        example["value"] = 1.0 - example["value"]
        example["metadata"]["winner"] = {"BLUE": "RED", "RED": "BLUE"}[example["metadata"]["winner"]]
    store = convert(make.write("a.pkl.gz", [example for game in games for example in game]))
    assert [game["end_reason"] for game in store.games()] == ["unknown", *["chain"] * 7]
