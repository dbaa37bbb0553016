"""Assignment to buckets by ranges of keys, by game and by strata, compared with plain definitions."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.order import bucket_bounds, derive_key, sort_key, sort_subkeys
from hexdata.schema import SPLITS
from hexdata.selection import placement as placement_module
from hexdata.selection import ranks
from hexdata.selection.placement import assign_positions

SEED = 11
STRATA = {
    "value": lambda r: str(r["value"]),
    "length": lambda r: str(r["total_positions"]),
    "source": lambda r: r["source"],
    "value_sample_tier": lambda r: None if r["value_sample_tier"] is None else str(r["value_sample_tier"]),
}


@pytest.fixture(scope="module", autouse=True)
def small_cells():
    """Use many histogram cells for small groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "CELL_ROWS", 4)
        yield


def in_range(key, buckets):
    return int(
        np.searchsorted(np.array(bucket_bounds(buckets)[1:-1], np.uint64), np.uint64(key), side="right")
    )


def expected_strata(rows, value, buckets, seed):
    """Return {position id: bucket} by the definition: each stratum divided evenly from an offset."""
    key = derive_key(seed, "strata")
    strata = defaultdict(list)
    for row in rows:
        strata[row["split"], value(row)].append(row["position_id"])
    bucket_of = {}
    for (split, name), ids in strata.items():
        ids.sort(key=lambda i: int(sort_key(i, key)))
        purpose = (seed, "stratify", split) if name is None else (seed, "stratify", split, name)
        offset = derive_key(*purpose) % buckets[split]
        for bucket in range(buckets[split]):
            low = (bucket * len(ids) + offset) // buckets[split]
            high = ((bucket + 1) * len(ids) + offset) // buckets[split]
            bucket_of |= dict.fromkeys(ids[low:high], bucket)
    return bucket_of


@pytest.mark.parametrize("buckets", [1, 3, 64, 1000])
def test_positions_are_assigned_by_their_keys(buckets, choose, assign, choice_store, choice_rows):
    found = assign(choose(choice_store), train=buckets, val=2, test=1)
    split = {row["position_id"]: row["split"] for row in choice_rows}
    keys = {i: int(sort_key(i, derive_key(SEED, "shuffle"))) for i in split}
    numbers = {"train": buckets, "val": 2, "test": 1}
    assert sorted(found) == sorted((split[i], in_range(k, numbers[split[i]]), k, i) for i, k in keys.items())
    for name in SPLITS:
        ids = [i for at, _, _, i in found if at == name]
        assert ids == sorted(ids, key=keys.__getitem__), "the number of buckets does not change the order"


@pytest.mark.parametrize("buckets", [1, 3, 64])
def test_boundaries_equal_bucket_bounds_exactly(con, buckets):
    bounds = bucket_bounds(buckets)[1:-1]
    keys = [0, (1 << 64) - 1, *(k + d for k in bounds for d in (-1, 0, 1))]
    ids = ", ".join(f"({unsort(key, 5)}::UBIGINT)" for key in keys)
    chosen = f"SELECT id AS position_id, 0 AS split_index FROM (VALUES {ids}) AS ids(id)"
    assigned = con.sql(assign_positions(chosen, 5, {0: buckets})).fetchall()
    assert sorted((key, bucket) for _, _, key, bucket in assigned) == sorted(
        (k, in_range(k, buckets)) for k in keys
    )


def unsort(value, key):
    """Return the id whose sort key is ``value``: the inverse of ``sort_key``."""
    first, second, third = sort_subkeys(key)

    def unshift(x, shift):
        found = x
        for _ in range(64 // shift):
            found = x ^ (found >> shift)
        return found

    x = unshift(value, 31) ^ third
    x = unshift(x * pow(0x94D049BB133111EB, -1, 1 << 64) % (1 << 64), 27) ^ second
    return unshift(x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) % (1 << 64), 30) ^ first


def test_positions_of_a_game_share_a_bucket(choose, assign, choice_store, choice_rows):
    found = assign(choose(choice_store, assign="game"), train=9, val=4, test=1)
    game = {row["position_id"]: row["game_id"] for row in choice_rows}
    game_key, key = derive_key(SEED, "shuffle-games"), derive_key(SEED, "shuffle")
    numbers = {"train": 9, "val": 4, "test": 1}
    for split, bucket, position_key, position in found:
        assert position_key == int(sort_key(position, key))
        deciding_key = position_key if game[position] is None else int(sort_key(game[position], game_key))
        assert bucket == in_range(deciding_key, numbers[split])
    assert found == sorted(found, key=lambda row: (SPLITS.index(row[0]), row[1], row[2]))
    assert len(found) == len(choice_rows)


