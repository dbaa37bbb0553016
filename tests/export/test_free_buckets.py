"""Export that removes each bucket of the shuffle as soon as its shards are written."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.errors import StoreError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.pipeline import Config, run_config
from hexdata.progress import Silent
from hexdata.quality import measure_quality
from hexdata.report import write_report
from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store
from hexdata.sql import run_query
from hexdata.storage import storage_of
from hexdata.store import Store
from hexdata.store.files import write_bytes
from hexdata.verify import verify_store
from tests.conftest import DERIVED
from tests.ledger_units import read_units
from tests.pairs import FULL

if TYPE_CHECKING:
    from upath import UPath

    from tests.conftest import CopyStore, KillAtEveryChange, StoreBytes

SIZES: dict[str, Any] = {"shard_size": 96, "block_size": 32, "workers": 1}
SHUFFLE = ShuffleOptions(seed=7, buckets=5, threads=1)
REMOVED = "the buckets of the shuffle were removed by `hexdata export --free-buckets`"
AGAIN = r"Run `hexdata shuffle .*--seed 7 --buckets 5` to make them again"


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory, odd_store: Path) -> Path:
    """The odd store, shuffled into five buckets. Read-only: copy it."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("shuffled") / "store")
    shuffle_store(store, SHUFFLE)
    return store


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, shuffled: Path) -> Path:
    """The store after an export that keeps the buckets. Read-only."""
    store = shutil.copytree(shuffled, tmp_path_factory.mktemp("plain") / "store")
    export_shards(store, ExportOptions(**SIZES))
    return store


@pytest.fixture(scope="module")
def freed(tmp_path_factory: pytest.TempPathFactory, shuffled: Path) -> Path:
    """The store after an export that removes the buckets. Read-only: copy it."""
    store = shutil.copytree(shuffled, tmp_path_factory.mktemp("freed") / "store")
    result = export_shards(store, ExportOptions(**SIZES, free_buckets=True))
    assert result.buckets_removed == 7
    return store


def buckets(store: Path) -> list[str]:
    return sorted(path.relative_to(store).as_posix() for path in store.glob("shuffled/*/*"))


class Watch(Silent):
    """Records after each shard the shards and the buckets on disk; stops like Ctrl-C at the n-th shard."""

    def __init__(self, store: Path, stop: int = 1_000) -> None:
        self.store, self.stop = store, stop
        self.seen: list[tuple[int, list[str]]] = []

    def advance(self, amount: int) -> None:
        shards = len(list(self.store.glob("shards/*.tar")))
        if amount:
            self.seen.append((shards, buckets(self.store)))
        if shards == self.stop:
            raise KeyboardInterrupt


# --- removing -----------------------------------------------------------------------------------------


def test_the_shards_are_those_of_a_plain_export(plain: Path, freed: Path, store_bytes: StoreBytes) -> None:
    assert not (freed / "shuffled").exists()
    expected = {
        name: digest
        for name, digest in store_bytes(plain).items()
        if not name.startswith("shuffled/") and name not in ("manifest.json", *DERIVED)
    }
    found = store_bytes(freed)
    assert found.keys() == {*expected, "manifest.json", *DERIVED}
    assert {name: found[name] for name in expected} == expected
    before, after = Store.open(plain).manifest, Store.open(freed).manifest
    assert after.stages["export"] == before.stages["export"]
    assert after.removed_buckets == after.buckets() == before.files_in("shuffled")
    assert not after.files_in("shuffled")


def test_each_bucket_is_removed_after_its_last_shard(shuffled: Path, copy_store: CopyStore) -> None:
    store = copy_store(shuffled)
    files = Store.open(store).manifest.files_in("shuffled/train")
    watch = Watch(store)
    export_shards(store, ExportOptions(**SIZES, free_buckets=True), watch)
    for shards, left in watch.seen:
        end = 0
        for name, facts in files.items():
            end += facts.rows
            assert (name in left) == (end > min(shards * 96, sum(f.rows for f in files.values())))


