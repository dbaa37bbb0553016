"""Verification of the shuffle: rows, order and quality."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from hexdata.errors import StoreError, VerifyError
from hexdata.export import ExportOptions, export_shards
from hexdata.order import derive_key, sort_key
from hexdata.schema import positions_schema
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.manifest import Manifest
from hexdata.verify import VerifyOptions, verify_store
from hexdata.verify.shuffled import check_rows

if TYPE_CHECKING:
    from tests.conftest import CopyStore, WriteOddStore
    from tests.verify.conftest import Edit, Failures, Rewrite

SEED = 7
POSITIONS = "positions/part-000000.parquet"
GAMES = "games/part-000000.parquet"
BUCKET, NEXT_BUCKET = (f"shuffled/train/bucket-00000{i}.parquet" for i in (0, 1))


def by_key(table: pa.Table) -> pa.Table:
    """Put rows into the order of their sort keys."""
    return table.take(np.argsort(sort_key(table["position_id"].to_numpy(), derive_key(SEED, "shuffle"))))


OTHER_VALUES = {
    "position_id": 10_000,
    "game_id": 3,
    "position_in_game": 77,
    "total_positions": 99,
    "board": bytes(7),
    "move": 24,
    "policy": [{"cell": 3, "probability": 0.25}],
    "value": 0.125,
    "player_to_move": 1,
    "value_sample_tier": 3,
    "winner": "RED",
    "metadata": "{}",
}


NULLABLE = [field.name for field in positions_schema(5) if field.nullable]


@pytest.mark.parametrize(
    ("column", "before", "after"),
    [
        *((column, "value", value) for column, value in OTHER_VALUES.items()),
        *((column, "null", OTHER_VALUES[column]) for column in NULLABLE),
        *((column, "value", None) for column in NULLABLE),
    ],
)
def test_one_altered_value_is_found(
    store: Path, column: str, before: str, after: object, rewrite: Rewrite, edit: Edit
) -> None:
    def alter(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        row = next(i for i, v in enumerate(values) if (v is None) == (before == "null") and v != after)
        return edit(table, column, row, after)

    rewrite(store, BUCKET, alter)
    with pytest.raises(VerifyError, match="the bucket contains wrong rows") as caught:
        check_rows(Store.open(store), VerifyOptions())
    assert caught.value.path == str(store / BUCKET)


@pytest.mark.parametrize("policy", [[], [None], [{"cell": 3, "probability": 0.0}]])
def test_an_empty_list_is_no_null(
    store: Path, policy: list[Any], rewrite: Rewrite, failures: Failures, edit: Edit
) -> None:
    row = pc.index(pc.is_null(pq.read_table(store / BUCKET)["policy"]), True).as_py()
    rewrite(store, BUCKET, lambda table: edit(table, "policy", row, policy))
    assert "shuffled rows" in failures(store)


def test_the_sign_of_a_zero_is_found(
    odd_store: Path, copy_store: CopyStore, rewrite: Rewrite, failures: Failures, edit: Edit
) -> None:
    store = copy_store(odd_store)
    zero, negative = ({"cell": 3, "probability": value} for value in (0.0, -0.0))

    def with_zeros(table: pa.Table) -> pa.Table:
        return edit(edit(table, "value", 0, 0.0), "policy", 0, [zero])

    rewrite(store, POSITIONS, with_zeros)
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=1))
    found = pq.read_table(store / BUCKET)
    row = found["value"].to_pylist().index(0.0)
    for column, value in (("value", -0.0), ("policy", [negative])):
        assert failures(store) == {}
        rewrite(store, BUCKET, lambda table, column=column, value=value: edit(table, column, row, value))
        assert "shuffled rows" in failures(store)
        rewrite(store, BUCKET, lambda table: found)


def test_values_swapped_between_rows_are_found(
    store: Path, rewrite: Rewrite, failures: Failures, edit: Edit
) -> None:
    one, other = pq.read_table(store / BUCKET)["value"].to_pylist()[3:5]
    rewrite(store, BUCKET, lambda table: edit(edit(table, "value", 3, other), "value", 4, one))
    assert "shuffled rows" in failures(store)


def test_two_positions_swapped_in_a_bucket_are_found(
    store: Path, rewrite: Rewrite, failures: Failures
) -> None:
    rewrite(store, BUCKET, lambda table: table.take([1, 0, *range(2, len(table))]))
    assert list(failures(store)) == ["shuffled order", "shards"]
    assert BUCKET in failures(store)["shuffled order"]


def test_a_position_held_twice_is_found(store: Path, rewrite: Rewrite, failures: Failures) -> None:
    rewrite(store, BUCKET, lambda table: table.take([0, 0, *range(2, len(table))]))
    assert list(failures(store)) == ["shuffled rows", "shuffled order", "shards"]


def test_a_position_in_the_wrong_bucket_is_found(store: Path, rewrite: Rewrite, failures: Failures) -> None:
    moved = pq.read_table(store / BUCKET)[-1:]
    rewrite(store, BUCKET, lambda table: table[:-1])
    rewrite(store, NEXT_BUCKET, lambda table: pa.concat_tables([moved, table]))
    assert list(failures(store)) == ["shuffled rows"]


def test_positions_swapped_between_buckets_are_found(
    store: Path, rewrite: Rewrite, failures: Failures
) -> None:
    """As many rows in each bucket as before, and each in the order of its keys."""
    one, other = pq.read_table(store / BUCKET), pq.read_table(store / NEXT_BUCKET)
    rewrite(store, BUCKET, lambda table: by_key(pa.concat_tables([table[1:], other[:1]])))
    rewrite(store, NEXT_BUCKET, lambda table: by_key(pa.concat_tables([table[1:], one[:1]])))
    found = failures(store)
    assert list(found) == ["shuffled rows", "shards"]
    assert "changed or from other buckets" in found["shuffled rows"]


def test_a_bucket_of_another_seed_is_found(
    exported: Path, store: Path, copy_store: CopyStore, rewrite: Rewrite, failures: Failures
) -> None:
    other = copy_store(exported, "other")
    shuffle_store(other, ShuffleOptions(seed=SEED + 1, buckets=3))
    rewrite(store, BUCKET, lambda table: pq.read_table(other / BUCKET))
    assert list(failures(store))[:2] == ["shuffled rows", "shuffled order"]


def test_a_shuffle_of_another_seed_than_stated_is_found(store: Path, failures: Failures) -> None:
    """Buckets and shards are what a run wrote; only the seed in the manifest is another."""
    manifest = Manifest.load(store)
    manifest.stages["shuffle"]["seed"] = SEED + 1
    manifest.save(store)
    assert list(failures(store))[:2] == ["shuffled rows", "shuffled order"]


def test_a_position_in_the_wrong_split_is_found(store: Path, rewrite: Rewrite, failures: Failures) -> None:
    """The order of keys, all counts and the shards are made consistent."""
    moved = pq.read_table(store / BUCKET)[:1]

    rewrite(store, BUCKET, lambda table: table[1:])
    rewrite(
        store,
        "shuffled/val/bucket-000000.parquet",
        lambda table: by_key(pa.concat_tables([table, moved])),
    )
    manifest = Manifest.load(store)
    manifest.stages["shuffle"]["splits"]["train"] -= 1
    manifest.stages["shuffle"]["splits"]["val"] += 1
    del manifest.stages["export"]
    manifest.save(store)
    export_shards(store, ExportOptions(shard_size=192, block_size=32, workers=1))
    assert list(failures(store)) == ["shuffled rows"]


# --- choices ------------------------------------------------------------------------------------------

CHOICES: dict[str, dict[str, Any]] = {
    "where": {"where": "position_in_game > 4"},
    "per game": {"per_game": 7},
    "balanced": {"balance_by": "winner"},
    "stratified": {"stratify_by": "player_to_move"},
    "whole games": {"assign": "game"},
    "all at once": {"where": "value > 0.1", "dedup": "symmetric", "per_game": 9, "stratify_by": "length"},
}


@pytest.fixture(scope="module", params=CHOICES)
def chosen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, odd_store: Path) -> Path:
    """The odd store, shuffled with some choices. Read only: copy it."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("chosen") / "store")
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3, **CHOICES[request.param]))
    return store


