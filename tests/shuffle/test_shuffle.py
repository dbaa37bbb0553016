"""Results of a shuffle agree with the definition for any buckets, threads and memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import BudgetError, StoreError, StoreLockedError
from hexdata.export import ExportOptions, export_shards
from hexdata.order import bucket_bounds, derive_key, sort_key
from hexdata.progress import Silent
from hexdata.schema import SPLITS, positions_schema
from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store, sort
from hexdata.shuffle.options import MINIMUM_MEMORY
from hexdata.store import Store
from hexdata.store.files import FileFacts
from hexdata.store.manifest import Manifest
from hexdata.verify import verify_store
from tests.pairs import FULL
from tests.shuffle.shuffle_script import sort_in_passes

if TYPE_CHECKING:
    from tests.conftest import CopyStore, DemoTrmph, StoreBytes, WriteOddStore

SEED = 7
NAMES = ["it's [a]*? {b}", "split=train", '盤 "ø"; --']
"""Names of stores with characters that are special in SQL, patterns and paths."""
GRID: dict[str, dict[str, Any]] = {
    "one bucket": {"buckets": 1, "threads": 1},
    "one bucket, two threads": {"buckets": 1, "threads": 2},
    "3 buckets": {"buckets": 3, "threads": 2},
    "3 buckets, 2 passes": {"buckets": 3, "threads": 1, "passes": 2},
    "3 buckets, least memory": {"buckets": 3, "threads": 2, "memory": MINIMUM_MEMORY, "passes": 3},
    "3 buckets, more threads": {"buckets": 3, "threads": 5, "memory": 2_000_000_000},
    "40 buckets": {"buckets": 40, "threads": 2},
    "40 buckets, 7 passes": {"buckets": 40, "threads": 2, "passes": 7},
    "as many buckets as there are by default": {"threads": 2},
    "games": {"buckets": 3, "threads": 1, "assign": "game"},
    "games, 3 passes": {"buckets": 3, "threads": 2, "assign": "game", "passes": 3},
    "games in many buckets": {"buckets": 40, "threads": 1, "assign": "game"},
    "games in many buckets, 9 passes": {"buckets": 40, "threads": 2, "assign": "game", "passes": 9},
    "strata": {"buckets": 3, "threads": 1, "stratify_by": "length"},
    "strata, 2 passes": {"buckets": 3, "threads": 2, "stratify_by": "length", "passes": 2},
}
SAME_BYTES = [
    [name for name in GRID if name.startswith(start)]
    for start in ("one bucket", "3 buckets", "40 buckets", "games in many", "strata")
]
SAME_BYTES.append(["games", "games, 3 passes"])
BY_KEY = [name for name, asked in GRID.items() if not {"assign", "stratify_by"} & asked.keys()]
"""Cases in which the order does not depend on the buckets."""
EXPORTED = ("one bucket", "3 buckets, 2 passes", "40 buckets, 7 passes")


TARGETS = ("extra.odd", "extra.temperature", "root_value", "visits", "weight")
"""Optional columns of the positions. The second of the three parts has none of them."""


def read_positions(store: Path) -> pa.Table:
    parts = [pq.read_table(path) for path in Store.open(store).files("positions")]
    return pa.concat_tables(parts, promote_options="default")


def read_shuffled(store: Path, split: str) -> pa.Table:
    """Return the concatenated rows of all buckets of a split."""
    return pa.concat_tables([pq.read_table(path) for path in Store.open(store).files(f"shuffled/{split}")])


def plain_shuffle(store: Path, seed: int) -> dict[str, pa.Table]:
    """The definition: the positions of each split, sorted by key."""
    positions = read_positions(store)
    games = pa.concat_tables([pq.read_table(path) for path in Store.open(store).files("games")])
    split_of = dict(zip(games["game_id"].to_pylist(), games["split"].to_pylist(), strict=True))
    split = np.array([split_of.get(game, "train") for game in positions["game_id"].to_pylist()])
    order = np.argsort(sort_key(positions["position_id"].to_numpy(), derive_key(seed, "shuffle")))
    return {name: positions.take(order[split[order] == name]) for name in SPLITS if (split == name).any()}


def plain_buckets_of_games(store: Path, seed: int, buckets: int) -> pa.Table:
    """The definition for whole games: the training positions by bucket of their game, then by key."""
    train = plain_shuffle(store, seed)["train"]
    key = sort_key(train["position_id"].to_numpy(), derive_key(seed, "shuffle")).tolist()
    games = train["game_id"].to_pylist()
    game_key = derive_key(seed, "shuffle-games")
    own = [k if game is None else int(sort_key(game, game_key)) for game, k in zip(games, key, strict=True)]
    return train.take(sorted(range(len(key)), key=lambda i: ((own[i] * buckets) >> 64, key[i])))


class Shuffled(dict[str, Path]):
    """The odd store, shuffled with options of ``GRID`` when a test needs it; some are exported too."""

    def __init__(self, converted: Path) -> None:
        self._converted = converted

    def __missing__(self, name: str) -> Path:
        store = shutil.copytree(self._converted, self._converted.with_name(f"store-{len(self)}"))
        options = dict(GRID[name])
        with pytest.MonkeyPatch.context() as monkeypatch:
            sort_in_passes(monkeypatch, options.pop("passes", 1))
            shuffle_store(store, ShuffleOptions(seed=SEED, **options))
        if name in EXPORTED:
            export_shards(store, ExportOptions(shard_size=128, block_size=32, workers=1))
        self[name] = store
        return store


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory, write_odd_store: WriteOddStore) -> Shuffled:
    return Shuffled(write_odd_store(tmp_path_factory.mktemp("grid") / "converted", 900, 3, TARGETS))


# --- the result ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_KEY)
def test_the_rows_agree_with_the_definition(shuffled: Shuffled, name: str) -> None:
    plain = plain_shuffle(shuffled[name], SEED)
    assert set(plain) == set(SPLITS)
    for split, expected in plain.items():
        found = read_shuffled(shuffled[name], split)
        assert found.schema.equals(positions_schema(5, TARGETS))
        assert repr(found.to_pylist()) == repr(expected.to_pylist())  # -0.0 is not 0.0
        assert len(set(found["extra.odd"].to_pylist())) == 4
        assert found["root_value"].null_count > found.num_rows / 3


@pytest.mark.parametrize("name", [name for name in GRID if name.startswith("games")])
def test_whole_games_are_assigned_to_buckets(shuffled: Shuffled, name: str) -> None:
    expected = plain_buckets_of_games(shuffled[name], SEED, GRID[name]["buckets"])
    assert read_shuffled(shuffled[name], "train").to_pylist() == expected.to_pylist()


@pytest.mark.parametrize("name", BY_KEY)
def test_each_bucket_contains_its_range_of_keys(shuffled: Shuffled, name: str) -> None:
    store = Store.open(shuffled[name])
    for split, count in store.manifest.stages["shuffle"]["buckets"].items():
        files = store.files(f"shuffled/{split}")
        for path, (low, high) in zip(files, pairwise(bucket_bounds(count)), strict=True):
            keys = sort_key(
                pq.read_table(path)["position_id"].to_numpy(), derive_key(SEED, "shuffle")
            ).tolist()
            assert all(low <= key < high for key in keys)


@pytest.mark.parametrize("name", GRID)
def test_buckets_are_sorted_and_contain_all_rows(shuffled: Shuffled, name: str) -> None:
    ids = []
    for path in Store.open(shuffled[name]).files("shuffled"):
        ids.append(pq.read_table(path)["position_id"].to_numpy())
        assert (np.diff(sort_key(ids[-1], derive_key(SEED, "shuffle")).astype(object)) > 0).all()
    assert sorted(np.concatenate(ids).tolist()) == list(range(900))


def test_the_shards_are_the_same_bytes_for_any_number_of_buckets(
    shuffled: Shuffled, store_bytes: StoreBytes
) -> None:
    shards = [
        {name: digest for name, digest in store_bytes(shuffled[key]).items() if name.startswith("shards/")}
        for key in EXPORTED
    ]
    assert len(shards[0]) > 8
    assert all(other == shards[0] for other in shards)


@pytest.mark.parametrize("names", SAME_BYTES, ids=lambda names: names[0])
def test_memory_and_threads_do_not_change_the_bytes(
    shuffled: Shuffled, store_bytes: StoreBytes, names: list[str]
) -> None:
    first, *others = (
        {path: digest for path, digest in store_bytes(shuffled[name]).items() if path.startswith("shuffled/")}
        for name in names
    )
    assert others
    assert all(other == first for other in others)
    lineages = [Store.open(shuffled[name]).manifest.stages["shuffle"] for name in names]
    assert all(lineage == lineages[0] for lineage in lineages)


def test_the_store_has_every_kind_of_value(shuffled: Shuffled) -> None:
    """The comparisons above need a store with values and nulls in every column."""
    train = read_shuffled(shuffled["3 buckets"], "train")
    for column in train.schema.names:
        assert column == "policy" or len(train[column].unique().drop_null()) > 1
        assert bool(train[column].null_count) == train.schema.field(column).nullable
    assert sorted(train["winner"].unique().drop_null().to_pylist()) == ["BLUE", "RED"]
    assert pc.max(pc.list_value_length(train["policy"])).as_py() == 16


@pytest.mark.parametrize("name", EXPORTED)
def test_verify_agrees(shuffled: Shuffled, name: str) -> None:
    verify_store(shuffled[name]).require()


def test_unknown_games_train_and_no_game_is_in_two_splits(shuffled: Shuffled) -> None:
    games = {split: read_shuffled(shuffled["3 buckets"], split)["game_id"] for split in SPLITS}
    assert {split: column.null_count > 0 for split, column in games.items()} == {
        "train": True,
        "val": False,
        "test": False,
    }
    known = [set(column.drop_null().to_pylist()) for column in games.values()]
    assert sum(map(len, known)) == len(set.union(*known))


def test_another_seed_gives_another_order(odd_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(odd_store)
    orders = []
    for seed in (0, 1, -1, 2**70):
        assert shuffle_store(store, ShuffleOptions(seed=seed)).seed == seed
        orders.append(read_shuffled(store, "train")["position_id"].to_pylist())
        assert sorted(orders[-1]) == sorted(orders[0])
    assert len({tuple(order) for order in orders}) == 4


# --- small and odd stores -----------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [None, 1, 5])
def test_one_position(tmp_path: Path, write_odd_store: WriteOddStore, buckets: int | None) -> None:
    store = write_odd_store(tmp_path / "store", 1, 1)
    result = shuffle_store(store, ShuffleOptions(buckets=buckets))
    assert (result.positions, result.splits, result.buckets) == (1, {"train": 1}, {"train": buckets or 1})
    assert read_shuffled(store, "train").to_pylist() == read_positions(store).to_pylist()
    export_shards(store)
    verify_store(store).require()


def test_one_game(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    paths = demo_trmph(tmp_path / "games", games=1, files=1)
    convert_sources(paths, tmp_path / "store", ConvertOptions(workers=1))
    shuffle_store(tmp_path / "store", ShuffleOptions(seed=3, buckets=2))
    ((split, expected),) = plain_shuffle(tmp_path / "store", 3).items()
    assert read_shuffled(tmp_path / "store", split).to_pylist() == expected.to_pylist()
    verify_store(tmp_path / "store").require()


@pytest.mark.parametrize("name", NAMES if FULL else [" ".join(NAMES)])
def test_a_store_may_have_any_name(odd_store: Path, copy_store: CopyStore, name: str) -> None:
    store = copy_store(odd_store, name)
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=2))
    export_shards(store, ExportOptions(workers=1))
    verify_store(store).require()
    assert read_shuffled(store, "train").to_pylist() == plain_shuffle(store, SEED)["train"].to_pylist()


def test_an_empty_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a hexdata store"):
        shuffle_store(tmp_path / "none")
    Manifest().save(tmp_path)
    with pytest.raises(StoreError, match=r"contains no positions.*hexdata convert"):
        shuffle_store(tmp_path)


# --- again, and otherwise -----------------------------------------------------------------------------


class Notes(Silent):
    """Collects the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def times(store: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in store.rglob("*") if path.name != ".lock"}


