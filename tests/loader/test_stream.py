"""Tests of stream mode: its order against a plain definition, its reads, and damaged shards."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.loader import Loader
from hexdata.loader.options import LoaderOptions
from hexdata.loader.schedule import StreamSchedule, StreamWindow
from hexdata.order import Permutation, derive_key

if TYPE_CHECKING:
    from tests.shard_folder import ShardFolder

BLOCK = 4
Row = tuple[int, int]
"""A position: the index of its shard in the split, and its row in the shard."""


# --- order --------------------------------------------------------------------------------------------


def rows_of_epoch(sizes: list[int], options: LoaderOptions, epoch: int) -> list[Row]:
    """Return the rows of all shards, in the epoch's order of shards."""
    key = derive_key(options.seed, "epoch", epoch, options.split, "shards")
    return [
        (shard, i) for shard in Permutation(len(sizes), key).slice(0, len(sizes)) for i in range(sizes[shard])
    ]


def plain_stream(rows: list[Row], part: slice, options: LoaderOptions, epoch: int, stream: int) -> list[Row]:
    """Return the rows of a stream: take the longest window, then go back to the last boundary in it."""
    delivered: list[Row] = []
    start, window = part.start, 0
    while start < part.stop:
        end = limit = min(start + options.window, part.stop)
        if limit < part.stop:
            backwards = range(limit, start, -1)
            shards = [i for i in backwards if rows[i][1] == 0]
            blocks = [i for i in backwards if rows[i][1] % BLOCK == 0 and rows[i][0] == rows[limit][0]]
            end = [*shards, *blocks, limit][0]
        key = derive_key(options.seed, "epoch", epoch, options.split, "stream", stream, "window", window)
        delivered += [rows[start + i] for i in Permutation(end - start, key).slice(0, end - start)]
        start, window = end, window + 1
    return delivered


@given(
    sizes=st.lists(st.integers(1, 3 * BLOCK), max_size=12),
    parts=st.integers(1, 4),
    phases=st.integers(1, 4),
    part_size=st.integers(1, 5),
    window=st.integers(1, 40),
    remainder=st.sampled_from(["short", "drop", "pad"]),
    epoch=st.integers(0, 3),
)
def test_streams_match_the_plain_definition(
    sizes: list[int], parts: int, phases: int, part_size: int, window: int, remainder: Any, epoch: int
) -> None:
    """Sizes first, then the rows of the epoch are cut, then each window is permuted."""
    batch, positions = parts * part_size, sum(sizes)
    options = LoaderOptions(
        mode="stream", streams=(parts, phases), batch_size=batch, window=window, remainder=remainder, seed=5
    )
    batches = [batch] * (positions // batch)
    if positions % batch and remainder != "drop":
        batches.append(positions % batch)
    sizes_of_parts = [[size // parts + (p < size % parts) for p in range(parts)] for size in batches]
    rows = rows_of_epoch(sizes, options, epoch)
    expected: list[list[list[Row]]] = [[[] for _ in range(parts)] for _ in batches]
    start = 0
    for part, phase in itertools.product(range(parts), range(phases)):
        steps = range(phase, len(batches), phases)
        stop = start + sum(sizes_of_parts[step][part] for step in steps)
        stream = iter(plain_stream(rows, slice(start, stop), options, epoch, part * phases + phase))
        for step in steps:
            expected[step][part] = list(itertools.islice(stream, sizes_of_parts[step][part]))
        start = stop
    schedule = StreamSchedule(sizes, BLOCK, options, epoch)

    def delivered(window: StreamWindow, row: int) -> Row:
        order = schedule.window_order(window)
        return rows[row if order is None else window.start + order[row - window.start]]

    for step, parts_of_step in enumerate(expected):
        assert list(itertools.chain(*parts_of_step)) == [
            delivered(own.window, row)
            for own in schedule.slices_at(step)
            if own.window
            for row in range(own.start, own.stop)
        ]
    assert schedule.steps == len(expected)


def test_the_order_is_pinned(shards: ShardFolder) -> None:
    """If this literal changes, runs cannot be repeated or resumed, and ORDER_VERSION must be increased."""
    rows = np.argsort(shards.splits["train"]["position_id"])
    options: dict[str, Any] = {"mode": "stream", "window": 24, "streams": (2, 2), "batch_size": 8, "seed": 1}
    loader = Loader(shards.path, fields=("position_id",), **options)
    loader.set_epoch(1)
    assert [rows[batch["position_id"]].tolist() for batch in itertools.islice(loader, 3)] == [
        [38, 46, 36, 47, 78, 72, 74, 69],
        [54, 133, 59, 131, 102, 101, 107, 111],
        [34, 42, 45, 33, 125, 127, 71, 68],
    ]


def test_an_invalid_number_of_workers_is_refused(shards: ShardFolder) -> None:
    loader = Loader(shards.path, mode="stream", batch_size=12)
    with pytest.raises(ConfigError, match="number of workers, 3, must divide Q"):
        next(loader._deliveries(0, 3))
