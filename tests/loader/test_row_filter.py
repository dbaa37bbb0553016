"""Tests of ``hexdata.loader.row_filter`` against plain Python over the labels in the shards."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.batch import BatchOptions
from hexdata.errors import ConfigError, FormatError
from hexdata.loader.options import LoaderOptions
from hexdata.loader.row_filter import RowSubset, select_rows
from hexdata.schema import NO_MOVE
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.mapped import MappedShards
from hexdata.shards.sources import FolderSource

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

SKIP = BatchOptions(final_policy="skip")


def select(folder: ShardFolder, **options: Any) -> list[int] | None:
    shards = MappedShards(FolderSource(folder.path), ShardManifest.load(folder.path), "train")
    subset = select_rows(shards, LoaderOptions(**options))
    return None if subset is None else subset.rows(np.arange(len(subset))).tolist()


def labels_of(folder: ShardFolder) -> list[dict[str, Any]]:
    """Return the labels of each row as in SQL: None instead of sentinels."""
    source = folder.splits["train"]
    nulls = {"game_id": -1, "move": 65_535, "position_in_game": 65_535, "value_sample_tier": 255}
    return [
        {name: None if value == nulls.get(name) else value for name, value in row.items()}
        for row in (
            {name: array[number].item() for name, array in source.items() if array.ndim == 1}
            for number in range(len(source["move"]))
        )
    ]


@given(st.sets(st.integers(0, 400_000), max_size=60), st.lists(st.integers(0, 400_000), max_size=4))
def test_a_subset_returns_its_rows(chosen: set[int], cuts: list[int]) -> None:
    rows = sorted(chosen)
    bounds = [0, *sorted(cuts), 400_001]
    arrays = [
        np.array([row for row in rows if start <= row < stop], np.int64)
        for start, stop in itertools.pairwise(bounds)
    ]
    subset = RowSubset(arrays)
    assert len(subset) == len(rows)
    assert subset.rows(np.arange(len(rows))).tolist() == rows
    assert subset.rows(np.arange(len(rows))[::-1]).tolist() == rows[::-1]
    assert subset.digest == RowSubset([np.array(rows, np.int64)]).digest


def test_other_rows_have_other_digests() -> None:
    sets = [[], [0], [1], [0, 1], [65_536], [1, 65_536], [65_537], [131_073]]
    assert len({RowSubset([np.array(rows, np.int64)]).digest for rows in sets}) == len(sets)


def test_a_subset_takes_two_bytes_per_row() -> None:
    subset = RowSubset(np.arange(start, start + 10**6) for start in range(0, 10**7, 10**6))
    arrays = [value for value in vars(subset).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 2.01 * 10**7
    assert subset.rows(np.array([0, 10**7 - 1, 65_536])).tolist() == [0, 10**7 - 1, 65_536]


def test_default_options_select_all_rows(shards: ShardFolder) -> None:
    assert select(shards) is None


CONDITIONS: list[tuple[str, Any]] = [
    ("value_sample_tier < 2", lambda row: row["value_sample_tier"] < 2),
    ("move IS NULL", lambda row: row["move"] is None),
    ("move % 2 = 0", lambda row: row["move"] is not None and row["move"] % 2 == 0),
    ("value = 1 AND player_to_move = 0", lambda row: row["value"] == 1 and row["player_to_move"] == 0),
    (
        "game_id IN (1, 5) OR position_in_game >= 7",
        lambda row: row["game_id"] in (1, 5) or row["position_in_game"] >= 7,
    ),
    (
        "position_id < 20 OR total_positions = 12",
        lambda row: row["position_id"] < 20 or row["total_positions"] == 12,
    ),
    (
        "position_in_game - total_positions < -3",  # negative, unlike every label
        lambda row: (
            None not in (row["position_in_game"], row["total_positions"])
            and row["position_in_game"] - row["total_positions"] < -3
        ),
    ),
    ("move * move * move > 1000 -- more than 16 bits", lambda row: (row["move"] or 0) ** 3 > 1000),
    ("1 = 1", lambda row: True),
]


@pytest.mark.parametrize(("where", "matches"), CONDITIONS)
@pytest.mark.parametrize("cuts", [(), (3, 37)])
def test_where_selects_the_matching_rows(
    make_shards: MakeShards, where: str, matches: Any, cuts: tuple[int, ...]
) -> None:
    folder = make_shards(train=134, cuts=cuts)
    expected = [number for number, row in enumerate(labels_of(folder)) if matches(row)]
    assert expected
    assert select(folder, where=where) == expected


def test_only_the_labels_in_the_condition_are_checked(make_shards: MakeShards) -> None:
    folder = make_shards(train=40)
    path = folder.path / "train-000001.tar"
    data = bytearray(path.read_bytes())
    start = data.index(b"000003.move.npy") + 640
    data[start : start + 2] = b"\x19\x00"  # cell 25 of a board that has 25
    path.write_bytes(data)
    assert select(folder, where="value = 1") == np.flatnonzero(folder.splits["train"]["value"] == 1).tolist()
    with pytest.raises(
        FormatError,
        match=r"000003\.move\.npy row 0: .*found 25; expected a number from 0 to 24",
    ):
        select(folder, where="value = 1 AND move > 0")


@pytest.mark.parametrize("games", [1, 3, 8, 9, 10, 1000])
def test_newest_selects_the_games_with_the_highest_ids(make_shards: MakeShards, games: int) -> None:
    folder = make_shards(train=134)
    ids = folder.splits["train"]["game_id"]
    newest = sorted(set(ids.tolist()))[-games:]
    assert select(folder, newest=games) == [row for row in range(134) if ids[row] in newest]


def test_newest_does_not_select_positions_of_unknown_games(make_shards: MakeShards) -> None:
    folder = make_shards(train=40)
    manifest = ShardManifest.load(folder.path)
    for shard in manifest.splits["train"]:
        data = bytearray((folder.path / shard.name).read_bytes())
        for offset in shard.offsets["game_id"]:
            data[offset : offset + 16] = b"\xff" * 16  # the first two of each block
        (folder.path / shard.name).write_bytes(data)
    known = [row for row in range(40) if row % 8 > 1]
    assert select(folder, newest=1000) == known
    assert select(folder, where="game_id IS NOT NULL") == known


@pytest.mark.parametrize("dense", [False, True])
def test_final_policy_skip_selects_positions_with_a_policy(make_shards: MakeShards, dense: bool) -> None:
    folder = make_shards(train=134, dense=dense)
    moves = folder.splits["train"]["move"]
    expected = [row for row in range(134) if moves[row] != NO_MOVE or (dense and row % 3 == 0)]
    assert select(folder, batch=SKIP) == expected


def test_several_options_select_their_intersection(make_shards: MakeShards) -> None:
    folder = make_shards(train=134)
    parts = [{"where": "value = 1"}, {"newest": 4}, {"batch": SKIP}]
    expected = set.intersection(*(set(select(folder, **part) or ()) for part in parts))
    assert select(folder, where="value = 1", newest=4, batch=SKIP) == sorted(expected)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("tier < 2", r"no column .tier.; found tier < 2; expected one of .*game_id, .*move, "),
        ("value <", "where: syntax error"),
        ("board IS NULL", "no column 'board'"),
        ("_row < 10", "no column '_row'"),
        ("move", "where is not a condition; found BIGINT from move; expected BOOLEAN"),
        ("random() < 0.5", "random: its value may differ between runs"),
        ("position_id > (SELECT avg(position_id) FROM labels)", "contains a subquery"),
        ("1 = 1); SELECT 0 AS _row WHERE (1 = 1", "where: "),
        ("value > 2", r"the options select no position of train; found where='value > 2'"),
    ],
)
def test_an_invalid_condition_is_refused(shards: ShardFolder, where: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select(shards, where=where)


def test_a_condition_that_fails_for_a_position_is_an_error(shards: ShardFolder) -> None:
    with pytest.raises(ConfigError, match="where fails for a position: Conversion Error"):
        select(shards, where="(value::TEXT || 'x')::INTEGER = 1")
