"""Training shards: WebDataset tar files whose sample is a block of positions.

Turns arrays into bytes and bytes into arrays. Never chooses an order, a split or a place on disk.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import re
import tarfile
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import unpack_boards
from hexdata.errors import FormatError, StoreError
from hexdata.formats.shard_manifest import FieldSpec, ShardEntry, ShardManifest
from hexdata.remote import AnyPath, as_path, open_binary
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER, board_bytes, board_size_of

__all__ = [
    "POLICY_FIELDS",
    "SENTINELS",
    "Block",
    "FieldSpec",
    "ShardEntry",
    "ShardManifest",
    "ShardWriter",
    "block_fields",
    "block_length",
    "block_samples",
    "block_to_policy",
    "columns_to_block",
    "decode_npy",
    "npy_header",
    "read_blocks",
    "read_placed_blocks",
]

Block = dict[str, npt.NDArray[Any]]
"""n positions, one array a field with n as its leading dimension, the fields in :func:`block_fields`.

Only ``policy`` (k, cells) and ``policy_row`` (k,) differ: they hold the dense policies of the block and
the ascending rows that have one.
"""

POLICY_FIELDS: Final = ("policy", "policy_row")
"""The fields that are as long as the block has dense policies, not positions."""

SENTINELS: Final[Mapping[str, int]] = {
    "game_id": NO_GAME,
    "move": NO_MOVE,
    "position_in_game": NO_PLY,
    "total_positions": NO_PLY,
    "value_sample_tier": NO_TIER,
}
"""What stands for null, a field."""
_MEMBER_NAME: Final = re.compile(r"(\d{6,})\.([a-z_]+)\.npy")
_END_OF_ARCHIVE: Final = bytes(2 * tarfile.BLOCKSIZE)


def block_fields(board_size: int, with_policy: bool) -> dict[str, FieldSpec]:
    """Return the fields of every block of a split; ``with_policy`` where it holds any dense policy."""
    fields = {
        "board": FieldSpec("|u1", (board_bytes(board_size),)),
        "game_id": FieldSpec("<i8", ()),
        "move": FieldSpec("<u2", ()),
        "player_to_move": FieldSpec("|u1", ()),
        "position_id": FieldSpec("<i8", ()),
        "position_in_game": FieldSpec("<u2", ()),
        "total_positions": FieldSpec("<u2", ()),
        "value": FieldSpec("<f4", ()),
        "value_sample_tier": FieldSpec("|u1", ()),
    }
    if with_policy:
        fields["policy"] = FieldSpec("<f4", (board_size * board_size,))
        fields["policy_row"] = FieldSpec("<u4", ())
    return fields


def block_length(block: Mapping[str, npt.NDArray[Any]]) -> int:
    """Return n, the positions of a block.

    Raises:
        ValueError: if its fields differ in length.
    """
    lengths = {len(array) for name, array in block.items() if name not in POLICY_FIELDS}
    if len(lengths) != 1:
        raise ValueError(f"the fields of a block have different lengths: {sorted(lengths)}")
    return lengths.pop()


# --- Arrow columns and blocks -------------------------------------------------------------------------


def columns_to_block(table: pa.Table | pa.RecordBatch, with_policy: bool) -> Block:
    """Turn rows of ``schema.positions_schema`` into one block, nulls into their sentinels.

    Raises:
        StoreError: if a column that must not be null is, or a dense policy has another length than
            the board has cells.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    board_size = board_size_of(table.schema.field("board").type.byte_width)
    block: Block = {}
    for name, spec in block_fields(board_size, with_policy=False).items():
        column = table.column(name)
        if name in SENTINELS:
            column = column.fill_null(SENTINELS[name])
        elif column.null_count:
            raise StoreError(f"column {name} holds {column.null_count} nulls", expected="none")
        values = _binary_to_bytes(column) if name == "board" else column.to_numpy()
        block[name] = values.astype(spec.dtype, copy=False)
    if with_policy:
        block |= _dense_policies(table.column("policy"), board_size * board_size)
    return block


def _binary_to_bytes(column: pa.ChunkedArray) -> npt.NDArray[np.uint8]:
    """Return a fixed-size-binary column without nulls as uint8 (rows, width)."""
    width = column.type.byte_width
    chunks = [
        np.frombuffer(chunk.buffers()[1], np.uint8, len(chunk) * width, chunk.offset * width)
        for chunk in column.chunks
        if len(chunk)
    ]
    joined = chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])
    return joined.reshape(-1, width)


