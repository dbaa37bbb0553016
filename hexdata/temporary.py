"""Temporary folders that name the process that made them, so that a later process can remove abandoned ones.

A name contains the id and the start time of its process, because the system uses ids again, and a digest of
the machine, its boot and the container (the namespace of process ids), because processes of others cannot be
seen. What others have left, such as this machine before it was started again, is removed when it is old.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from hexdata.system import process_start

_NAME: Final = re.compile(
    "(?:sem[.])?hexdata-[a-z]+-(?P<place>[0-9a-f]{16})-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[0-9a-f]{16}"
)
"""Names of ``temporary_path``. Linux keeps a semaphore in a file whose name begins with "sem."."""
_SEMAPHORES: Final = Path("/dev/shm")  # noqa: S108 - where Linux keeps semaphores
# Long, since a process of another machine or container may still use them.
_OLD: Final = 30 * 86_400
"""Seconds after which files are removed whose process cannot be seen."""


def temporary_path(purpose: str, parent: Path | None = None) -> Path:
    """Return the path of a new temporary file or folder, which the caller creates and removes.

    Args:
        purpose: What it contains, in lower-case letters.
        parent: Folder to contain it; None for the system's temporary folder (default).
    """
    owner = f"{place_of_processes()}-{os.getpid()}-{process_start(os.getpid())}"
    return (parent or Path(tempfile.gettempdir())) / f"hexdata-{purpose}-{owner}-{os.urandom(8).hex()}"


@contextmanager
def temporary_folder(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a folder and remove it with its content at the end.

    Args:
        purpose: What it contains, in lower-case letters.
        parent: Folder to contain it, which is created too; None for the system's temporary folder (default).
    """
    # Here, so that space that killed processes left is free before more is used.
    remove_abandoned(parent)
    folder = temporary_path(purpose, parent)
    try:  # begins before the folder exists, so that no signal can arrive between
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@cache
def remove_abandoned(parent: Path | None = None) -> None:
    """Remove the temporary files and folders of processes that were killed, once per process and parent.

    Files of other users, links, and names that ``temporary_path`` does not make are left alone.

    Args:
        parent: Folder to search; None for the system's temporary folder and that of semaphores (default).
    """
    for folder in (Path(tempfile.gettempdir()), _SEMAPHORES) if parent is None else (parent,):
        with suppress(OSError):
            for path in folder.iterdir():
                name = _NAME.fullmatch(path.name)
                with suppress(OSError):  # its owner, or another process, removes it at this moment
                    if name and _is_abandoned(path, name):
                        if path.is_dir():
                            shutil.rmtree(path, ignore_errors=True)
                        else:
                            path.unlink(missing_ok=True)


def _is_abandoned(path: Path, name: re.Match[str]) -> bool:
    """Return whether a file or folder is this user's, and its process has ended or is out of sight."""
    status = path.lstat()
    # A temporary folder is shared, so another user could create such a name or a link to other files.
    if path.is_symlink() or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
        return False
    if name["place"] != place_of_processes():
        return time.time() - status.st_mtime > _OLD
    return process_start(int(name["pid"])) != int(name["start"])


def place_of_processes() -> str:
    """Return what identifies the machine, its boot and the namespace of process ids of this process."""
    place = platform.node().encode()
    with suppress(OSError):  # only Linux has these files
        place += Path("/proc/sys/kernel/random/boot_id").read_bytes()
        place += b"%d" % Path("/proc/self/ns/pid").stat().st_ino
    return hashlib.sha256(place).hexdigest()[:16]
