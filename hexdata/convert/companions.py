"""The companion files of the legacy tools: JSON files beside the pickles that name their raw files.

They are not trusted. A companion never makes a run fail. Names that contradict each other are not used.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hexdata.convert.inputs import require_answer
from hexdata.convert.spool import Source
from hexdata.games.findings import column
from hexdata.schema import is_legacy_format
from hexdata.storage import AnyPath, storage_of, translate_errors
from hexdata.text import encodable

MAX_BYTES: Final = 64 << 20
"""Largest companion that is read, in bytes. Real ones have one line per raw file, a few hundred kilobytes."""

_PATTERNS: Final = ("file_lookup_*.json", "processing_stats.json")


def add_companions(sources: Sequence[Source]) -> None:
    """Add to sources the names of raw files that the companions beside them state, and notes.

    A name is used if the metadata names no raw file, and all companions and the header of the source agree.
    """
    folders: dict[AnyPath, dict[int, list[str]]] = {}
    for source in sources:
        facts = source.facts
        if not (facts.positions and is_legacy_format(facts.format)):
            continue
        folder = source.path.parent
        # A folder is read once, and its first source gets the notes on its companions.
        if folder not in folders:
            folders[folder], source.notes = read_companions(folder)
        found, wanted = folders[folder], set[int]()
        for games in source.spool.batches("games", ["file_idx", "origin"], *source.games) if found else ():
            # Only games whose metadata names no raw file need a name from here.
            wanted |= set(column(games.filter(games["origin"].is_null()), "file_idx", -1).tolist())
        conflicts = []
        for file_idx in sorted(wanted & found.keys()):
            stated = found[file_idx] + ([] if facts.raw_file is None else [facts.raw_file])
            # Of two paths of which one is the end of the other, only the longer counts.
            names = [n for n in stated if not any(other.endswith(f"/{n}") for other in stated)]
            if len(distinct := dict.fromkeys(names)) == 1:
                source.origins += ((file_idx, names[0]),)
            else:  # at least one companion or the header is of other data
                conflicts.append(f"file_idx {file_idx} is {' or '.join(distinct)}")
        if conflicts:
            text = f"companion files name {len(conflicts)} raw files differently; not used: {conflicts[0]} …"
            source.notes += (text,)


def read_companions(folder: AnyPath) -> tuple[dict[int, list[str]], tuple[str, ...]]:
    """Return the names of raw files that the companions in a folder state, by ``file_idx``, and notes.

    There is a note on each companion that cannot be used.

    Raises:
        InputError: The disk failed to read a companion.
        StoreError: An object store did not answer, so it is unknown which companions exist.
    """
    found: dict[int, list[str]] = {}
    notes: tuple[str, ...] = ()
    with translate_errors():
        listed = storage_of(folder).names()
    for name in (name for pattern in _PATTERNS for name in fnmatch.filter(listed, pattern)):
        path = folder / name
        try:
            with storage_of(path).open() as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES:,} bytes")
            for key, raw in _statements(json.loads(data)):
                number = str(key)
                # Of an int32. Unknown content is ignored, since the layouts changed.
                if isinstance(raw, str) and number.isascii() and number.isdigit() and len(number) < 10:
                    found.setdefault(int(number), []).append(encodable(raw))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, OSError):
                require_answer(path, error)
            problem = getattr(error, "strerror", None) or error
            notes += (f"the companion file {encodable(name)} cannot be used: {problem}",)
    return found, notes


def _statements(content: Any) -> Iterable[tuple[Any, Any]]:
    """Return ``file_idx`` and raw file, as a companion states them.

    ``processing_stats.json`` is a list of files, or totals, which name no file. ``file_lookup_*.json`` maps
    ``file_idx`` as text to the raw file, at the top level or in ``file_mapping``.
    """
    if isinstance(content, list):
        return [(item.get("file_idx"), item.get("file_path")) for item in content if isinstance(item, dict)]
    mapping = content.get("file_mapping", content) if isinstance(content, dict) else None
    return mapping.items() if isinstance(mapping, dict) else ()
