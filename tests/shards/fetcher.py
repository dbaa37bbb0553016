"""A process that opens one shard through the cache, for tests that pause or kill it, or limit its disk space.

Run as a script: ``fetcher.py CACHE SIZE SOURCE NAME BYTES SHA256 [halt|full]``. Prints ``begin``; with
``halt``, instead prints ``half`` after the first bytes and waits for a line. Then prints the digest of the
bytes or the error.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hexdata.errors import HexdataError
from hexdata.shards.cache import ShardCache
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.sources import WHOLE_FILE, ByteRange, FileStream, FolderSource


class PausingStream(FileStream):
    halted = False

    def read(self, size: int, /) -> bytes:
        if self.halted:
            return super().read(size)
        self.halted = True
        data = super().read(100)
        print("half", flush=True)
        sys.stdin.readline()
        return data


class PausingSource(FolderSource):
    @contextmanager
    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> Iterator[FileStream]:
        with (self.folder / name).open("rb") as file:
            yield PausingStream(file, name)


def main(cache: str, size: str, folder: str, name: str, length: str, sha256: str, *how: str) -> None:
    if "full" in how:
        sys.dont_write_bytecode = True  # truncated bytecode files would break later imports
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    if "halt" not in how:
        print("begin", flush=True)
    source = (PausingSource if "halt" in how else FolderSource)(Path(folder))
    entry = ShardEntry(name, 1, 1, int(length), sha256, {})
    try:
        with ShardCache(Path(cache), int(size)).open(entry, source) as file:
            print(hashlib.sha256(file.read()).hexdigest(), flush=True)
    except HexdataError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
