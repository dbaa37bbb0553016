"""Alterations of a store after which digests, counts and manifests agree, and the checks that fail."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from hexdata.order import derive_key, sort_key
from hexdata.shards.blocks import Block
from hexdata.shards.format import ShardWriter, read_blocks
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from hexdata.storage import storage_of
from hexdata.store.files import FileFacts, canonical_json, digest_file, write_bytes
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from hexdata.verify import verify_store

SEED = 7
SHARD = "train-000001.tar"
Change = Callable[[pa.Table], pa.Table]
Blocks = dict[int, Block]


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """Return a table with other values in a column of the same type."""
    index = table.schema.get_field_index(name)
    field = table.schema.field(index)
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return table.set_column(index, field, pa.chunked_array([pa.array(values, kind).cast(field.type)]))


def with_cell(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    """Return a table with one value changed."""
    values = table[name].to_pylist()
    values[row] = value
    return with_column(table, name, values)


def by_key(table: pa.Table) -> pa.Table:
    """Put rows into the order of their sort keys."""
    return table.take(np.argsort(sort_key(table["position_id"].to_numpy(), derive_key(SEED, "shuffle"))))


def failures(store: Path) -> dict[str, str]:
    """Return the detail of each failed check by name."""
    return {check.name: check.detail for check in verify_store(store).checks if not check.ok}


class Altered:
    """A copy of a store with all stages, to alter."""

    def __init__(self, store: Path) -> None:
        self.path = store

    def read(self, name: str) -> pa.Table:
        """Return a table."""
        return pq.read_table(self.path / name)

    def table(self, name: str, change: Change) -> None:
        """Change a Parquet file."""
        manifest = Manifest.load(self.path)
        table = change(self.read(name))
        folder, before = name.split("/")[0], manifest.files[name].rows
        manifest.files[name] = write_parquet(self.path / name, table.schema, [table])
        if folder in manifest.counts:
            manifest.counts[folder] += table.num_rows - before
        self._save(manifest)

    def cell(self, name: str, column: str, row: int, value: Any) -> None:
        """Change one value of a Parquet file."""
        self.table(name, lambda table: with_cell(table, column, row, value))

    def content(self, name: str, data: bytes) -> None:
        """Replace the bytes of a listed file."""
        (self.path / name).write_bytes(data)
        manifest = Manifest.load(self.path)
        manifest.files[name] = FileFacts(manifest.files[name].rows, *digest_file(self.path / name))
        self._save(manifest)

    def _save(self, manifest: Manifest) -> None:
        for stage, made_of in (("shuffle", ("positions", "games")), ("export", ("shuffled",))):
            if stage in manifest.stages:
                manifest.stages[stage]["of"] = manifest.digest(*made_of)
        manifest.save(self.path)

    def manifest(self, change: Callable[[Manifest], object]) -> None:
        """Change the manifest alone."""
        manifest = Manifest.load(self.path)
        change(manifest)
        manifest.save(self.path)

    def entry(self, *names: str) -> None:
        """Change a value of the manifest to another one of its type."""
        content = json.loads((self.path / "manifest.json").read_bytes())
        del content["digest"]
        *above, last = names
        node = content
        for name in above:
            node = node[name]
        old = node.get(last, False)
        if isinstance(old, bool):
            node[last] = not old
        elif isinstance(old, str):
            node[last] = old[::-1]
        else:
            node[last] = old / 2 if isinstance(old, float) else old + 1
        content["digest"] = hashlib.sha256(canonical_json(content)).hexdigest()
        (self.path / "manifest.json").write_text(json.dumps(content))

    def shards(self, change: Callable[[ShardManifest], ShardManifest] = lambda shards: shards) -> None:
        """Change the manifest of the shards."""
        folder = self.path / "shards"
        shards = change(load_manifest(make_source(folder)))
        splits = {}
        for split, entries in shards.splits.items():
            digests = [digest_file(folder / entry.name) for entry in entries]
            splits[split] = [
                replace(e, bytes=size, sha256=sha) for e, (size, sha) in zip(entries, digests, strict=True)
            ]
        shards = replace(shards, splits=splits)
        manifest = Manifest.load(self.path)
        for entry in (entry for listed in splits.values() for entry in listed):
            manifest.files[f"shards/{entry.name}"] = FileFacts(entry.positions, entry.bytes, entry.sha256)
        manifest.files["shards/manifest.json"] = write_bytes(folder / "manifest.json", shards.dumps())
        manifest.stages["export"]["digest"] = shards.digest
        manifest.save(self.path)

    def blocks(self, change: Callable[[Blocks], Blocks], shard: str = SHARD, *, listed: bool = True) -> None:
        """Change the blocks of one shard, by their keys; in the manifest of the shards too, if ``listed``."""
        path = self.path / "shards" / shard
        blocks = change({int(key): dict(block) for key, block in read_blocks(path)})
        with storage_of(path).publish() as file:
            writer = ShardWriter(file)  # type: ignore[arg-type]
            for key, block in blocks.items():
                writer.write_block(key, block)
            writer.close()
        made = writer.entry(shard, "")

        def with_entry(shards: ShardManifest) -> ShardManifest:
            entries = [made if e.name == shard and listed else e for e in shards.splits["train"]]
            return replace(shards, splits={**shards.splits, "train": entries})

        self.shards(with_entry)
