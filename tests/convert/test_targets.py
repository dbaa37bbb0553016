"""Optional columns of positions: from the numbers of legacy examples, and from readers that give them."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import pytest

from hexdata.schema import is_target
from hexdata.store import Store
from hexdata.verify import verify_store
from hexdata.verify.roundtrip import check_round_trip


def columns_of(store, source: int = 0) -> dict[str, list[Any]]:
    """Return the optional columns of the part of a source, by name."""
    table = pq.read_table(store.path / f"positions/part-{source:06d}.parquet")
    return {name: table[name].to_pylist() for name in table.column_names if is_target(name)}


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
    assert store.notes() == []
    assert [result.ok for result in check_round_trip(store.path, [path])] == [True]


def test_the_root_value_has_the_convention_of_the_store(make, convert):
    examples = with_numbers(make, root_value=0.25)
    for example in examples:
        example["value"] = 1.0 - example["value"]
    store = convert(make.write("a.pkl.gz", examples))
    assert store.source("a.pkl.gz")["value_sense"] == "blue-is-1"
    assert set(columns_of(store)["root_value"]) == {0.75}


def test_numbers_that_cannot_be_columns_stay_in_the_metadata(make, convert):
    examples = with_numbers(make, sometimes=1, Name=1, name=2, twice=3)
    examples[0]["metadata"] |= {"sometimes": "x", "large": (1 << 60) + 1, "flag": True, "a b": 1, "twice": 4}
    del examples[0]["sometimes"]
    path = make.write("a.pkl.gz", examples)
    store = convert(path)
    assert list(columns_of(store)) == ["extra.Name"]
    (note,) = store.notes()
    for text in ("a b (", "large (", "name (", "extra.Name", "sometimes (", "twice ("):
        assert text in note
    assert "flag" not in note
    assert "()" not in note, "each has a reason"
    assert [result.ok for result in check_round_trip(store.path, [path])] == [True]


def test_a_second_run_adds_columns_to_all_parts(make, convert):
    first = convert(make.write("a/a.pkl.gz", with_numbers(make, visits=5, Alpha=1)))
    before = first.rows("positions")
    examples = [example | {"weight": 0.5, "alpha": 2} for example in make.dicts(make.games(1, start=7))[0]]
    store = convert(make.write("b/b.pkl.gz", examples))
    assert [path.name for path in Store.open(store.path).files("positions")] == [
        "part-000000-1.parquet",
        "part-000001.parquet",
    ]
    assert store.rows("positions")[: len(before)] == [row | {"weight": None} for row in before]
    assert len(list((store.path / "positions").iterdir())) == 2
    assert verify_store(store.path).ok
    assert Store.open(store.path).manifest.targets == ("extra.Alpha", "visits", "weight")
    assert list(columns_of(store, 1)) == ["extra.Alpha", "visits", "weight"]
    (note,) = store.notes("b.pkl.gz")
    assert "alpha (" in note
    third = convert(make.write("c/c.pkl.gz", with_numbers(make, **{f"n{k:02}": k for k in range(40)})))
    names = ["extra.Alpha", *(f"extra.n{k:02}" for k in range(31)), "visits", "weight"]
    assert list(columns_of(third, 2)) == names  # at most 32 have the prefix
    assert Store.open(store.path).manifest.targets == tuple(names)
    assert "n31 (" in third.notes("c.pkl.gz")[0]


# Readers with optional columns


def test_the_end_of_a_game_is_its_chain_or_unknown(make, convert):
    one, two = make.dicts(make.games(2))
    store = convert(make.write("a.pkl.gz", [*one, *two[:-1]]))
    ends = [(game["end_reason"], game["swap"]) for game in store.games()]
    assert ends == [("chain", None), ("unknown", None)]