def test_a_finished_export_removes_the_buckets_later(
    plain: Path, freed: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(plain)
    result = export_shards(store, ExportOptions(**SIZES, free_buckets=True))
    assert (result.already_done, result.buckets_removed) == (True, 7)
    assert store_bytes(store) == store_bytes(freed)


@pytest.mark.parametrize("free", [True, False])
def test_the_same_export_again_is_already_done(
    freed: Path, copy_store: CopyStore, store_bytes: StoreBytes, free: bool
) -> None:
    store = copy_store(freed)
    result = export_shards(store, ExportOptions(**SIZES, free_buckets=free))
    assert (result.already_done, result.buckets_removed) == (True, 0)
    assert store_bytes(store) == store_bytes(freed)


# --- interruptions ------------------------------------------------------------------------------------


def test_killed_at_every_moment(
    shuffled: Path, freed: Path, store_bytes: StoreBytes, kill_at_every_change: KillAtEveryChange
) -> None:
    """The manifest never lists a missing file, and the same command gives the bytes of an undisturbed run.

    It is killed at every third moment, or at every moment with ``HEXDATA_TESTS=full``.
    """
    options = {**SIZES, "free_buckets": True}
    expected, removed = store_bytes(freed), set()
    for copy in kill_at_every_change("export", shuffled, options, every=1 if FULL else 3):
        assert all((copy / name).exists() for name in Store.open(copy).manifest.files)
        removed.add(7 - len(buckets(copy)))
        done = len(read_units(copy / ".work" / "export" / "progress.json"))
        assert export_shards(copy, ExportOptions(**options)).resumed in (done, 0)
        assert store_bytes(copy) == expected
        assert not (copy / ".work" / "export").exists()
    assert removed == set(range(8)) if FULL else {0, 7} < removed


def test_an_export_without_the_option_continues_the_interrupted_one(
    shuffled: Path, freed: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(shuffled)
    with pytest.raises(KeyboardInterrupt):
        export_shards(store, ExportOptions(**SIZES, free_buckets=True), Watch(store, stop=4))
    assert 0 < len(buckets(store)) < 7
    export_shards(store, ExportOptions(**SIZES))
    assert store_bytes(store) == store_bytes(freed)


@pytest.mark.parametrize("other", [{"shard_size": 192}, {"layout": "samples"}])
def test_other_options_after_an_interruption_lose_nothing(
    shuffled: Path, freed: Path, copy_store: CopyStore, store_bytes: StoreBytes, other: dict[str, Any]
) -> None:
    store = copy_store(shuffled)
    with pytest.raises(KeyboardInterrupt):
        export_shards(store, ExportOptions(**SIZES, free_buckets=True), Watch(store, stop=4))
    with pytest.raises(StoreError, match=r"must be written, but .* has removed its buckets.*hexdata shuffle"):
        export_shards(store, ExportOptions(**SIZES | other, free_buckets=True))
    assert export_shards(store, ExportOptions(**SIZES, free_buckets=True)).resumed > 0
    assert store_bytes(store) == store_bytes(freed)


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_damaged_shard_needs_the_shuffle_again(
    shuffled: Path,
    freed: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    interrupted: bool,
) -> None:
    store = copy_store(shuffled if interrupted else freed)
    options = ExportOptions(**SIZES, free_buckets=True)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            export_shards(store, options, Watch(store, stop=4))
    with (store / "shards" / "train-000000.tar").open("ab") as file:
        file.write(b"x")
    message = r"train-000000.tar.*removed its buckets.*--seed 7 --buckets 5.*Undamaged shards are kept"
    with pytest.raises(StoreError, match=message):
        export_shards(store, options)
    before = (store / "shards" / "train-000001.tar").stat().st_ino
    result = shuffle_store(store, SHUFFLE)
    assert (result.already_done, len(buckets(store))) == (False, 7)
    export_shards(store, options)
    assert (store / "shards" / "train-000001.tar").stat().st_ino == before
    assert store_bytes(store) == store_bytes(freed)


# --- the shuffle again --------------------------------------------------------------------------------


def test_the_same_shuffle_makes_the_buckets_again_and_keeps_the_shards(
    plain: Path, freed: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(freed)
    plan = plan_shuffle(store, SHUFFLE)
    assert (plan.already_done, plan.disk_freed) == (False, 0)
    assert not shuffle_store(store, SHUFFLE).already_done
    assert store_bytes(store) == store_bytes(plain)
    assert shuffle_store(store, SHUFFLE).already_done
    assert export_shards(store, ExportOptions(**SIZES)).already_done


def test_the_shuffle_lists_buckets_again_of_which_none_was_removed(
    shuffled: Path, copy_store: CopyStore, store_bytes: StoreBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_store(shuffled)
    with monkeypatch.context() as patch:
        patch.setattr("hexdata.export.shards._ShardExport._remove", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export_shards(store, ExportOptions(**SIZES, free_buckets=True))
    assert Store.open(store).manifest.removed_buckets
    assert shuffle_store(store, SHUFFLE).already_done
    assert store_bytes(store)["manifest.json"] == store_bytes(shuffled)["manifest.json"]


def test_another_shuffle_makes_buckets_again_and_keeps_the_shards(
    freed: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(freed)
    shards = store_bytes(store / "shards")
    shuffle_store(store, ShuffleOptions(seed=8, threads=1))
    assert not Store.open(store).manifest.removed_buckets
    assert store_bytes(store / "shards") == shards
    export_shards(store, ExportOptions(workers=1, shard_size=128, block_size=32))
    assert store_bytes(store / "shards") != shards
    verify_store(store).require()


def test_an_object_store_is_freed_too(
    shuffled: Path, freed: Path, bucket: UPath, store_bytes: StoreBytes
) -> None:
    store = bucket / "store"
    for name in store_bytes(shuffled):
        write_bytes(store / name, (shuffled / name).read_bytes())
    options = ExportOptions(**SIZES, free_buckets=True)

    class StopAtFour(Silent):
        def advance(self, amount: int) -> None:
            if amount and len(storage_of(store / "shards").names()) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_shards(store, options, StopAtFour())
    left = storage_of(store / "shuffled").files()
    assert 0 < len(left) < 7
    assert not Store.open(store).manifest.files_in("shuffled")
    result = export_shards(store, options)
    assert (result.resumed, result.buckets_removed) == (4, len(left))
    expected = store_bytes(freed)
    found = {name for name in storage_of(store).files() if not name.startswith((".", "logs/"))}
    assert found | DERIVED == expected.keys()
    for name in ("manifest.json", "shards/manifest.json"):
        assert hashlib.sha256((store / name).read_bytes()).hexdigest() == expected[name]


# --- readers ------------------------------------------------------------------------------------------


def test_readers_of_buckets_name_the_command(freed: Path, copy_store: CopyStore) -> None:
    store = copy_store(freed)
    for use in (
        lambda: export_shards(store, ExportOptions(**SIZES | {"shard_size": 192})),
        lambda: export_pickles(store, PicklesOptions(workers=1)),
        lambda: measure_quality(store),
        lambda: run_query(store, "SELECT count(*) FROM shuffled", memory=10**9).__enter__(),
    ):
        with pytest.raises(StoreError, match=f"{REMOVED}.*{AGAIN}"):
            use()
    export_pickles(store, PicklesOptions(workers=1, order="original"))


def test_the_report_says_that_the_buckets_were_removed(freed: Path, copy_store: CopyStore) -> None:
    store = copy_store(freed)
    result = write_report(store)
    assert result.facts.quality is None
    assert sum(row["shuffled"] for row in result.facts.tables["splits"]) == 900
    assert result.verdict.answers[0].short == "Not measured"
    assert "removed by `hexdata export --free-buckets`" in result.verdict.answers[0].text
    assert "ready for training" in result.verdict.headline


@pytest.mark.parametrize("layout", ["blocks", "samples"])
@pytest.mark.parametrize("choices", [{}, {"assign": "game"}])
def test_verify_compares_the_shards_with_the_positions(
    odd_store: Path, copy_store: CopyStore, layout: str, choices: dict[str, Any]
) -> None:
    store = copy_store(odd_store)
    shuffle_store(store, ShuffleOptions(seed=7, buckets=5, threads=1, **choices))
    export_shards(store, ExportOptions(**SIZES, layout=layout, free_buckets=True))
    result = verify_store(store)
    result.require()
    details = {check.name: check.detail for check in result.checks}
    assert "contain the shuffled positions in the same order" in details["shards"]
    assert REMOVED in details["shuffled rows"]
    assert "not measured" in details["shuffle quality"]


def test_verify_names_both_commands_for_a_damaged_shard(freed: Path, copy_store: CopyStore) -> None:
    store = copy_store(freed)
    (store / "shards" / "train-000001.tar").unlink()
    commands = [command.split()[1] for command in verify_store(store).commands]
    assert commands == ["shuffle", "export"]


# --- configs ------------------------------------------------------------------------------------------


def test_a_config_is_run_again_without_making_the_buckets(
    odd_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(odd_store)
    content = {
        "store": str(store),
        "shuffle": {"seed": 7, "buckets": 5, "threads": 1},
        "export": {**SIZES, "free_buckets": True},
        "verify": {},
    }
    assert run_config(Config.model_validate(content)).quality is None
    before = store_bytes(store)
    run_config(Config.model_validate(content))
    assert store_bytes(store) == before
    with pytest.raises(Exception, match="free_buckets removes the buckets"):
        Config.model_validate(content | {"pickles": {"order": "shuffled"}})
