"""Training shards: WebDataset tar files in which each sample is a block of positions.

Converts arrays to bytes and bytes to arrays. The order, the splits and the paths are chosen elsewhere.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from hexdata.board import pack_boards, unpack_boards
from hexdata.schema import board_size_of
from hexdata.shards.block_check import invalid_values_error
from hexdata.shards.blocks import Block, block_length, block_to_members, block_to_policy
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.tar_members import MemberReader, archive_end, broken_shard_error, member_headers
from hexdata.storage import AnyPath, as_path, storage_of

__all__ = [
    "ShardWriter",
    "block_samples",
    "read_blocks",
    "read_blocks_with_offsets",
    "sample_fields",
    "samples_to_block",
]

_MAX_BYTES: Final = 1 << 30
"""Maximum size of one block or sample in bytes. A sparse file can claim any size."""
_MAX_MEMBERS: Final = 64
"""Maximum number of members of one block or sample."""


def sample_fields(block: Block) -> Block:
    """Return the fields of a block's samples, stacked: as :func:`block_samples`, with a leading dimension."""
    board_size = board_size_of(block["board"].shape[1])
    fields = {name: array for name, array in block.items() if name != "policy_row"}
    fields["board"] = unpack_boards(block["board"], board_size, np.uint8)
    if "policy" in block:
        fields["policy"] = block_to_policy(block, board_size * board_size)
    return fields


def block_samples(block: Block) -> Iterator[tuple[int, Block]]:
    """Split a block into samples of one position, for ``--layout samples``.

    Every sample of a split has the same fields, which some readers require: ``policy`` is in all samples or,
    in a split without dense policies, in none.

    Yields:
        (position_id, fields) of each position: ``board`` uint8 (2, n, n), ``policy`` float32 (n·n,), and the
        other fields without their leading dimension.
    """
    fields = sample_fields(block)
    for row, position_id in enumerate(block["position_id"].tolist()):
        yield position_id, {name: array[row, ...] for name, array in fields.items()}


# --- writing ------------------------------------------------------------------------------------------


