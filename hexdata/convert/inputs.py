"""Which files a run converts: found below the inputs, named without the machine, digested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hexdata.errors import InputError, SourceChangedError
from hexdata.store.files import digest_file, walk_once
from hexdata.text import encodable

__all__ = ["SourceFile", "digest_source", "find_sources", "new_sources"]

COMPANIONS: Final = ("processing_stats.json", "processing_state.json", "file_lookup_")
"""Beginnings of the names of files that the legacy tools leave beside their data: not sources."""


@dataclass(frozen=True)
class SourceFile:
    """One input file."""

    name: str
    """The same on every machine: the input folder's name and the path below it."""
    path: Path
    bytes: int = 0
    sha256: str = ""
    """Empty if the file cannot be read."""
    problem: str = ""
    """Why it cannot be read."""

    @property
    def identity(self) -> str:
        """What tells the file from others: its digest, else its name."""
        return self.sha256 or self.name


def find_sources(inputs: Sequence[Path], store: Path) -> list[SourceFile]:
    """Return the files below ``inputs``, sorted by name; digests are not filled in yet.

    A folder gives every file below it but hidden ones, the legacy tools' own notes (``COMPANIONS``) and
    whatever lies in the store itself. A file given by its own path is taken as it is.

    Raises:
        InputError: an input does not exist, holds nothing, or two inputs give the same name.
        OSError: a folder cannot be listed.
    """
    if not inputs:
        raise InputError("no inputs", expected="files or folders to convert")
    found: dict[str, SourceFile] = {}
    for given in inputs:
        root = given.resolve()
        if not root.exists():
            raise InputError("no such file or folder", path=given, cure="Check the path.")
        paths = [root] if root.is_file() else list(_files_below(root, store.resolve()))
        if not paths:
            raise InputError(
                "no files to convert", path=given, expected="*.pkl.gz or *.trmph files in it or below"
            )
        top = root.parent if root.is_file() else root
        for path in paths:
            name = encodable((Path(top.name) / path.relative_to(top)).as_posix())
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


def _files_below(root: Path, store: Path) -> Iterator[Path]:
    """Find the files below a folder that may be sources; the store is not entered."""
    for folder, subfolders, names in walk_once(root, onerror=_raise):
        if folder.resolve() == store:
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            path = folder / name
            # A link that leads nowhere is taken too: it is a file that cannot be read.
            is_source = not name.startswith((".", *COMPANIONS)) and (path.is_file() or not path.exists())
            if is_source:
                yield path


def _raise(error: OSError) -> None:
    raise error


def digest_source(path: Path) -> tuple[int, str, str]:
    """Return (bytes, SHA-256, problem) of a file; one that cannot be read has a problem and no digest."""
    try:
        return *digest_file(path), ""
    except OSError as error:
        return _size_of(path), "", error.strerror or str(error)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def new_sources(
    sources: Sequence[SourceFile], known: Iterable[tuple[str, str, int]]
) -> tuple[list[SourceFile], list[tuple[SourceFile, str]]]:
    """Part the sources into new ones and those that the store or an earlier source has already.

    Args:
        sources: digested, sorted by name.
        known: name, digest and positions of each source of the store.

    Returns:
        The new sources, and the others each with the name under which its bytes are known.

    Raises:
        SourceChangedError: the store holds positions of a source of that name with other bytes. One
            that gave no position, for it was damaged, may be replaced.
    """
    known = list(known)
    seen = {sha256 or name: name for name, sha256, _ in known}
    digests = {name: sha256 for name, sha256, positions in known if positions}
    new, same = [], []
    for source in sources:
        if source.identity in seen:
            same.append((source, seen[source.identity]))
            continue
        if source.name in digests:
            raise SourceChangedError(
                "this source has changed since it was converted",
                path=source.path,
                found=source.problem or f"sha256 {source.sha256[:16]}…",
                expected=f"sha256 {digests[source.name][:16]}… as in the store",
                cure="Restore the file, give the new one another name, or convert into a new store.",
            )
        seen[source.identity] = source.name
        new.append(source)
    return new, same
