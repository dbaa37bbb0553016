"""Verify: content with good stores, and no corruption escapes it, however well it is covered up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import make_games
from hexdata.errors import BudgetError, ConfigError, StoreError, VerifyError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store.files import FileFacts, canonical_json, digest_file, write_bytes
from hexdata.store.manifest import Manifest
from hexdata.verify import VerifyOptions, verify_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore
    from tests.verify.conftest import Edit, Failures, Rewrite

GAMES, SOURCES, REJECTED = (f"{name}/part-000000.parquet" for name in ("games", "sources", "rejected"))
POSITIONS = "positions/part-000001.parquet"
BUCKET = "shuffled/train/bucket-000000.parquet"
SHARD = "train-000001.tar"


# --- good stores ----------------------------------------------------------------------------------


def test_a_good_store_passes_at_each_stage(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    stages: list[Callable[[], object]] = [
        lambda: None,
        lambda: shuffle_store(store, ShuffleOptions(buckets=2)),
        lambda: export_shards(store, ExportOptions(workers=1)),
    ]
    made = []
    for stage, skipped in zip(stages, (["shuffle", "export"], ["export"], []), strict=True):
        stage()
        result = verify_store(store)
        result.require()
        assert result.skipped == skipped
        made.append(len(result.checks))
    assert made == [9, 13, 15]


def test_the_oddest_store_passes(store: Path, failures: Failures) -> None:
    assert failures(store) == {}


def test_what_failed_is_raised_with_all_its_names(store: Path, rewrite: Rewrite) -> None:
    rewrite(store, BUCKET, lambda table: table[1:])
    with pytest.raises(VerifyError, match=r"2 of 15 checks failed; found shuffled rows: .*shards: "):
        verify_store(store).require()


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a hexdata store"):
        verify_store(tmp_path)


def test_a_verification_writes_nothing_into_the_store(store: Path) -> None:
    """So that it works on a store that can only be read."""
    before = {path: path.stat().st_mtime_ns for path in [store, *store.rglob("*")]}
    verify_store(store).require()
    assert {path: path.stat().st_mtime_ns for path in [store, *store.rglob("*")]} == before


@pytest.mark.parametrize("threads", [1, 3])
def test_the_least_memory_is_enough_for_a_small_store(store: Path, threads: int) -> None:
    with pytest.raises(BudgetError, match=r"at least \d+ MB\. Raise --memory") as caught:
        VerifyOptions(memory=1_000_000, threads=threads)
    least = int(str(caught.value.expected).split()[2]) * 1_000_000 + 1_000_000
    verify_store(store, VerifyOptions(memory=least, threads=threads)).require()


def test_threads_follow_from_the_memory() -> None:
    assert VerifyOptions(threads=5).session(Path()).threads == 5
    assert VerifyOptions(memory=395_000_000).session(Path()).threads == 1
    assert VerifyOptions(memory=395_000_000).session(Path()).memory < 395_000_000 - 300_000_000
    with pytest.raises(ConfigError, match="threads cannot be used; found 0"):
        VerifyOptions(threads=0)


# --- files ----------------------------------------------------------------------------------------

FILES = [POSITIONS, GAMES, SOURCES, REJECTED, BUCKET, f"shards/{SHARD}", "shards/manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.4, 0.999])
def test_a_flipped_byte_is_found(store: Path, name: str, place: float, failures: Failures) -> None:
    data = bytearray((store / name).read_bytes())
    data[int(len(data) * place)] ^= 1
    (store / name).write_bytes(data)
    found = failures(store)
    assert list(found) == ["files"]
    assert str(store / name) in found["files"]
    assert "altered" in found["files"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(store: Path, name: str, failures: Failures) -> None:
    (store / name).unlink()
    assert failures(store)["files"].startswith(f"{store / name}: the file is missing")


@pytest.mark.parametrize(
    "name", ["positions/part-000009.parquet", "shuffled/more/x", "shards/train-000099.tar"]
)
def test_an_extra_file_is_found(store: Path, name: str, failures: Failures) -> None:
    write_bytes(store / name, b"")
    assert f"not in the manifest; found {name}" in failures(store)["files"]


# --- the manifest ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "check"),
    [
        (("counts", "positions"), "tables"),
        (("counts", "games"), "tables"),
        (("counts", "sources"), "tables"),
        (("counts", "rejected"), "tables"),
        (("files", POSITIONS, "rows"), "tables"),
        (("files", BUCKET, "rows"), "tables"),
        (("files", GAMES, "bytes"), "files"),
        (("files", f"shards/{SHARD}", "rows"), "shards"),
        (("board_size",), "tables"),
        (("stages", "convert", "records"), "in = out + rejected"),
        (("stages", "convert", "positions"), "in = out + rejected"),
        (("stages", "convert", "rejected"), "in = out + rejected"),
        (("stages", "convert", "val"), "stages"),
        (("stages", "convert", "test"), "stages"),
        (("stages", "convert", "salvage"), "stages"),
        (("files", "shards/manifest.json", "rows"), "stages"),
        (("stages", "shuffle", "positions"), "shuffle stage"),
        (("stages", "shuffle", "rejected"), "shuffle stage"),
        (("stages", "shuffle", "of"), "shuffle stage"),
        (("stages", "shuffle", "splits", "val"), "shuffled rows"),
        (("stages", "shuffle", "seed"), "shuffled rows"),
        (("stages", "shuffle", "buckets", "train"), "shuffled rows"),
        (("stages", "export", "positions"), "export stage"),
        (("stages", "export", "of"), "export stage"),
        (("stages", "export", "splits", "test"), "shards"),
        (("stages", "export", "shards", "train"), "shards"),
        (("stages", "export", "digest"), "shards"),
    ],
)
def test_an_altered_manifest_is_found(
    store: Path, entry: tuple[str, ...], check: str, failures: Failures
) -> None:
    content = json.loads((store / "manifest.json").read_bytes())
    del content["digest"]
    *path, last = entry
    place = content
    for name in path:
        place = place[name]
    if isinstance(place.get(last, False), bool):
        place[last] = not place.get(last, False)
    elif isinstance(place[last], float):
        place[last] /= 2
    else:
        place[last] = place[last][::-1] if isinstance(place[last], str) else place[last] + 1
    content["digest"] = hashlib.sha256(canonical_json(content)).hexdigest()
    (store / "manifest.json").write_text(json.dumps(content))
    assert next(iter(failures(store))) == check


@pytest.mark.parametrize("stage", ["convert", "shuffle", "export"])
@pytest.mark.parametrize("with_files", [False, True])
def test_a_deleted_stage_is_found(store: Path, stage: str, with_files: bool, failures: Failures) -> None:
    manifest = Manifest.load(store)
    gone = {"convert": ["convert"], "shuffle": ["shuffle", "export"], "export": ["export"]}[stage]
    for name in gone:
        del manifest.stages[name]
    if with_files:
        folders = {"convert": ("rejected/",), "shuffle": ("shuffled/", "shards/"), "export": ("shards/",)}
        manifest.files = {n: f for n, f in manifest.files.items() if not n.startswith(folders[stage])}
    manifest.save(store)
    assert failures(store).keys() & {"stages", "files"}


@pytest.fixture(scope="module")
def pickled(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with pickles in both orders. Read only: copy it."""
    store = tmp_path_factory.mktemp("pickled") / "store"
    demo = tmp_path_factory.mktemp("pickled-games")
    write_trmph(demo / "a.trmph", list(make_games(6, 1, 7)), 7)
    write_trmph(demo / "b.trmph", list(make_games(6, 2, 7)), 7)
    convert_sources(demo, store, ConvertOptions(workers=1))
    shuffle_store(store, ShuffleOptions(seed=7, buckets=2))
    for order in ("original", "shuffled"):
        export_pickles(store, PicklesOptions(order=order, workers=1))
    return store


