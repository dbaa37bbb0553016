"""Local shard files, or local copies of remote shards, mapped into memory and compared with the manifest."""

from __future__ import annotations

import errno
import functools
import hashlib
import math
import mmap
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hexdata.errors import BudgetError, FormatError, StoreError
from hexdata.progress import SILENT, Progress
from hexdata.shards.block_check import (
    are_blocks_valid,
    check_field,
    check_policies,
    find_bad_policy,
    invalid_values_error,
)
from hexdata.shards.cache import CachedSource
from hexdata.shards.manifest import FieldSpec, ShardEntry, ShardManifest
from hexdata.shards.member_check import (
    BlockEntry,
    block_entry,
    has_own_length,
    manifest_mismatch_error,
)
from hexdata.shards.options import Check, OnError
from hexdata.shards.sources import (
    FolderSource,
    ShardFile,
    altered_shard_error,
    missing_file_error,
    unreadable_file_error,
)
from hexdata.shards.tar_members import (
    HEADER_BYTES,
    MAX_END_BYTES,
    MemberHeader,
    broken_shard_error,
    check_end,
    member_headers,
    parse_headers,
)

__all__ = ["LocalShard", "MappableSource", "open_shards", "row_bytes"]

_THREADS: Final = 8
"""Number of threads that hash or fetch shards."""
_CHECK_BYTES: Final = 1 << 18
"""Bytes of values checked at once: they fit into the CPU cache."""
_READ_BYTES: Final = 1 << 20
"""Bytes of a file that are read and hashed at once."""
_TOO_MANY_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Array = npt.NDArray[Any]
MappableSource: TypeAlias = FolderSource | CachedSource
"""A source whose shards are local files, or are copied to local files."""

Fault = tuple[ShardEntry, StoreError | FormatError]
"""A shard that cannot be used, and its error."""


def row_bytes(spec: FieldSpec) -> int:
    """Return the size of one row of a field in bytes."""
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


