"""Balancing: its definition, agreement with ``balanced_take``, and the table of means."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.order import balanced_take, derive_key, sort_key
from hexdata.schema import SPLITS
from hexdata.selection import Means, groups, ranks

SEED = 11
BY = {
    "winner": lambda r: r["winner"],
    "source": lambda r: r["source"],
    "total_positions // 8": lambda r: str(r["total_positions"] // 8),
    "CASE WHEN value_sample_tier > 1 THEN '' END": lambda r: (
        "" if (r["value_sample_tier"] or 0) > 1 else None
    ),
    "value": lambda r: str(r["value"]),
    "1": lambda r: "1",
}


@pytest.fixture(scope="module", autouse=True)
def small_cells():
    """Use many histogram cells for small groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "CELL_ROWS", 4)
        yield


def grouped(rows, value):
    """Return the ids of each group, ascending, by split and value."""
    found = defaultdict(list)
    for row in rows:
        found[row["split"], value(row)].append(row["position_id"])
    return found


def expected_balance(rows, value, seed):
    """Return the ids that balancing keeps, by (split, value)."""
    members = grouped(rows, value)
    kept = {}
    for (split, name), ids in members.items():
        count = min(len(other) for (at, _), other in members.items() if at == split)
        key = derive_key(seed, "balance") if name is None else derive_key(seed, "balance", name)
        kept[split, name] = sorted(sorted(ids, key=lambda i: int(sort_key(i, key)))[:count])
    return kept


def ids_of(found):
    return {split: {i for (at, _), ids in found.items() if at == split for i in ids} for split in SPLITS}


@pytest.mark.parametrize("by", BY)
def test_balance_keeps_the_lowest_keys_of_each_group(by, choose, kept, choice_store, choice_rows):
    expected = expected_balance(choice_rows, BY[by], SEED)
    found = choose(choice_store, balance_by=by)
    assert kept(found) == ids_of(expected)
    assert found.left_out == {"balance_by": len(choice_rows) - sum(map(len, expected.values()))}


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.sampled_from(sorted(BY)), st.sampled_from([None, 2, 6]))
def test_balance_is_applied_last(choose, kept, write_games, read, seed, by, most):
    store = write_games(seed, games=24)
    limited = {"per_game": most} if most else {}
    left = set().union(*kept(choose(store, seed=seed, **limited)).values())
    rows = [row for row in read(store) if row["position_id"] in left]
    found = choose(store, seed=seed, balance_by=by, **limited)
    assert kept(found) == ids_of(expected_balance(rows, BY[by], seed))


def test_a_group_depends_on_other_groups_only_through_the_smallest_size(choose, kept, choice_store):
    """Changes to larger groups have no effect; a smaller smallest group removes positions."""
    text = "CASE source WHEN 's0/games.trmph' THEN 'a' WHEN 's1/games.trmph' THEN 'b' ELSE 'c' END"
    in_a = "source = 's0/games.trmph'"

    def of_a(where):
        ids = kept(choose(choice_store, where=where, balance_by=text))["train"]
        return ids & kept(choose(choice_store, where=in_a))["train"]

    whole = of_a("split = 'train'")
    small = "source = 's1/games.trmph' AND position_id % 3 = 0"
    one = of_a(f"{in_a} OR {small}")
    other = of_a(f"{in_a} OR {small} OR (source = 's2/games.trmph' AND position_id % 2 = 0)")
    assert one == other
    assert one < whole
    assert one


def test_balance_agrees_with_balanced_take(choose, kept, write_games):
    """The group has position ids from 0, which are the indices that ``balanced_take`` returns."""
    store = write_games(0, games=0, loose=230)
    found = choose(store, balance_by="CASE WHEN position_id < 150 THEN 'first' ELSE 'second' END")
    taken = balanced_take({"first": 150, "second": 80}, SEED)
    assert len(taken["first"]) == 80
    assert kept(found)["train"] == {*taken["first"].tolist(), *range(150, 230)}


# balanced_take


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=5), st.integers(0, 40), max_size=4), st.integers(-5, 5))
def test_balanced_take_equals_its_definition(sizes, seed):
    found = balanced_take(sizes, seed)
    assert list(found) == list(sizes)
    for name, taken in found.items():
        keys = [int(k) for k in sort_key(np.arange(sizes[name]), derive_key(seed, "balance", name))]
        assert taken.dtype == np.int64
        assert taken.tolist() == sorted(
            sorted(range(sizes[name]), key=keys.__getitem__)[: min(sizes.values())]
        )


