"""Ids and bytes of a store depend only on the sources, not on workers or the order of the inputs."""

from __future__ import annotations

import shutil
from itertools import chain

import numpy as np
import pytest

from hexdata.demo.games import DemoGame
from hexdata.errors import ConfigError, InputError, SourceChangedError, StoreError
from hexdata.formats.trmph import write_trmph
from hexdata.progress import Silent
from hexdata.store import Store
from hexdata.verify import verify_store


@pytest.fixture
def collection(make):
    """A folder with every kind of source: tuples, dicts, TRMPH, two shuffled files, a broken one."""
    games = make.games(24)
    make.v1("v1/a_processed.pkl.gz", games[:6])
    make.v2("v2/b_processed.pkl.gz", games[4:10])
    (make.folder / "raw").mkdir()
    write_trmph(make.folder / "raw/c.trmph", games[8:14], make.n)
    examples = list(chain.from_iterable(make.dicts(games[14:])))
    for part in range(2):
        stats = {"num_buckets": 2, "bucket_id": part, "source_files": ["x"]}
        make.write(f"shuffled/shuffled_{part:04d}.pkl.gz", examples[part::2], shuffling_stats=stats)
    make.write_bytes("z/broken.pkl.gz", b"not a pickle")
    make.write("z/empty.pkl.gz", [])
    (make.folder / "processing_stats.json").write_text("{}")
    return make.folder


def test_the_bytes_do_not_depend_on_the_number_of_workers(collection, convert):
    stores = [
        convert(collection, store=f"w{workers}", workers=workers, memory=2 * 10**9, max_reject_rate=1.0)
        for workers in (1, 3)
    ]
    assert stores[0].result.games == 28
    assert stores[0].files() == stores[1].files()
    assert stores[0].result == stores[1].result
    assert verify_store(stores[0].path).ok


def test_the_bytes_do_not_depend_on_the_order_of_the_inputs(collection, convert):
    folders = sorted(path for path in collection.iterdir() if path.is_dir())
    one = convert(*folders, store="one", max_reject_rate=1.0)
    other = convert(*reversed(folders), store="other", max_reject_rate=1.0)
    assert one.files() == other.files()


def test_ids_are_dense_and_follow_the_names_of_the_sources(collection, convert):
    store = convert(collection, max_reject_rate=1.0)
    sources = store.rows("sources")
    names = [source["name"] for source in sources]
    assert names == sorted(names)
    assert [source["source_id"] for source in sources] == list(range(len(names)))
    assert store.table("positions")["position_id"].to_pylist() == list(range(store.result.positions))
    games = store.games()
    assert [game["game_id"] for game in games] == list(range(28))
    assert [game["source_id"] for game in games] == sorted(game["source_id"] for game in games)
    manifest = Store.open(store.path).manifest
    assert manifest.counts == {
        "sources": len(names),
        "positions": store.result.positions,
        "games": 28,
        "rejected": 1,
    }


def test_relative_input_paths_give_the_same_bytes(collection, convert, monkeypatch):
    one = convert(collection, store="one", max_reject_rate=1.0)
    monkeypatch.chdir(collection.parent)
    other = convert(collection.relative_to(collection.parent), store="other", max_reject_rate=1.0)
    assert one.files() == other.files()


def test_no_temporary_files_remain(collection, convert):
    store = convert(collection, max_reject_rate=1.0)
    assert set(store.files()) == {"manifest.json", *Store.open(store.path).manifest.files}


def test_duplicates_point_at_the_first_game(collection, convert):
    store = convert(collection, max_reject_rate=1.0)
    first = {}
    for game in store.games():
        expected = first.setdefault(game["game_hash"], game["game_id"])
        assert game["duplicate_of"] == (expected if expected != game["game_id"] else None)
    assert store.result.duplicate_games == 4  # two in a and b, two in b and c


# Adding sources later.


def add_more(make):
    """Add two sources, one of which sorts before all others; some of their games are already known."""
    games = make.games(30)
    make.v2("0/first_processed.pkl.gz", games[20:30], file_idx=9)
    make.v1("zz/last_processed.pkl.gz", games[:8])


def test_adding_leaves_existing_files_unchanged_and_continues_the_ids(collection, make, convert):
    before = convert(collection, max_reject_rate=1.0)
    files = before.files()
    del files["manifest.json"]
    rows = {name: before.rows(name) for name in ("positions", "games", "sources", "rejected")}
    add_more(make)
    after = convert(collection)
    assert (after.result.sources, after.result.skipped, after.result.games) == (2, 7, 18)
    assert {file_name: after.files()[file_name] for file_name in files} == files
    for name, old in rows.items():
        assert after.rows(name)[: len(old)] == old
    ids = after.table("positions")["position_id"].to_pylist()
    assert ids == list(range(len(rows["positions"]) + after.result.positions))
    assert [game["game_id"] for game in after.games()] == list(range(28 + 18))
    assert verify_store(after.path).ok


def test_batches_that_are_removed_once_converted_give_the_store_of_one_run(collection, convert):
    folders = sorted(path for path in collection.iterdir() if path.is_dir())
    whole = convert(*folders, store="whole", max_reject_rate=1.0)
    records = 0
    for folder in folders:
        batches = convert(folder, store="batches", max_reject_rate=1.0)
        shutil.rmtree(folder)
        assert batches.result.records == batches.result.positions + batches.result.rejected
        records += batches.result.records
    assert records == whole.result.records
    assert Store.open(batches.path).manifest.counts == Store.open(whole.path).manifest.counts
    parts, expected = (
        {name: data for name, data in store.files().items() if name.startswith(("positions/", "games/"))}
        for store in (batches, whole)
    )
    assert parts == expected
    assert len(parts) == 9
    for table in ("sources", "rejected"):
        assert batches.rows(table) == whole.rows(table)
    assert verify_store(batches.path).ok


