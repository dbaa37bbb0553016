"""Shards that lie elsewhere, read through copies on this machine.

To whoever reads them this is one more place that shards are in. Never decides what is kept: the cache does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hexdata.shards.cache import CopyFile, NoRoomError, ShardCache
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.source import WHOLE, ByteStream, FileStream, Part, Source

__all__ = ["CachedSource"]


@dataclass(frozen=True)
class CachedSource:
    """A source whose shards are copied to this machine when they are first asked for.

    Attributes:
        source: where they lie.
        cache: where the copies are.
        entries: the shards by name; other files are read past the cache.
        digests: whether to hold a copy against its digest each time that it is opened.
    """

    source: Source
    cache: ShardCache
    entries: Mapping[str, ShardEntry]
    digests: bool = False

    def address(self, name: str) -> str:
        """Return where the file lies; the copy is nobody's business."""
        return self.source.address(name)

    @contextmanager
    def open(self, name: str, part: Part = WHOLE) -> Iterator[ByteStream]:
        """Open the copy, fetched if need be; see ``Source``.

        Where mapped shards take all the room, the shard is read past the cache, with a warning.
        """
        if name not in self.entries:
            with self.source.open(name, part) as stream:
                yield stream
            return
        try:
            file = self.cache.open(self.entries[name], self.source, digest=self.digests)
        except NoRoomError as error:
            warnings.warn(f"read past the cache: {error}", stacklevel=2)
            with self.source.open(name, part) as stream:
                yield stream
            return
        with file:
            file.seek(part.start)
            yield FileStream(file, self.address(name))

    def open_to_map(self, entry: ShardEntry, *, digest: bool) -> CopyFile:
        """Return the copy of a shard, fetched if need be, which stays while it is open or mapped.

        Raises:
            StoreError, BudgetError: as ``ShardCache.open``.
        """
        return self.cache.open(entry, self.source, digest=digest, mapped=True)