def test_balanced_take_accepts_any_sequences():
    blocks = {"web": [f"block {i}" for i in range(300)], "code": np.zeros((40, 8)), "books": "x" * 120}
    taken = balanced_take(blocks, seed=7)
    assert {name: len(found) for name, found in taken.items()} == {"web": 40, "code": 40, "books": 40}
    assert taken["code"].tolist() == list(range(40))
    assert taken["web"].max() > 200, "not only the first elements"
    larger = {**blocks, "books": "x" * 5000}
    assert balanced_take(larger, seed=7)["web"].tolist() == taken["web"].tolist()
    fewer = balanced_take({**blocks, "code": 10}, seed=7)["web"]
    assert set(fewer.tolist()) < set(taken["web"].tolist())
    assert balanced_take({}, seed=7) == {}
    with pytest.raises(ValueError, match="-1 elements"):
        balanced_take({"web": -1}, seed=7)


def test_balanced_take_is_uniform():
    """Each index is kept equally often over many seeds, within 5 standard deviations."""
    seeds, size, kept = 4000, 20, 5
    taken = [balanced_take({"a": size, "b": kept}, seed)["a"] for seed in range(seeds)]
    counts = np.bincount(np.concatenate(taken), minlength=size)
    share = kept / size
    assert np.abs(counts - seeds * share).max() < 5 * (seeds * share * (1 - share)) ** 0.5


# The table of means


def expected_means(rows, relative_positions):
    def mean(values):
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    return Means(
        mean([row["total_positions"] for row in rows]),
        mean([row["value"] for row in rows]),
        mean([relative_positions[row["position_id"]] for row in rows]),
    )


@pytest.mark.parametrize("by", ["source", "winner", "value", "1"])
def test_the_table_contains_means_of_the_head_and_of_the_kept_positions(by, choose, write_games, read):
    store = write_games(8)
    rows = {row["position_id"]: row for row in read(store)}
    relative_positions = {}
    sizes = [s["positions"] for s in sources_of(store)]
    for start, size in zip(np.cumsum(sizes) - sizes, sizes, strict=True):
        relative_positions |= {int(start) + i: (i + 0.5) / size for i in range(size)}
    members = grouped(rows.values(), BY[by])
    taken = expected_balance(rows.values(), BY[by], SEED)
    table = {(row.split, row.group, row.total): row for row in choose(store, balance_by=by).balance}
    assert len(table) == len(members) + len(SPLITS)
    for split in SPLITS:
        names = [name for at, name in members if at == split]
        wholes = {name: members[split, name] for name in names}
        heads = {name: ids[: len(taken[split, name])] for name, ids in wholes.items()}
        seeded = {name: taken[split, name] for name in names}
        for name in names:
            check(
                table[split, name, False], rows, relative_positions, wholes[name], heads[name], seeded[name]
            )
        joined = [[i for ids in some.values() for i in ids] for some in (wholes, heads, seeded)]
        check(table[split, None, True], rows, relative_positions, *joined)


def check(row, rows, relative_positions, whole, head, seeded):
    assert (row.before, row.kept) == (len(whole), len(seeded))
    for found, ids in ((row.whole, whole), (row.head, head), (row.seeded, seeded)):
        expected = expected_means([rows[i] for i in ids], relative_positions)
        assert asdict(found) == pytest.approx(asdict(expected), abs=1e-8)
    json.dumps(asdict(row), allow_nan=False)


def sources_of(store):
    import pyarrow.parquet as pq

    tables = [pq.read_table(path) for path in sorted((store / "sources").iterdir())]
    return [row for table in tables for row in table.to_pylist()]


# Notes and errors


def test_a_note_names_a_smallest_group_of_null(choose, choice_store):
    found = choose(choice_store, balance_by="source")
    (note,) = [note for note in found.notes if note.startswith("train")]
    assert "the smallest group of source is NULL with 45 positions" in note
    assert '--where "(source) IS NOT NULL"' in note
    assert {row.kept for row in found.balance if row.split == "train" and not row.total} == {45}
    assert choose(choice_store, balance_by="source", where="(source) IS NOT NULL").notes == ()
    few = choose(choice_store, balance_by="CASE WHEN position_id < 2 THEN 'few' END", where="split = 'train'")
    assert {row.group for row in few.balance if row.before > row.kept and not row.total} == {None}
    assert few.notes == ()


def test_too_many_groups_are_refused(choose, choice_store, monkeypatch):
    monkeypatch.setattr(groups, "MAX_GROUPS", 20)
    with pytest.raises(ConfigError, match=r"balance_by has too many values.*at most 20.*coarser"):
        choose(choice_store, balance_by="position_id")
    assert choose(choice_store, balance_by="position_id % 20").rows["train"] > 0
