"""Blocks of one split's shards, read from front to back through webdataset and held against the manifest.

Never trusts a shard to end where it should: a tar file that was cut between two members looks complete.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from webdataset.tariterators import group_by_keys, tar_file_expander

from hexdata.errors import StoreError
from hexdata.formats.shards import POLICY_FIELDS, Block, ShardEntry, ShardManifest, decode_npy
from hexdata.loader.headers import HEADER_BYTES, altered
from hexdata.loader.source import ByteStream, Part, Source
from hexdata.loader.sources import FolderSource

__all__ = ["BlockReader"]

_CHUNK: Final = 1 << 20
_ENDS: Final = 16
"""How often tarfile may meet the end of a part: once at its end, and once more when it is closed."""


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
        self._source = source
        self._digests = digests
        self._suffixes = tuple(f".{name}.npy" for name in members)
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
        start, end_byte = _block_start(entry, begin), _block_start(entry, end)
        address = self._source.address(entry.name)
        with self._source.open(entry.name, Part(start, end_byte, entry.bytes)) as stream:
            span = _Span(stream, start, end_byte, entry.bytes, address, self._digests)
            samples = _read_samples(span, self._suffixes, address)
            for number in range(begin, end):
                sample = next(samples, None)
                if sample is None:
                    raise altered(address, "end of the shard", f"{number} blocks", entry.blocks)
                block = self._decode(address, shard, number, sample)
                if first <= number < stop:
                    yield block
            if next(samples, None) is not None:
                raise altered(address, "end of the shard", "more blocks", entry.blocks)
            digest = span.finish()
        if self._digests and digest != entry.sha256:
            raise altered(address, "sha256", digest, entry.sha256)

    def _decode(self, address: str, shard: int, number: int, sample: Mapping[str, Any]) -> Block:
        """Turn the ``number``-th sample of the shard into a block of the length that it must have."""
        key = f"{self._first_keys[shard] + number:06d}"
        if sample["__key__"] != key:
            raise altered(address, f"block {number}", f"key {sample['__key__']}", key)
        rows = min(self.block_size, self.shards[shard].positions - number * self.block_size)
        block: Block = {}
        for name in self.specs:
            member = f"{key}.{name}.npy"
            if f"{name}.npy" not in sample:
                raise altered(address, member, "no such member", "one in every block")
            block[name] = decode_npy(sample[f"{name}.npy"], address, member)
            self._check(address, member, name, block[name], rows)
        if len({len(block[name]) for name in POLICY_FIELDS if name in block}) > 1:
            raise altered(address, f"block {number}", "policies and their rows", "as many of each")
        return block

    def _check(self, address: str, member: str, name: str, array: npt.NDArray[Any], rows: int) -> None:
        spec = self.specs[name]
        shape = (array.shape[:1] if name in POLICY_FIELDS else (rows,)) + spec.shape
        if array.dtype.str != spec.dtype or array.shape != shape:
            found = f"{array.dtype.str} of shape {array.shape}"
            raise altered(address, member, found, f"{spec.dtype} of shape {shape}")


def _block_start(entry: ShardEntry, block: int) -> int:
    """Return the byte at which the block's first member begins, headers included; the size for the end."""
    if block == entry.blocks:
        return entry.bytes
    return min(places[block] for places in entry.offsets.values()) - HEADER_BYTES


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
        self._ends = 0

    def __str__(self) -> str:
        """Return the address, as webdataset ends its messages with the stream."""
        return self._address

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes, none at the end of the part.

        Raises:
            FormatError: if the shard ends before the part does, or a member claims to go on after it.
            StoreError: if the source failed.
        """
        wanted = min(size, self._stop - self._place)
        if not wanted:
            # To pass over a member, tarfile asks for all the bytes that its header claims, be it for years.
            self._ends += 1
            if self._ends > _ENDS:
                raise altered(self._address, "tar structure", "a member without an end", "a readable shard")
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


def _read_samples(span: _Span, suffixes: tuple[str, ...], address: str) -> Iterator[dict[str, Any]]:
    """Yield webdataset's samples of a part of a shard, with the members of these endings, undecoded."""
    files = tar_file_expander(
        [{"url": address, "stream": span}], select_files=lambda name: name.endswith(suffixes)
    )
    try:
        yield from group_by_keys(files)
    except (tarfile.TarError, ValueError, EOFError, zlib.error) as error:
        raise altered(address, "tar structure", str(error.args[0]), "a readable shard") from error
