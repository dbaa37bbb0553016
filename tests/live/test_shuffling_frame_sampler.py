"""Tests of the reservoir, against one that handles a single position at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import ConfigError, StoreError
from hexdata.live.chunk_unpacker import ChunkUnpacker
from hexdata.live.pipeline import Pipeline
from hexdata.live.shuffling_frame_sampler import Reservoir, ShufflingFrameSampler
from hexdata.order import derive_key, uniform_draw
from hexdata.shards.blocks import Block, block_length
from tests.live.sample_games import Row, SampleGames, block_rows, ids_of, move_chunks, rows_of

SEED = 5


def block_of(start: int, rows: int, dense: list[bool] | None = None) -> Block:
    """Return distinguishable rows; ``dense`` states which of them have a policy."""
    ids = np.arange(start, start + rows)
    block: Block = {
        "board": (ids[:, np.newaxis] + np.arange(3)).astype(np.uint8),
        "move": ids.astype(np.uint16),
        "position_id": ids,
    }
    with_policy = np.flatnonzero((dense or [])[:rows])
    if len(with_policy):
        block["policy"] = (ids[with_policy, np.newaxis] + np.arange(2) / 8).astype(np.float32)
        block["policy_row"] = with_policy.astype(np.uint32)
    return block


def rows(block: Block) -> list[Row]:
    return block_rows({**block, "value": block["position_id"]})


class PlainReservoir:
    """Reservoir that handles one row at a time, as the documentation defines it."""

    def __init__(self, size: int, least: int) -> None:
        self.size, self.least = size, least
        self.held: list[Row] = []
        self.swapped = 0
        self.key = derive_key(SEED, "live", "reservoir")

    def swap(self, block: list[Row]) -> list[Row]:
        out = []
        first = min(len(block), max(0, self.least - len(self.held)))
        half = (len(block) - first + 1) // 2
        joining = first + min(half, self.size - len(self.held) - first)
        for number, row in enumerate(block):
            if number < joining:
                self.held.append(row)
                continue
            index = int(float(uniform_draw([self.swapped], self.key)[0]) * len(self.held))
            self.swapped += 1
            out.append(self.held[index])
            self.held[index] = row
        return out


blocks = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.booleans(), max_size=20)), min_size=1, max_size=12
)


@settings(max_examples=100)
@given(blocks=blocks, size=st.integers(1, 25), share=st.integers(0, 4))
def test_swapping_a_block_equals_swapping_row_by_row(blocks, size, share):
    """In such small reservoirs, nearly every block draws some index twice."""
    least = max(1, size * share // 4)
    reservoir, plain = Reservoir(size, SEED, least), PlainReservoir(size, least)
    start = 0
    for length, dense in blocks:
        block = block_of(start, length, dense)
        expected = plain.swap(rows(block))
        assert [row for out in reservoir.swap(block) for row in rows(out)] == expected
        start += length
    assert reservoir.held == len(plain.held)
    left = []
    while (block := reservoir.drain(3)) is not None:
        assert 1 <= block_length(block) <= 3
        left += rows(block)
    assert sorted(left, key=lambda row: row["position_id"]) == sorted(
        plain.held, key=lambda row: row["position_id"]
    )


def test_the_swaps_and_the_drain_are_pinned():
    """Another result would change every live run and need a new ORDER_VERSION."""
    reservoir = Reservoir(4, SEED, 4)
    assert reservoir.swap(block_of(0, 4)) == []
    assert ids_of(reservoir.swap(block_of(4, 6))) == [0, 4, 5, 3, 6, 1]
    block = reservoir.drain(9)
    assert block is not None
    assert block["position_id"].tolist() == [7, 9, 2, 8]


def test_the_time_in_the_reservoir_is_geometric():
    """Each of 50 rows is equally likely at each step: a position remains after k steps with (49/50)^k."""
    reservoir = Reservoir(50, SEED, 50)
    reservoir.swap(block_of(0, 50))
    (out,) = reservoir.swap(block_of(50, 20_000))
    order = np.full(20_050, 30_000)
    order[out["position_id"]] = np.arange(20_000)
    stayed = order[50:19_000] - np.arange(18_950)  # in steps, except for the last positions
    for steps in (1, 10, 35, 100, 200):
        chance = (49 / 50) ** (steps - 1)
        later = np.count_nonzero(stayed >= steps)
        assert abs(later - 18_950 * chance) <= 5 * (18_950 * chance * (1 - chance)) ** 0.5


def test_drained_rows_are_shuffled():
    reservoir = Reservoir(500, SEED, 500)
    reservoir.swap(block_of(0, 500))
    block = reservoir.drain(500)
    assert block is not None
    ids = block["position_id"]
    assert sorted(ids.tolist()) == list(range(500))
    assert abs(np.corrcoef(ids, np.arange(500))[0, 1]) < 0.2


def test_a_million_positions_take_75_megabytes():
    reservoir = Reservoir(10_000, SEED, 10_000)
    (block,) = ChunkUnpacker(seed=0, pool_size=9, positions_per_game="all").process(
        tuple(move_chunks(3, board_size=13))
    )
    reservoir.swap(block)
    assert reservoir.nbytes == 10_000 * 75


def test_memory_of_dense_policies_follows_their_maximum():
    reservoir = Reservoir(100, SEED, 100)
    for start in range(0, 20_000, 50):
        out = reservoir.swap(block_of(start, 50, [start < 10_000] * 50))
        dense = sum(len(block.get("policy_row", ())) for block in out)
        if start >= 12_000:
            assert dense == 0
    assert reservoir.nbytes <= 100 * (3 + 2 + 8 + 4) + 2 * 150 * 8
    assert sum("policy" in block for block in out) == 0


def test_a_block_with_other_fields_is_refused():
    reservoir = Reservoir(4, SEED, 4)
    reservoir.swap(block_of(0, 2))
    for other in (
        {"position_id": np.arange(2)},
        {**block_of(0, 2), "board": np.zeros((2, 4), np.uint8)},
        {**block_of(0, 2), "move": np.zeros(2, np.int64)},
    ):
        with pytest.raises(StoreError, match="other fields"):
            reservoir.swap(other)


@pytest.mark.parametrize("dense", [False, True])
def test_a_state_continues_at_any_time_even_while_draining(dense):
    def steps(reservoir: Reservoir, first: int) -> list[list[Row]]:
        done = []
        for step in range(first, 14):
            if step < 8:
                out = reservoir.swap(block_of(10 * step, 10, [dense and i % 3 == 0 for i in range(10)]))
            else:
                out = [block for block in [reservoir.drain(4)] if block is not None]
            done.append([row for block in out for row in rows(block)])
        return done

    whole = steps(Reservoir(23, SEED, 20), 0)
    assert sorted(row["position_id"] for out in whole for row in out) == list(range(80))
    for stop in range(14):
        reservoir = Reservoir(23, SEED, 20)
        partly = []
        for step in range(stop):
            if step < 8:
                out = reservoir.swap(block_of(10 * step, 10, [dense and i % 3 == 0 for i in range(10)]))
            else:
                out = [block for block in [reservoir.drain(4)] if block is not None]
            partly.append([row for block in out for row in rows(block)])
        other = Reservoir(23, SEED, 20)
        other.load_state(reservoir.state())
        assert other.held == reservoir.held
        assert partly + steps(other, stop) == whole


def test_rows_added_after_a_partial_drain_join_the_others():
    reservoir = Reservoir(20, SEED, 20)
    reservoir.swap(block_of(0, 20, [True] * 20))
    out = [reservoir.drain(7)]
    assert reservoir.held == len(reservoir.state()["policy_row"]) == 13
    assert reservoir.swap(block_of(20, 7, [True] * 7)) == []
    out += reservoir.swap(block_of(27, 5))
    out += [reservoir.drain(99), reservoir.drain(99)]
    assert out.pop() is None
    everything = [row for block in out if block is not None for row in rows(block)]
    assert sorted(row["position_id"] for row in everything) == list(range(32))
    assert all((row["policy"] is not None) == (row["position_id"] < 27) for row in everything)


# --- the stage ----------------------------------------------------------------------------------------


def run(reservoir: int, prefill: float = 1.0, passes: int = 1) -> tuple[list[Block], dict[str, float]]:
    stages = [
        SampleGames(passes=passes),
        ChunkUnpacker(seed=1, pool_size=40, positions_per_game="all"),
        ShufflingFrameSampler(seed=SEED, reservoir=reservoir, prefill=prefill),
    ]
    out = []
    with Pipeline(stages, [(2, "block")] * 3) as pipeline:
        pipeline.start()
        while True:
            try:
                out.append(pipeline.take())
            except StopIteration:
                return out, pipeline.metrics()["ShufflingFrameSampler"]


@pytest.mark.parametrize("reservoir", [1, 37, 100_000])
@pytest.mark.parametrize("prefill", [0.0, 0.3, 1.0])
def test_each_position_is_emitted_once_even_if_there_are_few(reservoir, prefill):
    out, metrics = run(reservoir, prefill)
    chunks = move_chunks(40)
    expected = [chunk.number * 1024 + ply for chunk in chunks for ply in range(chunk.positions)]
    expected = [identity for identity in expected if identity // 1024 != 1] + list(range(1024, 1033))
    assert sorted(ids_of(out)) == sorted(expected)
    assert (metrics["held"], metrics["size"]) == (0, reservoir)
    dense = {row["position_id"] for row in rows_of(out) if row["policy"] is not None}
    assert dense == {1026, 1029, 1032}


def test_positions_are_mixed_over_the_whole_reservoir():
    ids = np.array(ids_of(run(300, passes=4)[0]))
    assert (np.diff(ids) == 1).mean() < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reservoir": 0}, "reservoir"),
        ({"prefill": 1.1}, "prefill"),
        ({"prefill": -0.1}, "prefill"),
        ({"prefill": True}, "prefill"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ShufflingFrameSampler(seed=0, **options)
