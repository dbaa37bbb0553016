"""The sources of a run: files found below the inputs, with machine-independent names and digests."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from hexdata.errors import InputError, SourceChangedError
from hexdata.storage import (
    AnyPath,
    RemotePath,
    file_system,
    list_objects,
    storage_of,
    translate_errors,
    walk_once,
    with_retries,
)
from hexdata.store.files import digest_file
from hexdata.text import encodable

__all__ = ["SourceDigest", "SourceFile", "digest_source", "find_sources", "new_sources"]

COMPANIONS: Final = ("processing_stats.json", "processing_state.json", "file_lookup_")
"""Name prefixes of the statistics files that the legacy tools write beside their data; not sources."""


_KINDS: Final = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True)
class SourceFile:
    """One input file."""

    name: str
    """The name of the input folder and the path below it, so the same on every machine."""
    path: AnyPath
    bytes: int = 0
    """Size; 0 until the file is digested, except for objects, whose listing states it."""
    sha256: str = ""
    """Empty if the file cannot be read, and until it is digested."""
    problem: str = ""
    """The error if the file cannot be read, else empty."""
    version: str = ""
    """``Storage.version`` of the file, taken before it was digested."""

    @property
    def identity(self) -> str:
        """The key that identifies the content: the digest, or the name if the file cannot be read."""
        return self.sha256 or self.name


def find_sources(inputs: Sequence[AnyPath], store: AnyPath) -> list[SourceFile]:
    """Return the files below ``inputs``, sorted by name, without digests.

    A folder yields every file below it, except hidden files, the statistics files of the legacy tools
    (``COMPANIONS``) and the files of the store itself. A file given by its own path is always included.
    In an object store, the part of a key before a slash counts as a folder, and so does a bucket.

    Args:
        inputs: files and folders, local or in an object store.
        store: folder of the store, which is not searched.

    Raises:
        InputError: an input does not exist, is neither file nor folder, contains no files, or has a key
            that is no valid path; or two inputs have the same name.
        OSError: a folder cannot be listed.
        StoreError: an object store cannot be listed.
    """
    if not inputs:
        raise InputError("no inputs", expected="files or folders to convert")
    found: dict[str, SourceFile] = {}
    for input_path in inputs:
        listed = (
            _files_of(input_path, store) if isinstance(input_path, Path) else _objects_of(input_path, store)
        )
        if listed is None:
            raise InputError("no such file or folder", path=input_path, hint="Check the path.")
        if not listed:
            raise InputError(
                "no files to convert",
                path=input_path,
                expected="*.pkl.gz or *.trmph files in the folder or its subfolders",
            )
        for source in listed:
            other = found.setdefault(source.name, source)
            if other.path != source.path:
                raise InputError(
                    "two inputs have the same name",
                    path=source.path,
                    found=source.name,
                    expected=f"a name other than that of {other.path}",
                    hint="Convert them in two runs, or rename a folder.",
                )
    return [found[name] for name in sorted(found)]


def _files_of(input_path: Path, store: AnyPath) -> list[SourceFile] | None:
    """Return the files of a local input, or None if it does not exist."""
    root = input_path.resolve()
    if not root.exists():
        return None
    if root.is_file():
        top, paths = root.parent, [root]
    elif not root.is_dir():
        raise InputError(
            "neither a file nor a folder",
            path=input_path,
            found=_KINDS.get(stat.S_IFMT(root.stat().st_mode), "something else"),
            expected="a file, or a folder of files",
            hint="Save its content to a file first, because hexdata reads each input twice.",
        )
    else:
        top, paths = root, list(_files_below(root, store))
    return [
        SourceFile(encodable((Path(top.name) / path.relative_to(top)).as_posix()), path) for path in paths
    ]


def _files_below(root: Path, store: AnyPath) -> Iterator[Path]:
    """Yield the files below a folder that may be sources, except those in the store."""
    store = store.resolve()
    for folder, subfolders, names in walk_once(root, onerror=_raise):
        if folder.resolve() == store:
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            path = folder / name
            # A broken link is included, so that the run reports a file that cannot be read.
            if _may_be_source(name) and (path.is_file() or not path.exists()):
                yield path


def _raise(error: OSError) -> None:
    raise error


def _may_be_source(name: str) -> bool:
    return not name.startswith((".", *COMPANIONS))


def _objects_of(input_path: RemotePath, store: AnyPath) -> list[SourceFile] | None:
    """Return the objects of an input in an object store, or None if it does not exist."""
    system, root = file_system(input_path), input_path.path.rstrip("/")
    with translate_errors(input_path):
        try:
            info = with_retries(system.info, root)
        except FileNotFoundError:
            return None
        is_object = info["type"] == "file"
        keys = {root: info} if is_object else list_objects(system, root, recursive=True)
    top = root.rpartition("/")[0] if is_object else root
    store_prefix = ""
    if not isinstance(store, Path) and isinstance(system, type(file_system(store))):
        store_prefix = store.path.rstrip("/") + "/"
    sources: list[SourceFile] = []
    for key, info in keys.items():
        below = key[len(top) + 1 :]
        if (store_prefix and key.startswith(store_prefix)) or not _is_wanted(
            input_path, below, info["size"], alone=is_object
        ):
            continue
        name = encodable(f"{top.rpartition('/')[2]}/{below}")
        sources.append(SourceFile(name, input_path if is_object else input_path / below, info["size"]))
    return sources


def _is_wanted(input_path: RemotePath, below: str, size: int, *, alone: bool) -> bool:
    """Return whether an object may be a source.

    Args:
        input_path: the input.
        below: key of the object relative to the input's folder.
        size: size of the object in bytes.
        alone: the input is this object itself, so any name is accepted.

    Raises:
        InputError: a part of the key is empty, "." or "..", so no file path corresponds to it.
    """
    *folders, name = below.split("/")
    if not name and not size:
        return False  # some tools write such an object to mark an empty folder
    if not {"", ".", ".."}.isdisjoint([*folders, name]):
        raise InputError(
            "this object key is not a valid file path",
            path=f"{input_path}/{below}" if below else input_path,
            expected="a key without the parts '', '.' and '..'",
            hint="Rename the object, or pass folders that do not contain it.",
        )
    return alone or (_may_be_source(name) and not any(folder.startswith(".") for folder in folders))


class SourceDigest(NamedTuple):
    """Size, digest and version of a file, or the error on reading it."""

    bytes: int
    """Size; 0 if it is not known."""
    sha256: str
    """Empty if the file cannot be read."""
    problem: str
    """The error if the file cannot be read, else empty."""
    version: str
    """``Storage.version`` of the file, taken before it was read."""


def digest_source(path: AnyPath) -> SourceDigest:
    """Return the digest of a file, or a ``problem`` and no digest if the file cannot be read.

    Raises:
        StoreError: an object store did not answer, so nothing is known about the object.
    """
    version = ""
    try:
        version = storage_of(path).version()
        return SourceDigest(*digest_file(path), "", version)
    except OSError as error:
        if storage_of(path).is_temporary(error):
            with translate_errors(path):
                raise
        return SourceDigest(_size_of(path), "", error.strerror or str(error), version)


def _size_of(path: AnyPath) -> int:
    try:
        return storage_of(path).size() or 0
    except OSError:
        return 0


def new_sources(
    sources: Sequence[SourceFile], known: Iterable[tuple[str, str, int]]
) -> tuple[list[SourceFile], list[tuple[SourceFile, str]]]:
    """Split the sources into new ones and ones whose bytes are already known.

    Args:
        sources: sources with digests, sorted by name.
        known: name, digest and number of positions of each source of the store.

    Returns:
        The new sources; and each other source with the name of the source of the store, or of this run,
        that has the same bytes.

    Raises:
        SourceChangedError: the store has positions of a source with the same name and other bytes. A
            source that yielded no positions, because it was damaged, may be replaced.
    """
    known = list(known)
    known_names = {sha256 or name: name for name, sha256, _ in known}
    digests = {name: sha256 for name, sha256, positions in known if positions}
    new, same = [], []
    for source in sources:
        if source.identity in known_names:
            same.append((source, known_names[source.identity]))
            continue
        if source.name in digests:
            raise SourceChangedError(
                "this source has changed since it was converted",
                path=source.path,
                found=source.problem or f"sha256 {source.sha256[:16]}…",
                expected=f"sha256 {digests[source.name][:16]}… as in the store",
                hint="Restore the file, give the new one another name, or convert into a new store.",
            )
        known_names[source.identity] = source.name
        new.append(source)
    return new, same
