"""The headers of a shard's members, compared with what the manifest says of them.

A block's numbers are found through an offset; the headers before them tell whether they are the right
ones. Never reads the numbers themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Final, NamedTuple

from hexdata.errors import FormatError, Reason
from hexdata.shards.blocks import POLICY_FIELDS
from hexdata.shards.manifest import FieldSpec, ShardEntry
from hexdata.shards.tar_members import HEADER_BYTES, MemberHeader

_begin: Final = operator.attrgetter("begin")

__all__ = ["HINT", "BlockPlace", "altered", "place_block"]

HINT: Final = "Run `hexdata verify`, then `hexdata export` again."


def altered(path: str, record: str, found: object, expected: object) -> FormatError:
    """Return the error for a place in a shard where something else stands."""
    return FormatError(
        "the shard is not what the manifest says",
        code=Reason.BROKEN_SHARD,
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint=HINT,
    )


class BlockPlace(NamedTuple):
    """One block of a shard, as the manifest describes it.

    Attributes:
        path: of the shard, for messages.
        entry: what the manifest says of the shard.
        number: of the block in the shard.
        key: of the block in the split.
        rows: positions of the block.
    """

    path: str
    entry: ShardEntry
    number: int
    key: str
    rows: int

    @property
    def start(self) -> int:
        """The byte of the shard at which the block begins."""
        return self._start_of(self.number)

    @property
    def stop(self) -> int:
        """The byte at which the next block begins, or at which the shard ends."""
        last = self.number + 1 == self.entry.blocks
        return self.entry.bytes if last else self._start_of(self.number + 1)

    def members(self) -> list[str]:
        """Return the fields of the block in their order in the file."""
        offsets = self.entry.offsets
        return sorted(offsets, key=lambda name: offsets[name][self.number])

    def member(self, field: str) -> str:
        """Return the name of a member of the block."""
        return f"{self.key}.{field}.npy"

    def check_header(self, field: str, header: MemberHeader, spec: FieldSpec) -> None:
        """Check that a header is that of a field of the block, where the manifest says.

        Raises:
            FormatError: it is not.
        """
        name, offset = self.member(field), self.entry.offsets[field][self.number]
        if header.name != name or header.begin != offset:
            raise altered(
                self.path,
                name,
                f"{header.name}, whose numbers begin at byte {header.begin}",
                f"{name}, whose numbers begin at byte {offset}",
            )
        dense = field in POLICY_FIELDS
        rows = header.shape[0] if dense and header.shape and header.shape[0] <= self.rows else self.rows
        if header.dtype != spec.dtype or header.shape != (rows, *spec.shape):
            found, expected = (
                f"{header.dtype} of shape {header.shape}",
                f"{spec.dtype} of shape {(rows, *spec.shape)}",
            )
            raise altered(self.path, name, found, f"{expected}, at most" if dense else expected)

    def check_layout(self, headers: Mapping[str, MemberHeader]) -> None:
        """Check that the members of the block leave no gap, and that policies are as many as their rows.

        Raises:
            FormatError: there is a gap, or there are more of the one than of the other.
        """
        place = self.start if self.number else 0
        for header in sorted(headers.values(), key=_begin):
            if header.begin != place + HEADER_BYTES:
                raise altered(self.path, header.name, f"byte {header.begin}", f"byte {place + HEADER_BYTES}")
            place = header.end
        if self.number + 1 < self.entry.blocks and place != self.stop:
            raise altered(self.path, f"block {self.key}", f"an end at byte {place}", f"byte {self.stop}")
        if not headers.keys().isdisjoint(POLICY_FIELDS):
            counts = [headers[name].shape[0] for name in POLICY_FIELDS if name in headers]
            if len(set(counts)) > 1:
                raise altered(
                    self.path,
                    self.member("policy"),
                    f"{counts[0]} policies",
                    f"{counts[1]}, as its policy_row has",
                )

    def _start_of(self, number: int) -> int:
        return min(places[number] for places in self.entry.offsets.values()) - HEADER_BYTES


def place_block(path: str, entry: ShardEntry, number: int, first_key: int, block_size: int) -> BlockPlace:
    """Return the block of that number of a shard whose first block has the key ``first_key``."""
    rows = min(block_size, entry.positions - number * block_size)
    return BlockPlace(path, entry, number, f"{first_key + number:06d}", rows)