def _dense_policies(column: pa.ChunkedArray, cells: int) -> Block:
    rows = np.flatnonzero(column.is_valid().to_numpy())
    dense = column.drop_null()
    lengths = dense.combine_chunks().value_lengths().to_numpy()
    if (lengths != cells).any():
        wrong = int(np.flatnonzero(lengths != cells)[0])
        raise StoreError(
            "a dense policy does not cover the board",
            record=f"row {rows[wrong]}",
            found=f"{lengths[wrong]} numbers",
            expected=cells,
        )
    numbers = dense.combine_chunks().flatten().to_numpy()
    return {
        "policy": numbers.astype("<f4", copy=False).reshape(-1, cells),
        "policy_row": rows.astype("<u4"),
    }


def block_to_policy(block: Mapping[str, npt.NDArray[Any]], cells: int) -> npt.NDArray[np.float32]:
    """Return the policies of a block as float32 (n, cells).

    Dense where the position has a dense policy, else one-hot at ``move``, else (final positions) zeros.
    """
    move = block["move"]
    policy = np.zeros((len(move), cells), np.float32)
    has_move = np.flatnonzero(move != NO_MOVE)
    policy[has_move, move[has_move]] = 1.0
    if "policy" in block:
        policy[block["policy_row"]] = block["policy"]
    return policy


def block_samples(block: Block) -> Iterator[tuple[int, Block]]:
    """Take a block apart for ``--layout samples``: (position_id, its fields without leading dimension).

    The board is unpacked to uint8 (2, n, n). ``policy`` float32 (n·n,) stands in every sample or, in
    splits without dense policies, in none, as some readers want the same fields throughout.
    """
    board_size = board_size_of(block["board"].shape[1])
    fields = {name: array for name, array in block.items() if name != "policy_row"}
    fields["board"] = unpack_boards(block["board"], board_size, np.uint8)
    if "policy" in block:
        fields["policy"] = block_to_policy(block, board_size * board_size)
    for row, position_id in enumerate(block["position_id"].tolist()):
        yield position_id, {name: array[row, ...] for name, array in fields.items()}


# --- writing ------------------------------------------------------------------------------------------


