"""Positions for the compared loaders: shards for hexdata, and the same records for the others.

Run as a script: ``positions.py FOLDER POSITIONS`` generates random positions.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hexdata.batch import Batch, BatchOptions, make_batch
from hexdata.board import pack_boards
from hexdata.schema import NO_MOVE
from hexdata.shards.blocks import block_fields
from hexdata.shards.format import ShardWriter
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.store.files import digest_file

N = 13
CELLS = N * N
BLOCK = 4_096
SHARD = 262_144
FINAL = 1 / 70
"""Share of positions without a move; a game has about 69 positions."""
RECORD = np.dtype([("board", "u1", 43), ("move", "<u2"), ("value", "<f4"), ("player_to_move", "u1")])
"""One position as the other loaders store it: packed as in shards, 50 bytes."""

Records = npt.NDArray[Any]
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
        block = empty_block(len(part)) | {name: part[name] for name in RECORD.names or ()}
        yield block | {"position_id": np.arange(start, start + len(part))}


def empty_block(positions: int) -> dict[str, npt.NDArray[Any]]:
    """Return a block of zeros with all the fields of a shard."""
    fields = block_fields(N, with_policy=False)
    return {name: np.zeros((positions, *spec.shape), spec.dtype) for name, spec in fields.items()}


def write_shards(folder: Path, blocks: Iterator[Mapping[str, npt.NDArray[Any]]]) -> None:
    """Write blocks as the shards of ``train`` with their manifest."""
    entries: list[ShardEntry] = []
    keyed = enumerate(blocks)
    while shard := list(itertools.islice(keyed, SHARD // BLOCK)):
        name = f"train-{len(entries):06d}.tar"
        with (folder / name).open("wb") as file:
            writer = ShardWriter(file)
            for key, block in shard:
                writer.write_block(key, block)
            writer.close()
        entries.append(writer.entry(name, digest_file(folder / name)[1]))
    manifest = ShardManifest(
        board_size=N,
        block_size=BLOCK,
        shard_size=SHARD,
        seed=0,
        fields=block_fields(N, False),
        splits={"train": entries},
    )
    (folder / "manifest.json").write_bytes(manifest.dumps())


def main(folder: Path, positions: int) -> None:
    records = make_records(positions)
    np.save(folder / "records.npy", records.view(np.uint8).reshape(positions, RECORD.itemsize))
    write_shards(folder, full_blocks(records))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
