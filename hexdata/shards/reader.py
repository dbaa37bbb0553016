"""Blocks of one split's shards, read from front to back and compared with the manifest.

Never trusts a shard to end where it should: a tar file that was cut between two members looks complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from typing import Final

import numpy as np

from hexdata.errors import StoreError
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import Block
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.shards.member_check import BlockPlace, altered, place_block
from hexdata.shards.source import ByteStream, Part, Source
from hexdata.shards.sources import FolderSource
from hexdata.shards.tar_members import MemberHeader, MemberReader

__all__ = ["BlockReader"]

_CHUNK: Final = 1 << 20


class BlockReader:
    """Reads chosen members of one split's shards as blocks that are what the manifest says.

    Shards are given by their number in the split, blocks by theirs in the shard. Whatever is opened is
    closed when the iteration ends or is left.

    Args:
        source: where the shards lie.
        manifest: what they are.
        split: one that the manifest has.
        members: which fields.
        digests: whether to read every shard whole and hold it against its SHA-256.
    """

    def __init__(
        self,
        source: Source,
        manifest: ShardManifest,
        split: str,
        members: Sequence[str],
        *,
        digests: bool = False,
    ) -> None:
        self.shards = manifest.splits[split]
        self.specs = {name: manifest.fields[name] for name in members}
        self.block_size = manifest.block_size
        self._board_size = manifest.board_size
        self._fields = manifest.fields
        self._source = source
        self._digests = digests
        self._first_keys = np.cumsum([0, *(shard.blocks for shard in self.shards)]).tolist()

    def find_faults(self) -> Iterator[tuple[ShardEntry, StoreError]]:
        """Yield the shards that are missing or of another size, where that can be seen without reading them.

        That is in a folder; what other sources give is seen at the read.
        """
        if isinstance(self._source, FolderSource):
            for entry in self.shards:
                fault = self._source.find_fault(entry.name, entry.bytes)
                if fault:
                    yield entry, fault

    def read(self, shard: int, first: int = 0, stop: int | None = None) -> Generator[Block, None, None]:
        """Yield blocks [first, stop) of a shard, one or more; others are not read where that can be.

        The blocks hold once the iteration has ended without an error, and not before.

        Raises:
            StoreError: if the shard is missing, of another size or cannot be reached.
            FormatError: if its content is not what the manifest says, naming shard and member.
        """
        entry = self.shards[shard]
        stop = entry.blocks if stop is None else stop
        begin, end = (0, entry.blocks) if self._digests else (first, stop)
        address, first_key = self._source.address(entry.name), self._first_keys[shard]
        places = [place_block(address, entry, n, first_key, self.block_size) for n in range(begin, end)]
        # A block that is not where the manifest says would be looked for outside of the shard.
        start = places[0].start if begin else 0
        if not 0 <= start < places[-1].stop <= entry.bytes:
            raise altered(address, "offsets", f"bytes {start} to {places[-1].stop}", f"some of {entry.bytes}")
        with self._source.open(entry.name, Part(start, places[-1].stop, entry.bytes)) as stream:
            span = _Span(stream, start, places[-1].stop, entry.bytes, address, self._digests)
            members = MemberReader(span.read, start, places[-1].stop, entry.bytes, address)
            for place in places:
                block = self._read_block(members, place)
                if first <= place.number < stop:
                    yield self._checked(block, place)
            if (more := members.next_header()) is not None:
                raise altered(address, "end of the shard", f"a member {more.name}", "the end of the archive")
            digest = span.finish()
        if self._digests and digest != entry.sha256:
            raise altered(address, "sha256", digest, entry.sha256)

    def _read_block(self, members: MemberReader, place: BlockPlace) -> Block:
        """Read the members of one block; keep those that were asked for."""
        block: Block = {}
        headers: dict[str, MemberHeader] = {}
        for field in place.members():
            header = members.next_header(place.member(field))
            if header is None:
                raise altered(
                    place.path, place.member(field), "the end of the archive", "a member in every block"
                )
            place.check_header(field, header, self._fields[field])
            headers[field] = header
            if field in self.specs:
                block[field] = members.read_array()
            else:
                members.skip()
        place.check_layout(headers)
        return block

    def _checked(self, block: Block, place: BlockPlace) -> Block:
        """Return a block, seen to hold what positions can have."""
        check_block(
            block,
            place.path,
            place.key,
            board_size=self._board_size,
            rows=place.rows,
            members=self.specs.keys(),
        )
        return block


class _Span:
    """The bytes of a part of a shard: exactly as many as there must be, hashed as they pass if asked."""

    def __init__(
        self, stream: ByteStream, start: int, stop: int, size: int, address: str, hashed: bool
    ) -> None:
        self._stream = stream
        self._place = start
        self._stop = stop
        self._size = size
        self._address = address
        self._hash = hashlib.sha256() if hashed else None

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes, none at the end of the part.

        Raises:
            FormatError: if the shard ends before the part does.
            StoreError: if the source failed.
        """
        wanted = min(size, self._stop - self._place)
        if not wanted:
            return b""
        data = self._stream.read(wanted)
        if not data:
            self._stream.finish()  # a source that knows why it ended says so
            raise altered(self._address, "end of the shard", f"{self._place} bytes", self._size)
        self._place += len(data)
        if self._hash:
            self._hash.update(data)
        return data

    def finish(self) -> str | None:
        """Read what is left of the part; return the SHA-256 if it was asked for.

        Raises:
            FormatError, StoreError: as ``read``; and if the part ends the shard, but the shard goes on.
        """
        while self.read(_CHUNK):
            pass
        if self._stop == self._size:
            self._stream.finish()
        return self._hash.hexdigest() if self._hash else None
