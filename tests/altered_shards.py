"""Alters shards and updates all digests, as a careless or malicious publisher might."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hexdata.shards.blocks import Block
from hexdata.shards.format import ShardWriter, read_blocks
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.store.manifest import FileFacts, Manifest

__all__ = ["alter_blocks", "alter_bytes", "rename_member", "set_header"]


def alter_blocks(folder: Path, name: str, change: Callable[[dict[str, Block]], Mapping[str, Block]]) -> None:
    """Write a shard again with changed blocks, and update all digests.

    The shard is ``folder / name``. If the parent of ``folder`` has a manifest, it is updated, too. ``change``
    receives copies of the blocks by key and returns the blocks to write.
    """
    blocks = {
        key: {field: np.array(array) for field, array in block.items()}
        for key, block in read_blocks(folder / name)
    }
    with (folder / name).open("wb") as file:
        writer = ShardWriter(file)
        for key, block in change(blocks).items():
            for field, offset in writer._write_members(key, block):
                writer.offsets.setdefault(field, []).append(offset)
        writer.close()
    _publish(folder, name, writer.offsets)


def alter_bytes(folder: Path, name: str, change: Callable[[bytearray], bytes | None]) -> None:
    """Change the bytes of a shard, in place or by returning new bytes, and update all digests."""
    data = bytearray((folder / name).read_bytes())
    (folder / name).write_bytes(change(data) or data)
    _publish(folder, name, None)


def rename_member(data: bytes, name: str, new_name: str) -> bytes:
    """Return the bytes of a shard with one member renamed, under a valid tar header."""
    begin = data.index(name.encode("ascii"))
    info = tarfile.TarInfo.frombuf(data[begin : begin + 512], "ascii", "strict")
    info.name = new_name
    return data[:begin] + info.tobuf(tarfile.USTAR_FORMAT) + data[begin + 512 :]


def set_header(data: bytearray, begin: int, offset: int, field: bytes) -> None:
    """Change a field of the tar header that begins at byte ``begin``, and update its checksum."""
    data[begin + offset : begin + offset + len(field)] = field
    header = data[begin : begin + 512]
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    data[begin + 148 : begin + 156] = b"%06o\0 " % total


def _publish(folder: Path, name: str, offsets: Mapping[str, list[int]] | None) -> None:
    data = (folder / name).read_bytes()
    shards = ShardManifest.load(folder)
    digest = hashlib.sha256(data).hexdigest()
    splits: dict[str, list[ShardEntry]] = {}
    for split, entries in shards.splits.items():
        splits[split] = [
            ShardEntry(
                entry.name,
                entry.positions,
                entry.blocks,
                len(data) if entry.name == name else entry.bytes,
                digest if entry.name == name else entry.sha256,
                entry.offsets if offsets is None or entry.name != name else offsets,
            )
            for entry in entries
        ]
    facts: dict[str, Any] = {f: getattr(shards, f) for f in shards.__dataclass_fields__}
    altered = ShardManifest(**{**facts, "splits": splits})
    (folder / "manifest.json").write_bytes(altered.dumps())
    if not (folder.parent / "manifest.json").is_file():
        return
    store = Manifest.load(folder.parent)
    for path in (folder / name, folder / "manifest.json"):
        known = store.files[f"shards/{path.name}"]
        content = path.read_bytes()
        store.files[f"shards/{path.name}"] = FileFacts(
            known.rows, len(content), hashlib.sha256(content).hexdigest()
        )
    store.stages["export"]["digest"] = altered.digest
    store.save(folder.parent)  # also updates the manifest's own digest
