"""Local cache folders for unfinished work and copies of objects."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hexdata.storage.address import local_path

if TYPE_CHECKING:
    from upath import UPath

__all__ = ["FOLDER_VARIABLE", "cache_folder"]

FOLDER_VARIABLE: Final = "HEXDATA_CACHE"
"""Environment variable with the cache folder. The default is ``hexdata`` in the user's cache folder."""


def cache_folder(purpose: str, address: UPath | None = None) -> Path:
    """Return the local folder for a purpose, such as "work". The folder may not exist.

    Args:
        purpose: Name of the folder below the cache folder.
        address: Address with a separate folder, named by a hash of the address.

    Raises:
        ConfigError: The environment variable contains an address.
    """
    root = os.environ.get(FOLDER_VARIABLE)
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hexdata")  # noqa: PTH118
    folder = (local_path(root, f"the folder that {FOLDER_VARIABLE} names") / purpose).absolute()
    return folder if address is None else folder / hashlib.sha256(str(address).encode()).hexdigest()[:24]
