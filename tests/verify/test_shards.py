"""Verification of shards: every difference from the shuffle is found, even if all digests are correct."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.export import ExportOptions, export_shards
from hexdata.shards.blocks import SPARSE_FIELDS, Block
from hexdata.shards.format import ShardWriter, read_blocks
from hexdata.shards.manifest import FieldSpec, ShardEntry, ShardManifest
from hexdata.storage import storage_of
from hexdata.store.files import FileFacts, digest_file, write_bytes
from hexdata.store.manifest import Manifest

if TYPE_CHECKING:
    from tests.verify.conftest import Failures

SEED = 7
SHARD = "train-000001.tar"


def save_shards(store: Path, shards: ShardManifest) -> None:
    """Write a shard manifest and update the manifest of the store and the digests of the shards."""
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
    with storage_of(path).publish() as file:
        writer = ShardWriter(file)  # type: ignore[arg-type]
        for key, block in blocks.items():
            writer.write_block(key, block)
        writer.close()
    return writer.entry(path.name, "")


def test_a_shard_in_the_place_of_another_is_found(store: Path, failures: Failures) -> None:
    folder = store / "shards"
    shutil.copy(folder / "train-000000.tar", folder / SHARD)
    shards = ShardManifest.load(folder)
    first, second, *others = shards.splits["train"]
    entries = [first, replace(second, offsets=first.offsets), *others]
    save_shards(store, replace(shards, splits={**shards.splits, "train": entries}))
    assert failures(store)["shards"].startswith(f"{folder / SHARD}: block 000006: a block differs")


@pytest.mark.parametrize(
    "name",
    [
        *("board", "game_id", "move", "player_to_move", "position_id", "value"),
        *("policy_row", "policy_count", "policy_cell", "policy_probability"),
    ],
)
def test_one_altered_number_is_found(store: Path, name: str, failures: Failures) -> None:
    def alter(blocks: dict[int, Block]) -> dict[int, Block]:
        array = blocks[8][name].copy()
        array.reshape(-1)[-1] += 1
        return blocks | {8: blocks[8] | {name: array}}

    rewrite_shard(store, alter)
    message = failures(store)["shards"]
    assert "block 000008: a block differs" in message or "the shard contains invalid data" in message
    assert "000008" in message


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
def test_a_shard_made_otherwise_is_found(store: Path, change: str, failures: Failures) -> None:
    rewrite_shard(store, CHANGES[change])
    assert list(failures(store)) == ["shards"]


def test_a_lost_block_is_found(store: Path, failures: Failures) -> None:
    rewrite_shard(store, lambda blocks: {key: block for key, block in blocks.items() if key != 7})
    assert list(failures(store)) == ["shards"]


def test_a_block_more_than_stated_is_found(store: Path, failures: Failures) -> None:
    path = store / "shards" / SHARD
    blocks = {int(key): dict(block) for key, block in read_blocks(path)}
    write_blocks(path, blocks | {max(blocks) + 1: blocks[max(blocks)]})
    save_shards(store, ShardManifest.load(path.parent))
    assert "contains more positions than the shard manifest records" in failures(store)["shards"]


def test_an_offset_that_leads_elsewhere_is_found(store: Path, failures: Failures) -> None:
    shards = ShardManifest.load(store / "shards")
    entries = list(shards.splits["train"])
    entries[1].offsets["value"][2] += 4
    save_shards(store, shards)
    assert "block 000008: value is not at the offset in the shard manifest" in failures(store)["shards"]


@pytest.mark.parametrize("columns", [["value"], [], ["board", "nothing"]])
def test_offsets_of_other_fields_are_found(store: Path, columns: list[str], failures: Failures) -> None:
    shards = ShardManifest.load(store / "shards")
    entries = list(shards.splits["train"])
    places = entries[1].offsets
    entries[1] = replace(entries[1], offsets={name: places.get(name, places["board"]) for name in columns})
    save_shards(store, replace(shards, splits={**shards.splits, "train": entries}))
    told = failures(store)["shards"]
    manifest = store / "shards" / "manifest.json"
    said = {"nothing": f"{manifest}: a shard has a field that the manifest does not describe; found nothing"}
    other = f"{store / 'shards' / SHARD}: the shard manifest has offsets of wrong fields; found "
    assert told.startswith(said.get(columns[-1] if columns else "", other))


def test_offsets_of_samples_are_found(store: Path, failures: Failures) -> None:
    export_shards(store, ExportOptions(shard_size=192, block_size=32, layout="samples", workers=1))
    assert failures(store) == {}
    shards = ShardManifest.load(store / "shards")
    first, *others = shards.splits["train"]
    entries = [replace(first, offsets={"board": [0] * first.blocks}), *others]
    save_shards(store, replace(shards, splits={**shards.splits, "train": entries}))
    assert "train-000000.tar: the shard manifest has offsets of wrong fields" in failures(store)["shards"]


@pytest.mark.parametrize("layout", ["blocks", "samples"])
@pytest.mark.parametrize("change", ["fewer", "no policy", "another type"])
def test_other_fields_in_the_manifest_are_found(
    store: Path, layout: str, change: str, failures: Failures
) -> None:
    export_shards(store, ExportOptions(shard_size=192, block_size=32, layout=layout, workers=1))
    shards = ShardManifest.load(store / "shards")
    fields = dict(shards.fields)
    if change == "another type":
        fields["value"] = FieldSpec("<f8", ())
    else:
        for name in ["value"] if change == "fewer" else SPARSE_FIELDS:
            del fields[name]
    save_shards(store, replace(shards, fields=fields))
    undescribed = layout == "blocks" and change != "another type"  # shards say where such a field begins
    said = (
        "a field that the manifest does not describe"
        if undescribed
        else "the shard manifest lists wrong fields"
    )
    assert said in failures(store)["shards"]


@pytest.mark.parametrize("change", [{"board_size": 6}, {"shard_size": 384}, {"order_version": 99}], ids=str)
def test_a_number_of_the_manifest_that_says_otherwise_is_found(
    store: Path, change: dict[str, int], failures: Failures
) -> None:
    shards = ShardManifest.load(store / "shards")
    save_shards(store, replace(shards, **change))
    assert failures(store)["shards"].startswith(
        f"{store / 'shards'}: the shard manifest and the manifest of the store differ"
    )


@pytest.mark.parametrize("change", ["seed", "split", "last shard"])
def test_a_shard_manifest_that_says_otherwise_is_found(store: Path, change: str, failures: Failures) -> None:
    shards = ShardManifest.load(store / "shards")
    if change == "seed":
        shards = replace(shards, seed=SEED + 1)
    elif change == "split":
        shards = replace(shards, splits={"train": shards.splits["train"]})
    else:
        shards = replace(shards, splits={**shards.splits, "train": shards.splits["train"][:-1]})
    save_shards(store, shards)
    assert "differ" in failures(store)["shards"]
