"""Tests of batches of a fixed size, against joining all blocks and cutting the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.batch import FIELDS, Batch, BatchOptions, make_batch
from hexdata.errors import ConfigError
from hexdata.live.chunk_unpacker import ChunkUnpacker
from hexdata.live.pipeline import Pipeline
from hexdata.live.tensor_generator import TensorGenerator
from hexdata.shards.blocks import Block
from tests.live.number_stages import in_thread, until
from tests.live.sample_games import N, SampleGames, block_chunk

OPTIONS = BatchOptions(fields=FIELDS, symmetry=True, tier_probability=(1.0, 0.5, 0.5, 0.0), planes=3)
SEED = 2


def generator(batch_size: int = 8, **options: Any) -> TensorGenerator:
    return TensorGenerator(**{"batch_size": batch_size, "batch": OPTIONS, "seed": SEED, **options})


def blocks_of(sizes: list[int]) -> list[Block]:
    """Return blocks of random positions; every third position of every second block has a dense policy."""
    chunks = [
        block_chunk(number, size, dense=range(0, size, 3) if number % 2 else ())
        for number, size in enumerate(sizes)
    ]
    return [
        block
        for chunk in chunks
        for block in ChunkUnpacker(seed=0, pool_size=99, positions_per_game="all").process((chunk,))
    ]


def plain_batches(blocks: list[Block], batch_size: int, drop: bool = False) -> list[Batch]:
    """Return batches of ``batch_size`` rows, cut from all rows joined into one block."""
    rows: list[tuple[Block, int]] = [(block, row) for block in blocks for row in range(len(block["value"]))]
    batches = []
    for number, start in enumerate(range(0, len(rows), batch_size)):
        some = rows[start : start + batch_size]
        block: Block = {
            name: np.array([each[name][row] for each, row in some])
            for name in blocks[0]
            if not name.startswith("policy")
        }
        dense = [
            (index, each["policy"][each["policy_row"] == row][0])
            for index, (each, row) in enumerate(some)
            if row in each.get("policy_row", ())
        ]
        if dense:
            block["policy_row"] = np.array([index for index, _ in dense], np.uint32)
            block["policy"] = np.array([policy for _, policy in dense])
        if len(some) == batch_size or not drop:
            batches.append(make_batch(block, OPTIONS, N, seed=SEED, epoch=number))
    return batches


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    batch_size=st.integers(1, 40),
    drop=st.booleans(),
)
def test_batches_contain_the_rows_in_order(sizes, batch_size, drop):
    blocks = blocks_of(sizes)
    stage = generator(batch_size, remainder="drop" if drop else "short")
    found = [batch for block in blocks for batch in stage.process(block)]
    assert all(len(batch["value"]) == batch_size for batch in found)
    found += stage.finish()
    assert_same(found, plain_batches(blocks, batch_size, drop))
    assert stage.counts.get("batches", 0) == len(found)
    assert stage.counts.get("positions", 0) == sum(len(batch["value"]) for batch in found)
    assert list(stage.finish()) == []


def test_a_state_continues_in_the_middle_of_a_batch():
    blocks = blocks_of([5, 9, 1, 30, 2, 2, 11])
    expected = plain_batches(blocks, 8)
    for stop in range(len(blocks) + 1):
        stage = generator()
        found = [batch for block in blocks[:stop] for batch in stage.process(block)]
        other = generator()
        other.load_state(stage.state())
        found += [batch for block in blocks[stop:] for batch in other.process(block)]
        assert_same([*found, *other.finish()], expected)


def test_more_threads_build_the_same_batches():
    def run(threads: int) -> list[bytes]:
        stages = [SampleGames(passes=4), ChunkUnpacker(seed=0, pool_size=40), generator(16, threads=threads)]
        found = []
        with Pipeline(stages, [(2, "block")] * 3) as pipeline:
            pipeline.start()
            while True:
                try:
                    batch = pipeline.take()
                except StopIteration:
                    return sorted(found)
                found.append(b"".join(batch[name].tobytes() for name in sorted(batch)))

    one = run(1)
    assert one == run(3)
    assert len(one) > 20


class Meddling(dict[str, Any]):
    """Block that lets another thread add a block when it is accessed for the ``at``-th time."""

    def __init__(self, block: Block, at: int, stage: TensorGenerator, other: Block) -> None:
        super().__init__(block)
        self._left = at
        self._stage = stage
        self._other = other
        self.result: Callable[[], Any] | None = None

    def __getitem__(self, name: str) -> Any:
        if not self._left:
            self.result = in_thread(lambda: list(self._stage.process(self._other)))
            until(lambda: self._stage._collect_lock.locked() or self._stage.counts.get("positions"))
        self._left -= 1
        return super().__getitem__(name)


@pytest.mark.parametrize("at", range(0, 20, 3))
def test_threads_do_not_interfere_while_collecting(at):
    """The pending rows are in exactly one batch, and no two batches have the same number."""
    first, one, other = blocks_of([5, 8, 9])
    stage = generator(8)
    assert stage.process(first) == []
    meddling = Meddling(one, at, stage, other)
    found = list(stage.process(meddling))
    assert meddling.result is not None
    found += [*meddling.result(), *stage.finish()]

    def in_bytes(batches: list[Batch]) -> list[bytes]:
        return sorted(b"".join(batch[name].tobytes() for name in sorted(batch)) for batch in batches)

    orders = [[first, one, other], [first, other, one]]
    assert in_bytes(found) in [in_bytes(plain_batches(blocks, 8)) for blocks in orders]


def test_a_repeated_position_gets_a_new_symmetry():
    blocks = blocks_of([64])
    stage = generator(64, batch=BatchOptions(fields=("move",), symmetry=True))
    first, second = (batch["move"] for _ in range(2) for batch in stage.process(blocks[0]))
    assert (first != second).mean() > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"remainder": "pad"}, "remainder"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        generator(**options)
