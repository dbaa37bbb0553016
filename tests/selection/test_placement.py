"""Assignment to buckets by ranges of keys, by game and by strata, compared with plain definitions."""

from __future__ import annotations

from collections import defaultdict

import pytest

from hexdata.errors import ConfigError
from hexdata.order import derive_key, sort_key
from hexdata.schema import SPLITS
from hexdata.selection import groups

SEED = 11
STRATA = {
    "value": lambda r: str(r["value"]),
    "length": lambda r: str(r["total_positions"]),
    "source": lambda r: r["source"],
    "value_sample_tier": lambda r: None if r["value_sample_tier"] is None else str(r["value_sample_tier"]),
}


def in_range(key, buckets):
    return next(bucket for bucket in range(buckets) if key < (bucket + 1 << 64) // buckets)


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


@pytest.mark.parametrize("buckets", [3, 1000])
def test_positions_are_assigned_by_their_keys(buckets, choose, assign, choice_store, choice_rows):
    found = assign(choose(choice_store, buckets={"train": buckets, "val": 2, "test": 1}))
    split = {row["position_id"]: row["split"] for row in choice_rows}
    keys = {i: int(sort_key(i, derive_key(SEED, "shuffle"))) for i in split}
    numbers = {"train": buckets, "val": 2, "test": 1}
    assert sorted(found) == sorted((split[i], in_range(k, numbers[split[i]]), k, i) for i, k in keys.items())
    for name in SPLITS:
        ids = [i for at, _, _, i in found if at == name]
        assert ids == sorted(ids, key=keys.__getitem__), "the number of buckets does not change the order"


@pytest.mark.parametrize("by", STRATA)
@pytest.mark.parametrize("buckets", [2, 50])
def test_strata_are_cut_at_their_order_statistics(by, buckets, choose, assign, choice_store, choice_rows):
    numbers = {"train": buckets, "val": 3, "test": 1}
    expected = expected_strata(choice_rows, STRATA[by], numbers, SEED)
    found = assign(choose(choice_store, buckets=numbers, stratify_by=by))
    assert {i: bucket for _, bucket, _, i in found} == expected
    assert len(found) == len(choice_rows)


def test_too_many_parts_of_strata_are_refused(choose, assign, choice_store, monkeypatch):
    monkeypatch.setattr(groups, "MAX_STRATUM_PARTS", 100)
    with pytest.raises(ConfigError, match=r"too many strata for this number of buckets.*at most 100"):
        choose(choice_store, buckets={"train": 50, "val": 1, "test": 1}, stratify_by="length")
    assert assign(choose(choice_store, buckets={"train": 20, "val": 1, "test": 1}, stratify_by="value"))
