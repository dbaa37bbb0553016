"""Sequential reading of one split's shards as blocks, each compared with the manifest.

The SHA-256 of every shard is compared with the manifest before a block of it is used, since a shard that
was exported again may have the name, the size and the layout of the former one. The manifest has one digest
per shard, so the first read of a part of a shard reads all of it. The states of the digest between its blocks
are then kept, and later reads hash only the blocks that they need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from hexdata.errors import StoreError
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import Block, block_fields, block_to_members, members_of_fields
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.shards.member_check import BlockEntry, block_entry, manifest_mismatch_error
from hexdata.shards.sources import ByteRange, ByteStream, FolderSource, ShardSource, discard_bytes
from hexdata.shards.tar_members import MemberHeader, MemberReader

__all__ = ["BlockReader"]


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
        specs: The fields that are read, by name. Policies are sparse, whatever the schema version.
        block_size: Positions per block.
    """

    def __init__(
        self, source: ShardSource, manifest: ShardManifest, split: str, members: Sequence[str]
    ) -> None:
        self.shards = manifest.splits[split]
        self._members = frozenset(members_of_fields(members, manifest.fields))
        fields = dict(manifest.fields)
        if "policy" in fields:  # schema version 1
            fields |= block_fields(manifest.board_size, with_policy=True)
        self.specs = {name: fields[name] for name in members_of_fields(members, fields.keys() - {"policy"})}
        self.block_size = manifest.block_size
        self._board_size = manifest.board_size
        self._fields = manifest.fields
        self._source = source
        self._states: dict[int, list[Any]] = {}
        """SHA-256 of the bytes before each block, and of all bytes, of shards of which a part was read."""
        self._first_keys = np.cumsum(
            [manifest.first_keys.get(split, 0), *(shard.blocks for shard in self.shards)]
        ).tolist()

    def find_faults(self) -> Iterator[tuple[ShardEntry, StoreError]]:
        """Yield the shards that are missing or have another size, with their errors.

        Only a local folder is checked. Faults of other sources are found when a shard is read.
        """
        if isinstance(self._source, FolderSource):
            for entry in self.shards:
                fault = self._source.find_fault(entry.name, entry.bytes)
                if fault:
                    yield entry, fault

    def read(self, shard: int, first: int = 0, stop: int | None = None) -> Generator[Block, None, None]:
        """Yield blocks [first, stop) of a shard, with sparse policies.

        The blocks are valid only once the iteration has ended without an error.

        Args:
            shard: Index of the shard in the split.
            first: Index of the first block in the shard. Default 0.
            stop: Index after the last block, greater than ``first``; None for the number of blocks.

        Raises:
            StoreError: The shard is missing, has another size, or cannot be read.
            FormatError: Its content does not match the manifest; names the shard and the member.
        """
        entry = self.shards[shard]
        stop = entry.blocks if stop is None else stop
        known = self._states.get(shard)
        begin, end = (first, stop) if known else (0, entry.blocks)
        address, first_key = self._source.address(entry.name), self._first_keys[shard]
        blocks = [block_entry(address, entry, n, first_key, self.block_size) for n in range(begin, end)]
        # Offsets of an invalid manifest may lie outside the shard.
        start, end_offset = blocks[0].start if begin else 0, blocks[-1].stop
        if not 0 <= start < end_offset <= entry.bytes:
            found = f"bytes {start} to {end_offset}"
            raise manifest_mismatch_error(address, "offsets", found, f"offsets up to {entry.bytes}")
        states: list[Any] = []
        with self._source.open(entry.name, ByteRange(start, end_offset, entry.bytes)) as stream:
            part = _ShardPart(stream, start, end_offset, entry.bytes, address)
            if known:
                part.sha256 = known[begin].copy()
            members = MemberReader(part.read, start, end_offset, entry.bytes, address)
            for block in blocks:
                states.append(part.sha256.copy())
                arrays = self._read_block(members, block)
                if first <= block.number < stop:
                    self._check(arrays, block)
                    yield block_to_members(arrays)
            if (header := members.next_header()) is not None:
                found = f"a member {header.name}"
                raise manifest_mismatch_error(address, "end of the shard", found, "the end of the archive")
            part.finish()
        if known and part.sha256.digest() != known[end].digest():
            record, found = f"blocks {first} to {stop - 1}", f"SHA-256 {part.sha256.hexdigest()}"
            raise manifest_mismatch_error(address, record, found, "the bytes that were read before")
        if not known and part.sha256.hexdigest() != entry.sha256:
            raise manifest_mismatch_error(address, "sha256", part.sha256.hexdigest(), entry.sha256)
        if (first, stop) != (0, entry.blocks):
            self._states.setdefault(shard, [*states, part.sha256])

    def _read_block(self, members: MemberReader, block: BlockEntry) -> Block:
        """Read the members of one block and return those that are needed."""
        arrays: Block = {}
        headers: dict[str, MemberHeader] = {}
        for field in block.fields_in_order():
            name = block.member_name(field)
            header = members.next_header(name)
            if header is None:
                found, expected = "the end of the archive", "a member in every block"
                raise manifest_mismatch_error(block.path, name, found, expected)
            block.check_header(field, header, self._fields[field])
            headers[field] = header
            if field in self._members:
                arrays[field] = members.read_array()
            else:
                members.skip()
        block.check_layout(headers)
        return arrays

    def _check(self, arrays: Block, block: BlockEntry) -> None:
        check_block(
            arrays,
            block.path,
            block.key,
            board_size=self._board_size,
            rows=block.rows,
            members=self._members,
        )


class _ShardPart:
    """The bytes [start, stop) of a shard, hashed while they are read.

    Attributes:
        sha256: Digest of the bytes that were read. A caller that skips bytes sets it to that of these bytes.
    """

    def __init__(self, stream: ByteStream, start: int, stop: int, size: int, address: str) -> None:
        self._stream = stream
        self._offset = start
        self._stop = stop
        self._size = size
        self._address = address
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes; none at the end of the part.

        Raises:
            FormatError: The shard ends before the part does.
            StoreError: The source failed.
        """
        wanted = min(size, self._stop - self._offset)
        if not wanted:
            return b""
        data = self._stream.read(wanted)
        if not data:
            self._stream.finish()  # raises a more precise error if the source failed
            found = f"{self._offset} bytes"
            raise manifest_mismatch_error(self._address, "end of the shard", found, self._size)
        self._offset += len(data)
        self.sha256.update(data)
        return data

    def finish(self) -> None:
        """Read the rest of the part.

        Raises:
            FormatError, StoreError: As for :meth:`read`; or the part ends the shard, but the source has more
                bytes.
        """
        discard_bytes(self.read, self._stop - self._offset)
        if self._stop == self._size:
            self._stream.finish()