def test_a_shuffle_of_a_choice_passes(chosen: Path) -> None:
    result = verify_store(chosen)
    result.require()
    assert result.quality is not None
    stage = Manifest.load(chosen).stages["shuffle"]
    assert stage["choices"]
    counted = Manifest.load(chosen).counts["positions"]
    assert stage["positions"] + sum(stage["left_out"].values()) == counted


def test_a_choice_that_is_not_stated_is_found(
    chosen: Path, copy_store: CopyStore, failures: Failures
) -> None:
    store = copy_store(chosen)
    manifest = Manifest.load(store)
    manifest.stages["shuffle"]["choices"] = {}
    manifest.save(store)
    assert "shuffled rows" in failures(store)


DAMAGES: dict[str, Callable[[pa.Table, pa.Table], tuple[pa.Table, pa.Table]]] = {
    "moved": lambda one, other: (one[1:], by_key(pa.concat_tables([other, one[:1]]))),
    "swapped": lambda one, other: (
        by_key(pa.concat_tables([one[1:], other[:1]])),
        by_key(pa.concat_tables([other[1:], one[:1]])),
    ),
    "repeated": lambda one, other: (by_key(pa.concat_tables([one, one[:1]])), other[1:]),
    "lost": lambda one, other: (one[:-1], other),
}