def test_the_same_command_again_does_nothing(
    trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(trmph_store)
    first = shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3))
    assert (first.already_done, first.resumed) == (False, 0)
    before = store_bytes(store), {path: t for path, t in times(store).items() if not Path(path).is_dir()}
    again = shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3, threads=1))
    assert (again.already_done, again.resumed) == (True, 0)
    assert (again.splits, again.buckets, again.bytes) == (first.splits, first.buckets, first.bytes)
    assert (
        store_bytes(store),
        {path: t for path, t in times(store).items() if not Path(path).is_dir()},
    ) == before


@pytest.mark.parametrize("other", [{"seed": SEED + 1}, {"buckets": 2}])
@pytest.mark.parametrize("replace", [False, True])
def test_another_shuffle_replaces_the_first(
    trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes, other: dict[str, int], replace: bool
) -> None:
    options = ShuffleOptions(**{"seed": SEED, "buckets": 3, **other}, replace=replace)
    store, fresh = copy_store(trmph_store), copy_store(trmph_store, "fresh")
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3))
    export_shards(store, ExportOptions(workers=1))
    shards = store_bytes(store / "shards")
    assert shards
    assert not shuffle_store(store, options).already_done
    assert replace or store_bytes(store / "shards") == shards
    assert replace == (not (store / "shards").exists())
    shuffle_store(fresh, options)
    for each in (store, fresh):
        export_shards(each, ExportOptions(workers=1))
    assert store_bytes(store) == store_bytes(fresh)


