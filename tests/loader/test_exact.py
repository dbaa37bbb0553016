"""Tests of ``hexdata.loader.exact``: the order of exact mode, for any chunk size."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.batch import BatchOptions
from hexdata.loader import exact
from hexdata.loader.exact import SelectedRows
from hexdata.loader.opening import open_shard_rows
from hexdata.loader.options import LoaderOptions
from hexdata.order import shuffle_indices
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.sources import FolderSource

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

IDS = ("position_id",)


def shards_of(folder: ShardFolder, members: tuple[str, ...] = IDS, **options: Any) -> SelectedRows:
    manifest = ShardManifest.load(folder.path)
    return open_shard_rows(
        FolderSource(folder.path), manifest, members, LoaderOptions(**{"batch_size": 12, **options})
    )


def rows_of(folder: ShardFolder, blocks: Any) -> list[list[int]]:
    """Return the rows of the split in each block."""
    row = np.argsort(folder.splits["train"]["position_id"])
    return [row[block["position_id"]].tolist() for block, _ in blocks]


def run(folder: ShardFolder, epoch: int = 0, steps: range | None = None, **options: Any) -> list[list[int]]:
    opened = shards_of(folder, **options).epoch(epoch)
    return rows_of(folder, opened.blocks(range(opened.steps) if steps is None else steps))


def test_the_order_is_pinned(shards: ShardFolder) -> None:
    """If this literal changes, runs cannot be repeated or resumed, and ORDER_VERSION must be increased."""
    assert run(shards, seed=1, batch_size=8)[:3] == [
        [65, 1, 55, 43, 31, 124, 129, 93],
        [78, 130, 71, 64, 119, 105, 17, 4],
        [76, 97, 70, 29, 26, 16, 52, 99],
    ]
    assert run(shards, epoch=1, seed=1, batch_size=8)[0] == [119, 40, 92, 94, 71, 111, 31, 102]


@pytest.mark.parametrize("epoch", [0, 1, 7])
@pytest.mark.parametrize("seed", [0, -3])
def test_the_order_equals_shuffle_indices(shards: ShardFolder, seed: int, epoch: int) -> None:
    expected = shuffle_indices(range(134), seed, epoch)
    assert list(itertools.chain(*run(shards, epoch, seed=seed))) == expected
    assert list(itertools.chain(*run(shards, epoch, seed=seed, shuffle=False))) == list(range(134))


def test_the_order_of_a_selection_equals_shuffle_indices(shards: ShardFolder) -> None:
    moves = shards.splits["train"]["move"]
    rows = [row for row in range(134) if moves[row] != 65_535]
    assert 0 < len(rows) < 134
    found = run(shards, 2, seed=5, batch=BatchOptions(final_policy="skip"))
    assert list(itertools.chain(*found)) == shuffle_indices(rows, 5, 2)


@pytest.mark.parametrize("first", [1, 7, 30])
@pytest.mark.parametrize("largest", [1, 40, 1000])
def test_chunk_sizes_do_not_change_the_order(
    shards: ShardFolder, monkeypatch: pytest.MonkeyPatch, first: int, largest: int
) -> None:
    expected = [run(shards), run(shards, steps=range(1, 12, 3)), run(shards, world_size=3, rank=1)]
    monkeypatch.setattr(exact, "_FIRST_CHUNK", first)
    monkeypatch.setattr(exact, "_LARGEST_CHUNK", largest)
    assert [run(shards), run(shards, steps=range(1, 12, 3)), run(shards, world_size=3, rank=1)] == expected


@pytest.mark.parametrize(("workers", "first"), [(1, 0), (1, 5), (2, 0), (2, 7), (3, 11), (5, 12)])
def test_blocks_are_those_of_the_given_steps(shards: ShardFolder, workers: int, first: int) -> None:
    assert run(shards, steps=range(first, 12, workers)) == run(shards)[first::workers]


def test_ranges_can_be_taken_in_any_order(shards: ShardFolder) -> None:
    whole = shuffle_indices(range(134), 0, 3)
    epoch = shards_of(shards, rank=1, world_size=2).epoch(3)
    ranges = [(130, 134), (0, 2), (0, 0), (134, 134), (60, 134), (1, 2), (2, 4), (0, 134)]
    taken = rows_of(shards, [(block, None) for block in epoch.take(ranges)])
    assert taken == [whole[start:stop] for start, stop in ranges]
    assert list(epoch.take([])) == []


def test_chunks_grow_up_to_the_limit(make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense policies, 100 bytes each, make chunks smaller."""
    monkeypatch.setattr(exact, "_CHUNK_BYTES", 1 << 20)
    folder = make_shards(train=20, dense=True)
    opened = {
        members: open_shard_rows(
            FolderSource(folder.path), ShardManifest.load(folder.path), members, LoaderOptions()
        )
        for members in (("move",), ("move", "policy", "policy_row"))
    }
    sizes = [list(itertools.islice(each.chunk_sizes(), 6)) for each in opened.values()]
    assert sizes == [
        [1_024, 4_096, 16_384, 65_536, 65_536, 65_536],
        [1_024, 4_096, 9_892, 9_892, 9_892, 9_892],  # 2^20 / (2 + 100 + 4)
    ]


def test_padding_repeats_the_first_positions_of_the_epoch(shards: ShardFolder) -> None:
    order = shuffle_indices(range(134), 0, 0)
    ranks = [
        list(
            shards_of(shards, batch_size=7, rank=rank, world_size=4, remainder="pad")
            .epoch(0)
            .blocks(range(5))
        )
        for rank in range(4)
    ]
    assert [mask for steps in ranks for _, mask in steps[:-1]] == [None] * 16
    last = [rows_of(shards, steps[-1:])[0] for steps in ranks]
    masks = [steps[-1][1].tolist() for steps in ranks]
    own = [
        row
        for rows, mask in zip(last, masks, strict=True)
        for row in itertools.compress(rows, (not x for x in mask))
    ]
    repeated = [row for rows, mask in zip(last, masks, strict=True) for row in itertools.compress(rows, mask)]
    assert own == order[112:]
    assert repeated == order[:6]
    assert [sum(mask) for mask in masks] == [1, 1, 2, 2]


def test_padding_may_repeat_a_short_epoch_several_times(make_shards: MakeShards) -> None:
    folder = make_shards(train=3)
    order = shuffle_indices(range(3), 0, 0)
    assert run(folder, batch_size=8, remainder="pad") == [(order * 4)[:3] + (order * 4)[:5]]


def test_an_empty_split_has_no_steps(make_shards: MakeShards) -> None:
    for remainder in ("short", "drop", "pad"):
        opened = shards_of(make_shards(remainder, train=0), remainder=remainder).epoch(0)
        assert opened.steps == 0
        assert list(opened.blocks(range(0))) == []


def test_a_block_does_not_refer_to_its_chunk(shards: ShardFolder) -> None:
    opened = shards_of(shards, ("board", "position_id", "value")).epoch(0)
    for block, _ in opened.blocks(range(opened.steps)):
        for array in block.values():
            owner = array if array.base is None else array.base
            assert owner.nbytes == array.nbytes
            assert array.flags.writeable
