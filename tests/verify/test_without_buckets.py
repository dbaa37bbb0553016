"""Comparison of shards with the positions of a store whose buckets were removed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from hexdata.export import ExportOptions, export_shards
from hexdata.shards.blocks import Block, row_fields
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.verify import verify_store
from hexdata.verify.without_buckets import PlacedRows, are_sorted, divide_shard, find_different, row_digests

if TYPE_CHECKING:
    from tests.conftest import CopyStore, WriteOddStore

SIZES: dict[str, Any] = {"shard_size": 96, "block_size": 32, "workers": 1}
SHUFFLE = ShuffleOptions(seed=7, buckets=5, threads=1)


ALTERATIONS: dict[str, tuple[Callable[[Block], None], str]] = {
    "a number": (lambda block: _add(block["player_to_move"], 1), "a (block|sample) differs"),
    "the last bit": (lambda block: _add(block["value"].view(np.int32), 1), "a (block|sample) differs"),
    "a null": (lambda block: _add(block["game_id"], 1), "a (block|sample) differs"),
    "a target": (lambda block: block["weight"].__setitem__(3, 0.75), "a (block|sample) differs"),
    "a policy": (lambda block: _add(block["policy"], np.float32(0.25)), "a (block|sample) differs"),
    "the row of a policy": (lambda block: _move_policy(block), "a (block|sample) differs"),
    "two rows exchanged": (lambda block: _exchange(block), "not sorted by key"),
    "a position of another split": (lambda block: _add(block["position_id"], 7), "sorted|differs|other"),
}
"""Faults of an exporter, and the messages that they give."""


def _add(values: npt.NDArray[Any], amount: Any) -> None:
    values.flat[3] += amount


def _move_policy(block: Block) -> None:
    """Give the last policy to the first row after it, or before it, that has none."""
    others = np.setdiff1d(np.arange(len(block["move"])), block["policy_row"])
    block["policy_row"][-1] = others[-1]
    block["policy_row"].sort()


def _exchange(block: Block) -> None:
    for name in row_fields(block):
        block[name][[3, 4]] = block[name][[4, 3]]


@pytest.mark.parametrize("layout", ["blocks", "samples"])
@pytest.mark.parametrize("name", ALTERATIONS)
def test_verify_finds_shards_of_other_rows(
    write_odd_store: WriteOddStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, name: str
) -> None:
    """The shards of a broken exporter have valid digests but one altered block."""
    from hexdata.export import shards

    if (name, layout) == ("the row of a policy", "samples"):
        pytest.skip("samples have no policy_row")
    alter, message = ALTERATIONS[name]
    convert, blocks = shards.columns_to_block, itertools.count()
    store = write_odd_store(tmp_path / "store", 900, 3, ("root_value", "weight"))
    shuffle_store(store, SHUFFLE)

    def altering(*arguments: Any) -> Any:
        block = convert(*arguments)
        if next(blocks) == 4:
            block = {field: array.copy() for field, array in block.items()}
            alter(block)
        return block

    with monkeypatch.context() as patch:
        patch.setattr(shards, "columns_to_block", altering)
        export_shards(store, ExportOptions(**SIZES, layout=layout, free_buckets=True))
    failed = [check for check in verify_store(store).checks if not check.ok]
    assert [check.name for check in failed] == ["shards"]
    assert re.search(message, failed[0].detail)
    assert ".tar" in failed[0].detail


def test_verify_finds_rows_exchanged_between_shards(
    odd_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every value is in the shards, but two positions of different shards have each other's values."""
    from hexdata.export import shards

    store, convert, blocks = copy_store(odd_store), shards.columns_to_block, itertools.count()
    shuffle_store(store, SHUFFLE)
    options = ExportOptions(**SIZES, free_buckets=True)
    made: list[Block] = []

    def recording(*arguments: Any) -> Any:
        made.append(convert(*arguments))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(shards, "columns_to_block", recording)
        export_shards(copy_store(store, "recorded"), options)
    boards = made[0]["board"].copy(), made[4]["board"].copy()
    other = int(np.flatnonzero((boards[0][0] != boards[1]).any(axis=1))[0])

    def altering(*arguments: Any) -> Any:
        block, number = convert(*arguments), next(blocks)
        if number in (0, 4):
            block["board"] = block["board"].copy()
            row, value = (0, boards[1][other]) if number == 0 else (other, boards[0][0])
            block["board"][row] = value
        return block

    with monkeypatch.context() as patch:
        patch.setattr(shards, "columns_to_block", altering)
        export_shards(store, options)
    failed = [check for check in verify_store(store).checks if not check.ok]
    assert [check.name for check in failed] == ["shards"]
    assert "differs from the shuffled positions" in failed[0].detail


@pytest.mark.parametrize("sizes", [[0, 40, 0, 0, 61, 7, 0], [0], [130], [1, 1, 1]])
@pytest.mark.parametrize("per_shard", [1, 16, 200])
def test_parts_are_the_rows_between_their_keys(sizes: list[int], per_shard: int) -> None:
    rng = np.random.default_rng(len(sizes))
    rows = [np.sort(rng.choice(1 << 20, size, replace=False)).astype(np.uint64) for size in sizes]
    buckets = np.repeat(np.arange(len(sizes)), sizes)
    keys, digests = np.concatenate(rows), rng.integers(0, 1 << 63, sum(sizes)).astype(np.uint64)
    parts = []
    for number, start in enumerate(range(0, len(keys), per_shard)):
        taken = slice(start, start + per_shard)
        parts += divide_shard(number, start, keys[taken], digests[taken], sizes)
        assert are_sorted(keys[taken], [part for part in parts if part.shard == number])
    assert sum(part.rows for part in parts) == len(keys)

    def placed(order: npt.NDArray[Any], values: npt.NDArray[np.uint64]) -> Iterator[Any]:
        for some in np.array_split(order, 3):
            rows = PlacedRows(pa.table({}), np.full(len(some), 2), buckets[some])
            yield rows, keys[some], values[some]

    order = rng.permutation(len(keys))
    assert find_different({2: parts}, placed(order, digests)) is None
    for row in rng.choice(len(keys), min(len(keys), 5), replace=False):
        other = digests.copy()
        other[row] += np.uint64(1)
        assert find_different({2: parts}, placed(order, other)) == (2, row // per_shard)
        assert find_different({2: parts}, placed(order[order != row], digests)) == (2, row // per_shard)


def test_digests_tell_rows_apart_by_every_byte() -> None:
    fields = {"a": np.arange(12, dtype=np.uint8).reshape(3, 4), "b": np.array([0.0, -0.0, np.nan], "<f4")}
    digests = row_digests(fields)
    assert len(set(digests.tolist())) == 3
    assert row_digests({name: array[1:] for name, array in fields.items()}).tolist() == digests[1:].tolist()
    wider = fields | {"a": fields["a"].astype(np.uint16)}
    renamed = {"a": fields["a"], "c": fields["b"]}
    assert not set(digests.tolist()) & {*row_digests(wider).tolist(), *row_digests(renamed).tolist()}
