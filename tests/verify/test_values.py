"""Values that no position and no game has, under digests that agree with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.errors import StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.altered_shards import alter_bytes, set_header

if TYPE_CHECKING:
    import pyarrow as pa

    from .conftest import Edit, Failures, Rewrite

PART = "positions/part-000000.parquet"


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("board", b"\xff" * 7, "row 3: .*found board the board ffffffffffffff"),
        ("move", 25, "row 3: .*found move 25; expected a number from 0 to 24"),
        ("move", 65535, "row 3: .*found move 65535; expected null"),
        ("value", 7.0, "row 3: .*found value 7"),
        ("value", float("nan"), "row 3: .*found value nan"),
        ("player_to_move", 9, "row 3: .*found player_to_move 9"),
        ("value_sample_tier", 200, "row 3: .*found value_sample_tier 200"),
        ("policy", [{"cell": 0, "probability": -1.0}], "row 3: .*cell 0 with -1.0"),
        ("policy", [{"cell": 25, "probability": 1.0}], "row 3: .*found .*cell 25"),
        ("policy", [{"cell": 4, "probability": 1.0}] * 2, "row 3: .*ascending"),
        ("policy", [{"cell": 4, "probability": None}], "row 3: .*null"),
        ("winner", "GREEN", "row 3: .*found winner 'GREEN'"),
        ("metadata", "{not JSON", "row 3: .*found metadata '{not JSON'"),
        ("metadata", "[" * 100_000, "row 3: .*found metadata"),
    ],
)
def test_values_that_no_position_has(
    store: Path, rewrite: Rewrite, edit: Edit, failures: Failures, column: str, value: Any, message: str
) -> None:
    rewrite(store, PART, lambda table: edit(table, column, 3, value))
    failed = failures(store)
    assert "position values" in failed
    assert re.search(message, failed["position values"])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("split", "bogus"),
        ("moves", [1, 1, 1, 1]),
        ("moves", [25]),
        ("duplicate_of", -7),
        ("first_player", 2),
        ("end_reason", "draw"),
        ("swap", "seats"),
    ],
)
def test_values_that_no_game_has(
    store: Path, rewrite: Rewrite, edit: Edit, failures: Failures, column: str, value: Any
) -> None:
    name = min(path.name for path in (store / "games").iterdir())
    rewrite(store, f"games/{name}", lambda table: edit(table, column, 1, value))
    assert f"game 1: the table contains an invalid value; found {column}" in failures(store)["game values"]


@pytest.mark.parametrize(
    ("duplicates", "wrong"),
    [
        ([None, 0, 0], None),
        ([None, 0, None], "game 2: .*found duplicate_of null"),
        ([None, 0, 1], "game 2: .*found duplicate_of 1"),
        ([None, 0, 2], "game 2: .*found duplicate_of 2"),
        ([None, 0, 5], "game 2: .*found duplicate_of 5"),
        ([None, 0, 10**6], "game 2: .*found duplicate_of 1000000"),
        ([0, None, 0], "game 0: .*found duplicate_of 0"),
        ([0, 0, 0], "game 0: .*found duplicate_of 0"),
        ([1, None, 1], "game 0: .*found duplicate_of 1"),
        ([None, None, None], "game 1: .*found duplicate_of null"),
    ],
)
def test_duplicates_name_the_first_game_of_their_hash(
    store: Path,
    rewrite: Rewrite,
    edit: Edit,
    failures: Failures,
    duplicates: list[int | None],
    wrong: str | None,
) -> None:
    def repeat_game(table: pa.Table) -> pa.Table:
        first = {name: table[name][0].as_py() for name in ("game_hash", "split")}
        for row, duplicate in enumerate(duplicates):
            for name, value in {**first, "duplicate_of": duplicate}.items():
                table = edit(table, name, row, value)
        return table

    name = min(path.name for path in (store / "games").iterdir())
    rewrite(store, f"games/{name}", repeat_game)
    failed = failures(store)
    assert ("game values" in failed) == (wrong is not None)
    if wrong is not None:
        assert re.search(wrong, failed["game values"])


def test_export_refuses_what_no_position_has(store: Path, rewrite: Rewrite, edit: Edit) -> None:
    bucket = min((store / "shuffled" / "train").iterdir()).name
    rewrite(store, f"shuffled/train/{bucket}", lambda table: edit(table, "value", 3, 7.0))
    with pytest.raises(StoreError, match=r"found value 7\.0; expected a number from 0 to 1"):
        export_shards(store, ExportOptions(shard_size=96, block_size=32, workers=1))


def test_shuffle_refuses_what_no_position_has(store: Path, rewrite: Rewrite, edit: Edit) -> None:
    rewrite(store, PART, lambda table: edit(table, "value", 3, 7.0))
    with pytest.raises(StoreError, match=r"position 3: .*found value 7\.0; expected a number from 0 to 1"):
        shuffle_store(store, ShuffleOptions(seed=11, buckets=3))


@pytest.mark.parametrize("size", [2**60, 2**63])
def test_a_shard_of_a_huge_size_field_is_named(store: Path, failures: Failures, size: int) -> None:
    shard = "train-000000.tar"
    field = b"\x80" + size.to_bytes(11, "big")
    alter_bytes(store / "shards", shard, lambda data: set_header(data, 0, 124, field))
    failed = failures(store)
    assert list(failed) == ["shards"]
    assert shard in failed["shards"]
