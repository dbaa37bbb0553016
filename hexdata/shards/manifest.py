"""The manifest of a directory of shards, ``shards/manifest.json``.

Builds, reads and checks manifests. Never opens a shard and never writes a file.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import StoreError
from hexdata.order import ORDER_VERSION
from hexdata.schema import SCHEMA_VERSION
from hexdata.storage import AnyPath, as_path, is_address, storage_of
from hexdata.store.location import no_store_error
from hexdata.strict_json import (
    MAX_JSON_BYTES,
    MAX_JSON_VALUES,
    AtMost,
    Count,
    FileName,
    HexDigest,
    Matching,
    Within,
    check_value,
    parse_json,
    shortened,
)

__all__ = [
    "LAYOUTS",
    "MANIFEST_NAME",
    "MANIFEST_VERSION",
    "MAX_SIZE_OF_SHARDS",
    "REPAIR_HINT",
    "FieldSpec",
    "ShardEntry",
    "ShardManifest",
    "max_offsets",
    "missing_manifest_error",
]

MANIFEST_VERSION: Final = 1
"""Version of the manifest format. Manifests of another version are refused."""
MANIFEST_NAME: Final = "manifest.json"
"""File name of the manifest, in the directory of the shards."""
LAYOUTS: Final = ("blocks", "samples")
"""Layouts of shards: each tar sample is a block of positions, or a single position."""

REPAIR_HINT: Final = "Run `hexdata verify`, then `hexdata export` again."
"""What to do about a shard that does not match its manifest."""

READABLE_VERSIONS: Final = (1, SCHEMA_VERSION)
"""Versions of the position schema whose shards can be read."""
_FieldName = Annotated[
    str, Matching(r"^(?:[a-z][a-z0-9_]{0,31}|extra\.[A-Za-z_][A-Za-z0-9_]{0,62})$", "the name of a field")
]
MAX_SIZE_OF_SHARDS: Final = 1 << 40
"""Maximum number of positions of a block and of a shard."""
_Size = Annotated[int, Within(1, MAX_SIZE_OF_SHARDS)]


class FieldSpec(NamedTuple):
    """One field of a block: its NumPy type string and its shape without the leading dimension."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardEntry:
    """The entry of one shard in the manifest, as :meth:`ShardWriter.entry` returns it.

    Attributes:
        name: Plain file name of the shard.
        positions: Number of positions.
        blocks: Number of blocks; in the layout ``samples``, number of samples.
        bytes: Size of the file.
        sha256: SHA-256 of the file, in hexadecimal.
        offsets: For each field, the byte offset of its numbers in every block. Empty in the layout
            ``samples``.

    Raises:
        StoreError: ``name`` is not a plain file name, or a field does not have one offset per block.
    """

    name: FileName
    positions: Count
    blocks: Count
    bytes: Count
    sha256: HexDigest
    offsets: Mapping[_FieldName, list[Count]]

    def __post_init__(self) -> None:
        if Path(self.name).name != self.name:
            raise StoreError("the name of a shard must be a plain file name", found=shortened(self.name))
        if any(len(offsets) != self.blocks for offsets in self.offsets.values()):
            raise StoreError(f"{self.name} needs one offset per block and field", expected=self.blocks)


