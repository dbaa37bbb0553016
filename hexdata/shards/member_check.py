"""Comparison of the headers of a shard's members with the manifest. Does not read the numbers of members."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Final, NamedTuple

from hexdata.board import MAX_SIZE
from hexdata.errors import FormatError, Reason
from hexdata.shards.manifest import REPAIR_HINT, FieldSpec, ShardEntry
from hexdata.shards.tar_members import HEADER_BYTES, MemberHeader

__all__ = ["BlockEntry", "block_entry", "has_own_length", "manifest_mismatch_error"]

_begin: Final = operator.attrgetter("begin")
_MOST_PER_ROW: Final = {
    **dict.fromkeys(("policy", "policy_row", "policy_count"), 1),
    **dict.fromkeys(("policy_cell", "policy_probability"), MAX_SIZE**2),
}
"""Maximum number of entries per position of members whose length differs from the number of positions."""
_EQUAL_LENGTHS: Final = (
    ("policy", "policy_row", "policies"),
    ("policy_count", "policy_row", "policies"),
    ("policy_probability", "policy_cell", "probabilities"),
)
"""Pairs of members of equal length, and what the first contains."""


def has_own_length(name: str) -> bool:
    """Return whether the length of a member differs from the number of positions of its block."""
    return name in _MOST_PER_ROW


def manifest_mismatch_error(path: str, record: str, found: object, expected: object) -> FormatError:
    """Return the error for a shard that does not match the manifest."""
    return FormatError(
        "the shard does not match the manifest",
        code=Reason.BROKEN_SHARD,
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint=REPAIR_HINT,
    )


class BlockEntry(NamedTuple):
    """One block of a shard, as the manifest describes it.

    Attributes:
        path: Path or URL of the shard, for messages.
        shard: Manifest entry of the shard.
        number: Number of the block in the shard, from 0.
        key: Key of the block in the split.
        rows: Number of positions in the block.
    """

    path: str
    shard: ShardEntry
    number: int
    key: str
    rows: int

    @property
    def start(self) -> int:
        """Byte offset of the block in the shard."""
        return self._start_of(self.number)

    @property
    def stop(self) -> int:
        """Byte offset of the next block, or the size of the shard."""
        is_last = self.number + 1 == self.shard.blocks
        return self.shard.bytes if is_last else self._start_of(self.number + 1)

    def fields_in_order(self) -> list[str]:
        """Return the fields of the block in their order in the file."""
        offsets = self.shard.offsets
        return sorted(offsets, key=lambda name: offsets[name][self.number])

    def member_name(self, field: str) -> str:
        """Return the name of the tar member of a field."""
        return f"{self.key}.{field}.npy"

    def check_header(self, field: str, header: MemberHeader, spec: FieldSpec) -> None:
        """Check the name, offset, dtype and shape in the header of a field.

        Raises:
            FormatError: They are not as the manifest says.
        """
        name, offset = self.member_name(field), self.shard.offsets[field][self.number]
        if header.name != name or header.begin != offset:
            raise manifest_mismatch_error(
                self.path,
                name,
                f"{header.name}, whose numbers begin at byte {header.begin}",
                f"{name}, whose numbers begin at byte {offset}",
            )
        own_length = has_own_length(field)
        rows = self.rows * _MOST_PER_ROW.get(field, 1)
        if own_length and header.shape and header.shape[0] <= rows:
            rows = header.shape[0]
        if header.dtype != spec.dtype or header.shape != (rows, *spec.shape):
            found = f"{header.dtype} of shape {header.shape}"
            expected = f"{spec.dtype} of shape {(rows, *spec.shape)}{', at most' if own_length else ''}"
            raise manifest_mismatch_error(self.path, name, found, expected)

    def check_layout(self, headers: Mapping[str, MemberHeader]) -> None:
        """Check that there are no gaps between members, and that the lengths of policies agree.

        Args:
            headers: The headers of all members of the block, by field.

        Raises:
            FormatError: There is a gap, or the lengths of members differ that must be equal.
        """
        offset = self.start if self.number else 0
        for header in sorted(headers.values(), key=_begin):
            if header.begin != offset + HEADER_BYTES:
                found, expected = f"byte {header.begin}", f"byte {offset + HEADER_BYTES}"
                raise manifest_mismatch_error(self.path, header.name, found, expected)
            offset = header.end
        if self.number + 1 < self.shard.blocks and offset != self.stop:
            found, expected = f"an end at byte {offset}", f"byte {self.stop}"
            raise manifest_mismatch_error(self.path, f"block {self.key}", found, expected)
        for name, other, what in _EQUAL_LENGTHS:
            if name in headers and other in headers and headers[name].shape[0] != headers[other].shape[0]:
                found = f"{headers[name].shape[0]} {what}"
                expected = f"{headers[other].shape[0]}, the length of its {other}"
                raise manifest_mismatch_error(self.path, self.member_name(name), found, expected)

    def _start_of(self, index: int) -> int:
        return min(offsets[index] for offsets in self.shard.offsets.values()) - HEADER_BYTES


def block_entry(path: str, shard: ShardEntry, index: int, first_key: int, block_size: int) -> BlockEntry:
    """Return the entry of one block.

    Args:
        path: Path or URL of the shard, for messages.
        shard: Manifest entry of the shard.
        index: Index of the block in the shard.
        first_key: Key of the shard's first block.
        block_size: Positions per block.
    """
    rows = min(block_size, shard.positions - index * block_size)
    return BlockEntry(path, shard, index, f"{first_key + index:06d}", rows)
