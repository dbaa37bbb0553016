"""Verify: content with good stores, and no corruption escapes it, however well it is covered up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from hexdata.errors import StoreError, VerifyError
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.shards import Block, ShardEntry, ShardManifest, ShardWriter, read_blocks
from hexdata.order import derive_key, sort_key
from hexdata.schema import positions_schema
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store.files import FileFacts, atomic_file, digest_file, write_bytes
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from hexdata.verify import verify_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore

SEED = 7
GAMES, SOURCES, REJECTED = (f"{name}/part-000000.parquet" for name in ("games", "sources", "rejected"))
POSITIONS = "positions/part-000001.parquet"
BUCKET, NEXT_BUCKET = (f"shuffled/train/bucket-00000{i}.parquet" for i in (0, 1))
SHARD = "train-000001.tar"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, odd_store: Path) -> Path:
    """The odd store through all stages. Read only: copy it."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("exported") / "store")
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3))
    export_shards(store, ExportOptions(shard_size=192, block_size=32, workers=1))
    return store


@pytest.fixture
def store(exported: Path, copy_store: CopyStore) -> Path:
    return copy_store(exported)


def failures(store: Path) -> dict[str, str]:
    """Return the failed checks: name and what they say."""
    return {check.name: check.detail for check in verify_store(store).checks if not check.ok}


# --- good stores --------------------------------------------------------------------------------------


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
    assert made == [6, 9, 11]


def test_the_oddest_store_passes(store: Path) -> None:
    assert failures(store) == {}


def test_what_failed_is_raised_with_all_its_names(store: Path) -> None:
    rewrite(store, BUCKET, lambda table: table[1:])
    with pytest.raises(VerifyError, match=r"2 of 11 checks failed; found shuffled rows: .*shards: "):
        verify_store(store).require()


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a hexdata store"):
        verify_store(tmp_path)


# --- files --------------------------------------------------------------------------------------------

FILES = [POSITIONS, GAMES, SOURCES, REJECTED, BUCKET, f"shards/{SHARD}", "shards/manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.4, 0.999])
def test_a_flipped_byte_is_found(store: Path, name: str, place: float) -> None:
    data = bytearray((store / name).read_bytes())
    data[int(len(data) * place)] ^= 1
    (store / name).write_bytes(data)
    found = failures(store)
    assert list(found) == ["files"]
    assert str(store / name) in found["files"]
    assert "altered" in found["files"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(store: Path, name: str) -> None:
    (store / name).unlink()
    assert failures(store)["files"].startswith(f"{store / name}: the file is missing")


@pytest.mark.parametrize(
    "name", ["positions/part-000009.parquet", "shuffled/more/x", "shards/train-000099.tar"]
)
def test_an_extra_file_is_found(store: Path, name: str) -> None:
    write_bytes(store / name, b"")
    assert f"no manifest names; found {name}" in failures(store)["files"]


# --- the manifest -------------------------------------------------------------------------------------


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
        (("stages", "shuffle", "positions"), "shuffle stage"),
        (("stages", "shuffle", "rejected"), "shuffle stage"),
        (("stages", "shuffle", "of"), "shuffle stage"),
        (("stages", "shuffle", "splits", "val"), "shuffled rows"),
        (("stages", "shuffle", "seed"), "shuffled order"),
        (("stages", "shuffle", "buckets", "train"), "shuffled order"),
        (("stages", "export", "positions"), "export stage"),
        (("stages", "export", "of"), "export stage"),
        (("stages", "export", "splits", "test"), "shards"),
        (("stages", "export", "shards", "train"), "shards"),
        (("stages", "export", "digest"), "shards"),
    ],
)
def test_an_altered_manifest_is_found(store: Path, entry: tuple[str, ...], check: str) -> None:
    content = json.loads((store / "manifest.json").read_bytes())
    *path, last = entry
    place = content
    for name in path:
        place = place[name]
    place[last] = place[last][::-1] if isinstance(place[last], str) else place[last] + 1
    (store / "manifest.json").write_text(json.dumps(content))
    assert next(iter(failures(store))) == check


# --- contents with every digest put right -------------------------------------------------------------


