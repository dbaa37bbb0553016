"""Results of a shuffle agree with the definition for any buckets, threads and memory; its plan."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import BudgetError, StoreError
from hexdata.export import export_shards
from hexdata.options import MINIMUM_MEMORY
from hexdata.order import derive_key, sort_key
from hexdata.schema import SPLITS, positions_schema
from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store, sort
from hexdata.shuffle.plan import SortLimits
from hexdata.store import Store
from hexdata.verify import verify_store
from tests.kit.whole import SHUFFLE, STAGES
from tests.verify.altered import Altered

SEED = 7
GRID: dict[str, dict[str, Any]] = {
    "one bucket": {"buckets": 1, "threads": 1},
    "3 buckets": {"buckets": 3, "threads": 2},
    "3 buckets, 2 passes": {"buckets": 3, "threads": 1, "passes": 2},
    "3 buckets, least memory": {
        "buckets": 3,
        "threads": 2,
        "memory": MINIMUM_MEMORY,
        "passes": 3,
        "most_rows": 30,
    },
    "40 buckets, 7 passes": {"buckets": 40, "threads": 2, "passes": 7},
    "as many buckets as there are by default": {"threads": 2},
    "games": {"buckets": 3, "threads": 1, "assign": "game"},
    "games, 3 passes": {"buckets": 3, "threads": 2, "assign": "game", "passes": 3, "most_rows": 30},
    "games in many buckets, 9 passes": {"buckets": 40, "threads": 2, "assign": "game", "passes": 9},
    "strata": {"buckets": 3, "threads": 1, "stratify_by": "length"},
    "strata, 3 passes": {"buckets": 3, "threads": 2, "stratify_by": "length", "passes": 3, "most_rows": 30},
}
SAME_BYTES = [("3 buckets", "3 buckets, 2 passes", "3 buckets, least memory"), ("games", "games, 3 passes")]
SAME_BYTES.append(("strata", "strata, 3 passes"))
TARGETS = ("extra.odd", "extra.temperature", "root_value", "visits", "weight")
"""Optional columns of the positions. The second of the three parts has none of them."""


def read(store, folder):
    """Return the concatenated rows of all files of a folder."""
    tables = [pq.read_table(path) for path in Store.open(store).files(folder)]
    return pa.concat_tables(tables, promote_options="default")


def plain_shuffle(store):
    """The definition: the positions of each split, sorted by key."""
    positions, games = read(store, "positions"), read(store, "games")
    split_of = dict(zip(games["game_id"].to_pylist(), games["split"].to_pylist(), strict=True))
    split = np.array([split_of.get(game, "train") for game in positions["game_id"].to_pylist()])
    order = np.argsort(sort_key(positions["position_id"].to_numpy(), derive_key(SEED, "shuffle")))
    return {name: positions.take(order[split[order] == name]) for name in SPLITS if (split == name).any()}


def plain_buckets_of_games(store, buckets):
    """The definition for whole games: the training positions by bucket of their game, then by key."""
    train = plain_shuffle(store)["train"]
    key = sort_key(train["position_id"].to_numpy(), derive_key(SEED, "shuffle")).tolist()
    games, game_key = train["game_id"].to_pylist(), derive_key(SEED, "shuffle-games")
    own = [k if game is None else int(sort_key(game, game_key)) for game, k in zip(games, key, strict=True)]
    return train.take(sorted(range(len(key)), key=lambda i: ((own[i] * buckets) >> 64, key[i])))


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory, write_odd_store):
    """Return ``shuffled(name)``: the odd store, shuffled with options of ``GRID`` in its number of passes."""
    folder = tmp_path_factory.mktemp("grid")
    converted, made = write_odd_store(folder / "converted", 900, 3, TARGETS), {}

    def shuffle(name):
        if name not in made:
            made[name] = shutil.copytree(converted, folder / f"{len(made)}")
            options = dict(GRID[name])
            passes = options.pop("passes", 1)
            with pytest.MonkeyPatch.context() as patch:  # as many as a small disk needs, or wide rows
                patch.setattr(SortLimits, "most_rows", options.pop("most_rows", None))
                patch.setattr(SortLimits, "count_passes", lambda *given: min(passes, given[-1] or 1))
                shuffle_store(made[name], ShuffleOptions(seed=SEED, **options))
        return made[name]

    return shuffle


@pytest.mark.parametrize(
    "name", [name for name, asked in GRID.items() if not {"assign", "stratify_by"} & asked.keys()]
)
def test_the_rows_agree_with_the_definition(shuffled, name):
    plain = plain_shuffle(shuffled(name))
    assert set(plain) == set(SPLITS)
    for split, expected in plain.items():
        found = read(shuffled(name), f"shuffled/{split}")
        assert found.schema.equals(positions_schema(5, TARGETS))
        assert repr(found.to_pylist()) == repr(expected.to_pylist())  # -0.0 is not 0.0
        assert len(set(found["extra.odd"].to_pylist())) == 4
        assert found["root_value"].null_count > found.num_rows / 3


@pytest.mark.parametrize("name", ["games", "games in many buckets, 9 passes"])
def test_whole_games_are_assigned_to_buckets(shuffled, name):
    expected = plain_buckets_of_games(shuffled(name), GRID[name]["buckets"])
    assert read(shuffled(name), "shuffled/train").to_pylist() == expected.to_pylist()


@pytest.mark.parametrize("names", SAME_BYTES, ids=lambda names: names[0])
def test_memory_threads_and_passes_do_not_change_the_bytes(shuffled, store_bytes, names):
    found = [store_bytes(shuffled(name) / "shuffled") for name in names]
    assert found[0]
    assert all(other == found[0] for other in found)
    stages = [Store.open(shuffled(name)).manifest.stages["shuffle"] for name in names]
    assert all(other == stages[0] for other in stages)


@pytest.mark.parametrize("buckets", [None, 5])
def test_one_position(tmp_path, write_odd_store, buckets):
    store = write_odd_store(tmp_path / "store", 1, 1)
    result = shuffle_store(store, ShuffleOptions(buckets=buckets))
    assert (result.positions, result.splits, result.buckets) == (1, {"train": 1}, {"train": buckets or 1})
    assert read(store, "shuffled/train").to_pylist() == read(store, "positions").to_pylist()
    export_shards(store)
    verify_store(store).require()


# --- again, and otherwise -----------------------------------------------------------------------------


def times(store):
    return {p: p.stat().st_mtime_ns for p in store.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize("other", [{"seed": 8, "replace": False}, {"buckets": 2, "replace": True}])
def test_another_shuffle_replaces_the_first(whole_store, trmph_store, copy_store, store_bytes, other):
    store, fresh = copy_store(whole_store), copy_store(trmph_store, "fresh")
    options = replace(SHUFFLE, **other)
    assert not shuffle_store(store, options).already_done
    for folder in ("shards", "pickles/shuffled"):
        assert (store / folder).exists() != options.replace
        assert options.replace or store_bytes(store / folder) == store_bytes(whole_store / folder)
    shuffle_store(fresh, options)
    for run in ("shards", "original", "shuffled"):
        STAGES[run](store)
        STAGES[run](fresh)
    assert store_bytes(store) == store_bytes(fresh)


def test_the_seed_of_a_shuffle_is_kept(trmph_store, copy_store):
    store = copy_store(trmph_store)
    assert shuffle_store(store).seed == 0
    shuffle_store(store, ShuffleOptions(seed=SEED))
    assert plan_shuffle(store, ShuffleOptions(buckets=2)).seed == SEED
    result = shuffle_store(store, ShuffleOptions(buckets=2))
    assert (result.seed, result.already_done) == (SEED, False)
    assert shuffle_store(store, ShuffleOptions(buckets=2)).already_done


def test_out_of_memory_is_reported_and_finished_work_is_kept(odd_store, copy_store, monkeypatch):
    store, original = copy_store(odd_store), sort.write_parquet
    options = ShuffleOptions(buckets=3, threads=1)

    def short(path, schema, tables, *, replace):
        if path.name == "bucket-000002.parquet":
            raise MemoryError("malloc of size 7 failed")
        return original(path, schema, tables)

    with monkeypatch.context() as patch:
        patch.setattr(sort, "write_parquet", short)
        with pytest.raises(BudgetError, match=r"out of its memory.*; found malloc .*Raise --memory"):
            shuffle_store(store, options)
    assert shuffle_store(store, options).resumed == 2
    verify_store(store).require()


def test_a_lost_position_is_never_published(odd_store, copy_store, monkeypatch):
    store, original = copy_store(odd_store), sort.write_parquet

    def lossy(path, schema, tables, *, replace):
        return original(path, schema, (table[1:] for table in tables))

    with monkeypatch.context() as patch:
        patch.setattr(sort, "write_parquet", lossy)
        with pytest.raises(StoreError, match=r"every position; found .*759.*; expected .*760"):
            shuffle_store(store)
    assert "shuffle" not in Store.open(store).manifest.stages
    assert shuffle_store(store).resumed == 0
    verify_store(store).require()


def test_an_invalid_position_is_named(odd_store, copy_store):
    store = Altered(copy_store(odd_store))
    store.cell("positions/part-000000.parquet", "winner", 3, "GREEN")
    with pytest.raises(StoreError, match=r"position 3: .*expected BLUE, RED or null"):
        shuffle_store(store.path)


# --- the plan -----------------------------------------------------------------------------------------


def test_a_plan_writes_nothing_and_predicts_the_shuffle(trmph_store, copy_store):
    store = copy_store(trmph_store)
    before, plan = times(store), plan_shuffle(store, SHUFFLE)
    assert times(store) == before
    made = STAGES["shuffle"](store)
    assert (plan.rows, plan.buckets, plan.left_out) == (made.splits, made.buckets, made.left_out)
    assert (plan.seed, plan.already_done, plan.buckets_done, plan.threads) == (5, False, 0, 1)
    assert made.bytes < plan.bucket_bytes < 3 * made.bytes
    assert (plan.passes, plan.spill_bytes, plan.memory) == (1, 0, 1_000_000_000)


MB, GB = 10**6, 10**9


@pytest.mark.parametrize(
    ("limits", "sorted_rows", "passes"),
    [
        ((1_000 * MB, 2, 500), (3 * MB, 10 * MB, 9), 3),  # each fits into 60 % of the memory
        ((1_000 * MB, 2, 500), (3 * MB, 10 * MB, 2), 2),  # at most one pass for each bucket
        ((600 * MB, 2, 100), (90 * MB, 16 * GB, 99), 1),  # the disk and the memory have enough for one
        ((600 * MB, 2, 100), (90 * MB, 8 * GB, 99), 2),  # temporary files take at most 80 % of the free disk
        ((600 * MB, 4, 100), (900 * MB, 900 * GB, 999), 17),  # the memory merges 5 GB
        ((600 * MB, 1, 5_000), (MB, 900 * GB, 1), 14),  # it merges no rows of this size
    ],
)
def test_the_number_of_passes(limits, sorted_rows, passes):
    assert SortLimits(*limits).count_passes(*sorted_rows) == passes


def test_a_budget_without_memory_to_sort_wide_rows_is_refused():
    assert SortLimits.of(660 * MB, 2, 3_500, 3_000).memory > 100 * MB
    with pytest.raises(BudgetError) as raised:
        SortLimits.of(570 * MB, 2, 3_500, 3_000)
    assert (raised.value.found, raised.value.expected) == ("570 MB", "at least 632 MB")
