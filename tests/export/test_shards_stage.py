"""Export of shards: sizes, contents and order, reproducible bytes, interruptions and refused options."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.board import unpack_boards
from hexdata.errors import BudgetError, ConfigError, StoreError, StoreLockedError
from hexdata.export import ExportOptions, export_shards, run
from hexdata.progress import Silent
from hexdata.shards import manifest as shard_manifest
from hexdata.shards.blocks import block_to_policy, columns_to_block, members_to_block
from hexdata.shards.format import read_blocks
from hexdata.shards.manifest import ShardManifest
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.verify import verify_store
from tests.ledger_units import read_units
from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.conftest import CopyStore, KillAtEveryChange, StoreBytes

SIZES: dict[str, Any] = {"shard_size": 192, "block_size": 32}
SHARDS = {"train": 4, "val": 1, "test": 1}


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory, odd_store: Path) -> Path:
    """The odd store, shuffled into three buckets. Read-only: copy it."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("shuffled") / "store")
    shuffle_store(store, ShuffleOptions(seed=7, buckets=3, threads=1))
    return store


@pytest.fixture
def store(shuffled: Path, copy_store: CopyStore) -> Path:
    return copy_store(shuffled)


@pytest.fixture
def undisturbed(shuffled: Path, copy_store: CopyStore, store_bytes: StoreBytes) -> dict[str, str]:
    """The bytes of an uninterrupted export."""
    store = copy_store(shuffled, "undisturbed")
    export_shards(store, ExportOptions(**SIZES, workers=1))
    return store_bytes(store)


def rows_of(store: Path, split: str) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in Store.open(store).files(f"shuffled/{split}")])


# --- contents -----------------------------------------------------------------------------------------


