"""Temporary folders that name the process that made them, so that a later process can remove abandoned ones.

A name contains the id and the start time of its process, because the system uses ids again, and the boot and
the container (its namespace of process ids), because processes of other containers and machines cannot be
seen. Such folders are left alone, except those that this machine's earlier boots left.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from hexdata.system import process_start

__all__ = ["remove_abandoned", "temporary_folder", "temporary_path"]

_NAME: Final = re.compile(
    r"(?:sem\.)?hexdata-[a-z]+-(?P<pid>[0-9]+)-(?P<start>[0-9]+)"
    r"-(?P<namespace>[0-9]+)-(?P<boot>[0-9a-f]{8})-(?P<machine>[0-9a-f]{8})-[0-9a-f]{16}"
)
"""Names of ``temporary_path``. Linux keeps a semaphore in a file whose name begins with "sem."."""
_SEMAPHORES: Final = Path("/dev/shm")  # noqa: S108 - where Linux keeps semaphores


def temporary_path(purpose: str, parent: Path | None = None) -> Path:
    """Return the path of a new temporary file or folder, which the caller creates and removes.

    Args:
        purpose: What it contains, in lower-case letters.
        parent: Folder to contain it; None for the system's temporary folder (default).
    """
    name = f"hexdata-{purpose}-{_owner()}-{os.urandom(8).hex()}"
    return (parent or Path(tempfile.gettempdir())) / name


@contextmanager
def temporary_folder(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a folder and remove it with its content at the end.

    Args:
        purpose: What it contains, in lower-case letters.
        parent: Folder to contain it, which is created too; None for the system's temporary folder (default).
    """
    remove_abandoned(parent)
    folder = temporary_path(purpose, parent)
    try:  # begins before the folder exists, so that no signal can arrive between
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def remove_abandoned(parent: Path | None = None) -> None:
    """Remove the temporary files and folders of processes that were killed, once per process and parent.

    Files of other users, links, and names that ``temporary_path`` does not make are left alone.

    Args:
        parent: Folder to search; None for the system's temporary folder and that of semaphores (default).
    """
    for folder in (Path(tempfile.gettempdir()), _SEMAPHORES) if parent is None else (parent,):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                found = _NAME.fullmatch(entry.name)
                if found and _is_own(entry) and _is_abandoned(found):
                    if entry.is_dir():
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        with suppress(OSError):
                            os.unlink(entry.path)  # noqa: PTH108


def _owner() -> str:
    """Return the part of a name that identifies this process."""
    pid = os.getpid()
    return f"{pid}-{process_start(pid)}-{'-'.join(_location())}"


def _is_own(entry: os.DirEntry[str]) -> bool:
    """Return whether this user owns a file or folder that is not a link."""
    is_owner = not hasattr(os, "getuid") or entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return is_owner and not entry.is_symlink()


def _is_abandoned(name: re.Match[str]) -> bool:
    """Return whether the process in a name has certainly ended."""
    namespace, boot, machine = _location()
    if name["machine"] != machine:
        return False
    if name["boot"] != boot:
        return True
    return name["namespace"] == namespace and process_start(int(name["pid"])) != int(name["start"])


def _location() -> tuple[str, str, str]:
    """Return what identifies the namespace of process ids, the boot and the machine of this process."""
    namespace, boot, machine = 0, b"", platform.node().encode()
    if sys.platform == "linux":
        with suppress(OSError):
            namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
            boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
            machine += Path("/etc/machine-id").read_bytes()
    return str(namespace), _hash(boot), _hash(machine)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
