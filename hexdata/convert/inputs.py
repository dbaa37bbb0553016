"""Which files a run converts: found below the inputs, named without the machine, digested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hexdata.errors import InputError, SourceChangedError

__all__ = ["SourceFile", "find_sources", "new_sources"]

COMPANIONS: Final = ("processing_stats.json", "processing_state.json", "file_lookup_")
"""Beginnings of the names of files that the legacy tools leave beside their data: not sources."""


@dataclass(frozen=True)
class SourceFile:
    """One input file. ``name`` is the same on every machine: the input folder's name and the path below."""

    name: str
    path: Path
    bytes: int = 0
    sha256: str = ""


def find_sources(inputs: Sequence[Path], store: Path) -> list[SourceFile]:
    """Return the files below ``inputs``, sorted by name; digests are not filled in yet.

    A folder gives every file below it but hidden ones, the legacy tools' own notes (``COMPANIONS``) and
    whatever lies in the store itself. A file given by its own path is taken as it is.

    Raises:
        InputError: an input does not exist, holds nothing, or two inputs give the same name.
    """
    found: dict[str, SourceFile] = {}
    for given in inputs:
        root = given.resolve()
        if not root.exists():
            raise InputError("no such file or folder", path=given, cure="Check the path.")
        paths = [root] if root.is_file() else _files_below(root, store.resolve())
        if not paths:
            raise InputError(
                "no files to convert", path=given, expected="*.pkl.gz or *.trmph files in it or below"
            )
        top = root.parent if root.is_file() else root
        for path in paths:
            name = (Path(top.name) / path.relative_to(top)).as_posix()
            if name in found and found[name].path != path:
                raise InputError(
                    "two inputs have the same name",
                    path=path,
                    found=name,
                    expected=f"another name than that of {found[name].path}",
                    cure="Convert them in two runs, or rename a folder.",
                )
            found[name] = SourceFile(name, path)
    return [found[name] for name in sorted(found)]


def _files_below(root: Path, store: Path) -> list[Path]:
    files = []
    for path in root.rglob("*"):
        below = path.relative_to(root).parts
        if any(part.startswith(".") for part in below) or path.name.startswith(COMPANIONS):
            continue
        if path.is_file() and not path.is_relative_to(store):
            files.append(path)
    return files


def new_sources(
    sources: Sequence[SourceFile], known: dict[str, str]
) -> tuple[list[SourceFile], list[tuple[SourceFile, str]]]:
    """Part the sources into new ones and those whose bytes are known already.

    Args:
        sources: with their digests, sorted by name.
        known: name of each source of the store by its digest.

    Returns:
        The new sources, and the others each with the name under which its bytes are known.

    Raises:
        SourceChangedError: the store knows a source of that name with other bytes.
    """
    names = {name: digest for digest, name in known.items()}
    seen = dict(known)
    new, same = [], []
    for source in sources:
        if source.sha256 in seen:
            same.append((source, seen[source.sha256]))
            continue
        if source.name in names:
            raise SourceChangedError(
                "this source has changed since it was converted",
                path=source.path,
                found=f"sha256 {source.sha256[:16]}…",
                expected=f"sha256 {names[source.name][:16]}… as in the store",
                cure="Restore the file, give the new one another name, or convert into a new store.",
            )
        seen[source.sha256] = source.name
        new.append(source)
    return new, same