def test_games_added_later_are_duplicates_of_the_old_ones(collection, make, convert):
    convert(collection, max_reject_rate=1.0)
    add_more(make)
    store = convert(collection)
    games = {game["game_id"]: game for game in store.games()}
    added = [game for game_id, game in games.items() if game_id >= 28]
    duplicates = [game for game in added if game["duplicate_of"] is not None]
    assert len(duplicates) == store.result.duplicate_games == 4 + 8
    for game in duplicates:
        first = games[game["duplicate_of"]]
        assert first["game_id"] < 28
        assert (first["game_hash"], first["split"]) == (game["game_hash"], game["split"])
        assert first["duplicate_of"] is None


def test_known_sources_are_skipped_under_any_name(collection, convert):
    notes = []

    class Watcher(Silent):
        def note(self, message):
            notes.append(message)

    first = convert(collection, max_reject_rate=1.0)
    files = first.files()
    shutil.copy(collection / "v1/a_processed.pkl.gz", collection / "v1/copy.pkl.gz")
    again = convert(collection, progress=Watcher())
    assert (again.result.sources, again.result.skipped, again.result.positions) == (0, 8, 0)
    assert again.files() == files
    assert notes == [
        "8 files already in the store; nothing to convert: "
        "legacy/v1/copy.pkl.gz (same bytes as legacy/v1/a_processed.pkl.gz)"
    ]
    causes = again.result.skipped_files
    assert len(causes) == 8
    assert causes.pop("legacy/v1/copy.pkl.gz") == "known-bytes: same bytes as legacy/v1/a_processed.pkl.gz"
    assert set(causes.values()) == {"known-bytes"}


def test_the_same_bytes_twice_in_one_run_are_converted_once(collection, convert):
    shutil.copy(collection / "v1/a_processed.pkl.gz", collection / "v1/copy.pkl.gz")
    store = convert(collection, max_reject_rate=1.0)
    assert store.result.skipped == 1
    assert "legacy/v1/copy.pkl.gz" not in [source["name"] for source in store.rows("sources")]


def test_a_changed_source_is_an_error(collection, make, convert):
    files = convert(collection, max_reject_rate=1.0).files()
    make.v1("v1/a_processed.pkl.gz", make.games(3))
    with pytest.raises(SourceChangedError, match="has changed since it was converted") as caught:
        convert(collection)
    assert caught.value.path == str(collection / "v1/a_processed.pkl.gz")
    assert "sha256" in str(caught.value)
    shutil.rmtree(collection)
    collection.mkdir()
    assert convert(make.v1("new.pkl.gz", make.games(3))).files().items() >= {
        (name, content) for name, content in files.items() if name != "manifest.json"
    }


@pytest.mark.parametrize("shares", [{"val": 0.06}, {"test": 0.0}])
def test_the_shares_of_a_store_never_change(collection, make, convert, shares):
    """A game's split depends on its hash and the shares, so other shares would move games."""
    files = convert(collection, max_reject_rate=1.0).files()
    add_more(make)
    with pytest.raises(ConfigError, match=r"expected val 0\.05, test 0\.01"):
        convert(collection, **shares)
    store = convert(collection, store="store", val=0.05, test=0.01)
    assert set(store.files()) > set(files)


def test_adding_makes_the_shuffle_out_of_date(collection, make, convert):
    from hexdata.shuffle import ShuffleOptions, shuffle_store

    path = convert(collection, max_reject_rate=1.0).path
    shuffle_store(path, ShuffleOptions(threads=1))
    Store.open(path).require_stage("shuffle")
    add_more(make)
    convert(collection)
    with pytest.raises(StoreError, match=r"older than"):
        Store.open(path).require_stage("shuffle")


def test_two_inputs_with_the_same_name_are_refused(make, convert):
    one = make.v2("one/data/a.pkl.gz", make.games(2)).parent
    other = make.v2("other/data/a.pkl.gz", make.games(2, start=2)).parent
    with pytest.raises(InputError, match="two inputs have the same name"):
        convert(one, other)


def test_a_folder_that_is_not_a_store_is_not_written_to(make, convert, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match="contains files but is not a store"):
        convert(make.v2("a.pkl.gz", make.games(2)))
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.txt"]


def test_a_store_may_be_inside_the_input_folder(make, convert, tmp_path):
    make.v2("a.pkl.gz", make.games(2))
    inside = make.folder / "deep/store"
    first = convert(make.folder, store=str(inside))
    assert convert(make.folder, store=str(inside)).result.skipped == 1
    assert first.result.games == 2


def test_games_of_one_move_and_of_all_cells(make, convert):
    """The shortest possible game, and one that fills the board."""
    make.n = 3
    full = DemoGame(np.array([0, 3, 1, 4, 5, 2, 7, 6, 8], dtype=np.uint16), 0)
    store = convert(make.v2("a.pkl.gz", [full, DemoGame(full.moves[:1], 0)]), value_convention="blue-is-0")
    assert [game["total_positions"] for game in store.games()] == [10, 2]
    assert [len(game["moves"]) for game in store.games()] == [9, 1]
