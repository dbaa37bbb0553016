"""The companion files of the legacy tools: JSON files beside the pickles, with counts and names of raw files.

They are not trusted. A companion never makes a run fail. Names that contradict each other are not used.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.convert.inputs import require_answer
from hexdata.convert.spool import Spool, SpoolFacts, compare_counts
from hexdata.games.find import column
from hexdata.storage import AnyPath, storage_of, translate_errors
from hexdata.text import encodable

__all__ = ["Companions", "read_companions", "unnamed_files", "with_origins"]

MAX_BYTES: Final = 64 << 20
"""Largest companion that is read, in bytes. Real ones have one line per raw file, a few hundred kilobytes."""

_PROCESSED: Final = "_processed.pkl.gz"
"""Suffix that the legacy tool appended to the name of a raw file."""


@dataclass(frozen=True)
class _Entry:
    """The entry of a companion for one raw file."""

    companion: str
    """Name of the companion."""
    raw: str
    """Path of the raw file when the legacy tool ran."""
    output: str
    """Name of the pickle written from it; empty if not stated."""
    stats: dict[str, Any]

    def describes(self, name: str, header: Mapping[str, Any]) -> bool:
        """Return whether the entry describes the source with this file name and header."""
        if self.output:
            return self.output == name
        return self.raw == header.get("source_file") or PurePosixPath(self.raw).stem + _PROCESSED == name


@dataclass
class Companions:
    """The content of the companions in one folder, with ``notes`` on those that cannot be used."""

    entries: list[_Entry] = field(default_factory=list)
    names: dict[int, list[str]] = field(default_factory=dict)
    """file_idx → names of the raw file. Paths of which one is the end of the other count as one name."""
    notes: list[str] = field(default_factory=list)

    def compare(self, name: str, facts: SpoolFacts) -> list[str]:
        """Return a note for each stated count that differs from the count found.

        Args:
            name: File name of the source.
            facts: Facts of the source.
        """
        notes = []
        for entry in self.entries:
            if entry.describes(name, facts.header):
                notes += compare_counts(entry.stats, facts, f"{entry.companion} states")
        return notes

    def origins(self, wanted: set[int], facts: SpoolFacts) -> tuple[dict[int, str], list[str]]:
        """Return the names of the raw files that the metadata of a source does not name.

        Args:
            wanted: Each ``file_idx`` without a name.
            facts: Facts of the source. If its header names a raw file, the companions must agree with it.

        Returns:
            file_idx → name where all companions agree; and notes on disagreements.
        """
        named: dict[int, str] = {}
        conflicts = []
        header = facts.header.get("source_file")
        for file_idx in sorted(wanted & self.names.keys()):
            names = list(self.names[file_idx])
            if isinstance(header, str):
                _add_name(names, header)
            if len(names) == 1:
                named[file_idx] = names[0]
            else:
                conflicts.append(f"file_idx {file_idx} is {' or '.join(names)}")
        notes = (
            [f"companion files name {len(conflicts)} raw files differently; not used: {conflicts[0]} …"]
            if conflicts
            else []
        )
        return named, notes

    def _add_entry(self, companion: str, raw: Any, output: Any, stats: Any) -> None:
        if isinstance(raw, str) and isinstance(stats, dict):
            name = PurePosixPath(output).name if isinstance(output, str) else ""
            self.entries.append(_Entry(companion, encodable(raw), encodable(name), stats))

    def _add_file_name(self, file_idx: Any, name: Any) -> None:
        if isinstance(name, str) and isinstance(file_idx, int) and not isinstance(file_idx, bool):
            _add_name(self.names.setdefault(file_idx, []), encodable(name))


def _add_name(names: list[str], name: str) -> None:
    """Add a name; of two paths of which one is the end of the other, keep only the longer."""
    for index, known in enumerate(names):
        short, long = sorted((PurePosixPath(known).parts, PurePosixPath(name).parts), key=len)
        if long[len(long) - len(short) :] == short:
            names[index] = max(known, name, key=lambda path: len(PurePosixPath(path).parts))
            return
    names.append(name)


# One function per layout. Unknown content is ignored, because the layouts changed between versions.


def _read_stats(found: Companions, companion: str, content: Any) -> None:
    """Read ``processing_stats.json``: a list of files; or totals, which name no file and are ignored."""
    for item in content if isinstance(content, list) else []:
        if isinstance(item, dict):
            found._add_entry(companion, item.get("file_path"), None, item.get("stats"))
            found._add_file_name(item.get("file_idx"), item.get("file_path"))


def _read_state(found: Companions, companion: str, content: Any) -> None:
    """Read ``processing_state.json``: the processed files, each with its output file and counts."""
    files = content.get("processed_files") if isinstance(content, dict) else None
    for item in files if isinstance(files, list) else []:
        if isinstance(item, dict):
            found._add_entry(companion, item.get("file"), item.get("output"), item.get("stats"))


def _read_lookup(found: Companions, _: str, content: Any) -> None:
    """Read ``file_lookup_*.json``: file_idx as text → raw file, at the top level or in ``file_mapping``."""
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    mapping = content.get("file_mapping", content)
    for key, name in mapping.items() if isinstance(mapping, dict) else ():
        if key.isascii() and key.isdigit() and len(key) < 10:
            found._add_file_name(int(key), name)


_LAYOUTS: Final[dict[str, Callable[[Companions, str, Any], None]]] = {
    "file_lookup_*.json": _read_lookup,
    "processing_state.json": _read_state,
    "processing_stats.json": _read_stats,
}


def read_companions(folder: AnyPath) -> Companions:
    """Read the companions in a folder; add a note for each one that cannot be used.

    Raises:
        InputError: The disk failed to read a companion.
        StoreError: An object store did not answer, so it is unknown which companions exist.
    """
    found = Companions()
    for path, read in _companions_in(folder):
        name = encodable(path.name)
        try:
            with storage_of(path).open() as file:
                if file.seek(0, os.SEEK_END) > MAX_BYTES:
                    raise ValueError(f"more than {MAX_BYTES:,} bytes")
                file.seek(0)
                read(found, name, json.loads(file.read()))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, OSError):
                require_answer(path, error)
            found.notes.append(
                f"the companion file {name} cannot be used: {getattr(error, 'strerror', None) or error}"
            )
    return found


def _companions_in(folder: AnyPath) -> Iterator[tuple[AnyPath, Callable[[Companions, str, Any], None]]]:
    with translate_errors(folder):
        names = storage_of(folder).names()
    for pattern, read in _LAYOUTS.items():
        for name in fnmatch.filter(names, pattern):
            yield folder / name, read


# Games


def unnamed_files(spool: Spool) -> set[int]:
    """Return each ``file_idx`` of games in a spool that have no origin."""
    wanted: set[int] = set()
    for games in spool.batches("games", ["file_idx", "origin"]):
        unnamed = games.filter(pc.is_null(games.column("origin")))
        wanted |= set(np.unique(column(unnamed, "file_idx", -1)).tolist())
    return wanted - {-1}


def with_origins(games: pa.RecordBatch, origins: dict[int, str]) -> pa.Array:
    """Return the origins of games, with nulls replaced from ``origins`` by ``file_idx``."""
    origin = games.column("origin")
    if not origins or not origin.null_count:
        return origin
    named = pa.array([origins.get(i) for i in column(games, "file_idx", -1).tolist()], pa.string())
    return pc.coalesce(origin, named)
