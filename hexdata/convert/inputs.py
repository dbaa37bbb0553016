"""The sources of a run: files found below the inputs, with machine-independent names and digests."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from hexdata.errors import FormatError, InputError, Reason, SourceChangedError
from hexdata.formats import (
    FilePart,
    expected_contents,
    is_known_name,
    known_patterns,
    open_source,
)
from hexdata.formats.gunzip import is_gzip
from hexdata.formats.trmph import is_game_line
from hexdata.storage import (
    AnyPath,
    RemotePath,
    file_system,
    is_address,
    list_objects,
    object_info,
    storage_of,
    translate_errors,
    walk_once,
)
from hexdata.store.disk_space import disk_error_hint, is_disk_failure, system_message
from hexdata.store.files import digest_beginning, digest_file
from hexdata.store.location import classify
from hexdata.text import encodable, lines_by_cause

__all__ = [
    "InputFiles",
    "KnownSource",
    "SkipCause",
    "SourceDigest",
    "SourceFile",
    "digest_source",
    "find_new_lines",
    "find_sources",
    "name_suffixes",
    "new_sources",
]

COMPANIONS: Final = ("processing_stats.json", "processing_state.json", "file_lookup_")
"""Name prefixes of the statistics files that the legacy tools write beside their data; not sources."""


_KINDS: Final = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class KnownSource(NamedTuple):
    """A source of the store, as far as it is compared with the inputs."""

    name: str
    sha256: str
    positions: int
    bytes: int = 0
    records: int = 0
    format: str = "unknown"
    source_id: int = -1
    continues: bool = False
    """It is a part of a file whose beginning is an earlier source."""


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
    base: KnownSource | None = None
    """The source of the store that had this name and other bytes."""
    part: FilePart | None = None
    """The lines of a grown file that the store does not have; None to read the whole file."""

    @property
    def new_bytes(self) -> int:
        """Number of bytes to read."""
        return self.bytes - (self.part.start if self.part else 0)

    @property
    def identity(self) -> str:
        """The key that identifies the content: the digest, or the name if the file cannot be read."""
        return self.sha256 or self.name


class SkipCause(StrEnum):
    """Why a file below the inputs is not read, in ``ConvertResult.skipped_files``."""

    BOARD_SIZE = "board-size"
    """Its board size is not that of ``ConvertOptions.board_size``."""
    KNOWN_BYTES = "known-bytes"
    """The store, or an earlier source of the run, has the same bytes."""
    MAX_POSITIONS = "max-positions"
    """With it, the store would have more positions than ``ConvertOptions.max_positions``; or it follows such
    a file."""
    NO_FILE = "no-file"
    """It is a pipe, a socket or a device, which could block or never end."""
    UNKNOWN_NAME = "unknown-name"
    """Its name matches no pattern of ``formats.known_patterns()``."""


@dataclass
class InputFiles:
    """The files below the inputs."""

    sources: list[SourceFile] = field(default_factory=list)
    """The files to read, sorted by name, without digests."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name → cause of the others, sorted by name: a ``SkipCause``, and a detail after a colon if any."""