@pytest.mark.parametrize("by", STRATA)
@pytest.mark.parametrize("buckets", [1, 2, 7, 50])
def test_strata_are_cut_at_their_order_statistics(by, buckets, choose, assign, choice_store, choice_rows):
    numbers = {"train": buckets, "val": 3, "test": 1}
    expected = expected_strata(choice_rows, STRATA[by], numbers, SEED)
    found = assign(choose(choice_store, stratify_by=by), **numbers)
    assert {i: bucket for _, bucket, _, i in found} == expected
    assert len(found) == len(choice_rows)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from(sorted(STRATA)))
def test_each_bucket_receives_its_share_to_within_one(choose, assign, write_games, read, seed, buckets, by):
    """Also holds for strata smaller than the number of buckets. Rows of a bucket are sorted by key."""
    store = write_games(seed, games=20)
    rows = {row["position_id"]: row for row in read(store)}
    found = assign(choose(store, seed=seed, stratify_by=by), train=buckets, val=2, test=1)
    numbers = {"train": buckets, "val": 2, "test": 1}
    shares = Counter((split, STRATA[by](rows[i]), bucket) for split, bucket, _, i in found)
    sizes = Counter((split, STRATA[by](rows[i])) for split, _, _, i in found)
    assert sum(sizes.values()) == len(rows)
    for (split, name), size in sizes.items():
        fair = {size // numbers[split], -(-size // numbers[split])}
        assert {shares[split, name, bucket] for bucket in range(numbers[split])} <= fair
    keys = defaultdict(list)
    for split, bucket, key, _ in found:
        keys[split, bucket].append(key)
    assert all(some == sorted(some) for some in keys.values())


def test_remainders_of_strata_are_spread_over_buckets(choose, assign, write_games):
    """With many strata of a few positions, no bucket receives all remainders."""
    store = write_games(2, sources=1, games=300, loose=0)
    found = assign(choose(store, stratify_by="game_id"), train=20, val=1, test=1)
    sizes = np.array(list(Counter(bucket for split, bucket, _, _ in found if split == "train").values()))
    assert len(sizes) == 20
    assert sizes.max() < 1.5 * sizes.min()


def test_the_order_within_a_bucket_is_independent_of_strata(choose, assign, write_games, read):
    """Neighbours share a stratum as often as in a uniform order, within 5 standard deviations.

    Dividing small strata by the key that orders the bucket would bring their positions together.
    """
    store = write_games(4, sources=1, games=300, shortest=10, longest=40, loose=0)
    game = {row["position_id"]: row["game_id"] for row in read(store)}
    found = assign(choose(store, where="split = 'train'", stratify_by="game_id"), train=8)
    pairs = expected = 0
    for bucket in range(8):
        games = [game[i] for _, number, _, i in found if number == bucket]
        pairs += sum(a == b for a, b in pairwise(games))
        expected += sum(n * (n - 1) for n in Counter(games).values()) / len(games)
    assert abs(pairs - expected) < 5 * expected**0.5


def test_strata_are_divided_after_the_filters(choose, assign, kept, choice_store, choice_rows):
    asked = {"where": "value_sample_tier >= 0", "dedup": "symmetric", "balance_by": "winner"}
    left = set().union(*kept(choose(choice_store, **asked)).values())
    numbers = {"train": 5, "val": 2, "test": 1}
    rows = [row for row in choice_rows if row["position_id"] in left]
    found = assign(choose(choice_store, **asked, stratify_by="source"), **numbers)
    assert {i: bucket for _, bucket, _, i in found} == expected_strata(rows, STRATA["source"], numbers, SEED)


def test_the_query_has_the_columns_of_positions_and_the_place(con, choose, tmp_path, choice_store):
    placement = choose(choice_store).assign_buckets({"train": 3, "val": 2, "test": 1}, con, tmp_path)
    placed = con.sql(f"FROM ({placement})")
    plain = con.sql(f"FROM read_parquet('{choice_store}/positions/*.parquet')").columns
    assert set(placed.columns) == {*plain, "split", "bucket", "sort_key"}
    types = dict(zip(placed.columns, placed.types, strict=True))
    assert [types[n] for n in ("split", "bucket", "sort_key")] == ["UTINYINT", "UINTEGER", "UBIGINT"]


def test_too_many_parts_of_strata_are_refused(choose, assign, choice_store, monkeypatch):
    monkeypatch.setattr(placement_module, "MAX_STRATUM_PARTS", 100)
    with pytest.raises(ConfigError, match=r"too many strata for this number of buckets.*at most 100"):
        assign(choose(choice_store, stratify_by="length"), train=50, val=1, test=1)
    assert assign(choose(choice_store, stratify_by="value"), train=20, val=1, test=1)
