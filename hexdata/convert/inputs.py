"""The sources of a run: files found below the inputs, and what of them the store does not have yet."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Final

import pyarrow.compute as pc

from hexdata.convert.spool import Source, SpoolFacts
from hexdata.errors import FormatError, InputError, Reason, SourceChangedError
from hexdata.formats import (
    SALVAGEABLE,
    FilePart,
    expected_contents,
    is_known_name,
    known_patterns,
    open_source,
)
from hexdata.formats.gunzip import has_lines, has_returns
from hexdata.formats.trmph import is_game_line, is_sidecar, sidecar_names
from hexdata.json_models import read_metadata
from hexdata.retry import is_transient
from hexdata.storage import AnyPath, is_address, prefix_of, storage_of, translate_errors
from hexdata.storage.errors import ObjectStoreError, disk_error_hint, system_message
from hexdata.storage.local import Version, walk_once
from hexdata.store import Store
from hexdata.store.commands import manifest_kind
from hexdata.store.files import Sidecar, digest_file, sidecar_of
from hexdata.store.parquet import read_parquet
from hexdata.text import count_of, encodable, lines_by_cause, listed

COMPANIONS: Final = ("processing_stats.json", "processing_state.json", "file_lookup_")
"""Name prefixes of the statistics files that the legacy tools write beside their data; not sources."""
NOT_FOUND: Final = "no such file or folder"
_OF_MOVES: Final = ("trmph", "unknown")
"""Formats of sources that may have a sidecar or be continued; a file with a sidecar may be refused."""
_SMALL_FILE: Final = 1 << 14
"""Bytes up to which a file is read at once."""
_LAST_LINE: Final = 1 << 17
"""Bytes before the end of a text in which its last line begins; a line has at most 65,536."""


class SkipCause(StrEnum):
    """Why a file below the inputs is not read, in ``ConvertResult.skipped_files``."""

    BOARD_SIZE = "board-size"
    """It has no board of the size ``ConvertOptions.board_size``."""
    KNOWN_BYTES = "known-bytes"
    """The store, or an earlier source of the run, has the same bytes."""
    NO_FILE = "no-file"
    """It is a pipe, a socket or a device, which could block or never end."""
    SIDECAR = "sidecar"
    """It is a sidecar without its TRMPH file."""
    UNKNOWN_NAME = "unknown-name"
    """Its name matches no pattern of ``formats.known_patterns()``."""


# The files below the inputs


def find_sources(
    inputs: Sequence[AnyPath],
    store: AnyPath,
    format: str | None = None,  # noqa: A002 - the name of the option
) -> tuple[list[Source], dict[str, str]]:
    """Return the files below ``inputs``.

    A folder yields every file below it whose name matches ``formats.known_patterns()``. Hidden files, the
    statistics files of the legacy tools (``COMPANIONS``) and the files of the store itself are left out;
    other files are skipped. A file given by its own path is included if its name matches or its content has a
    known format. In an object store, the part of a key before a slash counts as a folder, and so does a
    bucket.

    Args:
        inputs: Files and folders, local or in an object store.
        store: Folder of the store, which is not searched.
        format: Name of the format that the user states. Default None: the files show it.

    Returns:
        The files to read, sorted by name, without digests; and name → ``SkipCause`` of the others.

    Raises:
        InputError: An input does not exist, is neither file nor folder, has no known format, contains no
            files, or has a key that is no valid path; a folder cannot be listed; or two inputs have the same
            name.
        StoreError: An object store cannot be listed.
    """
    if not inputs:
        raise InputError("no inputs", expected="files or folders to convert")
    found: dict[str, Source] = {}
    skipped: dict[AnyPath, tuple[str, str]] = {}
    unknown: list[tuple[str, str, str]] = []
    for given in inputs:
        below = _local_files(given, store) if isinstance(given, Path) else _objects(given, store)
        top = given.resolve() if isinstance(given, Path) else PurePosixPath(given.path.rstrip("/"))
        if "" in below and not format and (problem := _problem_of(given)):
            unknown.append((problem, str(given), ""))
        others = []
        for relative, (path, listed_size) in below.items():
            name = encodable(f"{top.name}/{relative}" if relative else f"{top.parent.name}/{top.name}")
            cause, size = "", listed_size
            if relative and not is_known_name(path.name):
                cause = SkipCause.SIDECAR if is_sidecar(path.name) else SkipCause.UNKNOWN_NAME
            elif size is None and (size := _size_of(path)) is None:
                cause = SkipCause.NO_FILE
            if cause:
                skipped[path] = name, cause
                others.append(name)
            elif name not in found:
                found[name] = Source(name, path, size or 0)
            elif found[name].path != path:
                reason = f"has the same name in the store as {found[name].path}; rename a folder"
                raise InputError(reason, path=path)
        if len(others) == len(below):
            plain = [each for each in known_patterns() if not each.endswith(".gz")]
            expected = f"{', '.join(plain)} in the folder, most of them also with .gz"
            names, hint = None, None
            if isinstance(given, Path) and manifest_kind(given) == "store":
                names = "a store of hexdata, which is converted already"
                expected = "a folder of games or positions"
            elif others:
                names, hint = listed(sorted(others)), "Give files with other names by their own paths."
            raise InputError("no files to convert", path=given, found=names, expected=expected, hint=hint)
    if unknown:
        reason = f"{count_of(len(unknown), 'file')} without a known format"
        raise InputError(reason, expected=expected_contents(), lines=lines_by_cause(unknown))
    sources = [found[name] for name in sorted(found)]
    _find_sidecars(sources)
    # A sidecar has an unknown name, but is read with the file beside it; a file may be given by its own path.
    used = {path for source in sources for path in (source.path, source.beside)} if skipped else set()
    causes: dict[str, str] = {}
    for path, (name, cause) in sorted(skipped.items(), key=lambda item: (item[1][0], str(item[0]))):
        if path not in used:
            # Inputs may have files of the same name, which matters only for those that are read.
            causes[str(path) if name in causes else name] = cause
    return sources, causes


def _find_sidecars(sources: list[Source]) -> None:
    """Set the sidecars of sources, for which each folder is listed once.

    A TRMPH file without one is refused if another file of its folder has one: its masks would be missing.
    """
    folders: dict[AnyPath, set[str]] = {}
    for source in sources:
        folder = source.path.parent
        if (sidecars := folders.get(folder)) is None:
            with translate_errors(folder):
                folders[folder] = sidecars = set(filter(is_sidecar, storage_of(folder).names()))
        if sidecars and (names := sidecar_names(source.path.name)):
            beside = next((name for name in names if name in sidecars), None)
            if beside is not None:
                source.beside = folder / beside
            elif source.path.name.lower().endswith((".trmph", ".trmph.gz")):
                detail = f"{names[0]} is missing, and the folder contains sidecars"
                source.facts = SpoolFacts.failed(Reason.SIDECAR_MISSING, detail)


def require_same_sidecars(sources: Sequence[Source]) -> None:
    """Check that the sources have the sidecars that were found beside them before they were read.

    Raises:
        SourceChangedError: One has another sidecar, or has one only now, so that its masks were not read.
    """
    again = [Source(source.name, source.path, source.bytes) for source in sources]
    _find_sidecars(again)
    for source, now in zip(sources, again, strict=True):
        if now.beside != source.beside or (now.facts.failure and not source.facts.failure):
            hint = "Run the command again when no process writes to the folder."
            raise SourceChangedError("the sidecars in this folder changed", path=source.path, hint=hint)


def _problem_of(path: AnyPath) -> str:
    """Return why no reader can open a file that was given by its own path; empty if one can."""
    if is_known_name(path.name):
        return ""
    if is_sidecar(path.name):
        return "a sidecar of a TRMPH file, which is read together with that file"
    try:
        with open_source(path):
            return ""
    except FormatError as error:  # of a damaged file, the run reports the error
        return str(error.found or error.reason) if error.code == Reason.UNKNOWN_LAYOUT else ""
    except OSError as error:
        require_answer(path, error)
        return ""  # unreadable: the run reports it


def _size_of(path: AnyPath) -> int | None:
    """Return the size of a local file; None for a pipe, a socket or a device, and 0 if it is unknown."""
    # The run reports a link that leads nowhere as a file that cannot be read.
    with suppress(OSError):
        size = storage_of(path).size()
        return None if size is None and storage_of(path).exists() else size or 0
    return 0


def _is_left_out(relative: str) -> bool:
    """Return whether a file below an input is hidden, or is read together with a source."""
    folders = relative.split("/")
    is_companion = folders[-1].startswith(COMPANIONS) and not is_known_name(folders[-1])
    return is_companion or any(part.startswith(".") for part in folders)


def _local_files(given: Path, store: AnyPath) -> dict[str, tuple[AnyPath, int | None]]:
    """Return the files below a local input by relative path, also behind links; under "" if it is a file."""
    root = Path(os.path.realpath(given))  # ``resolve`` raises a RuntimeError for a link to itself
    with translate_errors(root):
        is_file, exists = storage_of(root).size() is not None, storage_of(root).exists()
    if is_file:
        return {"": (root, None)}
    if not root.is_dir():
        raise InputError("neither a file nor a folder" if exists else NOT_FOUND, path=given)

    def refuse(error: OSError) -> None:
        raise InputError("this folder cannot be listed", path=error.filename, found=error.strerror)

    found: dict[str, tuple[AnyPath, int | None]] = {}
    for folder, subfolders, names in walk_once(root, onerror=refuse):
        if folder.resolve() == store.resolve():
            subfolders.clear()
            continue
        # In place, as the walk goes on with the folders that are left, in this order.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        below = folder.relative_to(root).as_posix()
        relatives = names if below == "." else [f"{below}/{name}" for name in names]
        found |= {each: (root / each, None) for each in relatives if not _is_left_out(each)}
    return found


def _objects(given: AnyPath, store: AnyPath) -> dict[str, tuple[AnyPath, int | None]]:
    """Return the objects below an input in an object store by relative key; under "" if it is an object.

    Raises:
        InputError: There are none; or a part of a key is empty, "." or "..", so no path corresponds to it.
    """
    with translate_errors():
        keys = storage_of(given).files()
        if not keys and not storage_of(given).exists():
            raise InputError(NOT_FOUND, path=given)
    found: dict[str, tuple[AnyPath, int | None]] = {}
    for key, size in keys.items():
        # The store may be below the input; its own objects are no sources.
        if f"{prefix_of(given)}{key}".startswith(prefix_of(store)):
            continue
        if key and not {"", ".", ".."}.isdisjoint(key.split("/")):
            raise InputError("this object key is no file path", path=f"{given}/{key}")
        if not _is_left_out(key):
            found[key] = (given / key if key else given, size)
    return found


# Their bytes


def source_version(path: AnyPath, beside: AnyPath | None) -> tuple[Version | None, ...]:
    """Return the versions of a file and of its sidecar, if it has one; empty if the file is missing."""
    version = storage_of(path).version()
    return (version, *([storage_of(beside).version()] if beside else [])) if version else ()


def has_same_bytes(source: Source, version: tuple[Version | None, ...]) -> bool:
    """Return whether a source has the bytes that were digested, although it has another ``version``.

    A new hard link or new permissions change the version, too.
    """
    before, now = ([each and each.content for each in found] for found in (source.version, version))
    if now != before:
        return False
    is_same = digest_file(source.path)[1] == source.sha256
    return is_same and Sidecar.of(source.beside) == source.sidecar


def digest_source(source: Source) -> Source:
    """Set the size, version, digest and sidecar of a source, or the failure to read them; return the source.

    The content of a small text is kept: to open the file once more would take as long as to read its games.

    Raises:
        InputError: The disk failed, so nothing is known about the file.
        StoreError: An object store did not answer, so nothing is known about the object.
    """
    try:
        # Before the digest, so that a file that changes in between has another version when it is compared.
        source.version = source_version(source.path, source.beside)
        sidecar = None if source.beside is None else Sidecar.of(source.beside)
        data = None
        if source.bytes <= _SMALL_FILE:
            data = storage_of(source.path).read_range(0, _SMALL_FILE + 1)
        if data is None or len(data) > _SMALL_FILE:
            source.bytes, source.sha256 = digest_file(source.path)
        else:
            source.bytes, source.sha256 = len(data), hashlib.sha256(data).hexdigest()
            source.content = data if has_lines(data) else None
        source.sidecar = sidecar
    except OSError as error:
        require_answer(source.path, error)
        source.facts = SpoolFacts.failed(Reason.UNREADABLE, error.strerror or str(error))
        # Without a digest, the size still counts in the share of rejected bytes.
        with suppress(OSError):
            source.bytes = storage_of(source.path).size() or source.bytes
    return source


def require_answer(path: AnyPath, error: OSError) -> None:
    """Raise unless an error on reading a source concerns the file itself, such as its permissions.

    Raises:
        InputError: The disk failed, so nothing is known about the file.
        StoreError: An object store did not answer.
    """
    if isinstance(error, ObjectStoreError) and error.errno != errno.EACCES:
        with translate_errors():
            raise error
    if not is_address(path) and is_transient(error):
        raise InputError(
            "the system failed to read this source; nothing was published",
            path=path,
            found=system_message(error),
            hint=f"{disk_error_hint(error)} If this file is lost, restore it or move it out of the inputs.",
        ) from error


# What the store does not have


def choose_new(
    sources: Sequence[Source], store: Store, *, salvage: bool
) -> tuple[list[Source], list[tuple[Source, str]]]:
    """Split the sources into new ones and ones whose bytes are already known.

    Args:
        sources: Sources with digests, sorted by name.
        store: The store.
        salvage: Whether files that the store rejects for damage are new.

    Returns:
        The new sources, of which those that have grown have a ``part``; and each other source with the name
        of the source of the store, or of this run, that has the same bytes.

    Raises:
        SourceChangedError: The old bytes of a file that has grown have changed.
    """
    names = {source.name for source in sources}
    known: dict[str, str] = {}
    of_other_formats: dict[str, str] = {}
    bases: dict[str, Source] = {}
    for stored in _stored_sources(store, salvage=salvage):
        known[stored.identity] = stored.name
        # A file with the name of TRMPH may contain another format, for which its sidecar has no meaning.
        if stored.facts.format not in _OF_MOVES:
            of_other_formats[stored.sha256] = stored.name
        # A source that yielded no positions, because it was damaged, is no base. Of the parts of a file that
        # grew, the last one that was read remains: it has the size and digest of the whole file.
        is_base = stored.facts.positions or (stored.continues is not None and stored.sha256)
        if stored.name in names and is_base:
            bases[stored.name] = stored
    new, same = [], []
    for source in sources:
        name = known.get(source.identity) or of_other_formats.get(source.sha256)
        if name is not None:
            same.append((source, name))
            continue
        known[source.identity] = source.name
        if (base := bases.get(source.name)) is not None:
            source.part, source.continues = _new_lines(source, base, store), base.source_id
        new.append(source)
    return new, same


def _stored_sources(store: Store, *, salvage: bool) -> Iterator[Source]:
    """Yield the store's sources, except those to be salvaged now: they were rejected for damage."""
    damaged: set[int] = set()
    if salvage:
        whole = (pc.field("record").is_null()) & pc.field("reason").isin(sorted(SALVAGEABLE))
        for path in store.files("rejected"):
            damaged |= set(read_parquet(path, ["source_id"], whole)["source_id"].to_pylist())
    columns = ["name", "bytes", "sha256", "source_id", "format", "records", "positions"]
    for path in store.files("sources"):
        for row in read_parquet(path, [*columns, "salvaged", "header"]).to_pylist():
            name, size, sha256, number, kind, records, positions = (row[column] for column in columns)
            # The records of a source that was salvaged before are in the store already.
            if row["salvaged"] is None and number in damaged:
                continue
            text = row["header"] if kind in _OF_MOVES else None
            header = read_metadata(text, path, f"header of source {number}")
            source = Source(name, path, size, sha256=sha256, source_id=number)
            source.sidecar = sidecar_of(header, number)
            source.continues = number if "continues" in header else None
            source.facts = SpoolFacts(format=kind, records=records, positions=positions)
            yield source