def test_the_seed_of_a_shuffle_is_kept(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    assert shuffle_store(store).seed == 0
    shuffle_store(store, ShuffleOptions(seed=SEED))
    assert plan_shuffle(store, ShuffleOptions(buckets=2)).seed == SEED
    result = shuffle_store(store, ShuffleOptions(buckets=2))
    assert (result.seed, result.already_done) == (SEED, False)
    assert shuffle_store(store, ShuffleOptions(buckets=2)).already_done


def test_a_shuffle_gets_stale_when_more_is_converted(
    tmp_path: Path, demo_trmph: DemoTrmph, store_bytes: StoreBytes
) -> None:
    store = tmp_path / "store"
    for number in (1, 2):
        demo_trmph(tmp_path / f"games-{number}", games=6, files=1, seed=number)
    convert_sources([tmp_path / "games-1"], store, ConvertOptions(workers=1))
    shuffle_store(store, ShuffleOptions(seed=SEED))
    export_shards(store, ExportOptions(workers=1))
    convert_sources([tmp_path / "games-2"], store, ConvertOptions(workers=1))
    with pytest.raises(StoreError, match=r"shuffle stage is older.*hexdata shuffle .* --seed"):
        export_shards(store)
    failed = [check for check in verify_store(store).checks if not check.ok]
    assert [check.name for check in failed] == ["shuffle stage"]
    assert "hexdata shuffle" in failed[0].detail
    result = shuffle_store(store, ShuffleOptions(seed=SEED))
    assert (result.already_done, result.resumed) == (False, 0)
    export_shards(store, ExportOptions(workers=1))
    verify_store(store).require()


def test_a_locked_store_is_refused(odd_store: Path, copy_store: CopyStore, store_bytes: StoreBytes) -> None:
    store = copy_store(odd_store)
    with Store.open(store).writing("convert"), pytest.raises(StoreLockedError, match=str(os.getpid())):
        shuffle_store(store)
    assert store_bytes(store) == store_bytes(odd_store)


def test_out_of_memory_is_reported_and_finished_work_is_kept(
    odd_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_store(odd_store)
    options = ShuffleOptions(buckets=3, threads=1)
    original = sort.write_parquet

    def short(path: Path, schema: pa.Schema, tables: Iterator[pa.Table], *, replace: bool) -> FileFacts:
        if path.name == "bucket-000002.parquet":
            raise MemoryError("malloc of size 7 failed")
        return original(path, schema, tables)

    monkeypatch.setattr(sort, "write_parquet", short)
    with pytest.raises(BudgetError, match=r"out of memory; found malloc .*Raise --memory"):
        shuffle_store(store, options)
    monkeypatch.undo()
    assert shuffle_store(store, options).resumed == 2
    verify_store(store).require()


def test_a_lost_position_is_never_published(
    odd_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_store(odd_store)
    original = sort.write_parquet

    def lossy(path: Path, schema: pa.Schema, tables: Iterator[pa.Table], *, replace: bool) -> FileFacts:
        return original(path, schema, (table[1:] for table in tables))

    monkeypatch.setattr(sort, "write_parquet", lossy)
    with pytest.raises(StoreError, match=r"every position; found 759 in train, .*; expected 760 in train"):
        shuffle_store(store)
    assert "shuffle" not in Store.open(store).manifest.stages
    monkeypatch.undo()
    assert shuffle_store(store).resumed == 0
    verify_store(store).require()
