"""The epoch digest: the same whoever delivers, another as soon as anything else is delivered."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.loader.checkpoint import EpochDigest, combine_digests
from hexdata.order import derive_key, sort_key

SHARDS = "5" * 64
STEPS = [[3, 1, 4], [15, 9, 2], [6, 5, 35]]


def digest_of(steps, shards=SHARDS, epoch=0):
    digest = EpochDigest(shards, epoch)
    for step, ids in enumerate(steps):
        digest.add(step, np.array(ids, np.int64))
    return digest


def test_the_digest_is_the_documented_sum():
    key = derive_key(0, "digest", SHARDS, 7)
    total = sum(int(sort_key(i + step * 2**36, key)) for step, ids in enumerate(STEPS) for i in ids)
    assert digest_of(STEPS, epoch=7).value == total % 2**64
    assert str(digest_of(STEPS, epoch=7)) == format(total % 2**64, "016x")


def test_the_digest_is_pinned():
    """A literal digest: if it changes, runs of two releases cannot be compared."""
    assert str(digest_of(STEPS)) == "058dcb291a268ec6"


@given(cut=st.lists(st.integers(0, 3), min_size=9, max_size=9), seed=st.integers(0, 9))
def test_ranks_and_workers_add_up(cut, seed):
    """Whoever delivers a position, in whatever order within its step, the digests add up to the same."""
    shares = [EpochDigest(SHARDS, 0) for _ in range(4)]
    for number, who in enumerate(cut):
        shares[who].add(number // 3, np.array([STEPS[number // 3][number % 3]]))
    random.Random(seed).shuffle(shares)
    assert combine_digests(map(str, shares)) == str(digest_of(STEPS))


@pytest.mark.parametrize(
    "steps",
    [
        [[3, 1, 4], [15, 9, 2], [6, 5]],
        [[3, 1, 4], [15, 9, 2], [6, 5, 35, 35]],
        [[3, 1, 4], [15, 9, 2], [6, 5, 36]],
        [[3, 1, 15], [4, 9, 2], [6, 5, 35]],
        [[15, 9, 2], [3, 1, 4], [6, 5, 35]],
        [[3, 1, 4], [], [15, 9, 2], [6, 5, 35]],
        [],
    ],
)
def test_whatever_else_is_delivered_changes_it(steps):
    assert str(digest_of(steps)) != str(digest_of(STEPS))


def test_other_shards_and_epochs_have_others():
    digests = {str(digest_of(STEPS, shards, epoch)) for shards in (SHARDS, "6" * 64) for epoch in (0, 1)}
    assert len(digests) == 4


def test_going_on_from_a_value_is_as_if_never_left():
    first = digest_of(STEPS[:1])
    rest = EpochDigest(SHARDS, 0, first.value)
    for step in (1, 2):
        rest.add(step, np.array(STEPS[step]))
        assert rest.value == rest.value  # looking at it changes nothing
    assert str(rest) == str(digest_of(STEPS))


def test_many_small_steps_are_summed_as_they_are_one_by_one():
    ids = np.random.default_rng(1).integers(0, 2**36, 200_000)
    whole = EpochDigest(SHARDS, 2)
    value = 0
    for step, part in enumerate(np.split(ids, 100)):
        whole.add(step, part)
        alone = EpochDigest(SHARDS, 2)
        alone.add(step, part)
        value += alone.value
    assert whole.value == value % 2**64