def _new_lines(source: Source, base: Source, store: Store) -> FilePart:
    """Return the lines that were appended to a TRMPH text since it was converted.

    If the last line was incomplete, it is read again as a whole.

    Args:
        source: The file with its digest.
        base: The source of the store that it was.
        store: The store.

    Raises:
        SourceChangedError: The file is no TRMPH text without gzip; or it does not begin with the bytes that
            it had; or its last line was incomplete and was read as a game; or its sidecar has changed
            otherwise than by more lines.
    """
    path, storage = source.path, storage_of(source.path)
    with translate_errors():
        may_grow = base.facts.format == "trmph" and source.bytes > base.bytes and source.sha256
        is_longer = may_grow and has_lines(storage.read_range(0, 2))
        before = storage.read_range(max(base.bytes - _LAST_LINE, 0), base.bytes)
        # A line feed among the new bytes would make one line of all that end with carriage returns alone.
        is_longer = is_longer and not has_returns(before)
        # Records are appended to a sidecar as games are to its text.
        follows = base.sidecar.begins(source.beside) if base.sidecar else source.beside is None
        if not (is_longer and follows and digest_file(path, base.bytes)[1] == base.sha256):
            raise SourceChangedError(
                "this source or its sidecar has changed since it was converted",
                path=path,
                found=source.facts.failure and source.facts.failure[1],
                expected="the same bytes as in the store, or these with lines added (TRMPH without gzip)",
                hint="Restore the file, give the new one another name, or convert into a new store.",
            )
        # The last line was complete if a line feed ends it or has been added since.
        after = storage.read_range(base.bytes, base.bytes + 2)
    last = b"" if after.startswith((b"\n", b"\r\n")) else before.rpartition(b"\n")[2]
    if is_game_line(last):
        final = (pc.field("source_id") == base.source_id) & (pc.field("record") == base.facts.records - 1)
        if not any(read_parquet(each, ["record"], final).num_rows for each in store.files("rejected")):
            raise SourceChangedError(
                "the last game of this source was incomplete when it was converted",
                path=path,
                found=f"a line that continues at byte {base.bytes:,}",
                hint="Convert the file into a new store, and write whole lines from now on.",
            )
    return FilePart(base.bytes - len(last), source.bytes, store.manifest.board_size)