class ShardWriter:
    """Writes one tar shard sequentially.

    The archive is plain USTAR without times and owners, so the same arrays always result in the same bytes.

    Attributes:
        offsets: For each field, the byte offset of its numbers in every block, for reading through ``mmap``.
        positions: Number of positions written.
        blocks: Number of blocks or samples written.
        bytes: Number of bytes written.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Create a writer to ``file``, which must be at its beginning. The caller closes the file."""
        self.offsets: dict[str, list[int]] = {}
        self.positions = 0
        self.blocks = 0
        self.bytes = 0
        self._file = file
        self._last_key = -1

    def write_block(self, key: int, arrays: Block) -> None:
        """Append one block.

        Dense policies are written as sparse ones.

        Args:
            key: Number of the block, ascending over the whole split.
            arrays: The fields of the block.

        Raises:
            ValueError: The key is not greater than the last one, the fields are not those of the earlier
                blocks, or their lengths differ.
        """
        if key <= self._last_key:
            raise ValueError(f"block keys must ascend: {key} cannot follow {self._last_key}")
        rows = block_length(arrays)
        members = block_to_members(arrays)
        if self.blocks and members.keys() != self.offsets.keys():
            raise ValueError(f"block {key} has the members {sorted(members)}, not {sorted(self.offsets)}")
        for name, offset in self._write_members(f"{key:06d}", members):
            self.offsets.setdefault(name, []).append(offset)
        self._last_key = key
        self.positions += rows
        self.blocks += 1

    def write_sample(self, position_id: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Append one position as a sample. ``blocks`` then counts samples, and no offsets are kept.

        Args:
            position_id: Id of the position, the key of the sample.
            arrays: Its fields, as :func:`block_samples` yields them.
        """
        for _ in self._write_members(f"{position_id:09d}", arrays):
            pass
        self.positions += 1
        self.blocks += 1

    def close(self) -> None:
        """Write the end of the archive, zeros up to a whole tar record. The file stays open."""
        self._write(archive_end(self.bytes))

    def entry(self, name: str, sha256: str) -> ShardEntry:
        """Return the manifest entry of the shard. Call it after :meth:`close`.

        Args:
            name: Final file name of the shard.
            sha256: SHA-256 of the file, in hexadecimal.
        """
        return ShardEntry(name, self.positions, self.blocks, self.bytes, sha256, self.offsets)

    def _write_members(self, key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, int]]:
        """Write the members of one sample, sorted by name; yield each field and the offset of its numbers."""
        for name in sorted(arrays):
            array = arrays[name]
            # Little-endian on every machine. np.ascontiguousarray would add a dimension to a scalar.
            array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
            self._write(member_headers(key, name, array.dtype.str, array.shape))
            yield name, self.bytes
            self._write(array.reshape(-1).view(np.uint8).data)
            self._write(bytes(-self.bytes % tarfile.BLOCKSIZE))

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.bytes += len(data)


# --- reading ------------------------------------------------------------------------------------------


def read_blocks(path: str | AnyPath) -> Iterator[tuple[str, Block]]:
    """Read the blocks or samples of a shard in order.

    Stricter than ``tarfile``, which takes a broken header for the end of the archive: every byte up to the
    end of the file is checked. The values of the arrays are not checked; use ``check_block`` for that.

    Args:
        path: The shard.

    Yields:
        (key, arrays by member) of each block or sample. The arrays are read-only. Policies of blocks are
        sparse, except in shards of schema version 1; ``members_to_block`` makes them dense.

    Raises:
        FormatError: The shard is truncated or altered; names the shard, and the member or the byte. Blocks
            yielded before are then invalid.
    """
    for key, block, _ in read_blocks_with_offsets(path):
        yield key, block


def read_blocks_with_offsets(path: str | AnyPath) -> Iterator[tuple[str, Block, dict[str, int]]]:
    """Read the blocks or samples of a shard in order, with the offsets of their numbers.

    Args:
        path: The shard.

    Yields:
        (key, arrays by field, offsets by field). An offset is the byte of the shard at which the numbers of
        the field begin.

    Raises:
        FormatError: As for :func:`read_blocks`.
    """
    with storage_of(as_path(path)).open() as file:
        size = file.seek(0, 2)
        file.seek(0)
        members = MemberReader(file.read, 0, size, size, path)
        header = members.next_header()
        last_key = -1
        while header is not None:
            key, block, offsets = header.key, dict[str, npt.NDArray[Any]](), dict[str, int]()
            while header is not None and header.key == key:
                if header.field in block:
                    raise broken_shard_error(path, header.name, "the member twice", "once")
                total = header.bytes + sum(array.nbytes for array in block.values())
                if total > _MAX_BYTES or len(block) == _MAX_MEMBERS:
                    found = f"{len(block) + 1} members of {total:,} bytes"
                    raise broken_shard_error(path, key, found, f"{_MAX_MEMBERS} of {_MAX_BYTES:,} at most")
                block[header.field] = members.read_array()
                offsets[header.field] = header.begin
                header = members.next_header()
            is_sample = all(array.ndim == 0 for name, array in block.items() if name not in _UNPACKED)
            if not is_sample and int(key) <= last_key:
                found = f"block {key} after block {last_key:06d}"
                raise broken_shard_error(path, key, found, "ascending keys")
            last_key = max(last_key, int(key)) if not is_sample else last_key
            yield key, block, offsets


_UNPACKED: Final = ("board", "policy")
"""Fields of a sample that are arrays, not single numbers."""


def samples_to_block(samples: Sequence[tuple[str, Block]], path: object) -> Block:
    """Join samples into one block. Policies that are one-hot at the move become moves again.

    Only the values that the conversion depends on are checked.

    Args:
        samples: At least one (key, fields), as :func:`read_blocks` yields them.
        path: Path of the shard, for messages.

    Raises:
        FormatError: "broken-shard": The samples differ in their fields, dtypes or shapes, a board has cells
            other than 0 and 1, a policy is negative or not finite, or a key is not the position id.
    """
    first_key, first = samples[0]
    specs = {name: (array.dtype.str, array.shape) for name, array in first.items()}
    for key, sample in samples:
        found = {name: (array.dtype.str, array.shape) for name, array in sample.items()}
        if found != specs:
            name = min(name for name, _ in found.items() ^ specs.items())
            other = found.get(name, "no such member")
            raise invalid_values_error(path, f"{key}.{name}.npy", other, specs.get(name, "no such member"))
    block = {name: np.stack([sample[name] for _, sample in samples]) for name in specs}
    boards = block.get("board")
    if boards is None or boards.dtype != np.uint8 or boards.ndim != 4 or boards.max(initial=0) > 1:
        boards_found = (
            "none" if boards is None else f"{boards.dtype} of shape {boards.shape[1:]}, or a cell above 1"
        )
        raise invalid_values_error(
            path, f"{first_key}.board.npy", boards_found, "|u1 of shape (2, n, n), each cell 0 or 1"
        )
    block["board"] = pack_boards(boards)
    if "position_id" in block and block["position_id"].ndim == 1:
        for (key, _), position_id in zip(samples, block["position_id"].tolist(), strict=True):
            if int(key) != position_id:
                raise invalid_values_error(
                    path, f"{key}.position_id.npy", position_id, f"{int(key)}, as its key"
                )
    if "policy" in block and "move" in block:
        policies = block["policy"]
        if policies.ndim != 2 or not (policies.min() >= 0 and policies.max() < np.inf):
            raise invalid_values_error(
                path, f"{first_key}.policy.npy", "other values", "finite numbers from 0 up"
            )
        only = np.count_nonzero(policies, axis=1) == 1
        moves = only & (policies.argmax(axis=1) == block["move"]) & (policies.max(axis=1) == 1)
        rows = np.flatnonzero(policies.any(axis=1) & ~moves)
        block["policy"], block["policy_row"] = policies[rows], rows.astype("<u4")
    return block