def find_sources(inputs: Sequence[AnyPath], store: AnyPath) -> InputFiles:
    """Return the files below ``inputs``.

    A folder yields every file below it whose name matches ``formats.known_patterns()``. Hidden files, the
    statistics files of the legacy tools (``COMPANIONS``) and the files of the store itself are left out;
    other files are skipped. A file given by its own path is included if its name matches or its content has a
    known format. In an object store, the part of a key before a slash counts as a folder, and so does a
    bucket.

    Args:
        inputs: Files and folders, local or in an object store.
        store: Folder of the store, which is not searched.

    Raises:
        InputError: An input does not exist, is neither file nor folder, has no known format, contains no
            files, or has a key that is no valid path; a folder cannot be listed; or two inputs have the same
            name.
        StoreError: An object store cannot be listed.
    """
    if not inputs:
        raise InputError("no inputs", expected="files or folders to convert")
    found: dict[str, SourceFile] = {}
    skipped: dict[AnyPath, tuple[str, str]] = {}
    unknown: list[tuple[str, str, str]] = []
    for input_path in inputs:
        listed = (
            _files_of(input_path, store) if isinstance(input_path, Path) else _objects_of(input_path, store)
        )
        if listed is None:
            raise InputError("no such file or folder", path=input_path, hint="Check the path.")
        if listed.is_file and (problem := _problem_of(listed.sources[0])):
            unknown.append((problem, str(input_path), ""))
        if not listed.sources:
            raise InputError(
                "no files to convert",
                path=input_path,
                found=_found_instead([(name, cause) for _, name, cause in listed.skipped]),
                expected=f"{', '.join(known_patterns())} in the folder or its subfolders",
                hint=_hint_without_files(input_path) if listed.skipped else None,
            )
        skipped |= {path: (name, cause) for path, name, cause in listed.skipped}
        for source in listed.sources:
            other = found.setdefault(source.name, source)
            if other.path != source.path:
                raise InputError(
                    "two inputs have the same name",
                    path=source.path,
                    found=source.name,
                    expected=f"a name other than that of {other.path}",
                    hint="Convert them in two runs, or rename a folder.",
                )
    if unknown:
        one = len(unknown) == 1
        raise InputError(
            "this file has no known format" if one else f"{len(unknown):,} of the files have no known format",
            path=unknown[0][1] if one else None,
            found=unknown[0][0] if one else None,
            expected=expected_contents(),
            hint="Convert the other files without it." if one else "Convert the other files without them.",
            lines=[] if one else lines_by_cause(unknown),
        )
    sources = [found[name] for name in sorted(found)]
    read = {source.path for source in sources}
    result = InputFiles(sources)
    others = ((name, str(path), cause) for path, (name, cause) in skipped.items() if path not in read)
    for name, location, cause in sorted(others):
        result.skipped[location if name in result.skipped else name] = cause
    return result


def _hint_without_files(folder: AnyPath) -> str:
    if isinstance(folder, Path) and classify(folder).kind == "store":
        return "This folder is a store: pass the files or folders from which it was converted."
    return "Pass a file with another name by its own path."


def name_suffixes(names: Iterable[str], most: int = 5) -> str:
    """Return the number of files with each suffix, such as "312 *.pt, 2 *.csv, README", most frequent first.

    Args:
        names: Names of the files.
        most: Maximum number of suffixes. Default 5; the others are counted together.
    """
    counts: Counter[str] = Counter()
    for name in names:
        suffix = PurePosixPath(name).suffix
        counts[f"*{suffix}" if suffix else PurePosixPath(name).name] += 1
    listed = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    others = sum(count for _, count in listed[most:])
    texts = [f"{count:,} {kind}" for kind, count in listed[:most]]
    return ", ".join([*texts, f"{others:,} others"] if others else texts)


def _found_instead(skipped: list[tuple[str, str]]) -> str | None:
    """Return which files are in a folder without sources, or None if it is empty.

    Args:
        skipped: Name and cause of each file.
    """
    unknown = [name for name, cause in skipped if cause == SkipCause.UNKNOWN_NAME]
    texts = [name_suffixes(unknown)] if unknown else []
    if special := len(skipped) - len(unknown):
        texts.append(f"{special:,} that are pipes, sockets or devices")
    return ", ".join(texts) or None


class _Listed(NamedTuple):
    """The files of one input."""

    sources: list[SourceFile]
    skipped: list[tuple[AnyPath, str, str]]
    """Path, name and cause."""
    is_file: bool


def _problem_of(source: SourceFile) -> str:
    """Return why no reader can open a file that was given by its own path; empty if one can."""
    if is_known_name(source.path.name):
        return ""
    try:
        with open_source(source.path):
            return ""
    except FormatError as error:
        if error.code not in (Reason.UNKNOWN_LAYOUT, Reason.EMPTY_FILE):
            return ""  # damaged: the run reports it
        return str(error.found or error.reason)
    except OSError as error:
        require_answer(source.path, error)
        return ""  # unreadable: the run reports it


