"""Whether another machine runs this very code and sees the same files: asked before it is given work."""

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
from hexdata.remote import AnyPath, remove_object, telling

__all__ = ["Examined", "describe", "differences", "examine"]

LIBRARIES: Final = ("duckdb", "numpy", "pyarrow", "zlib-ng")
"""What decides bytes besides our own code: encodings, compression, and their versions in footers."""


@cache
def describe() -> dict[str, str]:
    """Return what this process runs on, by name: Python, hexdata with the digest of its code, libraries."""
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
    """Return what differs: its name, and both versions. Of Python the last figure may."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = [(name, ours.get(name, "none"), theirs.get(name, "none")) for name in names]
    return [pair for pair in pairs if _part(*pair[:2]) != _part(pair[0], pair[2])]


def _part(name: str, text: str) -> str:
    return text.rpartition(".")[0] if name == "Python" else text


@dataclass(frozen=True)
class Examined:
    """What other machines are asked.

    Attributes:
        paths: that they must see as this one does.
        folder: in which they must find a file of ours, and we one of theirs.
        token: what our file holds.
        sizes: of the paths that are files, in bytes.
    """

    paths: tuple[AnyPath, ...]
    folder: AnyPath | None
    token: str
    sizes: dict[str, int]

    def look(self, name: str) -> dict[str, str]:
        """Elsewhere: return what is wrong with each path, and leave a file for the one who asks."""
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
        """Say what is wrong with a path that will be read."""
        if not path.exists():
            return "not there"
        size = path.stat().st_size if path.is_file() else None
        return None if size == self.sizes.get(str(path)) else "another file"

    def _exchange(self, folder: AnyPath, name: str) -> str | None:
        """Read the file of the one who asks, and leave one; say what is wrong with the folder."""
        if _name(folder, self.token).read_text() != self.token:
            return "another folder"
        _name(folder, f"{self.token}-{name}").write_text(name)
        return None

    def require(self, machine: str, wrong: dict[str, str], name: str) -> None:
        """Check what another machine saw, and that this one sees what it left.

        Raises:
            EngineError: it does not see a path.
        """
        if self.folder is not None and not wrong and not _name(self.folder, f"{self.token}-{name}").exists():
            wrong = {str(self.folder): "another folder"}
        for path, why in wrong.items():
            raise EngineError(
                f"node {machine} does not see this path as this process does",
                path=path,
                found=why,
                hint="Put it on a file system that every machine has mounted at the same place, or into an "
                "object store that every machine may use.",
            )


def _name(folder: AnyPath, text: str) -> AnyPath:
    return folder / f".engine-{text}"


@contextmanager
def examine(paths: Sequence[AnyPath], folder: AnyPath | None) -> Iterator[Examined]:
    """Make ready to ask other machines, and clear up after them.

    Only one process at a time may ask in a folder: the one that has locked it.
    """
    token = os.urandom(8).hex()
    if folder is not None:
        _remove_signs(folder, "")  # of a process that was killed
    sizes = {str(path): path.stat().st_size for path in paths if path.is_file()}
    try:
        if folder is not None:
            _name(folder, token).write_text(token)
        yield Examined(tuple(paths), folder, token, sizes)
    finally:
        if folder is not None:
            _remove_signs(folder, token)


def _remove_signs(folder: AnyPath, token: str) -> None:
    found: list[AnyPath] = list(folder.iterdir())
    for path in found:
        if not path.name.startswith(_name(folder, token).name):
            continue
        if isinstance(path, Path):
            path.unlink(missing_ok=True)
        else:
            remove_object(path)