@pytest.mark.parametrize(("choice", "damage"), list(zip(CHOICES, cycle(DAMAGES), strict=False)))
def test_a_damaged_choice_is_found(
    odd_store: Path, copy_store: CopyStore, rewrite: Rewrite, failures: Failures, choice: str, damage: str
) -> None:
    store = copy_store(odd_store)
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3, **CHOICES[choice]))
    tables = DAMAGES[damage](pq.read_table(store / BUCKET), pq.read_table(store / NEXT_BUCKET))
    for name, table in zip((BUCKET, NEXT_BUCKET), tables, strict=True):
        rewrite(store, name, lambda _, table=table: table)
    assert "shuffled rows" in failures(store)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("left_out", {"where": 3}, "shuffle stage"),
        ("choices", {"per_game": "1"}, "per_game cannot be used; found '1'"),
        ("choices", {"where": 1}, "where cannot be used; found 1"),
        ("rejected", 1, "shuffle stage"),
        ("choices", {"per_game": 0}, "per_game"),
        ("splits", {"train": 1}, "wrong splits"),
        ("buckets", {"train": 2, "val": 1, "test": 1}, "the split train has other buckets"),
    ],
)
def test_a_lineage_that_says_otherwise_is_found(
    store: Path, failures: Failures, entry: str, value: object, message: str
) -> None:
    manifest = Manifest.load(store)
    manifest.stages["shuffle"][entry] = value
    manifest.save(store)
    check, said = next(iter(failures(store).items()))
    assert message in f"{check}: {said}"


@pytest.mark.parametrize("entry", ["seed", "choices", "left_out", "splits", "buckets", "rejected"])
def test_a_lineage_that_lacks_something_is_refused(store: Path, entry: str) -> None:
    manifest = Manifest.load(store)
    del manifest.stages["shuffle"][entry]
    manifest.save(store)
    with pytest.raises(StoreError, match=f"lacks the key stages.shuffle.{entry}"):
        verify_store(store)


# --- quality ------------------------------------------------------------------------------------------


def test_a_shuffle_that_does_not_mix_is_found(
    tmp_path: Path, write_odd_store: WriteOddStore, rewrite: Rewrite, failures: Failures
) -> None:
    """A store whose games are just those that its shuffle puts side by side: in order, and not mixed."""
    store = write_odd_store(tmp_path / "store", 2_000, 1)
    rank = np.argsort(np.argsort(sort_key(np.arange(2_000), derive_key(SEED, "shuffle"))))
    games = pq.read_table(store / GAMES)

    def regroup(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index("game_id")
        return table.set_column(at, table.schema.field(at), pa.array(rank // 20))

    def all_train(table: pa.Table) -> pa.Table:
        first = games.slice(0, 1).to_pylist()[0]
        made = [
            {
                **first,
                "game_id": game,
                "positions": 20,
                "split": "train",
                "game_hash": bytes([0x40 + game] * 16),
            }
            for game in range(100)
        ]
        return pa.Table.from_pylist(made, schema=table.schema)

    rewrite(store, POSITIONS, regroup)
    rewrite(store, GAMES, all_train)
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=2))
    found = failures(store, quality=True)
    assert list(found) == ["shuffle quality"]
    assert "neighbours of the same game, lag 1: 0.9505, expected 0.009505" in found["shuffle quality"]
    shuffle_store(store, ShuffleOptions(seed=SEED + 1, buckets=2))
    assert failures(store, quality=True) == {}


def test_the_figures_come_with_the_result(store: Path) -> None:
    result = verify_store(store)
    assert result.quality is not None
    assert result.quality.ok
    detail = next(check.detail for check in result.checks if check.name == "shuffle quality")
    assert "figures of the train split agree with a random order, within" in detail


def hexdata_verify(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hexdata", "verify", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_shows_the_figures(store: Path) -> None:
    done = hexdata_verify(store, "--memory", "500MB", "--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line[:33]: line for line in done.stdout.splitlines()}
    head = next(line for line in done.stdout.splitlines() if line.startswith("shuffle of the train split"))
    assert head.split()[5:] == ["status", "before", "after", "expected", "s.d.", "deviation", "note"]
    assert "s.d." in lines["same-game pairs in a batch of 256"]
    done = hexdata_verify(store, "--json")
    facts = json.loads(done.stdout)
    assert facts["ok"]
    figures = {figure["name"]: figure for figure in facts["quality"]["figures"]}
    assert figures["batch-256"]["before"] > figures["batch-256"]["after"] > 0
    assert abs(figures["batch-256"]["z"]) < 5 < figures["batch-256"]["bound"]


def test_too_little_memory_names_options_that_exist(store: Path) -> None:
    done = hexdata_verify(store, "--memory", "100MB", "--threads", "2")
    assert done.returncode == 1
    assert "too little memory to verify with 2 threads" in done.stderr
    assert "Raise --memory, or lower --threads." in done.stderr