def _files_of(input_path: Path, store: AnyPath) -> _Listed | None:
    """Return the files of a local input, or None if it does not exist."""
    root = input_path.resolve()
    if not root.exists():
        return None
    if root.is_file():
        return _Listed([SourceFile(encodable(f"{root.parent.name}/{root.name}"), root)], [], True)
    if not root.is_dir():
        raise InputError(
            "neither a file nor a folder",
            path=input_path,
            found=_KINDS.get(stat.S_IFMT(root.stat().st_mode), "something else"),
            expected="a file, or a folder of files",
            hint="Save its content to a file first, because hexdata reads each input twice.",
        )
    result = _Listed([], [], False)
    for path, cause in _files_below(root, store):
        name = encodable((Path(root.name) / path.relative_to(root)).as_posix())
        if cause:
            result.skipped.append((path, name, cause))
        else:
            result.sources.append(SourceFile(name, path))
    return result


def _files_below(root: Path, store: AnyPath) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder, except those in the store, each with the cause to skip it, if any."""
    store = store.resolve()
    for folder, subfolders, names in walk_once(root, onerror=_refuse_folder):
        if folder.resolve() == store:
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            if not _is_left_out(name):
                path = folder / name
                yield path, _cause_of(path)


def _refuse_folder(error: OSError) -> None:
    raise InputError(
        "this folder cannot be listed, so it is unknown which files it contains",
        path=error.filename,
        found=error.strerror,
        hint="Change its permissions, or pass only folders that can be listed.",
    )


def _is_left_out(name: str) -> bool:
    """Return whether a file in a folder is neither a source nor reported: it is hidden or a companion."""
    return name.startswith((".", *COMPANIONS))


def _cause_of(path: Path) -> str:
    """Return why a file in a folder is skipped; empty if it is a source."""
    if not is_known_name(path.name):
        return SkipCause.UNKNOWN_NAME
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError:
        return ""  # a broken link, for example: the run reports a file that cannot be read
    return f"{SkipCause.NO_FILE}: {_KINDS[kind]}" if kind in _KINDS else ""


def _objects_of(input_path: RemotePath, store: AnyPath) -> _Listed | None:
    """Return the objects of an input in an object store, or None if it does not exist."""
    system, root = file_system(input_path), input_path.path.rstrip("/")
    with translate_errors(input_path):
        try:
            info = object_info(system, root)
        except FileNotFoundError:
            return None
        is_object = info["type"] == "file"
        keys = {root: info} if is_object else list_objects(system, root, recursive=True)
    top = root.rpartition("/")[0] if is_object else root
    store_prefix = ""
    if not isinstance(store, Path) and isinstance(system, type(file_system(store))):
        store_prefix = store.path.rstrip("/") + "/"
    result = _Listed([], [], is_object)
    for key, info in keys.items():
        below = key[len(top) + 1 :]
        if (store_prefix and key.startswith(store_prefix)) or not _is_wanted(
            input_path, below, info["size"], alone=is_object
        ):
            continue
        name = encodable(f"{top.rpartition('/')[2]}/{below}")
        path = input_path if is_object else input_path / below
        if is_object or is_known_name(path.name):
            result.sources.append(SourceFile(name, path, info["size"]))
        else:
            result.skipped.append((path, name, SkipCause.UNKNOWN_NAME))
    return result


def _is_wanted(input_path: RemotePath, below: str, size: int, *, alone: bool) -> bool:
    """Return whether an object may be a source or is reported as skipped.

    Args:
        input_path: The input.
        below: Key of the object relative to the input's folder.
        size: Size of the object in bytes.
        alone: The input is this object itself, so any name is accepted.

    Raises:
        InputError: A part of the key is empty, "." or "..", so no file path corresponds to it.
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
    return alone or not (_is_left_out(name) or any(folder.startswith(".") for folder in folders))


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
        InputError: The disk failed, so nothing is known about the file.
        StoreError: An object store did not answer, so nothing is known about the object.
    """
    version = ""
    try:
        version = storage_of(path).version()
        return SourceDigest(*digest_file(path), "", version)
    except OSError as error:
        require_answer(path, error)
        return SourceDigest(_size_of(path), "", error.strerror or str(error), version)


def require_answer(path: AnyPath, error: OSError) -> None:
    """Raise unless an error on reading a source concerns the file itself, such as its permissions.

    Raises:
        InputError: The disk failed, so nothing is known about the file.
        StoreError: An object store did not answer.
    """
    if storage_of(path).is_temporary(error):
        with translate_errors(path):
            raise error
    if not is_address(path) and is_disk_failure(error):
        raise InputError(
            "the system failed to read this source; nothing was published",
            path=path,
            found=system_message(error),
            hint=f"{disk_error_hint(error)} It does not read the other sources again. If this file is lost, "
            "restore it or move it out of the inputs.",
        ) from error


def _size_of(path: AnyPath) -> int:
    try:
        return storage_of(path).size() or 0
    except OSError:
        return 0


def new_sources(
    sources: Sequence[SourceFile], known: Iterable[KnownSource]
) -> tuple[list[SourceFile], list[tuple[SourceFile, str]]]:
    """Split the sources into new ones and ones whose bytes are already known.

    Args:
        sources: Sources with digests, sorted by name.
        known: The sources of the store, in the order of their ids.

    Returns:
        The new sources, with ``base`` if the store has positions of a source with the same name and other
        bytes; and each other source with the name of the source of the store, or of this run, that has the
        same bytes. A source that yielded no positions, because it was damaged, is no base.
    """
    known = list(known)
    known_names = {source.sha256 or source.name: source.name for source in known}
    bases = {source.name: source for source in known if source.positions or source.continues}
    new, same = [], []
    for source in sources:
        if source.identity in known_names:
            same.append((source, known_names[source.identity]))
            continue
        known_names[source.identity] = source.name
        new.append(replace(source, base=bases.get(source.name)))
    return new, same


def find_new_lines(
    source: SourceFile, base: KnownSource, last_rejected: Callable[[], bool], board_size: int | None
) -> FilePart:
    """Return the lines that were appended to a TRMPH text since it was converted.

    If the last line was incomplete, it is read again as a whole.

    Args:
        source: The file with its digest.
        base: The source that it was.
        last_rejected: Returns whether the last record of ``base`` was rejected.
        board_size: Board size of the store.

    Raises:
        SourceChangedError: The file is no TRMPH text without gzip; or it does not begin with the bytes that
            it had; or its last line was incomplete and was read as a game.
    """
    path = source.path
    with translate_errors(path):
        if not _begins_with(source, base):
            raise SourceChangedError(
                "this source has changed since it was converted",
                path=path,
                found=source.problem or f"sha256 {source.sha256[:16]}…",
                expected=f"sha256 {base.sha256[:16]}… as in the store, or the same bytes with lines added "
                "(TRMPH without gzip)",
                hint="Restore the file, give the new one another name, or convert into a new store.",
            )
        before = storage_of(path).read_range(max(base.bytes - _LAST_LINE, 0), base.bytes)
        after = storage_of(path).read_range(base.bytes, base.bytes + 2)
    last = before.rpartition(b"\n")[2]
    if after.startswith((b"\n", b"\r\n")):
        last = b""
    if is_game_line(last) and not last_rejected():
        raise SourceChangedError(
            "the last game of this source was incomplete when it was converted",
            path=path,
            found=f"a line that continues at byte {base.bytes:,}",
            expected="a line end there",
            hint="Convert the file into a new store. Write whole lines, so that this cannot happen again.",
        )
    return FilePart(base.bytes - len(last), source.bytes, board_size)


_LAST_LINE: Final = 1 << 17
"""Bytes before the end of a text in which its last line begins; a line has at most 65,536."""


def _begins_with(source: SourceFile, base: KnownSource) -> bool:
    """Return whether a file is a text without gzip that begins with the bytes of ``base``."""
    return (
        base.format == "trmph"
        and not source.problem
        and base.bytes < source.bytes
        and not is_gzip(storage_of(source.path).read_range(0, 2))
        and digest_beginning(source.path, base.bytes) == base.sha256
    )