def rewrite(store: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change the rows of a table's file and make the manifest agree."""
    manifest = Manifest.load(store)
    table = change(pq.read_table(store / name))
    folder, before = name.split("/")[0], manifest.files[name].rows
    manifest.files[name] = write_parquet(store / name, table.schema, [table])
    if folder in manifest.counts:
        manifest.counts[folder] += table.num_rows - before
    for stage, made_of in (("shuffle", ("positions", "games")), ("export", ("shuffled",))):
        manifest.stages[stage]["of"] = manifest.digest(*made_of)
    manifest.save(store)


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    index = table.schema.get_field_index(name)
    field = table.schema.field(index)
    return table.set_column(index, field, pa.chunked_array([pa.array(values).cast(field.type)]))


def edit(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    values = table[name].to_pylist()
    values[row] = value
    return with_column(table, name, pa.array(values, table.schema.field(name).type))


OTHER_VALUES = {
    "position_id": 10_000,
    "game_id": 3,
    "position_in_game": 77,
    "total_positions": 99,
    "board": bytes(7),
    "move": 24,
    "policy": [0.25] * 25,
    "value": 0.125,
    "player_to_move": 1,
    "value_sample_tier": 3,
    "winner": "RED",
    "extra": "{}",
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
def test_one_altered_value_is_found(store: Path, column: str, before: str, after: object) -> None:
    def alter(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        row = next(i for i, v in enumerate(values) if (v is None) == (before == "null") and v != after)
        return edit(table, column, row, after)

    rewrite(store, BUCKET, alter)
    assert "train" in failures(store)["shuffled rows"]


@pytest.mark.parametrize("policy", [[], [None], [0.0], [0.0, 0.0]])
def test_an_empty_list_is_no_null(store: Path, policy: list[float | None]) -> None:
    row = pc.index(pc.is_null(pq.read_table(store / BUCKET)["policy"]), True).as_py()
    rewrite(store, BUCKET, lambda table: edit(table, "policy", row, policy))
    assert "shuffled rows" in failures(store)


def test_values_swapped_between_rows_are_found(store: Path) -> None:
    value = pq.read_table(store / BUCKET)["value"].to_pylist()
    value[3], value[4] = value[4], value[3]
    rewrite(store, BUCKET, lambda table: with_column(table, "value", value))
    assert "shuffled rows" in failures(store)


def test_two_positions_swapped_in_a_bucket_are_found(store: Path) -> None:
    rewrite(store, BUCKET, lambda table: table.take([1, 0, *range(2, len(table))]))
    assert list(failures(store)) == ["shuffled order", "shards"]
    assert BUCKET in failures(store)["shuffled order"]


def test_a_position_held_twice_is_found(store: Path) -> None:
    rewrite(store, BUCKET, lambda table: table.take([0, 0, *range(2, len(table))]))
    assert list(failures(store)) == ["shuffled rows", "shuffled order", "shards"]


def test_a_position_in_the_wrong_bucket_is_found(store: Path) -> None:
    moved = pq.read_table(store / BUCKET)[-1:]
    rewrite(store, BUCKET, lambda table: table[:-1])
    rewrite(store, NEXT_BUCKET, lambda table: pa.concat_tables([moved, table]))
    assert list(failures(store)) == ["shuffled order"]


def test_a_position_in_the_wrong_split_is_found(store: Path) -> None:
    """With its key in order, every count put right, and the shards made anew."""
    moved = pq.read_table(store / BUCKET)[:1]

    def insert(table: pa.Table) -> pa.Table:
        joined = pa.concat_tables([table, moved])
        return joined.take(
            np.argsort(sort_key(joined["position_id"].to_numpy(), derive_key(SEED, "shuffle")))
        )

    rewrite(store, BUCKET, lambda table: table[1:])
    rewrite(store, "shuffled/val/bucket-000000.parquet", insert)
    manifest = Manifest.load(store)
    manifest.stages["shuffle"]["splits"]["train"] -= 1
    manifest.stages["shuffle"]["splits"]["val"] += 1
    del manifest.stages["export"]
    manifest.save(store)
    export_shards(store, ExportOptions(shard_size=192, block_size=32, workers=1))
    assert list(failures(store)) == ["shuffled rows"]


def test_a_lost_position_is_found(store: Path) -> None:
    rewrite(store, POSITIONS, lambda table: table[:-1])
    assert list(failures(store))[:2] == ["in = out + rejected", "position ids"]


def test_two_positions_swapped_in_the_input_are_found(store: Path) -> None:
    rewrite(store, POSITIONS, lambda table: table.take([1, 0, *range(2, len(table))]))
    assert list(failures(store)) == ["position ids"]


@pytest.mark.parametrize(("column", "change"), [("positions", 1), ("records", 1), ("rejected", -1)])
def test_an_altered_count_of_a_source_is_found(store: Path, column: str, change: int) -> None:
    rewrite(store, SOURCES, lambda t: edit(t, column, 1, t[column][1].as_py() + change))
    assert "source-1: records are missing" in failures(store)["in = out + rejected"]


def test_a_removed_source_is_found(store: Path) -> None:
    rewrite(store, SOURCES, lambda table: table[:-1])
    assert "do not add up" in failures(store)["in = out + rejected"]


def test_a_removed_rejection_is_found(store: Path) -> None:
    rewrite(store, REJECTED, lambda table: table[1:])
    assert "source-0: records are missing" in failures(store)["in = out + rejected"]


def test_a_game_that_claims_other_positions_is_found(store: Path) -> None:
    rewrite(store, GAMES, lambda table: edit(table, "positions", 4, 21))
    assert "game 4 does not have its positions; found 20; expected 21" in failures(store)["games"]


def test_a_position_of_no_known_game_is_found(store: Path) -> None:
    rewrite(store, POSITIONS, lambda table: edit(table, "game_id", 0, 10_000))
    assert "games" in failures(store)


def test_a_game_held_twice_is_found(store: Path) -> None:
    rewrite(store, GAMES, lambda table: pa.concat_tables([table[:5], table[4:]]))
    assert "game ids" in failures(store)


def test_the_same_game_in_two_splits_is_found(store: Path) -> None:
    games = pq.read_table(store / GAMES)
    assert games["split"][4] != games["split"][5]
    rewrite(store, GAMES, lambda table: edit(table, "game_hash", 4, table["game_hash"][5].as_py()))
    assert "games 4 and 5" in failures(store)["games"]


@pytest.mark.parametrize("name", [POSITIONS, GAMES, SOURCES, REJECTED, BUCKET])
def test_another_schema_is_found(store: Path, name: str) -> None:
    rewrite(store, name, lambda table: table.drop_columns([table.schema.names[-1]]))
    assert list(failures(store)) == ["tables"]


@pytest.mark.parametrize("name", [POSITIONS, BUCKET])
def test_a_broken_page_is_found_where_the_digest_agrees(store: Path, name: str) -> None:
    data = bytearray((store / name).read_bytes())
    data[4:400] = bytes(396)
    (store / name).write_bytes(data)
    manifest = Manifest.load(store)
    manifest.files[name] = FileFacts(manifest.files[name].rows, *digest_file(store / name))
    for stage, made_of in (("shuffle", ("positions", "games")), ("export", ("shuffled",))):
        manifest.stages[stage]["of"] = manifest.digest(*made_of)
    manifest.save(store)
    assert failures(store)


# --- shards with every digest put right ---------------------------------------------------------------


def save_shards(store: Path, shards: ShardManifest) -> None:
    """Write a manifest of shards and make the store's agree, the digests of the shards too."""
    folder = store / "shards"
    splits = {}
    for split, entries in shards.splits.items():
        digests = [digest_file(folder / entry.name) for entry in entries]
        splits[split] = [
            replace(e, bytes=size, sha256=sha) for e, (size, sha) in zip(entries, digests, strict=True)
        ]
    shards = replace(shards, splits=splits)
    manifest = Manifest.load(store)
    for entry in (entry for listed in splits.values() for entry in listed):
        manifest.files[f"shards/{entry.name}"] = FileFacts(entry.positions, entry.bytes, entry.sha256)
    manifest.files["shards/manifest.json"] = write_bytes(folder / "manifest.json", shards.dumps())
    manifest.stages["export"]["digest"] = shards.digest
    manifest.save(store)


def rewrite_shard(store: Path, change: Callable[[dict[int, Block]], dict[int, Block]]) -> None:
    """Change the blocks of one shard, by their keys, and make both manifests agree."""
    path = store / "shards" / SHARD
    entry = write_blocks(path, change({int(key): dict(block) for key, block in read_blocks(path)}))
    shards = ShardManifest.load(path.parent)
    entries = [entry if e.name == SHARD else e for e in shards.splits["train"]]
    save_shards(store, replace(shards, splits={**shards.splits, "train": entries}))


def write_blocks(path: Path, blocks: dict[int, Block]) -> ShardEntry:
    with atomic_file(path) as file:
        writer = ShardWriter(file)  # type: ignore[arg-type]
        for key, block in blocks.items():
            writer.write_block(key, block)
        writer.close()
    return writer.entry(path.name, "")


def test_a_shard_in_the_place_of_another_is_found(store: Path) -> None:
    folder = store / "shards"
    shutil.copy(folder / "train-000000.tar", folder / SHARD)
    shards = ShardManifest.load(folder)
    first, second, *others = shards.splits["train"]
    entries = [first, replace(second, offsets=first.offsets), *others]
    save_shards(store, replace(shards, splits={**shards.splits, "train": entries}))
    assert failures(store)["shards"].startswith(f"{folder / SHARD}: block 000006: a block differs")


@pytest.mark.parametrize(
    "name", ["board", "game_id", "move", "player_to_move", "policy", "policy_row", "position_id", "value"]
)
def test_one_altered_number_is_found(store: Path, name: str) -> None:
    def alter(blocks: dict[int, Block]) -> dict[int, Block]:
        array = blocks[8][name].copy()
        array.reshape(-1)[-1] += 1
        return blocks | {8: blocks[8] | {name: array}}

    rewrite_shard(store, alter)
    assert "block 000008: a block differs" in failures(store)["shards"]


CHANGES: dict[str, Callable[[dict[int, Block]], dict[int, Block]]] = {
    "another key": lambda blocks: {key + (key == 11): block for key, block in blocks.items()},
    "two blocks swapped": lambda blocks: blocks | {8: blocks[9], 9: blocks[8]},
    "a field left out": lambda blocks: {
        k: {n: a for n, a in b.items() if n != "move"} for k, b in blocks.items()
    },
    "policies left out": lambda blocks: {
        k: {n: a for n, a in b.items() if not n.startswith("policy")} for k, b in blocks.items()
    },
    "another type": lambda blocks: {k: b | {"value": b["value"].astype("<f8")} for k, b in blocks.items()},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_made_otherwise_is_found(store: Path, change: str) -> None:
    rewrite_shard(store, CHANGES[change])
    assert list(failures(store)) == ["shards"]


def test_a_lost_block_is_found(store: Path) -> None:
    rewrite_shard(store, lambda blocks: {key: block for key, block in blocks.items() if key != 7})
    assert list(failures(store)) == ["shards"]


def test_a_block_more_than_stated_is_found(store: Path) -> None:
    path = store / "shards" / SHARD
    blocks = {int(key): dict(block) for key, block in read_blocks(path)}
    write_blocks(path, blocks | {max(blocks) + 1: blocks[max(blocks)]})
    save_shards(store, ShardManifest.load(path.parent))
    assert "holds more than it should" in failures(store)["shards"]


def test_an_offset_that_leads_elsewhere_is_found(store: Path) -> None:
    shards = ShardManifest.load(store / "shards")
    entries = list(shards.splits["train"])
    entries[1].offsets["value"][2] += 4
    save_shards(store, shards)
    assert "block 000008: value begins elsewhere" in failures(store)["shards"]


@pytest.mark.parametrize("change", ["seed", "split", "last shard"])
def test_a_shard_manifest_that_says_otherwise_is_found(store: Path, change: str) -> None:
    shards = ShardManifest.load(store / "shards")
    if change == "seed":
        shards = replace(shards, seed=SEED + 1)
    elif change == "split":
        shards = replace(shards, splits={"train": shards.splits["train"]})
    else:
        shards = replace(shards, splits={**shards.splits, "train": shards.splits["train"][:-1]})
    save_shards(store, shards)
    assert "contradicts" in failures(store)["shards"]