class ShardWriter:
    """Writes one tar shard front to back: USTAR, no times, no owners, so the same arrays give the same bytes.

    ``offsets`` gives, a field, where each block's numbers begin in the file (after tar and npy headers),
    so that a local shard can be read through ``mmap``. ``positions``, ``blocks`` and ``bytes`` count
    what has been written.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Write to ``file``, which stands at its beginning and stays the caller's to close."""
        self.offsets: dict[str, list[int]] = {}
        self.positions = 0
        self.blocks = 0
        self.bytes = 0
        self._file = file
        self._last_key = -1

    def write_block(self, key: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Append the block ``key``, a number that counts upward over the whole split.

        Raises:
            ValueError: if the key does not ascend, the fields are not those of the shard's earlier
                blocks, or their lengths differ.
        """
        if key <= self._last_key:
            raise ValueError(f"block keys ascend: {key} cannot follow {self._last_key}")
        rows = block_length(arrays)
        if self.blocks and arrays.keys() != self.offsets.keys():
            raise ValueError(f"block {key} has the fields {sorted(arrays)}, not {sorted(self.offsets)}")
        for name, offset in self._write_members(f"{key:06d}", arrays):
            self.offsets.setdefault(name, []).append(offset)
        self._last_key = key
        self.positions += rows
        self.blocks += 1

    def write_sample(self, position_id: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Append one position as a sample of its own, as :func:`block_samples` gives it.

        No offsets are kept, and ``blocks`` counts samples.
        """
        for _ in self._write_members(f"{position_id:09d}", arrays):
            pass
        self.positions += 1
        self.blocks += 1

    def close(self) -> None:
        """End the archive: two blocks of zeros, and more up to a whole record. Leaves the file open."""
        end = self.bytes + len(_END_OF_ARCHIVE)
        self._write(_END_OF_ARCHIVE + bytes(-end % tarfile.RECORDSIZE))

    def entry(self, name: str, sha256: str) -> ShardEntry:
        """Return what the manifest says of the shard, closed, under its final name and with its digest."""
        return ShardEntry(name, self.positions, self.blocks, self.bytes, sha256, self.offsets)

    def _write_members(self, key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, int]]:
        """Write the members of one sample by name; yield each field and where its numbers begin."""
        for name in sorted(arrays):
            array = arrays[name]
            # Little-endian on every machine. np.ascontiguousarray would give a scalar a dimension.
            array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
            header = npy_header(array.dtype.str, array.shape)
            info = tarfile.TarInfo(f"{key}.{name}.npy")
            info.size = len(header) + array.nbytes
            self._write(info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict") + header)
            yield name, self.bytes
            self._write(array.reshape(-1).view(np.uint8).data)
            self._write(bytes(-info.size % tarfile.BLOCKSIZE))

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.bytes += len(data)


@functools.lru_cache(maxsize=1 << 14)
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the npy 1.0 header of an array in C order: 128 bytes, so that numbers in a tar are aligned."""
    buffer = io.BytesIO()
    facts = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, facts)
    return buffer.getvalue()


# --- reading ------------------------------------------------------------------------------------------


def read_blocks(path: str | AnyPath) -> Iterator[tuple[str, Block]]:
    """Read a shard front to back, one (key, arrays) at a time; the arrays are read-only.

    Stricter than ``tarfile``, which takes a broken header for the end of the archive: every byte must
    be accounted for, up to the end-of-archive blocks. Reads samples as well.

    Raises:
        FormatError: naming the shard and the member or the byte, if the shard is cut or altered. What
            was yielded before is then void.
    """
    for key, block, _ in read_placed_blocks(path):
        yield key, block


def read_placed_blocks(path: str | AnyPath) -> Iterator[tuple[str, Block, dict[str, int]]]:
    """Do as :func:`read_blocks`, and say of each field at which byte of the shard its numbers begin."""
    with open_binary(as_path(path)) as file:
        for key, members in itertools.groupby(_read_members(file, path), key=lambda member: member[0]):
            block: Block = {}
            places: dict[str, int] = {}
            for _, field, data, begin in members:
                member = f"{key}.{field}.npy"
                if field in block:
                    raise _broken(path, member, "the member twice", "each once")
                block[field] = decode_npy(data, path, member)
                places[field] = begin + len(data) - block[field].nbytes
            yield key, block, places


def _read_members(file: BinaryIO, path: str | AnyPath) -> Iterator[tuple[str, str, bytes, int]]:
    """Yield (key, field, npy bytes, where these begin) of each member up to the end of the archive."""
    while (header := file.read(tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
        place = f"byte {file.tell() - len(header)}"
        try:
            info = tarfile.TarInfo.frombuf(header, "ascii", "surrogateescape")
        except tarfile.HeaderError as error:
            raise _broken(path, place, f"no tar header ({error})", "the end-of-archive blocks") from None
        name = _MEMBER_NAME.fullmatch(info.name)
        if name is None or not info.isreg():
            raise _broken(path, place, f"member {info.name!r}", "a plain file KEY.FIELD.npy")
        begin, data = file.tell(), file.read(info.size)
        padding = file.read(-info.size % tarfile.BLOCKSIZE)
        if len(data) != info.size or padding != bytes(-info.size % tarfile.BLOCKSIZE):
            raise _broken(path, info.name, f"{len(data)} bytes and their padding", f"{info.size} bytes")
        yield name[1], name[2], data, begin
    rest = file.read()
    if len(rest) < tarfile.BLOCKSIZE or any(rest) or file.tell() % tarfile.RECORDSIZE:
        raise _broken(path, "end of archive", f"{len(rest)} bytes", "zeros up to a whole record")


def _broken(path: str | AnyPath, record: str, found: str, expected: str) -> FormatError:
    return FormatError(
        "the shard is cut or altered",
        code="broken-shard",
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint="Export the shards again.",
    )


def decode_npy(data: bytes, path: str | AnyPath, member: str) -> npt.NDArray[Any]:
    """Return the array of one ``.npy`` member, a read-only view of ``data``.

    Raises:
        FormatError: if it is not npy 1.0 in C order of plain numbers, or not as long as it says.
    """
    header = data[: 10 + int.from_bytes(data[8:10], "little")]
    try:
        dtype, shape = _parse_npy_header(header)
    except (ValueError, tokenize.TokenError) as error:
        raise _broken(path, member, str(error), "an npy 1.0 header") from None
    size = math.prod(shape) * dtype.itemsize
    if len(data) - len(header) != size:
        raise _broken(path, member, f"{len(data) - len(header)} bytes of numbers", f"{size} for {shape}")
    return np.frombuffer(data, dtype, offset=len(header)).reshape(shape)


@functools.lru_cache(maxsize=256)
def _parse_npy_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Parse a header; remembered, as parsing takes longer than the block and few headers differ."""
    stream = io.BytesIO(header)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("another npy version than 1.0")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
    if fortran_order or dtype.kind not in "iuf" or any(length < 0 for length in shape):
        raise ValueError(f"an npy array of {dtype}, shape {shape}, Fortran order {fortran_order}")
    return dtype, shape
