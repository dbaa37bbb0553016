"""Parsing of paths and addresses given by users. Accesses no file and no object store."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from hexdata.errors import ConfigError
from hexdata.extras import LIBRARIES, installed_by
from hexdata.storage.retry import CONNECT_TIMEOUT, READ_TIMEOUT

if TYPE_CHECKING:
    from upath import UPath

__all__ = [
    "PROTOCOLS",
    "AnyPath",
    "RemotePath",
    "as_path",
    "credentials_error",
    "local_path",
    "prefix_of",
]

RemotePath: TypeAlias = "UPath"
"""A path in an object store."""

AnyPath: TypeAlias = "Path | UPath"
"""A local path (``pathlib.Path``) or a path in an object store, which has the same methods."""

PROTOCOLS: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "memory": "",
}
"""Supported protocols, with the extra of hexdata that each needs. ``memory`` is fsspec's store for
experiments, which exists only in the process."""

_ONE_NAME: Final = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
"""Aliases, with the protocol that replaces them: all writers of a store must use the same address."""

MAX_CONNECTIONS: Final = 128
"""Maximum number of open connections to S3: eight for each thread of a machine with 16 cores."""
_URL: Final = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*):/{1,2}(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_UNCACHED: Final[dict[str, Any]] = {"use_listings_cache": False}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "s3": {
        **_UNCACHED,
        "config_kwargs": {
            "retries": {"total_max_attempts": 1},  # ``REQUESTS`` is the only policy
            "connect_timeout": CONNECT_TIMEOUT,
            "read_timeout": READ_TIMEOUT,
            "max_pool_connections": MAX_CONNECTIONS,
            # With a part of an object, rclone sends the checksum of the whole. hexdata compares digests.
            "response_checksum_validation": "when_required",
        },
    },
    "gcs": _UNCACHED,
    "azure": _UNCACHED,
    "": {},
}
"""Options for the file systems of fsspec. Listings are not cached, since other machines may write.
Credentials are never passed: the libraries find them in the environment and in the user's profiles."""


def as_path(text: str | AnyPath) -> AnyPath:
    """Return the path or address given as text.

    Aliases are replaced, so ``s3a://`` becomes ``s3://``. ``file://`` gives a local path.

    Args:
        text: Local path, address, or a path object, which is returned unchanged.

    Raises:
        ConfigError: The address has an unknown protocol, has no bucket, contains credentials, an account or
            parameters, or names a file of another machine; or its library is not installed.
    """
    if not isinstance(text, str):
        return text
    if text.lower().startswith("pipe:"):
        raise ConfigError(
            "a command can only be read by a loader", found=text, expected="a path or an address"
        )
    match = _url(text)
    if match is None:
        return Path(text)
    protocol = match["protocol"].lower()
    if protocol == "file":
        return _path_of_url(text)
    if protocol not in PROTOCOLS:
        raise ConfigError(
            "unsupported protocol in an address",
            found=f"{protocol}://",
            expected=", ".join(f"{name}://" for name in PROTOCOLS if name != "memory"),
        )
    bucket, _, below = match["rest"].strip("/").partition("/")
    if not bucket:
        raise ConfigError("an address needs a bucket", found=text, expected=f"{protocol}://BUCKET/PATH")
    extra = PROTOCOLS[protocol]
    host = unquote(bucket)
    if "@" in host or (":" in host and "@" in below and not host.startswith("arn:")):
        raise credentials_error("an account does" if extra == "azure" else "credentials do")
    if re.search(r"[?#][^/]*=", match["rest"]):
        raise credentials_error("parameters do")
    protocol = _ONE_NAME.get(protocol, protocol)
    clean = f"{protocol}://{bucket}/{below}".rstrip("/")
    with installed_by(extra, f"{protocol}://"):
        for library in LIBRARIES.get(extra, ()):
            import_module(library)  # fsspec would hide why an import fails
    from upath import UPath

    path: UPath = UPath(clean, **_OPTIONS[extra])
    return path


def credentials_error(what: str) -> ConfigError:
    """Return the error for an address with secrets. It omits the address."""
    return ConfigError(
        f"{what} not belong in an address",
        hint="Set them in the environment or in a profile, as for any other tool.",
    )


def local_path(text: str | AnyPath, what: str, hint: str = "Give a path of this machine.") -> Path:
    """Return the local path given as text.

    Args:
        text: Path object or text; ``file://`` gives a local path.
        what: Name of the argument for the error message.
        hint: Remedy for the error message.

    Raises:
        ConfigError: The text is an address.
    """
    if isinstance(text, Path):
        return text
    text = str(text)
    match = _url(text)
    if match is None:
        return Path(text)
    if match["protocol"].lower() == "file":
        return _path_of_url(text)
    raise ConfigError(f"{what} can only be on this machine", found=text, expected="a path", hint=hint)


def _url(text: str) -> re.Match[str] | None:
    """Return the parts of an address, or None for a path, including one with a drive letter."""
    match = _URL.fullmatch(text)
    is_drive = match is not None and len(match["protocol"]) == 1 and not text.startswith("//", 2)
    return None if is_drive else match


def _path_of_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(
            "a file:// address cannot name another machine",
            found=url,
            expected="file:///PATH",
            hint="Give a local path without file://.",
        )
    from urllib.request import url2pathname  # it imports the client for HTTP

    return Path(url2pathname(parts.path))


def prefix_of(folder: AnyPath) -> str:
    """Return the path of a folder with exactly one slash at its end.

    Only the path of a whole bucket or disk already ends with a slash.
    """
    return str(folder).rstrip("/") + "/"
