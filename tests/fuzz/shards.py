"""Fuzz target for shards, compared with tarfile and NumPy."""

from __future__ import annotations

import functools
import io
import random
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import make_games
from hexdata.errors import FormatError
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.shards.block_check import check_block
from hexdata.shards.format import archive_end, read_blocks
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.fuzz.target import Target, edited, require

__all__ = ["ShardTarget"]

BLOCK = tarfile.BLOCKSIZE


def with_checksums(raw: bytes) -> bytes:
    """Return an archive whose tar headers have valid checksums."""
    found, offset = bytearray(raw), 0
    while len(found) - offset >= BLOCK and any(found[offset : offset + BLOCK]):
        found[offset + 148 : offset + 156] = b" " * 8
        found[offset + 148 : offset + 156] = b"%06o\0 " % sum(found[offset : offset + BLOCK])
        try:
            size = int(bytes(found[offset + 124 : offset + 135]), 8)
        except ValueError:
            break
        offset += BLOCK + size + -size % BLOCK
    return bytes(found)


@functools.cache
def small_shards() -> list[bytes]:
    """Return the shards of three games on boards of size 3, two positions each."""
    with tempfile.TemporaryDirectory(prefix="hexdata-fuzz-") as folder:
        write_trmph(Path(folder, "a.trmph"), list(make_games(3, 1, 3)), 3)
        store = Path(folder, "store")
        convert_sources(Path(folder, "a.trmph"), store, ConvertOptions(workers=1))
        shuffle_store(store, ShuffleOptions(seed=7, threads=1))
        export_shards(store, ExportOptions(workers=1, shard_size=2, block_size=1))
        return [path.read_bytes() for path in sorted((store / "shards").glob("*.tar"))]


class ShardTarget(Target):
    """A whole shard: the arrays that tarfile and NumPy read from its members."""

    max_len = 1 << 15
    words = (
        *(b"'descr': '<f4'", b"'|u1'", b"'>f4'", b"'|O'", b"'shape': (2, 3), }", b"(2,)", b"()", b"True"),
        *(b"00000001000\0", b"ustar\x0000", b"ustar  \0", b"000001.extra.a.npy", b"../000000.a.npy"),
    )

    def seeds(self) -> list[bytes]:
        return small_shards()

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Change, repeat, remove or exchange members, and complete the archive."""
        pieces = [raw[start : start + BLOCK] for start in range(0, len(raw), BLOCK)]
        while pieces and not any(pieces[-1]):
            pieces.pop()
        for _ in range(rng.choice((0, 0, 1, 2))):
            start, length = rng.randrange(len(pieces) + 1), rng.choice((1, 2, 2, 4))
            if rng.random() < 0.5:
                pieces[start:start] = pieces[start : start + length]
            else:
                del pieces[start : start + length]
        if pieces and rng.random() < 0.8:
            place = rng.randrange(len(pieces))
            pieces[place] = edited(pieces[place], rng, self.words)[:BLOCK].ljust(BLOCK, b"\0")
        found = b"".join(pieces)
        if rng.random() < 0.9:
            found = with_checksums(found)
            found += archive_end(len(found))
        return found if rng.random() < 0.9 else edited(found, rng)

    def check(self, raw: bytes) -> bool:
        self.path.write_bytes(raw)
        try:
            blocks = list(read_blocks(self.path))
        except FormatError:
            return False
        ours = {f"{key}.{field}.npy": array for key, block in blocks for field, array in block.items()}
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            # A later member of the same name replaces the one before, for both readers.
            theirs = {member.name: archive.extractfile(member) for member in archive}
            require(theirs.keys() == ours.keys(), f"tarfile finds {list(theirs)}")
            for name, member in theirs.items():
                assert member is not None
                array = np.load(io.BytesIO(member.read()), allow_pickle=False)
                require(array.dtype == ours[name].dtype and array.shape == ours[name].shape, "another shape")
                require(array.tobytes() == ours[name].tobytes(), "other numbers")
        try:
            for key, block in blocks:
                check_block(block, "shard", key)
        except FormatError:
            return False
        return True
