"""The manifest of a source, and sequential reading of one split's shards as blocks, compared with it.

The SHA-256 of every block is compared with the manifest before it is used, since a shard that was exported
again may have the name and the size of the former one.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Final

from hexdata.errors import ConfigError, StoreError
from hexdata.json_models import MAX_JSON_BYTES
from hexdata.pool import read_ahead
from hexdata.schema import is_target
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import POLICY_FIELDS, SPARSE_FIELDS, Block, block_fields
from hexdata.shards.cache import AnySource, CachedSource
from hexdata.shards.format import MAX_BLOCK_BYTES, parse_blocks
from hexdata.shards.manifest import MANIFEST_NAME, REPAIR_HINT, ShardEntry, ShardManifest, broken_shard
from hexdata.shards.sources import ByteStream, ShardSource

_DIFFERS: Final = "the shard does not match the manifest"
_PIECE_BYTES: Final = 2 << 20
"""Bytes of a local shard that are read and hashed at once. Threads that wait for each other after each block
took 1.2 times the CPU time."""


def load_manifest(source: ShardSource) -> ShardManifest:
    """Read and check the manifest of a source.

    Raises:
        StoreError: The file is missing, is not a shard manifest, has another version or was altered, or the
            source fails.
    """
    with source.open(MANIFEST_NAME) as stream:
        # One byte more than is allowed, by which the parser recognises a file that is too large.
        data = stream.read(MAX_JSON_BYTES + 1)
        if len(data) <= MAX_JSON_BYTES:
            stream.finish()
    return ShardManifest.loads(data, source.address(MANIFEST_NAME))


def check_split(manifest: ShardManifest, split: str, location: str) -> list[str]:
    """Check that a split can be loaded, and return the sorted fields of its blocks, with dense policies.

    Args:
        manifest: The shard manifest.
        split: Name of the split.
        location: Location of the shards, for messages.

    Raises:
        ConfigError: The split does not exist.
        StoreError: The fields are not those of this version of hexdata.
    """
    if split not in manifest.splits:
        splits = ", ".join(manifest.splits)
        raise ConfigError("no such split in the shards", path=location, found=split, expected=splits)
    with_policy = "policy_row" in manifest.fields
    known = block_fields(manifest.board_size, with_policy, list(filter(is_target, manifest.fields)))
    # Once for all shards: the reader takes dtypes and shapes from these declarations.
    if manifest.fields != known:
        reason = "the shard manifest describes blocks with other fields"
        raise StoreError(reason, path=location, found=manifest.fields, expected=known, hint=REPAIR_HINT)
    return sorted({*known} - {*SPARSE_FIELDS} | ({*POLICY_FIELDS} if with_policy else set()))


class BlockReader:
    """Reads fields of one split's blocks from any source.

    Files are closed when an iteration ends or its generator is closed.

    Args:
        source: Source of the shards.
        manifest: The shard manifest.
        split: Name of a split in the manifest.
        members: Names of the fields to read; ``policy`` and ``policy_row`` for policies.

    Attributes:
        shards: Manifest entries of the shards of the split.
        specs: The fields that are read, by name. Policies are sparse.
        manifest: As given.
    """

    def __init__(
        self, source: AnySource, manifest: ShardManifest, split: str, members: Sequence[str]
    ) -> None:
        names = set(members)
        if "policy" in names:
            names = names - {"policy"} | set(SPARSE_FIELDS)
        self.shards = manifest.splits[split]
        # Sorted, so that blocks have the same order of fields whatever was requested.
        self.specs = {name: manifest.fields[name] for name in sorted(names)}
        self.manifest = manifest
        self._source = source

    def read(self, shard: int, first: int = 0, stop: int | None = None) -> Generator[Block, None, None]:
        """Yield blocks [first, stop) of a shard, with sparse policies.

        Args:
            shard: Index of the shard in the split.
            first: Index of the first block in the shard. Default 0.
            stop: Index after the last block, greater than ``first``; None for the number of blocks.

        Raises:
            StoreError: The shard is missing, has another size, or cannot be read.
            FormatError: Its content does not match the manifest; names the shard and the member.
        """
        entry = self.shards[shard]
        stop = len(entry.blocks) if stop is None else stop
        address = self._source.address(entry.name)
        # The last block is followed by the end of the archive, which is read with it.
        starts = [*(offset for offset, _ in entry.blocks), entry.bytes]
        # Without an end the source is read to its own, so that bytes after the listed ones are found.
        until = None if stop == len(entry.blocks) else starts[stop]

        # After Ctrl-C, a thread would wait for a source that is elsewhere. The copies of a cache are here.
        is_local = isinstance(self._source, CachedSource) or self._source.is_local

        def read(stream: ByteStream) -> Generator[list[tuple[memoryview, str]], None, None]:
            number = first
            while number < stop:
                # As many blocks as fit, but one at least.
                limit = starts[number] + (_PIECE_BYTES if is_local else 0)
                after = bisect.bisect_right(starts, limit, number + 2, stop + 1) - 1
                bounds = [start - starts[number] for start in starts[number : after + 1]]
                # Before it is read: a source may send any number of bytes.
                if bounds[-1] > MAX_BLOCK_BYTES:
                    found, expected = f"{bounds[-1]:,} bytes", f"at most {MAX_BLOCK_BYTES:,}"
                    raise broken_shard(_DIFFERS, address, f"block {number}", found, expected)
                data = memoryview(stream.read(bounds[-1]))
                if len(data) < bounds[-1]:
                    stream.finish()  # raises a more precise error if the source failed
                    record, found = "end of the shard", f"{starts[number] + len(data)} bytes"
                    raise broken_shard(_DIFFERS, address, record, found, entry.bytes)
                parts = [data[start:end] for start, end in itertools.pairwise(bounds)]
                yield [(part, hashlib.sha256(part).hexdigest()) for part in parts]
                number = after
            if until is None:
                stream.finish()

        with self._source.open(entry.name, starts[first], until, size=entry.bytes) as stream:
            # Reading and hashing takes as long as parsing, and does not need Python's lock.
            pieces = read_ahead(read(stream)) if is_local else read(stream)
            with closing(pieces):
                for number, (part, digest) in enumerate(itertools.chain.from_iterable(pieces), start=first):
                    # First, since its errors name the byte.
                    block = self._parse(part, number, entry, address)
                    if digest != (expected := entry.blocks[number][1]):
                        record = f"SHA-256 of block {number}"
                        raise broken_shard(_DIFFERS, address, record, digest, expected)
                    yield block

    def _parse(self, rest: memoryview, number: int, entry: ShardEntry, address: str) -> Block:
        """Return the needed arrays of a block, as views of its bytes, after checking them.

        Args:
            rest: The bytes of the block.
            number: Index of the block in its shard.
            entry: The shard.
            address: Address of the shard, for messages.
        """

        def read(size: int) -> memoryview:
            nonlocal rest
            part, rest = rest[:size], rest[size:]
            return part

        is_last = number + 1 == len(entry.blocks)
        blocks = list(parse_blocks(read, entry.blocks[number][0], address, is_end=is_last))
        key, block = blocks[0] if blocks else ("", Block())
        if block.keys() != self.manifest.fields.keys() or len(blocks) > 1:
            found = f"{len(blocks)} with the fields {[*block]}"
            expected = f"one with {[*self.manifest.fields]}"
            raise broken_shard(_DIFFERS, address, f"block {key}", found, expected)
        size = check_block(block, address, key, values=self.specs)
        # Only the last block of a shard may be shorter.
        rows = min(self.manifest.block_size, entry.positions - number * self.manifest.block_size)
        sizes, wanted = (len(block["board"]), size), (rows, self.manifest.board_size)
        if sizes != wanted:
            raise broken_shard(_DIFFERS, address, f"block {key}, (positions, board size)", sizes, wanted)
        return {name: block[name] for name in self.specs}
