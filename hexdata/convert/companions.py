"""What the legacy tools' own notes say of the files beside them: counts to compare, names of raw files.

They are hearsay: never a reason to fail, and never taken where they contradict each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.convert.spool import Spool, SpoolFacts
from hexdata.games.find import column
from hexdata.remote import AnyPath, RemotePath, is_passing, open_binary, patiently, telling
from hexdata.text import encodable

__all__ = ["Companions", "read_companions", "unnamed_files", "with_origins"]

LARGEST: Final = 64 << 20
"""Bytes of a companion that is looked into; one line a raw file makes a few hundred kilobytes."""

_PROCESSED: Final = "_processed.pkl.gz"
"""What the legacy tool put after the name of a raw file."""


@dataclass(frozen=True)
class _Entry:
    """What one companion says of one file."""

    companion: str
    raw: str
    """The raw file, as it was named then."""
    output: str
    """The name of the pickle made of it; empty if not said."""
    stats: dict[str, Any]

    def is_of(self, name: str, header: Mapping[str, Any]) -> bool:
        """Say whether it speaks of the source of that file name, which has that header."""
        if self.output:
            return self.output == name
        return self.raw == header.get("source_file") or PurePosixPath(self.raw).stem + _PROCESSED == name


@dataclass
class Companions:
    """The companions in one folder. ``notes`` says what is wrong with them."""

    entries: list[_Entry] = field(default_factory=list)
    names: dict[int, list[str]] = field(default_factory=dict)
    """file_idx → the names that companions give it; the same name, however long its path, stands once."""
    notes: list[str] = field(default_factory=list)

    def compare(self, name: str, facts: SpoolFacts) -> list[str]:
        """Hold what is said of a source, by the name of its file, against what was found."""
        notes = []
        for entry in self.entries:
            if not entry.is_of(name, facts.header):
                continue
            stated = {"records": "examples_generated", "games": "valid_games"}
            for what, key in stated.items():
                count, found = entry.stats.get(key), getattr(facts, what)
                if isinstance(count, int) and count != found:
                    notes.append(f"{entry.companion} says {count} {what}, the file has {found}")
        return notes

    def origins(self, wanted: set[int], facts: SpoolFacts) -> tuple[dict[int, str], list[str]]:
        """Name the raw files of a source that its metadata does not name.

        Args:
            wanted: each ``file_idx`` without a name.
            facts: of the source. If its header names one raw file, a companion must agree with that.

        Returns:
            file_idx → name, where all agree; and notes on where they do not.
        """
        named: dict[int, str] = {}
        torn = []
        header = facts.header.get("source_file")
        for file_idx in sorted(wanted & self.names.keys()):
            names = list(self.names[file_idx])
            if isinstance(header, str):
                _add_name(names, header)
            if len(names) == 1:
                named[file_idx] = names[0]
            else:
                torn.append(f"file_idx {file_idx} is {' or '.join(names)}")
        notes = [f"companions disagree on {len(torn)} raw files, left open: {torn[0]} …"] if torn else []
        return named, notes

    def _take_entry(self, companion: str, raw: Any, output: Any, stats: Any) -> None:
        if isinstance(raw, str) and isinstance(stats, dict):
            name = PurePosixPath(output).name if isinstance(output, str) else ""
            self.entries.append(_Entry(companion, encodable(raw), encodable(name), stats))

    def _take_name(self, file_idx: Any, name: Any) -> None:
        if isinstance(name, str) and isinstance(file_idx, int) and not isinstance(file_idx, bool):
            _add_name(self.names.setdefault(file_idx, []), encodable(name))


def _add_name(names: list[str], name: str) -> None:
    """Add a name, unless it is there; of two paths, one the end of the other, the longer one stays."""
    for place, known in enumerate(names):
        short, long = sorted((PurePosixPath(known).parts, PurePosixPath(name).parts), key=len)
        if long[len(long) - len(short) :] == short:
            names[place] = max(known, name, key=lambda path: len(PurePosixPath(path).parts))
            return
    names.append(name)


# Each companion's layout. What does not fit is no error: these files had several forms.


def _take_stats(found: Companions, companion: str, content: Any) -> None:
    """Take in ``processing_stats.json``: a list of files, or totals, which name no file."""
    for item in content if isinstance(content, list) else []:
        if isinstance(item, dict):
            found._take_entry(companion, item.get("file_path"), None, item.get("stats"))
            found._take_name(item.get("file_idx"), item.get("file_path"))


def _take_state(found: Companions, companion: str, content: Any) -> None:
    """Take in ``processing_state.json``: the files done, each with what was made of it."""
    files = content.get("processed_files") if isinstance(content, dict) else None
    for item in files if isinstance(files, list) else []:
        if isinstance(item, dict):
            found._take_entry(companion, item.get("file"), item.get("output"), item.get("stats"))


def _take_lookup(found: Companions, _: str, content: Any) -> None:
    """Take in ``file_lookup_*.json``: file_idx, as text, → raw file; at the top or as ``file_mapping``."""
    if not isinstance(content, dict):
        raise ValueError("not a table of names")
    mapping = content.get("file_mapping", content)
    for key, name in mapping.items() if isinstance(mapping, dict) else ():
        if key.isascii() and key.isdigit() and len(key) < 10:
            found._take_name(int(key), name)


_LAYOUTS: Final[dict[str, Callable[[Companions, str, Any], None]]] = {
    "file_lookup_*.json": _take_lookup,
    "processing_state.json": _take_state,
    "processing_stats.json": _take_stats,
}


def read_companions(folder: AnyPath) -> Companions:
    """Read the companions that lie in a folder; one that cannot be read becomes a note.

    Raises:
        StoreError: an object store did not answer, which says nothing of what is there.
    """
    found = Companions()
    for path, take in _companions_in(folder):
        name = encodable(path.name)
        try:
            with open_binary(path) as file:
                if file.seek(0, os.SEEK_END) > LARGEST:
                    raise ValueError(f"more than {LARGEST:,} bytes")
                file.seek(0)
                take(found, name, json.loads(file.read()))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, OSError) and not isinstance(path, Path) and is_passing(error):
                with telling(path):
                    raise
            found.notes.append(
                f"{name} beside it cannot be used: {getattr(error, 'strerror', None) or error}"
            )
    return found


def _companions_in(folder: AnyPath) -> Iterator[tuple[AnyPath, Callable[[Companions, str, Any], None]]]:
    there: list[RemotePath] = []
    if not isinstance(folder, Path):
        with telling(folder):
            there = patiently(lambda: sorted(folder.iterdir(), key=lambda path: path.name))
    for pattern, take in _LAYOUTS.items():
        if isinstance(folder, Path):
            for path in sorted(folder.glob(pattern)):
                yield path, take
        for found in there:
            if fnmatchcase(found.name, pattern):
                yield found, take


# Games


def unnamed_files(spool: Spool) -> set[int]:
    """Return each ``file_idx`` of the games of a spool whose origin is not known."""
    wanted: set[int] = set()
    for games in spool.batches("games", ["file_idx", "origin"]):
        open_ones = games.filter(pc.is_null(games.column("origin")))
        wanted |= set(np.unique(column(open_ones, "file_idx", -1)).tolist())
    return wanted - {-1}


def with_origins(games: pa.RecordBatch, origins: dict[int, str]) -> pa.Array:
    """Return the origins of games, those that are null filled in by ``file_idx``."""
    origin = games.column("origin")
    if not origins or not origin.null_count:
        return origin
    named = pa.array([origins.get(i) for i in column(games, "file_idx", -1).tolist()], pa.string())
    return pc.coalesce(origin, named)