@pytest.mark.parametrize("order", ["original", "shuffled"])
@pytest.mark.parametrize("change", ["rows", "files", "order", "positions", "gone", "gone with its files"])
def test_altered_facts_of_pickles_are_found(
    pickled: Path, copy_store: CopyStore, order: str, change: str, failures: Failures
) -> None:
    store = copy_store(pickled)
    assert failures(store) == {}
    manifest = Manifest.load(store)
    first, second, *_ = manifest.files_in(f"pickles/{order}")
    stage = manifest.stages[f"pickles-{order}"]
    if change == "rows":
        manifest.files[first] = replace(manifest.files[first], rows=manifest.files[first].rows + 1)
        manifest.files[second] = replace(manifest.files[second], rows=manifest.files[second].rows - 1)
    elif change.startswith("gone"):
        del manifest.stages[f"pickles-{order}"]
        if change.endswith("files"):
            kept = {n: f for n, f in manifest.files.items() if not n.startswith("pickles/")}
            manifest.files = kept
    else:
        stage[change] = {"original": "shuffled", "shuffled": "original"}.get(stage[change]) or stage[
            change
        ] + 1
    manifest.save(store)
    assert failures(store).keys() & {"stages", "files"}


def test_pickles_of_an_earlier_state_of_the_store_are_named_once(
    pickled: Path, copy_store: CopyStore, tmp_path: Path, failures: Failures
) -> None:
    store = copy_store(pickled)
    write_trmph(tmp_path / "c.trmph", list(make_games(2, 3, 7)), 7)
    convert_sources([tmp_path / "c.trmph"], store, ConvertOptions(workers=1))
    failed = failures(store)
    assert failed.keys() == {
        f"{stage} stage" for stage in ("shuffle", "pickles-original", "pickles-shuffled")
    }


