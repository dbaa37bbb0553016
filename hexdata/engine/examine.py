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
from hexdata.storage import AnyPath, remove_object, telling

__all__ = ["Examined", "describe", "differences", "examine"]

LIBRARIES: Final = ("duckdb", "numpy", "pyarrow", "zlib-ng")
"""Libraries whose versions may change the bytes written, through encodings, compression or footers."""


@cache
def describe() -> dict[str, str]:
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


def differences(ours: dict[str, str], theirs: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, our version, their version) of each difference, except in Python's patch release."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = [(name, ours.get(name, "none"), theirs.get(name, "none")) for name in names]
    return [pair for pair in pairs if _part(*pair[:2]) != _part(pair[0], pair[2])]


def _part(name: str, text: str) -> str:
    return text.rpartition(".")[0] if name == "Python" else text


@dataclass(frozen=True)
class Examined:
    """Checks to run on other machines.

    Attributes:
        paths: paths that must exist there with the same sizes.
        folder: shared folder: each side must find a file written by the other. None for no such check.
        token: content of the file written by this process.
        sizes: sizes in bytes of the paths that are files.
    """

    paths: tuple[AnyPath, ...]
    folder: AnyPath | None
    token: str
    sizes: dict[str, int]

    def look(self, name: str) -> dict[str, str]:
        """Run the checks on another machine: write the answering file and return the fault of each path."""
        wrong = {}
        for path in (*self.paths, *([] if self.folder is None else [self.folder])):
            try:
                with telling(path):
                    why = self._exchange(path, name) if path is self.folder else self._missing(path)
            except HexdataError as error:
                why = error.detail()
            except OSError as error:
                why = error.strerror or str(error)
            if why:
                wrong[str(path)] = why
        return wrong

    def _missing(self, path: AnyPath) -> str | None:
        """Return the fault of a path that tasks will read, or None."""
        if not path.exists():
            return "not there"
        size = path.stat().st_size if path.is_file() else None
        return None if size == self.sizes.get(str(path)) else "another file"

    def _exchange(self, folder: AnyPath, name: str) -> str | None:
        """Read the file of the asking process, write one in return, and return the folder's fault or None."""
        if _name(folder, self.token).read_text() != self.token:
            return "another folder"
        _name(folder, f"{self.token}-{name}").write_text(name)
        return None

    def require(self, machine: str, wrong: dict[str, str], name: str) -> None:
        """Check the answer of another machine, and that this machine sees the file written there.

        Raises:
            EngineError: a path is not visible there.
        """
        if self.folder is not None and not wrong and not _name(self.folder, f"{self.token}-{name}").exists():
            wrong = {str(self.folder): "another folder"}
        for path, why in wrong.items():
            raise EngineError(
                f"node {machine} does not see the same files under this path",
                path=path,
                found=why,
                hint="Use a file system that every machine mounts at the same path, or an object store that "
                "every machine can access.",
            )


def _name(folder: AnyPath, text: str) -> AnyPath:
    return folder / f".engine-{text}"


@contextmanager
def examine(paths: Sequence[AnyPath], folder: AnyPath | None) -> Iterator[Examined]:
    """Prepare the checks of other machines, and remove the files they write.

    Only one process may use a folder at a time: the one that holds its lock.
    """
    token = os.urandom(8).hex()
    if folder is not None:
        _remove_tokens(folder, "")  # left by a killed process
    sizes = {str(path): path.stat().st_size for path in paths if path.is_file()}
    try:
        if folder is not None:
            _name(folder, token).write_text(token)
        yield Examined(tuple(paths), folder, token, sizes)
    finally:
        if folder is not None:
            _remove_tokens(folder, token)


def _remove_tokens(folder: AnyPath, token: str) -> None:
    found: list[AnyPath] = list(folder.iterdir())
    for path in found:
        if not path.name.startswith(_name(folder, token).name):
            continue
        if isinstance(path, Path):
            path.unlink(missing_ok=True)
        else:
            remove_object(path)
