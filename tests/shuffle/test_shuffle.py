"""The shuffle's result: the plain definition, whatever the buckets, threads and memory; what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from hexdata import shuffle
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import StoreError, StoreLockedError
from hexdata.export import ExportOptions, export_shards
from hexdata.order import bucket_bounds, derive_key, sort_key
from hexdata.progress import Silent
from hexdata.quality import dispersion
from hexdata.schema import SPLITS, positions_schema
from hexdata.shuffle import ShuffleOptions, local, plan, shuffle_store
from hexdata.store import Store
from hexdata.store.files import FileFacts
from hexdata.store.manifest import Manifest
from hexdata.store.session import duckdb_session
from hexdata.verify import verify_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore, DemoTrmph, StoreBytes, WriteOddStore

SEED = 7
GRID = {
    "one bucket": {"buckets": 1, "threads": 1},
    "one bucket, many slices, two threads": {"buckets": 1, "threads": 2, "sort_rows": 100},
    "3 buckets": {"buckets": 3, "threads": 2},
    "3 buckets, many slices": {"buckets": 3, "threads": 1, "sort_rows": 40},
    "3 buckets, less memory": {"buckets": 3, "threads": 2, "memory": 450_000_000, "sort_rows": 170},
    "as many buckets as the memory asks for": {"threads": 2, "sort_rows": 100},
    "500 buckets": {"buckets": 500, "threads": 2, "sort_rows": 300},
}


def limit_sorts(monkeypatch: pytest.MonkeyPatch, rows: int, memory: int = 1_000_000_000) -> None:
    """Make the plan of the odd store, whose rows take some 160 bytes, sort about so many rows at a time."""
    duckdb_memory = memory - plan.BASE_MEMORY - plan.IN_FLIGHT_ROWS * 160
    monkeypatch.setattr(plan, "SORT_SHARE", rows * 160 / duckdb_memory)


def read_positions(store: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in Store.open(store).files("positions")])


def read_shuffled(store: Path, split: str) -> pa.Table:
    """Return the rows of all buckets of a split, one after the other."""
    return pa.concat_tables([pq.read_table(path) for path in Store.open(store).files(f"shuffled/{split}")])


def plain_shuffle(store: Path, seed: int) -> dict[str, pa.Table]:
    """The definition: the positions of each split, sorted by key."""
    positions = read_positions(store)
    games = pa.concat_tables([pq.read_table(path) for path in Store.open(store).files("games")])
    split_of = dict(zip(games["game_id"].to_pylist(), games["split"].to_pylist(), strict=True))
    split = np.array([split_of.get(game, "train") for game in positions["game_id"].to_pylist()])
    order = np.argsort(sort_key(positions["position_id"].to_numpy(), derive_key(seed, "shuffle")))
    return {name: positions.take(order[split[order] == name]) for name in SPLITS if (split == name).any()}


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory, write_odd_store: WriteOddStore) -> dict[str, Path]:
    """The odd store, shuffled and exported with each of the options of ``GRID``."""
    stores = {}
    for number, (name, asked) in enumerate(GRID.items()):
        store = write_odd_store(tmp_path_factory.mktemp("grid") / f"store-{number}", 900, 3)
        options: dict[str, Any] = dict(asked)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rows := options.pop("sort_rows", None):
                limit_sorts(monkeypatch, rows, options.get("memory", 1_000_000_000))
            shuffle_store(store, ShuffleOptions(seed=SEED, **options))
        export_shards(store, ExportOptions(shard_size=128, block_size=32, workers=1))
        stores[name] = store
    return stores


# --- the result ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRID)
def test_the_rows_are_those_of_the_plain_definition(shuffled: dict[str, Path], name: str) -> None:
    plain = plain_shuffle(shuffled[name], SEED)
    assert set(plain) == set(SPLITS)
    for split, expected in plain.items():
        found = read_shuffled(shuffled[name], split)
        assert found.schema.equals(positions_schema(5))
        assert found.to_pylist() == expected.to_pylist()


@pytest.mark.parametrize("name", GRID)
def test_each_bucket_holds_its_range_of_keys(shuffled: dict[str, Path], name: str) -> None:
    store = Store.open(shuffled[name])
    for split, count in store.manifest.stages["shuffle"]["buckets"].items():
        files = store.files(f"shuffled/{split}")
        for path, (low, high) in zip(files, pairwise(bucket_bounds(count)), strict=True):
            keys = sort_key(
                pq.read_table(path)["position_id"].to_numpy(), derive_key(SEED, "shuffle")
            ).tolist()
            assert all(low <= key < high for key in keys)


def test_the_grid_is_what_it_says(shuffled: dict[str, Path]) -> None:
    counts = {n: Store.open(s).manifest.stages["shuffle"]["buckets"]["train"] for n, s in shuffled.items()}
    assert [counts[name] for name in list(GRID)[:5]] == [1, 1, 3, 3, 3]
    assert 5 <= counts["as many buckets as the memory asks for"] <= 12
    assert counts["500 buckets"] == 500


def test_the_shards_are_the_same_bytes_for_all(shuffled: dict[str, Path], store_bytes: StoreBytes) -> None:
    shards = [
        {name: digest for name, digest in store_bytes(store).items() if name.startswith("shards/")}
        for store in shuffled.values()
    ]
    assert len(shards[0]) > 8
    assert all(other == shards[0] for other in shards)


def test_the_buckets_are_the_same_bytes_for_the_same_number(
    shuffled: dict[str, Path], store_bytes: StoreBytes
) -> None:
    for names in (list(GRID)[:2], list(GRID)[2:5]):
        first, *others = (store_bytes(shuffled[name]) for name in names)
        assert all(other == first for other in others)


def test_every_column_came_through(shuffled: dict[str, Path]) -> None:
    """What the comparisons above rest on: there is something of everything in the store."""
    train = read_shuffled(shuffled["3 buckets"], "train")
    for column in train.schema.names:
        assert column == "policy" or len(train[column].unique().drop_null()) > 1
        assert bool(train[column].null_count) == train.schema.field(column).nullable
    assert sorted(train["winner"].unique().drop_null().to_pylist()) == ["BLUE", "RED"]
    assert pc.max(pc.list_value_length(train["policy"])).as_py() == 25


@pytest.mark.parametrize("name", GRID)
def test_verify_agrees(shuffled: dict[str, Path], name: str) -> None:
    verify_store(shuffled[name]).require()


def test_unknown_games_train_and_no_game_is_in_two_splits(shuffled: dict[str, Path]) -> None:
    games = {split: read_shuffled(shuffled["3 buckets"], split)["game_id"] for split in SPLITS}
    assert {split: column.null_count > 0 for split, column in games.items()} == {
        "train": True,
        "val": False,
        "test": False,
    }
    known = [set(column.drop_null().to_pylist()) for column in games.values()]
    assert sum(map(len, known)) == len(set.union(*known))


def test_another_seed_is_another_order(odd_store: Path, copy_store: CopyStore) -> None:
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


@pytest.mark.parametrize("name", ["it's [a]*? {b}", "split=train", '盤 "ø"; --'])
def test_a_store_may_have_any_name(odd_store: Path, copy_store: CopyStore, name: str) -> None:
    store = copy_store(odd_store, name)
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=2))
    export_shards(store, ExportOptions(workers=1))
    verify_store(store).require()
    assert dispersion(store).games_in_bucket
    assert read_shuffled(store, "train").to_pylist() == plain_shuffle(store, SEED)["train"].to_pylist()


def keyed_rows(odd_store: Path, keys: list[int], splits: list[int]) -> pa.Table:
    """The first positions of a store, with keys and splits as phase 1 would give them."""
    rows = read_positions(odd_store).slice(0, len(keys))
    rows = rows.append_column("sort_key", pa.array(keys, pa.uint64()))
    return rows.append_column("split", pa.array(splits, pa.uint8())).combine_chunks()


@pytest.mark.parametrize("buckets", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("sort_rows", [1, 2, 100])
def test_keys_at_the_ends_of_their_range_are_kept(
    tmp_path: Path, odd_store: Path, buckets: int, sort_rows: int
) -> None:
    """Keys next to 2^64 and 2^63, which no seed gives to so few positions."""
    keys = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]
    asked = replace(plan.make_plan(ShuffleOptions(buckets=buckets), 5, {"val": 6}), sort_rows=sort_rows)
    rows = keyed_rows(odd_store, keys, [1] * 6)
    pq.write_table(pa.concat_tables(local._cut_by_range(iter([rows[:4], rows[4:]]), asked)), tmp_path / "run")
    found = []
    with duckdb_session(memory=100 << 20, threads=1) as con:
        for bucket, tables in local.sort_buckets(con, [tmp_path / "run"], asked, asked.buckets):
            ids = [i for table in tables for i in table["position_id"].to_pylist()]
            assert all(bucket.low <= keys[i] < bucket.high for i in ids)
            found += ids
    assert found == list(range(6))


def test_a_run_is_cut_where_ranges_meet(odd_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ROW_GROUP_ROWS", 50)
    keys = np.sort(sort_key(np.arange(900), 1))
    keys[600:].sort()
    rows = keyed_rows(odd_store, keys[np.r_[0:900:3, 1:900:3, 2:900:3]].tolist(), [0] * 600 + [2] * 300)
    rows = rows.sort_by([("split", "ascending"), ("sort_key", "ascending")])
    asked = replace(plan.make_plan(ShuffleOptions(), 5, {"train": 600, "test": 300}), sort_rows=130)
    groups = list(local._cut_by_range(iter([rows[i : i + 64] for i in range(0, 900, 64)]), asked))
    assert pa.concat_tables(groups).equals(rows.combine_chunks())
    assert len({(g["split"][0].as_py(), _range_of(asked, g)) for g in groups}) == 5 + 3
    assert all(group.num_rows <= 50 + 64 for group in groups)


def _range_of(asked: plan.ShufflePlan, group: pa.Table) -> tuple[int, int]:
    """Return the one range that holds all the keys of a row group."""
    first, last = (group["sort_key"][i].as_py() for i in (0, -1))
    ((low, high),) = [r for r in asked.ranges(SPLITS[group["split"][0].as_py()]) if r[0] <= first < r[1]]
    assert low <= last < high
    return low, high


def test_an_empty_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a hexdata store"):
        shuffle_store(tmp_path / "none")
    Manifest().save(tmp_path)
    with pytest.raises(StoreError, match=r"holds no positions.*Convert some sources"):
        shuffle_store(tmp_path)


# --- again, and otherwise -----------------------------------------------------------------------------


class Notes(Silent):
    """Keeps what it is told."""

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
def test_another_shuffle_replaces_the_first_and_its_shards(
    trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes, other: dict[str, int]
) -> None:
    options = ShuffleOptions(**{"seed": SEED, "buckets": 3, **other})
    store, fresh = copy_store(trmph_store), copy_store(trmph_store, "fresh")
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3))
    export_shards(store, ExportOptions(workers=1))
    notes = Notes()
    assert not shuffle_store(store, options, notes).already_done
    assert notes.notes == [f"replaces the shuffle of seed {SEED} and what was made of it"]
    assert not (store / "shards").exists()
    shuffle_store(fresh, options)
    assert store_bytes(store) == store_bytes(fresh)


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
    for stage in (export_shards, dispersion):
        with pytest.raises(StoreError, match=r"shuffle stage is older.*hexdata shuffle .* again"):
            stage(store)
    failed = [check for check in verify_store(store).checks if not check.ok]
    assert [check.name for check in failed] == ["shuffle stage"]
    assert "hexdata shuffle" in failed[0].detail
    result = shuffle_store(store, ShuffleOptions(seed=SEED))
    assert (result.already_done, result.resumed) == (False, 0)
    verify_store(store).require()


def test_a_locked_store_is_left_alone(
    odd_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(odd_store)
    with Store.open(store).writing("convert"), pytest.raises(StoreLockedError, match=str(os.getpid())):
        shuffle_store(store)
    assert store_bytes(store) == store_bytes(odd_store)


def test_a_lost_position_is_never_published(
    odd_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_store(odd_store)
    original = shuffle.write_parquet

    def lossy(path: Path, schema: pa.Schema, tables: Iterator[pa.Table]) -> FileFacts:
        return original(path, schema, (table[1:] for table in tables))

    monkeypatch.setattr(shuffle, "write_parquet", lossy)
    with pytest.raises(StoreError, match="do not hold every position; found 897; expected 900"):
        shuffle_store(store)
    assert "shuffle" not in Store.open(store).manifest.stages
