"""Balancing: its definition, agreement with ``balanced_take``, and the table of means."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from itertools import chain
from statistics import fmean

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.order import balanced_take, derive_key, sort_key
from hexdata.schema import SPLITS
from hexdata.selection import groups

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


def grouped(rows, value):
    """Return the ids of each group, ascending, by split and value."""
    found = defaultdict(list)
    for row in rows:
        found[row["split"], value(row)].append(row["position_id"])
    return found


def expected_balance(rows, value, seed):
    """Return the ids that balancing keeps, by (split, value)."""
    members, kept = grouped(rows, value), {}
    for (split, name), ids in members.items():
        count = min(len(other) for (at, _), other in members.items() if at == split)
        key = derive_key(seed, "balance") if name is None else derive_key(seed, "balance", name)
        kept[split, name] = sorted(sorted(ids, key=lambda i: int(sort_key(i, key)))[:count])
    return kept


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.sampled_from(sorted(BY)), st.sampled_from([None, 2, 6]))
def test_balance_is_applied_last(choose, kept, write_games, read, seed, by, most):
    store = write_games(seed, games=24)
    limited = {"per_game": most} if most else {}
    left = set().union(*kept(choose(store, seed=seed, **limited)).values())
    rows = [row for row in read(store) if row["position_id"] in left]
    expected = {split: set() for split in SPLITS}
    for (split, _), ids in expected_balance(rows, BY[by], seed).items():
        expected[split].update(ids)
    assert kept(choose(store, seed=seed, balance_by=by, **limited)) == expected


@settings(max_examples=10)
@given(st.dictionaries(st.text(max_size=5), st.integers(0, 40), max_size=4), st.integers(-5, 5))
def test_balanced_take_equals_its_definition(sizes, seed):
    found = balanced_take(sizes, seed)
    assert list(found) == list(sizes)
    for name, taken in found.items():
        keys = [int(k) for k in sort_key(np.arange(sizes[name]), derive_key(seed, "balance", name))]
        first = sorted(range(sizes[name]), key=keys.__getitem__)[: min(sizes.values())]
        assert (taken.dtype, taken.tolist()) == (np.int64, sorted(first))


@pytest.mark.parametrize("by", ["source", "winner", "value", "1"])
def test_the_table_contains_means_of_the_head_and_of_the_kept_positions(by, choose, write_games, read):
    store = write_games(8)
    rows = {row["position_id"]: row for row in read(store)}
    paths = sorted((store / "sources").iterdir())
    sizes = [size for path in paths for size in pq.read_table(path)["positions"].to_pylist()]
    location = dict(enumerate((i + 0.5) / size for size in sizes for i in range(size)))

    def mean(values):
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def check(row, whole, head, seeded):
        assert (row.before, row.kept) == (len(whole), len(seeded))
        for found, ids in ((row.whole, whole), (row.head, head), (row.seeded, seeded)):
            means = [mean(rows[i][name] for i in ids) for name in ("total_positions", "value")]
            means.append(mean(location[i] for i in ids))
            assert list(asdict(found).values()) == pytest.approx(means, abs=1e-8)
        json.dumps(asdict(row), allow_nan=False)

    members, taken = grouped(rows.values(), BY[by]), expected_balance(rows.values(), BY[by], SEED)
    table = {(row.split, row.group, row.total): row for row in choose(store, balance_by=by).balance}
    assert len(table) == len(members) + len(SPLITS)
    for split in SPLITS:
        names = [name for at, name in members if at == split]
        wholes = [members[split, name] for name in names]
        seeded = [taken[split, name] for name in names]
        heads = [ids[: len(other)] for ids, other in zip(wholes, seeded, strict=True)]
        for name, *three in zip(names, wholes, heads, seeded, strict=True):
            check(table[split, name, False], *three)
        check(table[split, None, True], *([*chain(*some)] for some in (wholes, heads, seeded)))


def test_too_many_groups_are_refused(choose, choice_store, monkeypatch):
    monkeypatch.setattr(groups, "MAX_GROUPS", 20)
    for many in ("position_id", "least(position_id, 20)"):
        with pytest.raises(ConfigError, match=r"balance_by has too many values.*at most 20.*coarser"):
            choose(choice_store, balance_by=many)
    assert choose(choice_store, balance_by="position_id % 20").rows["train"] > 0


def test_a_smallest_group_without_a_value_is_noted(choose, write_games, read):
    store = write_games(8)
    counts = {key: len(ids) for key, ids in grouped(read(store), BY["winner"]).items()}
    expected = []
    for split in SPLITS:
        sizes = [count for (at, _), count in counts.items() if at == split]
        if counts.get((split, None)) == min(sizes) < max(sizes):
            expected.append(split)
    assert expected
    assert [note.partition(":")[0] for note in choose(store, balance_by="winner").notes] == expected