@dataclass(frozen=True)
class ShardManifest:
    """The content of ``shards/manifest.json``: the shards of each split, and the settings they share.

    In the layout ``blocks``, every block holds ``block_size`` positions, except that the last block of a
    shard may hold fewer. Block keys count upward over the split.

    Attributes:
        board_size: Cells along an edge.
        layout: One of ``LAYOUTS``.
        block_size: Positions per block.
        shard_size: Maximum number of positions per shard, a multiple of ``block_size``.
        seed: Seed of the shuffle.
        fields: The fields of the blocks by name.
        splits: The shards of each split, in order.
        schema_version: Version of the position schema. Policies are dense in version 1, and sparse since.
        order_version: Version of the shuffle order.
        first_keys: Key of the first block of each split whose first shards were left out by
            :meth:`with_shards`; not stored. Default: none, so the keys of all splits begin at 0.

    Raises:
        StoreError: The values contradict each other.
    """

    board_size: int
    layout: str
    block_size: int
    shard_size: int
    seed: int
    fields: Mapping[str, FieldSpec]
    splits: Mapping[str, Sequence[ShardEntry]]
    schema_version: int = SCHEMA_VERSION
    order_version: int = ORDER_VERSION
    first_keys: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise StoreError("unknown shard layout", found=self.layout, expected=" or ".join(LAYOUTS))
        if self.block_size < 1 or self.shard_size < 1 or self.shard_size % self.block_size:
            sizes = f"{self.shard_size} and {self.block_size}"
            raise StoreError("the shard size must be a multiple of the block size", found=sizes)
        for split in self.splits:
            for shard in self.splits[split]:
                self._check(shard)

    def _check(self, shard: ShardEntry) -> None:
        block_size = self.block_size if self.layout == "blocks" else 1
        if not 0 < shard.positions <= self.shard_size or shard.blocks != -(-shard.positions // block_size):
            found = f"{shard.positions} positions in {shard.blocks} blocks"
            raise StoreError(
                f"the entry of {shard.name} contradicts the block size or the shard size", found=found
            )

    def positions(self, split: str) -> int:
        """Return the number of positions in a split."""
        return sum(shard.positions for shard in self.splits[split])

    def with_shards(self, split: str, start: int, stop: int) -> ShardManifest:
        """Return a manifest with only the shards [start, stop) of a split."""
        shards = self.splits[split]
        first_key = self.first_keys.get(split, 0) + sum(shard.blocks for shard in shards[:start])
        return replace(
            self,
            splits={**self.splits, split: shards[start:stop]},
            first_keys={**self.first_keys, split: first_key},
        )

    @functools.cached_property
    def digest(self) -> str:
        """Identity of the shards: SHA-256 of the canonical JSON of all other values."""
        return _digest(self._facts())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        return {**self._facts(), "digest": self.digest}

    def dumps(self) -> bytes:
        """Return the bytes of manifest.json: compact JSON, as it holds one offset per block and field."""
        return json.dumps(self.to_json(), separators=(",", ":")).encode("ascii") + b"\n"

    def _facts(self) -> dict[str, Any]:
        return {
            "version": MANIFEST_VERSION,
            "schema_version": self.schema_version,
            "order_version": self.order_version,
            "board_size": self.board_size,
            "layout": self.layout,
            "block_size": self.block_size,
            "shard_size": self.shard_size,
            "seed": self.seed,
            "fields": {
                name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in self.fields.items()
            },
            "splits": {
                split: {"positions": self.positions(split), "shards": [dict(vars(s)) for s in shards]}
                for split, shards in self.splits.items()
            },
        }

    @classmethod
    def load(cls, folder: str | AnyPath) -> ShardManifest:
        """Read and check ``folder``/manifest.json.

        Args:
            folder: Directory of the shards.

        Raises:
            StoreError: The file is missing or cannot be read, is not a shard manifest, has another version,
                or was altered.
        """
        path = as_path(folder) / MANIFEST_NAME
        try:
            with storage_of(path).open() as file:
                data = file.read(MAX_JSON_BYTES + 1)
        except FileNotFoundError:
            raise missing_manifest_error(path) from None
        except OSError as error:
            raise StoreError(
                "the shard manifest cannot be read",
                path=path,
                found=error.strerror,
                hint="Check the disk and the permissions of the file, and run the command again.",
            ) from None
        return cls.loads(data, path)

    @classmethod
    def loads(cls, data: bytes, where: str | AnyPath) -> ShardManifest:
        """Read and check the bytes of a manifest.json.

        Args:
            data: The bytes.
            where: Their path or URL, for errors.

        Raises:
            StoreError: The bytes are not a shard manifest, have another version, or were altered.
        """
        hint = "Run `hexdata export` again."
        facts = parse_json(data, where, what="the shard manifest", hint=hint)
        _check_identity(facts, where)
        try:
            checked = check_value(_ShardManifestFile, facts, where, what="the shard manifest", hint=hint)
            return checked.manifest()
        except StoreError as error:
            raise error.at(where) from None


def max_offsets(shards: int, shard_bytes: int, fields: Collection[str]) -> int:
    """Return the maximum number of offsets in a manifest that readers accept; negative for too many shards.

    Args:
        shards: Number of shards.
        shard_bytes: Size of a shard in bytes, or a larger number.
        fields: Fields that have offsets.
    """
    entry_bytes = _ENTRY_BYTES + sum(len(name) + len('"":[],') for name in fields)
    by_bytes = (MAX_JSON_BYTES - _HEADER_BYTES - shards * entry_bytes) // len(f"{shard_bytes},")
    by_values = MAX_JSON_VALUES - _HEADER_VALUES - shards * (_ENTRY_VALUES + 2 * len(fields))
    return min(by_bytes, by_values)


_HEADER_BYTES: Final = 1 << 14
_HEADER_VALUES: Final = 1 << 9
"""Maximum size and number of values of a manifest without the entries of its shards."""
_ENTRY_BYTES: Final = 256
_ENTRY_VALUES: Final = 9
"""The same of the entry of a shard without its offsets and the names of its fields."""


@dataclass(frozen=True)
class _FieldFacts:
    dtype: Annotated[str, Matching("^(?:\\|[iu]1|<[iu][248]|<f[248])$", "the NumPy type of a plain number")]
    shape: Annotated[list[Annotated[int, Within(1, 4096)]], AtMost(3)]


@dataclass(frozen=True)
class _SplitFacts:
    positions: Count
    shards: list[ShardEntry]


@dataclass(frozen=True)
class _ShardManifestFile:
    """JSON schema of shards/manifest.json."""

    version: int
    schema_version: int
    order_version: Count
    board_size: Annotated[int, Within(MIN_SIZE, MAX_SIZE)]
    layout: str
    block_size: _Size
    shard_size: _Size
    seed: int
    fields: dict[_FieldName, _FieldFacts]
    splits: dict[Literal["train", "val", "test"], _SplitFacts]
    digest: HexDigest

    def manifest(self) -> ShardManifest:
        """Return the manifest after checking that its values agree with each other.

        Raises:
            StoreError: They contradict each other.
        """
        made = ShardManifest(
            board_size=self.board_size,
            layout=self.layout,
            block_size=self.block_size,
            shard_size=self.shard_size,
            seed=self.seed,
            fields={name: FieldSpec(spec.dtype, tuple(spec.shape)) for name, spec in self.fields.items()},
            splits={split: tuple(part.shards) for split, part in self.splits.items()},
            schema_version=self.schema_version,
            order_version=self.order_version,
        )
        for split, part in self.splits.items():
            if made.positions(split) != part.positions:
                raise StoreError(
                    f"the positions of the shards of {split} do not add up to those of the split",
                    found=made.positions(split),
                    expected=part.positions,
                )
            unknown = {name for shard in part.shards for name in shard.offsets} - made.fields.keys()
            if unknown:
                raise StoreError(
                    "a shard has a field that the manifest does not describe", found=min(unknown)
                )
        return made


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _check_identity(facts: object, path: str | AnyPath) -> None:
    """Check that ``facts`` is a shard manifest of this version and that it matches its digest.

    Raises:
        StoreError: It does not.
    """
    if not isinstance(facts, dict) or not {"version", "digest", "block_size"} <= facts.keys():
        raise StoreError("not a shard manifest", path=path, hint="Run `hexdata export` first.")
    for name, known in (("version", (MANIFEST_VERSION,)), ("schema_version", READABLE_VERSIONS)):
        if facts.get(name) not in known:
            hint = "Use the hexdata that wrote the shards, or export them again with this one."
            raise StoreError(
                f"the shards have another {name}",
                path=path,
                found=shortened(repr(facts.get(name))),
                expected=" or ".join(map(str, known)),
                hint=hint,
            )
    stated = facts["digest"]
    found = _digest({name: value for name, value in facts.items() if name != "digest"})
    if found != stated:
        raise StoreError(
            "the shard manifest was altered",
            path=path,
            found=f"digest {found}",
            expected=shortened(str(stated)),
            hint="Run `hexdata export` again.",
        )


def missing_manifest_error(path: str | AnyPath) -> StoreError:
    """Return the error for a missing shard manifest, with what there is instead in a local folder."""
    if is_address(path):
        hint = "Give the address of the folder that contains the manifest.json of the shards."
        return StoreError("no shard manifest", path=path, hint=hint)
    return no_store_error(Path(str(path)).parent, "a store or a folder of shards")
