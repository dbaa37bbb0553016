"""Steps and shares against a plain definition: deal the places out by hand, and see who got what."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.loader.options import LoaderOptions, Remainder
from hexdata.loader.schedule import EpochPlan, Share

Hands = list[tuple[list[int], list[int]]]
"""Of each rank at one step: the places that are its own, and those that it repeats."""


def deal(positions: int, batch_size: int, world_size: int, remainder: Remainder) -> list[Hands]:
    """Deal places 0 … positions - 1 out, step by step, as the docs say it."""
    global_batch = batch_size * world_size
    steps = []
    for first in range(0, positions, global_batch):
        size = min(global_batch, positions - first)
        if size < global_batch and remainder == "drop":
            break
        counts = [0] * world_size
        for number in range(size):
            counts[number % world_size if size < global_batch else number // batch_size] += 1
        places, repeats = iter(range(first, first + size)), itertools.cycle(range(positions))
        steps.append(
            [
                (
                    list(itertools.islice(places, count)),
                    list(itertools.islice(repeats, batch_size - count if remainder == "pad" else 0)),
                )
                for count in counts
            ]
        )
    return steps


@given(
    positions=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 6),
    remainder=st.sampled_from(["short", "drop", "pad"]),
)
def test_shares_are_dealt_out_by_hand(positions, batch_size, world_size, remainder):
    expected = deal(positions, batch_size, world_size, remainder)
    for rank in range(world_size):
        options = LoaderOptions(batch_size=batch_size, world_size=world_size, rank=rank, remainder=remainder)
        plan = EpochPlan(positions, options)
        assert plan.steps == len(expected)
        for step, hands in enumerate(expected):
            share, (own, repeats) = plan.share(step), hands[rank]
            assert share.places(positions).tolist() == own + repeats
            mask = share.padding_mask()
            assert (mask is None) == (not repeats)
            assert mask is None or mask.tolist() == [False] * len(own) + [True] * len(repeats)


def test_the_last_step_is_pinned():
    """Literal shares: if they change, runs cannot be resumed on other ranks."""
    options = [LoaderOptions(batch_size=4, rank=rank, world_size=3, remainder="pad") for rank in range(3)]
    assert [EpochPlan(29, each).share(2) for each in options] == [
        Share(24, 26, range(2)),
        Share(26, 28, range(2, 4)),
        Share(28, 29, range(4, 7)),
    ]


@pytest.mark.parametrize(("remainder", "steps"), [("short", 9_473), ("pad", 9_473), ("drop", 9_472)])
def test_a_large_epoch_is_arithmetic(remainder, steps):
    plan = EpochPlan(97_000_000, LoaderOptions(batch_size=1_280, world_size=8, rank=7, remainder=remainder))
    assert plan.steps == steps
    assert plan.share(5_000) == Share(5_000 * 10_240 + 8_960, 5_001 * 10_240, range(0))
