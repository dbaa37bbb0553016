"""Replays recorded file operations and builds the disks that a power failure may leave.

A disk keeps, for each file and folder, what was synced and what was changed since. POSIX allows any part of
the changes to be lost: the content of a file and the names in a folder are independent, and a write may be
stored in part, by sectors.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

KINDS: Final = (
    *("", "open", "create", "read", "write", "truncate", "sync", "rename", "link", "symlink", "unlink"),
    *("rmdir", "mkdir", "list"),
)
"""Kinds of operations by their number in ``shim.c``."""
CHANGES: Final = frozenset(("create", "write", "truncate", "sync", "rename", "unlink", "rmdir", "mkdir"))
"""Operations that change the disk or what is stored of it."""
CRASHES: Final = ("killed", "lost", "nameless", "empty", "zeros", "torn", "disordered")
"""What a crash loses: ``killed``: nothing; ``lost``: all that was not synced; ``nameless``: names that were
not synced; ``empty``: contents that were not synced; ``zeros``: the same, but the sizes are stored; ``torn``:
any sectors of contents; ``disordered``: any names and any sectors."""
SEEDED: Final = ("torn", "disordered")
"""Crashes that depend on a seed."""
SECTOR: Final = 512
_HEAD: Final = struct.Struct("<BBBBIQQQIIIxxxx")

Tree = dict[str, bytes | None]
"""Content by path; None for a folder."""


class Operation(NamedTuple):
    """One recorded operation."""

    number: int
    kind: str
    failed: bool
    is_folder: bool
    inode: int
    offset: int
    length: int
    path: str
    other: str
    data: bytes


def read_log(path: Path) -> list[Operation]:
    """Return the operations that the shim recorded."""
    log, at, found = path.read_bytes(), 0, []
    while at < len(log):
        head = _HEAD.unpack_from(log, at)
        kind, is_folder, failed, _, number, inode, offset, length, one, two, size = head
        at += _HEAD.size
        first, second = log[at : at + one], log[at + one : at + one + two]
        data = log[at + one + two : at + one + two + size]
        at += one + two + size
        texts = [os.fsdecode(text).strip("/") for text in (first, second)]
        found.append(
            Operation(number, KINDS[kind], bool(failed), bool(is_folder), inode, offset, length, *texts, data)
        )
    return found


@dataclass(eq=False)
class File:
    """A file: its synced content, and the changes since then."""

    stored: bytes = b""
    pending: list[Operation] = field(default_factory=list)
    current: bytearray = field(default_factory=bytearray)

    def apply(self, operation: Operation) -> None:
        self.pending.append(operation)
        _change(self.current, operation, operation.data)

    def after_crash(self, crash: str, rng: random.Random) -> bytes:
        if crash in ("killed", "nameless") or (crash == "zeros" and not self.pending):
            return bytes(self.current)
        if crash == "zeros":
            return self.stored[: len(self.current)].ljust(len(self.current), b"\0")
        content, how = bytearray(self.stored), rng.choice(("start", "end", "mixed", "none", "all"))
        for operation in self.pending if crash in SEEDED and how != "none" else ():
            if how != "all" and operation.kind == "write":
                _tear(content, operation, how, rng)
            elif how == "all" or rng.random() < 0.5:
                _change(content, operation, operation.data)
        return bytes(content)


def _change(content: bytearray, operation: Operation, data: bytes) -> None:
    if operation.kind == "truncate":
        del content[operation.length :]
        content.extend(bytes(operation.length - len(content)))
    else:
        content.extend(bytes(max(0, operation.offset - len(content))))
        content[operation.offset : operation.offset + len(data)] = data


def _tear(content: bytearray, operation: Operation, how: str, rng: random.Random) -> None:
    """Apply some sectors of a write: the first ones, the last ones, or any."""
    start, stop = operation.offset, operation.offset + len(operation.data)
    bounds = [start, *range((start // SECTOR + 1) * SECTOR, stop, SECTOR), stop]
    sectors = list(itertools.pairwise(bounds))
    cut = rng.randint(0, len(sectors))
    mixed = [sector for sector in sectors if rng.random() < 0.5]
    for first, last in {"start": sectors[:cut], "end": sectors[cut:]}.get(how, mixed):
        content.extend(bytes(max(0, first - len(content))))
        content[first:last] = operation.data[first - start : last - start]


@dataclass(eq=False)
class Folder:
    """A folder: its synced entries, and the changes since then.

    A change sets a name (or removes it, if the entry is None). Changes with one number are of one renaming.
    """

    stored: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[int, str, File | Folder | None]] = field(default_factory=list)
    current: dict[str, File | Folder] = field(default_factory=dict)

    def set(self, number: int, name: str, entry: File | Folder | None) -> None:
        self.pending.append((number, name, entry))
        _set(self.current, name, entry)

    def after_crash(
        self, crash: str, decisions: dict[int, float], rng: random.Random
    ) -> Mapping[str, File | Folder]:
        if crash in ("killed", "empty", "zeros", "torn"):
            return self.current
        if crash in ("lost", "nameless"):
            return self.stored
        entries = dict(self.stored)
        for number, name, entry in self.pending:
            chance = decisions.setdefault(number, rng.random())
            # Of a renaming, the old name is removed only if the new name is stored, but may also be kept.
            if chance < 0.4 or (entry is not None and chance < 0.6):
                _set(entries, name, entry)
        return entries


def _set(entries: dict[str, File | Folder], name: str, entry: File | Folder | None) -> None:
    if entry is None:
        entries.pop(name, None)
    else:
        entries[name] = entry


class Disk:
    """The files below one folder, as they are after each recorded operation.

    Args:
        tree: Synced files at the start, such as those of a dataset that the command extends.
    """

    def __init__(self, tree: Tree) -> None:
        self.root = Folder()
        self._files: dict[int, File] = {}
        for path, content in tree.items():
            folder, name = self._find(path)
            entry = Folder() if content is None else File(content, [], bytearray(content))
            folder.stored[name] = folder.current[name] = entry
        self.versions: dict[str, set[str]] = {
            path: {digest(content)} for path, content in tree.items() if content is not None
        }
        """Digests of the contents that each file had when it received its name."""

    def _find(self, path: str) -> tuple[Any, str]:
        *parents, name = path.split("/")
        folder: Any = self.root
        for parent in parents:
            folder = folder.current[parent]
        return folder, name

    def _entry(self, path: str) -> Any:
        folder, name = self._find(path)
        return folder.current[name] if path else self.root

    def _file(self, operation: Operation) -> File:
        """Return the open file of an operation: by its inode, since it may have lost its name."""
        if operation.inode not in self._files:
            self._files[operation.inode] = self._entry(operation.path)
        return self._files[operation.inode]

    def apply(self, operation: Operation) -> None:
        """Change the disk as the operation did."""
        kind, number = operation.kind, operation.number
        if operation.failed or kind not in CHANGES | {"open", "link", "symlink"}:
            return
        if kind in ("write", "truncate"):
            self._file(operation).apply(operation)
        elif kind == "sync" and operation.is_folder:
            synced: Any = self._entry(operation.path)
            synced.stored, synced.pending = dict(synced.current), []
        elif kind == "sync":
            file = self._file(operation)
            file.stored, file.pending = bytes(file.current), []
        elif kind == "open":
            if not operation.is_folder:
                self._files[operation.inode] = self._entry(operation.path)
        elif kind in ("create", "mkdir"):
            folder, name = self._find(operation.path)
            entry: Any = Folder() if kind == "mkdir" else File()
            folder.set(number, name, entry)
            if kind == "create":
                self._files[operation.inode] = entry
        elif kind in ("unlink", "rmdir", "rename"):
            folder, name = self._find(operation.path)
            if kind == "rename":
                other, new = self._find(operation.other)
                other.set(number, new, folder.current[name])
                self._add_versions(operation.other, folder.current[name])
            folder.set(number, name, None)
        else:
            raise NotImplementedError(f"{kind} of {operation.path}")

    def _add_versions(self, path: str, entry: File | Folder) -> None:
        if isinstance(entry, File):
            self.versions.setdefault(path, set()).add(digest(bytes(entry.current)))
        else:
            for name, inner in entry.current.items():
                self._add_versions(f"{path}/{name}", inner)

    def after_crash(self, crash: str, seed: str, running: Operation | None = None) -> Tree:
        """Return the files that a crash leaves.

        Args:
            crash: What is lost, one of ``CRASHES``.
            seed: Text that determines what is lost.
            running: Operation during which the crash happens; a write of it may be stored in part.
        """
        rng, decisions = random.Random(seed), dict[int, float]()
        torn = None
        if running is not None and running.kind == "write" and not running.failed:
            torn = self._file(running)
            kept = running.data[: len(running.data) // 2] if crash == "killed" else running.data
            before = bytes(torn.current), list(torn.pending)
            torn.apply(running._replace(data=kept))
        tree: Tree = dict(self._walk(self.root, "", crash, decisions, rng))
        if torn is not None:
            torn.current, torn.pending = bytearray(before[0]), before[1]
        return tree

    def _walk(
        self, folder: Folder, path: str, crash: str, decisions: dict[int, float], rng: random.Random
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, entry in sorted(folder.after_crash(crash, decisions, rng).items()):
            if isinstance(entry, Folder):
                yield path + name, None
                yield from self._walk(entry, f"{path}{name}/", crash, decisions, rng)
            else:
                yield path + name, entry.after_crash(crash, rng)


def digest(data: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def read_tree(folder: Path) -> Tree:
    """Return the files and folders below a folder."""
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def write_tree(tree: Tree, folder: Path) -> None:
    """Write the files and folders below a folder, and remove all others."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
