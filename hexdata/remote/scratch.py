"""Where this machine keeps what belongs to an object store: unfinished work, and copies."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hexdata.remote.address import local_path

if TYPE_CHECKING:
    from upath import UPath

__all__ = ["FOLDER_VARIABLE", "scratch_folder"]

FOLDER_VARIABLE: Final = "HEXDATA_CACHE"
"""The variable of the environment that names the folder; by default ``hexdata`` in the user's cache."""


def scratch_folder(purpose: str, address: UPath | None = None) -> Path:
    """Return the folder for a purpose, such as "work", and for one address, if given.

    It may not be there yet. Its name says nothing of the address, and two addresses never share one.

    Raises:
        ConfigError: the environment names an address.
    """
    root = os.environ.get(FOLDER_VARIABLE)
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hexdata")  # noqa: PTH118
    folder = (local_path(root, f"the folder that {FOLDER_VARIABLE} names") / purpose).absolute()
    return folder if address is None else folder / hashlib.sha256(str(address).encode()).hexdigest()[:24]
