"""The manifest of a source, and sequential reading of one split's shards as blocks, compared with it.

The SHA-256 of every block is compared with the manifest before it is used, since a shard that was exported
again may have the name and the size of the former one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
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

    def find_faults(self) -> Iterator[tuple[ShardEntry, StoreError]]:
        """Yield the shards that are missing or have another size, with their errors.

        Only a local folder is checked. Faults of other sources are found when a shard is read.
        """
        if isinstance(self._source, ShardSource) and self._source.is_local:
            for entry in self.shards:
                try:
                    with self._source.open(entry.name, size=entry.bytes):
                        pass
                except StoreError as error:
                    yield entry, error

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

        def read(stream: ByteStream) -> Generator[tuple[bytes, str], None, None]:
            for number in range(first, stop):
                at, size = starts[number], starts[number + 1] - starts[number]
                # Before it is read: a source may send any number of bytes.
                if size > MAX_BLOCK_BYTES:
                    found, expected = f"{size:,} bytes", f"at most {MAX_BLOCK_BYTES:,}"
                    raise broken_shard(_DIFFERS, address, f"block {number}", found, expected)
                data = stream.read(size)
                if len(data) < size:
                    stream.finish()  # raises a more precise error if the source failed
                    record, found = "end of the shard", f"{at + len(data)} bytes"
                    raise broken_shard(_DIFFERS, address, record, found, entry.bytes)
                yield data, hashlib.sha256(data).hexdigest()
            if until is None:
                stream.finish()

        with self._source.open(entry.name, starts[first], until, size=entry.bytes) as stream:
            blocks = read(stream)
            # Reading and hashing takes as long as parsing, and does not need Python's lock. Only of a file of
            # this machine: after Ctrl-C, the thread would wait for a slow source.
            if isinstance(self._source, CachedSource) or self._source.is_local:
                blocks = read_ahead(blocks)
            with closing(blocks):
                for number, (data, digest) in enumerate(blocks, start=first):
                    # First, since its errors name the byte.
                    block = self._parse(data, starts[number], number, entry, address)
                    if digest != (expected := entry.blocks[number][1]):
                        record = f"SHA-256 of block {number}"
                        raise broken_shard(_DIFFERS, address, record, digest, expected)
                    yield block

    def _parse(self, data: bytes, begin: int, number: int, entry: ShardEntry, address: str) -> Block:
        """Return the needed arrays of a block, as views of its bytes, after checking them.

        Args:
            data: The bytes of the block.
            begin: Byte offset of the block in its shard.
            number: Index of the block in its shard.
            entry: The shard.
            address: Address of the shard, for messages.
        """
        rest = memoryview(data)

        def read(size: int) -> memoryview:
            nonlocal rest
            part, rest = rest[:size], rest[size:]
            return part

        is_last = number + 1 == len(entry.blocks)
        blocks = list(parse_blocks(read, begin, address, is_end=is_last))
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
