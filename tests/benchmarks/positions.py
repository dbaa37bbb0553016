"""Positions for the compared loaders: shards for hexdata, and the same records for the others.

Run as a script: ``positions.py FOLDER POSITIONS`` generates random positions. ``positions.py FOLDER POSITIONS
hollow`` generates shards of the right sizes that need little disk space, and ``repeated`` instead of
``hollow`` generates shards that repeat a million random positions with different ids, which is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hexdata.batch import Batch, BatchOptions, make_batch
from hexdata.board import pack_boards
from hexdata.schema import NO_MOVE
from hexdata.shards.blocks import block_fields
from hexdata.shards.format import ShardWriter
from hexdata.shards.manifest import ShardEntry, ShardManifest

N = 13
CELLS = N * N
BLOCK = 4_096
SHARD = 262_144
FINAL = 1 / 70
"""Share of positions without a move; a game has about 69 positions."""
RECORD = np.dtype([("board", "u1", 43), ("move", "<u2"), ("value", "<f4"), ("player_to_move", "u1")])
"""One position as the other loaders store it: packed as in shards, 50 bytes."""

Records = npt.NDArray[Any]
REPEATED_BLOCKS = 256
"""Number of different blocks in shards of repeated positions."""
BATCH_OPTIONS = BatchOptions(planes=3)


def unpack(records: Records) -> Batch:
    """Make the batch of these records. All loaders use this function, so none is faster by unpacking."""
    block = {name: np.ascontiguousarray(records[name]) for name in RECORD.names or ()}
    return make_batch(block, BATCH_OPTIONS, N, seed=0, epoch=0)


def unpack_all(items: list[bytes]) -> Batch:
    """Make the batch of single records, as loaders of items collate them."""
    return unpack(np.frombuffer(b"".join(items), RECORD))


def read_records(folder: Path) -> Records:
    """Return the records (n,), mapped."""
    records: Records = np.load(folder / "records.npy", mmap_mode="r").view(RECORD)[:, 0]
    return records


def make_records(positions: int) -> Records:
    """Generate random positions: a third of the cells of each colour, any move, any value."""
    random = np.random.default_rng(1)
    records = np.empty(positions, RECORD)
    for start in range(0, positions, BLOCK):
        part = records[start : start + BLOCK]
        cells = random.integers(0, 3, (len(part), N, N), np.uint8)
        part["board"] = pack_boards(np.stack([cells == 1, cells == 2], axis=1))
        part["player_to_move"] = random.integers(0, 2, len(part), np.uint8)
    moves = random.integers(0, CELLS, positions, np.uint16)
    records["move"] = np.where(random.random(positions) < FINAL, NO_MOVE, moves)
    records["value"] = random.random(positions, np.float32)
    return records


def full_blocks(records: Records) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
    """Yield the records as blocks with all the fields of a shard."""
    for start in range(0, len(records), BLOCK):
        part = records[start : start + BLOCK]
        block = hollow_block(len(part)) | {name: part[name] for name in RECORD.names or ()}
        yield block | {"position_id": np.arange(start, start + len(part))}


def repeated_blocks(positions: int) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
    """Yield blocks that repeat the same random positions, with ascending ids."""
    blocks = list(full_blocks(make_records(min(positions, REPEATED_BLOCKS * BLOCK))))
    for start in range(0, positions, BLOCK):
        rows = min(BLOCK, positions - start)
        block = {name: array[:rows] for name, array in blocks[start // BLOCK % len(blocks)].items()}
        yield block | {"position_id": np.arange(start, start + rows)}


def hollow_block(positions: int) -> dict[str, npt.NDArray[Any]]:
    """Return a block of zeros with all the fields of a shard."""
    fields = block_fields(N, with_policy=False)
    return {name: np.zeros((positions, *spec.shape), spec.dtype) for name, spec in fields.items()}


def hollow_blocks(positions: int) -> Iterator[Mapping[str, npt.NDArray[Any]]]:
    """Yield ``count`` positions as blocks of zeros."""
    whole = hollow_block(BLOCK)
    for start in range(0, positions, BLOCK):
        yield whole if start + BLOCK <= positions else hollow_block(positions - start)


class Hollow:
    """A file whose data, all zeros, is stored as holes: headers and sizes are those of real shards."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        if len(data) >= BLOCK:
            self._file.truncate(self._file.seek(len(data), 1))
            return len(data)
        return self._file.write(data)


def write_shards(folder: Path, blocks: Iterator[Mapping[str, npt.NDArray[Any]]], hollow: bool) -> None:
    """Write blocks as the shards of ``train`` with their manifest, without digests."""
    entries: list[ShardEntry] = []
    keyed = enumerate(blocks)
    item = next(keyed, None)
    while item is not None:
        name = f"train-{len(entries):06d}.tar"
        with (folder / name).open("wb") as file:
            writer = ShardWriter(Hollow(file) if hollow else file)  # type: ignore[arg-type]
            while item is not None and writer.positions < SHARD:
                writer.write_block(*item)
                item = next(keyed, None)
            writer.close()
            entries.append(writer.entry(name, "0" * 64))
    manifest = ShardManifest(N, "blocks", BLOCK, SHARD, 0, block_fields(N, False), {"train": entries})
    (folder / "manifest.json").write_bytes(manifest.dumps())


def main(folder: Path, positions: int, kind: str) -> None:
    if kind == "hollow":
        write_shards(folder, hollow_blocks(positions), hollow=True)
        return
    if kind == "repeated":
        write_shards(folder, repeated_blocks(positions), hollow=False)
        return
    records = make_records(positions)
    np.save(folder / "records.npy", records.view(np.uint8).reshape(positions, RECORD.itemsize))
    write_shards(folder, full_blocks(records), hollow=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), " ".join(sys.argv[3:]))
