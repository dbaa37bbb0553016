"""The first stage alone, watching a directory, and what it finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hexdata.live.chunk import FoundFile
from hexdata.live.files.provider import FilePathProvider
from hexdata.live.pipeline import Pipeline
from tests.live.number_stages import PATIENCE


def watching(folder: Path, **options: Any) -> Pipeline:
    """Return a pipeline, not started, that looks again only when the system tells of a change."""
    options = {"settle": 0.05, "rescan": 1000.0, **options}
    return Pipeline([FilePathProvider(folder, **options)], [(2, "block")])


def take(pipeline: Pipeline) -> FoundFile:
    """Return the next file, or the mark of the first scan's end."""
    found = pipeline.take(PATIENCE)
    assert found is not None, "the file is not found"
    return found


def names(pipeline: Pipeline, count: int) -> list[str]:
    """Return the names of so many files, in the order in which they come."""
    return [take(pipeline).name for _ in range(count)]
