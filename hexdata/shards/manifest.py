"""The manifest of a directory of shards, ``shards/manifest.json``.

Builds, reads and checks manifests. Never opens a shard and never writes a file.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import FormatError, Reason, StoreError
from hexdata.json_models import Count, HexDigest, Model, as_model, read_json
from hexdata.order import ORDER_VERSION
from hexdata.schema import SCHEMA_VERSION
from hexdata.shards.blocks import FieldSpec
from hexdata.storage import AnyPath
from hexdata.store.files import check_identity

MANIFEST_VERSION: Final = 2
"""Version of the manifest format. Manifests of another version are refused."""
MANIFEST_NAME: Final = "manifest.json"
"""File name of the manifest, in the directory of the shards."""
REPAIR_HINT: Final = "Run `hexdata verify`, then `hexdata export` again."
"""What to do about a shard that does not match its manifest."""

MAX_SIZE_OF_SHARDS: Final = 1 << 40
"""Maximum number of positions of a block and of a shard."""
_Size = Annotated[int, Meta(ge=1, le=MAX_SIZE_OF_SHARDS)]
_FileName = Annotated[str, Meta(pattern=r"^(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,255}\Z")]
"""A file in the same folder, whose name needs no quotes in messages and addresses."""


class ShardEntry(Model, frozen=True):
    """The entry of one shard in the manifest, as :meth:`ShardWriter.entry` returns it.

    Attributes:
        name: Plain file name of the shard.
        positions: Number of positions.
        bytes: Size of the file.
        sha256: SHA-256 of the file, in hexadecimal.
        blocks: For each block, the byte at which it begins, and the SHA-256 of the bytes up to the next block
            or the end of the file.

    Raises:
        ValueError: The first block is not at the beginning of the file, or the offsets do not ascend.
    """

    name: _FileName
    positions: Count
    bytes: Count
    sha256: HexDigest
    blocks: list[tuple[Count, HexDigest]]

    @property
    def rows(self) -> int:
        """Number of positions, under the name that all files of a store have for it."""
        return self.positions

    def __post_init__(self) -> None:
        starts = [*(offset for offset, _ in self.blocks), self.bytes]
        if starts[0] != 0 or any(end <= start for start, end in itertools.pairwise(starts)):
            raise ValueError(f"{self.name} needs ascending offsets from 0")


class ShardManifest(Model, frozen=True, dict=True, kw_only=True):
    """The content of ``shards/manifest.json``: the shards of each split, and the settings they share.

    Every block has ``block_size`` positions, except that the last block of a shard may have fewer. Block keys
    count upward over the split.

    Attributes:
        version: Version of the manifest.
        schema_version: Version of the position schema.
        order_version: Version of the shuffle order.
        board_size: Cells along an edge.
        block_size: Positions per block.
        shard_size: Maximum number of positions per shard, a multiple of ``block_size``.
        seed: Seed of the shuffle.
        fields: The fields of every block by name.
        splits: The shards of each split, in order.

    Raises:
        ValueError: The values contradict each other.
    """

    version: int = MANIFEST_VERSION
    schema_version: int = SCHEMA_VERSION
    order_version: Count = ORDER_VERSION
    board_size: Annotated[int, Meta(ge=MIN_SIZE, le=MAX_SIZE)]
    block_size: _Size
    shard_size: _Size
    seed: int
    fields: Mapping[str, FieldSpec]
    splits: Mapping[Annotated[str, Meta(pattern=r"^(?:train|val|test)\Z")], Sequence[ShardEntry]]

    def __post_init__(self) -> None:
        if self.shard_size % self.block_size:
            raise ValueError(f"shard size {self.shard_size} is no multiple of block size {self.block_size}")
        for shard in itertools.chain(*self.splits.values()):
            blocks = -(-shard.positions // self.block_size)
            # The rows of a block are computed from these sizes, so they must not contradict each other.
            if not 0 < shard.positions <= self.shard_size or len(shard.blocks) != blocks:
                sizes = f"{shard.positions} positions in {len(shard.blocks)} blocks"
                raise ValueError(f"{shard.name} has {sizes}, against the sizes of blocks and shards")

    def positions(self, split: str) -> int:
        """Return the number of positions in a split."""
        return sum(shard.positions for shard in self.splits[split])

    @functools.cached_property
    def digest(self) -> str:
        """Identity of the shards: SHA-256 of the canonical JSON of all other values."""
        return _digest(asdict(self))

    def dumps(self) -> bytes:
        """Return the bytes of manifest.json: compact JSON, as it has an entry per block."""
        return msgspec.json.encode({**asdict(self), "digest": self.digest}) + b"\n"

    @classmethod
    def loads(cls, data: bytes, where: str | AnyPath) -> ShardManifest:
        """Read and check the bytes of a manifest.json.

        Args:
            data: The bytes.
            where: Their path or URL, for errors.

        Raises:
            StoreError: The bytes are not a shard manifest, have another version, or were altered.
        """
        what, hint = "the shard manifest", "Run `hexdata export` again."
        facts = read_json(data, where, what=what, hint=hint)
        # First whether it is such a manifest at all: the manifest of a store has the same file name.
        if not isinstance(facts, dict) or not {"version", "digest", "block_size", "splits"} <= facts.keys():
            raise StoreError("not a shard manifest", path=where, hint="Run `hexdata export` first.")
        versions = {"version": MANIFEST_VERSION, "schema_version": SCHEMA_VERSION}
        # Versions and digest before types: another version may have other types, and an altered file any.
        check_identity(facts, where, _digest, versions, what=what, hint=hint)
        return as_model(cls, facts, where, what=what, hint=hint)


def _digest(facts: dict[str, Any]) -> str:
    # Sorted keys, so that the digest is that of the values, whatever their order in the file.
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()


def broken_shard(reason: str, path: object, record: str, found: object, expected: object) -> FormatError:
    """Return the error for a shard that is altered or contains invalid values; ``record`` is the place."""
    code, hint = Reason.BROKEN_SHARD, REPAIR_HINT
    return FormatError(reason, code=code, path=path, record=record, found=found, expected=expected, hint=hint)
