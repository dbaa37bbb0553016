"""Reading of a source file, for the tests of its reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hexdata.formats import Rejection, SourceReader, open_source

__all__ = ["Source", "read_source", "save_source"]


class Source(NamedTuple):
    """What a reader returned."""

    reader: SourceReader
    rows: list[dict[str, Any]]
    rejected: list[Rejection]


def read_source(path: Path, **options: Any) -> Source:
    """Read a file with the options of ``open_source``."""
    with open_source(path, **options) as reader:
        batches = list(reader.batches())
    rows = [row for batch in batches for row in batch.positions.to_pylist()]
    return Source(reader, rows, [each for batch in batches for each in batch.rejected])


def save_source(path: Path, text: str | bytes) -> Path:
    """Write a file and return its path."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