# --- contents with every digest put right ---------------------------------------------------------------


def test_a_lost_position_is_found(store: Path, rewrite: Rewrite, failures: Failures) -> None:
    rewrite(store, POSITIONS, lambda table: table[:-1])
    assert list(failures(store))[:2] == ["in = out + rejected", "position ids"]


def test_two_positions_swapped_in_the_input_are_found(
    store: Path, rewrite: Rewrite, failures: Failures
) -> None:
    rewrite(store, POSITIONS, lambda table: table.take([1, 0, *range(2, len(table))]))
    assert list(failures(store)) == ["position ids"]


@pytest.mark.parametrize(("column", "change"), [("positions", 1), ("records", 1), ("rejected", -1)])
def test_an_altered_count_of_a_source_is_found(
    store: Path, column: str, change: int, rewrite: Rewrite, failures: Failures, edit: Edit
) -> None:
    rewrite(store, SOURCES, lambda t: edit(t, column, 1, t[column][1].as_py() + change))
    assert "source-1: the records of a source do not add up" in failures(store)["in = out + rejected"]


def test_a_removed_source_is_found(store: Path, rewrite: Rewrite, failures: Failures) -> None:
    rewrite(store, SOURCES, lambda table: table[:-1])
    assert "the totals of the sources differ" in failures(store)["in = out + rejected"]


def test_a_removed_rejection_is_found(store: Path, rewrite: Rewrite, failures: Failures) -> None:
    rewrite(store, REJECTED, lambda table: table[1:])
    assert "source-0: the records of a source do not add up" in failures(store)["in = out + rejected"]


def test_a_game_that_claims_other_positions_is_found(
    store: Path, rewrite: Rewrite, failures: Failures, edit: Edit
) -> None:
    rewrite(store, GAMES, lambda table: edit(table, "positions", 4, 21))
    assert "game 4 has the wrong number of positions; found 20; expected 21" in failures(store)["games"]


def test_a_position_of_no_known_game_is_found(
    store: Path, rewrite: Rewrite, failures: Failures, edit: Edit
) -> None:
    rewrite(store, POSITIONS, lambda table: edit(table, "game_id", 0, 10_000))
    assert "games" in failures(store)


def test_a_game_held_twice_is_found(store: Path, rewrite: Rewrite, failures: Failures) -> None:
    rewrite(store, GAMES, lambda table: pa.concat_tables([table[:5], table[4:]]))
    assert "game ids" in failures(store)


def test_the_same_game_in_two_splits_is_found(
    store: Path, rewrite: Rewrite, failures: Failures, edit: Edit
) -> None:
    games = pq.read_table(store / GAMES)
    assert games["split"][4] != games["split"][5]
    rewrite(store, GAMES, lambda table: edit(table, "game_hash", 4, table["game_hash"][5].as_py()))
    assert "games 4 and 5" in failures(store)["games"]


@pytest.mark.parametrize("name", [POSITIONS, GAMES, SOURCES, REJECTED, BUCKET])
def test_another_schema_is_found(store: Path, name: str, rewrite: Rewrite, failures: Failures) -> None:
    rewrite(store, name, lambda table: table.drop_columns([table.schema.names[-1]]))
    assert list(failures(store)) == ["tables"]


@pytest.mark.parametrize("name", [POSITIONS, BUCKET])
def test_a_broken_page_is_found_where_the_digest_agrees(store: Path, name: str, failures: Failures) -> None:
    data = bytearray((store / name).read_bytes())
    data[4:400] = bytes(396)
    (store / name).write_bytes(data)
    manifest = Manifest.load(store)
    manifest.files[name] = FileFacts(manifest.files[name].rows, *digest_file(store / name))
    for stage, made_of in (("shuffle", ("positions", "games")), ("export", ("shuffled",))):
        manifest.stages[stage]["of"] = manifest.digest(*made_of)
    manifest.save(store)
    assert failures(store)
