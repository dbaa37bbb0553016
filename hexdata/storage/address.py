"""Paths, addresses given by users, and cache folders. Accesses no file and no object store."""

from __future__ import annotations

import hashlib
import os
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

from hexdata.errors import ConfigError
from hexdata.extras import installed_by

if TYPE_CHECKING:
    from upath import UPath

AnyPath: TypeAlias = "Path | UPath"
"""A local path (``pathlib.Path``) or a path in an object store, which has the same methods."""

_ALIASES: Final = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
"""Protocols that are replaced, because all writers of a store must use the same address."""
_LIBRARIES: Final = {"s3": ("s3", "s3fs"), "gs": ("gcs", "gcsfs"), "az": ("azure", "adlfs")}
"""The extra of hexdata and the library that each protocol needs."""
PROTOCOLS: Final = (*_LIBRARIES, *_ALIASES, "memory")
"""Supported protocols. ``memory`` is fsspec's store in the process."""

FOLDER_VARIABLE: Final = "HEXDATA_CACHE"
"""Environment variable with the cache folder. The default is ``hexdata`` in the user's cache folder."""
_URL: Final = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*):/{1,2}.*", re.IGNORECASE | re.DOTALL)
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "s3": {
        "config_kwargs": {
            # A command whose server is silent ends after six attempts, in about a minute.
            "retries": {"mode": "standard", "total_max_attempts": 6},
            "connect_timeout": 5.0,
            "read_timeout": 10.0,  # seconds without a byte received
            "max_pool_connections": 128,  # eight for each thread of a machine with 16 cores
            # With a part of an object, rclone sends the checksum of the whole. hexdata compares digests.
            "response_checksum_validation": "when_required",
        },
    },
}
"""Options for the file systems of fsspec, by protocol.

Credentials are never passed: the libraries find them in the environment and in the user's profiles.
"""


def as_path(text: str | AnyPath) -> AnyPath:
    """Return the path or address given as text.

    Aliases are replaced, so ``s3a://`` becomes ``s3://``.

    Args:
        text: Local path, address, or a path object, which is returned unchanged.

    Raises:
        ConfigError: The address has an unknown protocol, has no bucket, contains credentials, an account or
            parameters; or its library is not installed.
    """
    if not isinstance(text, str):
        return text
    if text.lower().startswith("pipe:"):
        raise ConfigError("a command can only be read by a loader", found=text)
    if (local := _local(text)) is not None:
        return local
    protocol, _, rest = text.partition(":")
    protocol = protocol.lower()
    if protocol not in PROTOCOLS:
        known = ", ".join(f"{name}://" for name in PROTOCOLS if name != "memory")
        raise ConfigError("unsupported protocol in an address", found=f"{protocol}://", expected=known)
    bucket, _, below = rest.strip("/").partition("/")
    if not bucket:
        raise ConfigError("an address needs a bucket", found=text, expected=f"{protocol}://BUCKET/PATH")
    protocol = _ALIASES.get(protocol, protocol)
    host = unquote(bucket)
    # USER:KEY@HOST, also if the key contains a slash. Names of access points of S3, arn:…, contain colons.
    if "@" in host or (":" in host and "@" in below and not host.startswith("arn:")):
        raise credentials_error("an account does" if protocol == "az" else "credentials do")
    # A presigned address has its signature in parameters. Names may contain the characters ? and # alone.
    if re.search(r"[?#][^/]*=", rest):
        raise credentials_error("parameters do")
    if protocol in _LIBRARIES:
        extra, library = _LIBRARIES[protocol]
        with installed_by(extra, f"{protocol}://"):
            import_module(library)  # fsspec would hide why an import fails
    from upath import UPath

    address, options = f"{protocol}://{bucket}/{below}".rstrip("/"), _OPTIONS.get(protocol, {})
    try:  # listings are not cached, since other machines may write
        path: UPath = UPath(address, use_listings_cache=False, **options)
    except ValueError:  # of a bracket, for example
        raise ConfigError("the address has no valid bucket", found=text) from None
    return path


def credentials_error(what: str) -> ConfigError:
    """Return the error for an address with secrets. It omits the address."""
    hint = "Set them in the environment or in a profile, as for any other tool."
    return ConfigError(f"{what} not belong in an address", hint=hint)


def local_path(text: str | AnyPath, what: str, hint: str = "Give a path of this machine.") -> Path:
    """Return the local path given as text.

    Args:
        text: Path object or text.
        what: Name of the argument for the error message.
        hint: Remedy for the error message.

    Raises:
        ConfigError: The text is an address.
    """
    path = text if isinstance(text, Path) else _local(str(text))
    if path is None:
        raise ConfigError(f"{what} can only be on this machine", found=text, expected="a path", hint=hint)
    return path


def _local(text: str) -> Path | None:
    """Return the local path that a text states; None for an address."""
    match = _URL.fullmatch(text)
    # A single letter is a drive.
    is_local = match is None or (len(match["protocol"]) == 1 and not text.startswith("//", 2))
    return Path(text) if is_local else None


def prefix_of(folder: AnyPath) -> str:
    """Return the path of a folder with exactly one slash at its end.

    Only the path of a whole bucket or disk already ends with a slash.
    """
    return str(folder).rstrip("/") + "/"


def cache_folder(purpose: str, address: AnyPath | None = None) -> Path:
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
    # 96 bits of the hash: no two addresses share a folder, and paths stay short.
    return folder if address is None else folder / hashlib.sha256(str(address).encode()).hexdigest()[:24]