def test_sizes_are_exact_and_keys_ascend_over_the_split(store: Path) -> None:
    result = export_shards(store, ExportOptions(**SIZES, workers=1))
    assert result.shards == SHARDS
    manifest = ShardManifest.load(store / "shards")
    for split, count in result.splits.items():
        sizes = [shard.positions for shard in manifest.splits[split]]
        assert sizes == [192] * (count // 192) + [count % 192]
        blocks = [read_blocks(store / "shards" / shard.name) for shard in manifest.splits[split]]
        keys, lengths = zip(*((k, len(b["value"])) for shard in blocks for k, b in shard), strict=True)
        assert keys == tuple(f"{number:06d}" for number in range(-(-count // 32)))
        assert lengths == (32,) * (count // 32) + ((count % 32,) if count % 32 else ())


def test_blocks_hold_the_shuffled_rows_in_their_order(store: Path) -> None:
    result = export_shards(store, ExportOptions(**SIZES, workers=1))
    assert sum(result.splits.values()) == result.positions == 900
    for split in result.splits:
        expected = columns_to_block(rows_of(store, split), with_policy=True)
        shards = sorted((store / "shards").glob(f"{split}-*.tar"))
        blocks = [members_to_block(block, 25) for path in shards for _, block in read_blocks(path)]
        for name in expected.keys() - {"policy", "policy_row"}:
            np.testing.assert_array_equal(np.concatenate([block[name] for block in blocks]), expected[name])
        found = np.concatenate([block_to_policy(block, 25) for block in blocks])
        np.testing.assert_array_equal(found, block_to_policy(expected, 25))


@pytest.mark.parametrize("layout", ["blocks", "samples"])
@pytest.mark.parametrize("limit", ["MAX_JSON_BYTES", "MAX_JSON_VALUES"])
def test_a_manifest_that_no_reader_accepts_is_refused_before_anything_is_written(
    layout: str, limit: str, store: Path, store_bytes: StoreBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(shard_size: int, block_size: int) -> ExportOptions:
        return ExportOptions(shard_size=shard_size, block_size=block_size, layout=layout, workers=1)

    def size() -> int:
        text = (store / "shards" / "manifest.json").read_text()
        return {"MAX_JSON_BYTES": len(text), "MAX_JSON_VALUES": sum(map(text.count, ",[{"))}[limit]

    export_shards(store, options(3, 1))
    needed = size()
    export_shards(store, options(2, 1))
    before = store_bytes(store)
    monkeypatch.setattr(shard_manifest, limit, needed - 1)
    with pytest.raises(ConfigError, match="manifest of the shards would be too large"):
        export_shards(store, options(3, 1))
    assert store_bytes(store) == before
    small = {"MAX_JSON_BYTES": 25_000, "MAX_JSON_VALUES": 1_000}[limit]
    monkeypatch.setattr(shard_manifest, limit, small)
    with pytest.raises(ConfigError) as caught:
        export_shards(store, options(3, 1))
    block_size, shard_size = (
        int(word) for word in str(caught.value.hint).rstrip(".").split() if word.isdigit()
    )
    export_shards(store, options(shard_size, block_size))
    assert size() <= small < needed
    verify_store(store).require()


def test_too_little_memory_for_the_policies_is_refused_before_anything_is_removed(
    store: Path, trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    export_shards(store, ExportOptions(**SIZES, workers=1))
    before = store_bytes(store)
    least = ExportOptions.WORKER_MEMORY
    with pytest.raises(BudgetError, match="too little memory for 1 worker"):
        export_shards(store, ExportOptions(memory=least + 1000))
    assert store_bytes(store) == before
    export_shards(store, ExportOptions(memory=least + (1 << 20)))
    without_policies = copy_store(trmph_store, "without policies")
    shuffle_store(without_policies)
    export_shards(without_policies, ExportOptions(memory=least))


def test_sizes_that_no_reader_accepts_are_refused() -> None:
    largest = shard_manifest.MAX_SIZE_OF_SHARDS
    assert ExportOptions(shard_size=largest, block_size=largest).block_size == largest
    for block_size in (largest + 1, 1):
        with pytest.raises(ConfigError, match="too large"):
            ExportOptions(shard_size=largest + 1, block_size=block_size)


def test_samples_hold_one_position_each(store: Path) -> None:
    options = ExportOptions(shard_size=300, block_size=100, layout="samples", workers=1)
    assert export_shards(store, options).shards == {"train": 3, "val": 1, "test": 1}
    for split in ("train", "val"):
        expected = columns_to_block(rows_of(store, split), with_policy=True)
        shards = sorted((store / "shards").glob(f"{split}-*.tar"))
        keys, samples = zip(*(sample for path in shards for sample in read_blocks(path)), strict=True)
        assert keys == tuple(f"{position:09d}" for position in expected["position_id"].tolist())
        boards = np.stack([sample["board"] for sample in samples])
        np.testing.assert_array_equal(boards, unpack_boards(expected["board"], 5, np.uint8))
        policies = np.stack([sample["policy"] for sample in samples])
        np.testing.assert_array_equal(policies, block_to_policy(expected, 25))
        assert [float(sample["value"]) for sample in samples] == expected["value"].tolist()
    verify_store(store).require()


def test_a_split_without_dense_policies_has_no_such_field(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    shuffle_store(store)
    export_shards(store, ExportOptions(workers=1))
    assert "policy" not in ShardManifest.load(store / "shards").fields
    verify_store(store).require()


def test_offsets_are_the_positions_of_the_arrays(store: Path) -> None:
    export_shards(store, ExportOptions(**SIZES, workers=1))
    for shard in ShardManifest.load(store / "shards").splits["train"]:
        raw = (store / "shards" / shard.name).read_bytes()
        for number, (_, block) in enumerate(read_blocks(store / "shards" / shard.name)):
            for name, array in block.items():
                begin = shard.offsets[name][number]
                assert raw[begin : begin + array.nbytes] == array.tobytes()


# --- the same bytes -----------------------------------------------------------------------------------


def test_bytes_do_not_depend_on_workers(
    store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes
) -> None:
    export_shards(store, ExportOptions(**SIZES, workers=2))
    assert store_bytes(store) == undisturbed


def test_the_same_command_again_does_nothing(store: Path) -> None:
    first = export_shards(store, ExportOptions(**SIZES, workers=1))
    times = {
        path: path.stat().st_mtime_ns for path in store.rglob("*") if path.name not in (".lock", ".work")
    }
    again = export_shards(store, ExportOptions(**SIZES, workers=2, memory=10**9))
    assert (first.already_done, again.already_done) == (False, True)
    assert (again.digest, again.bytes, again.shards) == (first.digest, first.bytes, first.shards)
    assert {
        path: path.stat().st_mtime_ns for path in store.rglob("*") if path.name not in (".lock", ".work")
    } == times


@pytest.mark.parametrize("other", [{"shard_size": 384}, {"block_size": 64}, {"layout": "samples"}])
def test_other_options_replace_the_shards(
    store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, other: dict[str, Any]
) -> None:
    export_shards(store, ExportOptions(**{**SIZES, **other}, workers=1))
    assert store_bytes(store) != undisturbed
    assert not export_shards(store, ExportOptions(**SIZES, workers=1)).already_done
    assert store_bytes(store) == undisturbed


# --- interruptions ------------------------------------------------------------------------------------


def finished(store: Path) -> list[str]:
    return list(read_units(store / ".work" / "export" / "progress.json"))


def inodes(store: Path) -> dict[str, int]:
    folders = (store / "shards", store / ".work" / "export" / "new" / "shards")
    return {path.name: path.stat().st_ino for folder in folders for path in folder.glob("*.tar")}


def test_killed_at_every_moment(
    store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, kill_at_every_change: KillAtEveryChange
) -> None:
    """It is killed at every second moment, or at every moment with ``HEXDATA_TESTS=full``."""
    export_shards(store, ExportOptions(shard_size=128, block_size=64, workers=1))
    resumed = []
    every = 1 if FULL else 2
    for copy in kill_at_every_change("export", store, {**SIZES, "workers": 1}, every=every):
        published = Store.open(copy).manifest.stages.get("export", {}).get("shard_size") == 192
        done, before = finished(copy), inodes(copy)
        resumed.append(export_shards(copy, ExportOptions(**SIZES, workers=1)).resumed)
        assert resumed[-1] == (0 if published else len(done))
        after = inodes(copy)
        assert all(after[name] == before[name] for name in done)
        assert store_bytes(copy) == undisturbed
        assert not list(copy.rglob(".*.tmp"))
        assert not (copy / ".work" / "export").exists()
    possible = set(range(sum(SHARDS.values()) + 1))
    assert set(resumed) == possible if FULL else len(set(resumed)) > len(possible) // 2


class Stop(Silent):
    """Interrupts the stage at its n-th step, like Ctrl-C."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def advance(self, amount: int) -> None:
        self.steps -= 1
        if not self.steps:
            raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted(store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, workers: int) -> None:
    options = ExportOptions(**SIZES, workers=workers)
    with pytest.raises(KeyboardInterrupt):
        export_shards(store, options, Stop(4))
    assert "export" not in Store.open(store).manifest.stages
    done = len(finished(store))
    assert done == 3
    assert export_shards(store, options).resumed == done
    assert store_bytes(store) == undisturbed


def test_unfinished_shards_of_other_options_are_not_used(
    store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes
) -> None:
    """The unfinished shards of the first options were removed by the run with other options."""
    for options, steps in ((SIZES, 4), ({**SIZES, "shard_size": 64}, 1)):
        with pytest.raises(KeyboardInterrupt):
            export_shards(store, ExportOptions(**options, workers=1), Stop(steps))
    assert export_shards(store, ExportOptions(**SIZES, workers=1)).resumed == 0
    assert store_bytes(store) == undisturbed


# --- refused ------------------------------------------------------------------------------------------


def test_a_store_that_is_not_shuffled_is_refused(odd_store: Path, copy_store: CopyStore) -> None:
    with pytest.raises(StoreError, match=r"no shuffle stage yet.*hexdata shuffle"):
        export_shards(copy_store(odd_store))


def test_a_locked_store_is_not_changed(store: Path, shuffled: Path, store_bytes: StoreBytes) -> None:
    with Store.open(store).writing("shuffle"), pytest.raises(StoreLockedError, match="shuffle"):
        export_shards(store)
    assert store_bytes(store) == store_bytes(shuffled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size": 100, "block_size": 64}, "multiple of block_size"),
        ({"shard_size": 0}, "shard_size cannot be used; found 0"),
        ({"block_size": 0}, "block_size cannot be used; found 0"),
        ({"shard_size": -64, "block_size": 64}, "shard_size cannot be used; found -64"),
        ({"layout": "Blocks"}, "unknown layout; found .Blocks.; expected .blocks. or .samples."),
        ({"workers": 0}, "workers"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportOptions(**options)


# --- many shards --------------------------------------------------------------------------------------


def test_several_shards_per_task_change_neither_bytes_nor_the_ledger(
    store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers with one task each write the six shards in groups of three."""
    monkeypatch.setattr(run, "_TASKS_PER_WORKER", 1)
    options = ExportOptions(**SIZES, workers=2)
    with pytest.raises(KeyboardInterrupt):
        export_shards(store, options, Stop(4))
    assert len(finished(store)) == 3
    monkeypatch.setattr(run, "_MAX_FILES_PER_TASK", 2)
    assert export_shards(store, options).resumed == 3
    assert store_bytes(store) == undisturbed


# --- policies -----------------------------------------------------------------------------------------


def test_policies_are_counted_by_the_shuffle(
    store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = {split: rows_of(store, split)["policy"].is_valid().to_pylist().count(True) for split in SHARDS}
    assert Store.open(store).manifest.stages["shuffle"]["policies"] == counted
    assert any(counted.values())
    with monkeypatch.context() as patch:
        patch.delattr("hexdata.export.shards.duckdb_session")  # nothing is scanned
        export_shards(store, ExportOptions(**SIZES, workers=1))
    assert store_bytes(store) == undisturbed


def test_policies_of_a_store_of_an_earlier_release_are_found(
    store: Path, undisturbed: dict[str, str]
) -> None:
    opened = Store.open(store)
    del opened.manifest.stages["shuffle"]["policies"]
    opened.manifest.save(store)
    export_shards(store, ExportOptions(**SIZES, workers=1))
    shards = {name: f.sha256 for name, f in Store.open(store).manifest.files_in("shards").items()}
    assert shards == {name: undisturbed[name] for name in shards}
    verify_store(store).require()


def test_a_wrong_number_of_policies_is_refused(store: Path) -> None:
    opened = Store.open(store)
    opened.manifest.stages["shuffle"]["policies"] = dict.fromkeys(SHARDS, 0)
    opened.manifest.save(store)
    failed = [check.detail for check in verify_store(store).checks if not check.ok]
    assert ["wrong policies" in detail for detail in failed] == [True]
    with pytest.raises(StoreError, match="contain policies, but the manifest records none"):
        export_shards(store, ExportOptions(**SIZES, workers=1))
