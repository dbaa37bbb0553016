"""Checks that another machine runs the same code and sees the same files, before it receives tasks."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from hexdata import __version__
from hexdata.errors import EngineError, HexdataError
from hexdata.storage import AnyPath, storage_of, translate_errors

__all__ = ["NodeCheck", "installed_versions", "open_node_check", "version_differences"]

LIBRARIES: Final = ("duckdb", "numpy", "pyarrow", "zlib-ng")
"""Libraries whose versions may change the bytes written, through encodings, compression or footers."""


@cache
def installed_versions() -> dict[str, str]:
    """Return the versions of Python, hexdata (with a digest of its code) and libraries, by name."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".sql")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    found = {
        "Python": platform.python_version(),
        "hexdata": f"{__version__} (code {digest.hexdigest()[:12]})",
    }
    return found | {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def version_differences(ours: dict[str, str], theirs: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, our version, their version) of each difference, except in Python's patch release."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = [(name, ours.get(name, "none"), theirs.get(name, "none")) for name in names]
    return [pair for pair in pairs if _comparable(*pair[:2]) != _comparable(pair[0], pair[2])]


def _comparable(name: str, text: str) -> str:
    return text.rpartition(".")[0] if name == "Python" else text


@dataclass(frozen=True)
class NodeCheck:
    """Checks that a machine sees the same files as the driver, which sends them to each machine.

    Attributes:
        paths: Files and folders that must exist on the machine, files with the same sizes.
        folder: Shared folder, in which each side must find a file written by the other; None for no such
            check.
        token: Content of the file that the driver writes.
        sizes: Size in bytes of each path that is a file.
    """

    paths: tuple[AnyPath, ...]
    folder: AnyPath | None
    token: str
    sizes: dict[str, int]

    def run(self, name: str) -> dict[str, str]:
        """Run the checks on a machine and return a description of the fault of each path that has one.

        Writes a file to ``folder``, in answer to the file of the driver.

        Args:
            name: Unique name of the machine.
        """
        faults = {}
        for path in (*self.paths, *([] if self.folder is None else [self.folder])):
            try:
                with translate_errors(path):
                    fault = self._exchange(path, name) if path is self.folder else self._missing(path)
            except HexdataError as error:
                fault = error.detail()
            except OSError as error:
                fault = error.strerror or str(error)
            if fault:
                faults[str(path)] = fault
        return faults

    def _missing(self, path: AnyPath) -> str | None:
        """Return the fault of a path that tasks will read, or None."""
        if not storage_of(path).exists():
            return "does not exist"
        size = storage_of(path).size()
        return None if size == self.sizes.get(str(path)) else "a file of another size"

    def _exchange(self, folder: AnyPath, name: str) -> str | None:
        """Read the driver's file, write one in answer, and return the folder's fault or None."""
        token = self.token.encode()
        if storage_of(_token_file(folder, self.token)).read_range(0, len(token)) != token:
            return "a different folder"
        _write(_token_file(folder, f"{self.token}-{name}"), name)
        return None

    def require(self, machine: str, faults: dict[str, str], name: str) -> None:
        """On the driver, check the result of a machine, and that the file written there is visible here.

        Args:
            machine: Name of the machine for messages.
            faults: Result of :meth:`run` on the machine.
            name: Argument of :meth:`run` on the machine.

        Raises:
            EngineError: A path does not lead to the same file or folder.
        """
        answer = None if self.folder is None else _token_file(self.folder, f"{self.token}-{name}")
        if answer is not None and not faults and not storage_of(answer).exists():
            faults = {str(self.folder): "a different folder"}
        for path, fault in faults.items():
            raise EngineError(
                f"node {machine} does not see the same files under this path",
                path=path,
                found=fault,
                hint="Use a file system that every machine mounts at the same path, or an object store that "
                "every machine can access.",
            )


def _token_file(folder: AnyPath, text: str) -> AnyPath:
    return folder / f".engine-{text}"


def _write(path: AnyPath, text: str) -> None:
    with storage_of(path).publish() as file:
        file.write(text.encode())


@contextmanager
def open_node_check(paths: Sequence[AnyPath], folder: AnyPath | None) -> Iterator[NodeCheck]:
    """Prepare checks of other machines, and remove the files that they write when the context ends.

    Only one process may use a folder at a time: the one that holds its lock.
    """
    token = os.urandom(8).hex()
    if folder is not None:
        _remove_tokens(folder, "")  # left by a killed process
    sizes = {str(path): size for path in paths if (size := storage_of(path).size()) is not None}
    try:
        if folder is not None:
            _write(_token_file(folder, token), token)
        yield NodeCheck(tuple(paths), folder, token, sizes)
    finally:
        if folder is not None:
            _remove_tokens(folder, token)


def _remove_tokens(folder: AnyPath, token: str) -> None:
    for name in storage_of(folder).names():
        if name.startswith(_token_file(folder, token).name):
            storage_of(folder / name).remove()