@dataclass
class LocalShard:
    """One shard, mapped into memory at first use. Picklable; the map is opened again after unpickling.

    Attributes:
        source: Source of the shard.
        entry: Manifest entry of the shard.
        first_key: Key of the first block.
        block_size: Positions per block.
        board_size: Cells along an edge.
        fields: The fields of the blocks by name.
        data: The map; None until it is opened.
        stamp: Device, inode and times of the mapped file, by which a copy recognizes it; None until it is
            opened.
        checked: Whether the SHA-256 of this file was compared with the manifest.
    """

    source: MappableSource
    entry: ShardEntry
    first_key: int
    block_size: int
    board_size: int
    fields: Mapping[str, FieldSpec]
    data: mmap.mmap | None = None
    stamp: tuple[int, ...] | None = None
    checked: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the map, which cannot be pickled."""
        return {**self.__dict__, "data": None}

    @functools.cached_property
    def address(self) -> str:
        """Path or URL of the shard, for messages."""
        return self.source.address(self.entry.name)

    def open(self, *, digest: bool = False) -> mmap.mmap:
        """Return the map of the file, which the first call opens.

        A copy also checks the digest if the file is not the one that the original has mapped.

        Args:
            digest: Whether to check the digest when the file is opened. Default False.

        Raises:
            StoreError: The file is missing, cannot be read, or has another size or digest.
            BudgetError: The process cannot map more files, or the cache has no space for a copy.
        """
        if self.data is None:
            with self.open_file() as file:
                status = os.fstat(file.fileno())
                if status.st_size != self.entry.bytes:
                    raise altered_shard_error(self.address, f"{status.st_size} bytes", self.entry.bytes)
                stamp = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
                is_known = stamp == self.stamp
                # The cache has checked its copy, and changes its times.
                self.checked = isinstance(self.source, CachedSource) or (self.checked and is_known)
                if not self.checked and (digest or not (is_known or self.stamp is None)):
                    self.check_digest(file)
                self.stamp = stamp
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self.data

    def check_digest(self, file: ShardFile, on_read: Callable[[int], bool] = lambda _: True) -> None:
        """Read the file of the shard from its beginning, and compare its digest with the manifest.

        Args:
            file: The file from :meth:`open_file`.
            on_read: Called with the number of bytes after each read. False ends the reading without a result
                (default: all bytes are read).

        Raises:
            StoreError: The digest differs.
        """
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            if not on_read(size):
                return
        if digest.hexdigest() != self.entry.sha256:
            found = f"SHA-256 {digest.hexdigest()}"
            raise altered_shard_error(self.address, found, self.entry.sha256)
        self.checked = True

    @contextmanager
    def open_file(self) -> Iterator[ShardFile]:
        """Open the local file of the shard.

        Raises:
            StoreError: It is missing or cannot be opened, read or copied into the cache.
            BudgetError: The process cannot open or map more files, or the cache has no space for a copy.
        """
        try:
            with self.source.open_to_map(self.entry) as file:
                yield file
        except FileNotFoundError:
            raise missing_file_error(self.entry.name, self.address) from None
        except OSError as error:
            if error.errno not in _TOO_MANY_FILES:
                raise unreadable_file_error(self.address, error) from error
            raise BudgetError(
                "too many shards to map at once",
                path=self.address,
                found=error.strerror,
                hint="Raise the limit (`ulimit -n`), or export with a larger --shard-size.",
            ) from error

    def stored_rows(self, name: str, block: int) -> int:
        """Return the number of rows of a member in a block.

        Args:
            name: Name of the member.
            block: Index of the block in the shard.

        Raises:
            FormatError: For the members of policies, the headers are not those of the member.
        """
        if has_own_length(name):
            return self._header(name, self._block(block)).shape[0]
        return min(self.block_size, self.entry.positions - block * self.block_size)

    def check_block(self, block: int) -> None:
        """Check the headers of all members of a block, but not their numbers.

        Args:
            block: Index of the block in the shard.

        Raises:
            FormatError: They are not as the manifest says.
        """
        expected, data = self._block(block), self.open()
        headers = {name: self._header(name, expected) for name in self.entry.offsets}
        expected.check_layout(headers)
        for header in headers.values():
            stop = header.begin + header.bytes
            length = -stop % tarfile.BLOCKSIZE
            if length and data[stop : stop + length] != bytes(length):
                found = "other bytes after the numbers"
                raise broken_shard_error(self.address, header.name, found, "zeros")
        if block + 1 == self.entry.blocks:
            end = max(header.end for header in headers.values())
            check_end(data[end : end + MAX_END_BYTES], len(data) - end, len(data), self.address)

    def check_values(self, name: str, blocks: Sequence[int]) -> None:
        """Check the values of a member in several blocks. Their headers must have been checked.

        Args:
            name: Name of the member. For ``policy_count``, the number of cells is checked too.
            blocks: Indices of the blocks in the shard.

        Raises:
            FormatError: A value is invalid.
        """
        together = max(1, _CHECK_BYTES // (self.block_size * row_bytes(self.fields[name])))
        for start in range(0, len(blocks), together):
            part = blocks[start : start + together]
            arrays = [self._values(name, block) for block in part]
            rows = self.stored_rows("board", part[-1])  # the last block may have fewer than the others
            if name == "policy_count":
                for block, counts in zip(part, arrays, strict=True):
                    self._check_count(block, counts)
            if len(part) > 1 and self._are_valid(name, part, arrays, rows):
                continue
            for block, array in zip(part, arrays, strict=True):
                entry = self._block(block)
                check_field(name, array, self.board_size, entry.rows, self.address, entry.member_name(name))
                if name == "policy_cell":
                    counts = self._values("policy_count", block)
                    check_policies(counts, array, self.address, entry.key)

    def _are_valid(self, name: str, blocks: Sequence[int], arrays: Sequence[Array], rows: int) -> bool:
        """Return whether the values of a member are valid in all of several blocks."""
        if not are_blocks_valid(name, arrays, self.board_size, rows):
            return False
        if name != "policy_cell":
            return True
        counts = np.concatenate([self._values("policy_count", block) for block in blocks])
        return find_bad_policy(counts, np.concatenate(arrays)) is None

    def _check_count(self, block: int, counts: Array) -> None:
        """Check that the policies of a block have as many cells as it contains."""
        cells, total = self.stored_rows("policy_cell", block), int(counts.sum(dtype=np.int64))
        if total != cells:
            name = self._block(block).member_name("policy_count")
            raise invalid_values_error(self.address, name, f"{total} cells in total", f"{cells}")

    def _block(self, block: int) -> BlockEntry:
        return block_entry(self.address, self.entry, block, self.first_key, self.block_size)

    def _values(self, name: str, block: int) -> Array:
        """Return a field of a block as a view of the map."""
        spec = self.fields[name]
        shape = (self.stored_rows(name, block), *spec.shape)
        begin = self.entry.offsets[name][block]
        return np.frombuffer(self.open(), spec.dtype, math.prod(shape), begin).reshape(shape)

    def _header(self, name: str, block: BlockEntry) -> MemberHeader:
        """Parse and check the headers of a field of a block."""
        data, spec, begin = self.open(), self.fields[name], self.entry.offsets[name][block.number]
        headers_start = begin - HEADER_BYTES
        if not 0 <= headers_start <= len(data) - HEADER_BYTES:
            found = f"a member at byte {headers_start}, of {len(data)} bytes"
            raise manifest_mismatch_error(
                self.address, block.member_name(name), found, "a member within the shard"
            )
        headers = data[headers_start:begin]
        if not has_own_length(name):  # comparing with the expected bytes is faster than parsing
            shape = (block.rows, *spec.shape)
            size = math.prod(shape) * int(spec.dtype[2])
            if begin + size <= len(data) and headers == member_headers(block.key, name, spec.dtype, shape):
                return MemberHeader(block.key, name, spec.dtype, shape, begin, size)
        header = parse_headers(headers, headers_start, len(data), self.address, block.member_name(name))
        block.check_header(name, header, spec)
        return header

    def find_fault(self, *, digest: bool, blocks: bool) -> StoreError | FormatError | None:
        """Open the shard and return its first error; None if there is none.

        Args:
            digest: Whether to check the digest of the file.
            blocks: Whether to check the headers and values of all blocks.

        Raises:
            BudgetError: The process cannot map more files, or the cache has no space for a copy.
        """
        try:
            self.open(digest=digest)
            for block in range(self.entry.blocks if blocks else 0):
                self.check_block(block)
            for name in self.entry.offsets if blocks else ():
                self.check_values(name, range(self.entry.blocks))
        except (StoreError, FormatError) as error:
            return error
        return None


def open_shards(
    source: MappableSource,
    manifest: ShardManifest,
    split: str,
    *,
    on_error: OnError,
    check: Check,
    progress: Progress = SILENT,
) -> tuple[list[LocalShard], list[Fault]]:
    """Map the shards of a split. Remote shards are fetched into the cache, several at a time.

    Args:
        source: Source of the shards.
        manifest: The shard manifest.
        split: Name of the split.
        on_error: ``"raise"`` checks a block when it is first used. ``"skip"`` checks all blocks now, because
            the order of an epoch depends on the shards that remain.
        check: ``"sizes"`` compares file sizes with the manifest; ``"digests"`` also SHA-256 digests, as
            ``on_error="skip"`` does.
        progress: Receives the progress of fetching.

    Returns:
        The shards that can be used, and the faults of the others. With ``on_error="raise"``, no faults.

    Raises:
        StoreError: The first fault, with ``on_error="raise"``.
        BudgetError: The process cannot map all files, or the cache is too small for the split.
    """
    shards = []
    key = manifest.first_keys.get(split, 0)
    for entry in manifest.splits[split]:
        shards.append(
            LocalShard(source, entry, key, manifest.block_size, manifest.board_size, manifest.fields)
        )
        key += entry.blocks
    is_remote = isinstance(source, CachedSource)
    if isinstance(source, CachedSource):
        source.cache.require_size(manifest.splits[split], together=True)
        progress.begin("fetch", sum(shard.entry.bytes for shard in shards), "bytes")
    skip = on_error == "skip"
    digests = skip or check == "digests"
    usable: list[LocalShard] = []
    faults: list[Fault] = []
    threads = ThreadPoolExecutor(_THREADS if digests or is_remote else 1)
    try:
        found = threads.map(lambda shard: shard.find_fault(digest=digests, blocks=skip), shards)
        for shard, fault in zip(shards, found, strict=True):
            if fault is None:
                usable.append(shard)
            elif skip:
                faults.append((shard.entry, fault))
            else:
                raise fault
            if is_remote:
                progress.advance(shard.entry.bytes)
    finally:
        threads.shutdown(cancel_futures=True)
    return usable, faults
