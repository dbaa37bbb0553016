"""What people write for a path, as a path: of this machine, or of an object store. Touches neither."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from hexdata.errors import ConfigError

if TYPE_CHECKING:
    from upath import UPath

__all__ = ["CLIENT_MEMORY", "PROTOCOLS", "AnyPath", "RemotePath", "as_path", "prefix_of"]

RemotePath: TypeAlias = "UPath"
"""A path in an object store."""

AnyPath: TypeAlias = "Path | UPath"
"""A path of this machine, or one in an object store, which has the same methods: a ``Path`` or not."""

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
"""What an address may begin with, and the extra of hexdata that it needs. ``memory`` is fsspec's own, for
trying things out: it ends with the process."""

_ONE_NAME: Final = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
"""Of protocols with several: a store has one address, so that all who write to it meet."""

CLIENT_MEMORY: Final = 48 << 20
"""Bytes that a process holds besides once it reads or writes objects: client and buffers, as measured."""

_URL: Final = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*):/{1,2}(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_UNCACHED: Final[dict[str, Any]] = {"use_listings_cache": False}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "s3": {
        **_UNCACHED,
        "config_kwargs": {
            "retries": {"mode": "standard", "max_attempts": 4},
            "connect_timeout": 10,
            "read_timeout": 60,
        },
    },
    "gcs": _UNCACHED,
    "azure": _UNCACHED,
    "": {},
}
"""Of fsspec's file systems. Listings are not kept, since other machines write too. Credentials are never
among them: the libraries find them in the environment and in the user's profiles."""


def as_path(text: str | AnyPath) -> AnyPath:
    """Return the path that a text means; ``file://`` is a path of this machine.

    An address that can be written in several ways, as ``s3a://`` for ``s3://``, comes out in one.

    Raises:
        ConfigError: it is an address of a kind that is not known, has no bucket, holds credentials or an
            account, or is of a file of another machine; or the library for it is not installed.
    """
    if not isinstance(text, str):
        return text
    match = _URL.fullmatch(text)
    if match is None or (len(match["protocol"]) == 1 and not text.startswith("//", 2)):
        return Path(text)
    protocol = match["protocol"].lower()
    if protocol == "file":
        return _local_path(text)
    if protocol not in PROTOCOLS:
        raise ConfigError(
            "an address of this kind cannot be read and written here",
            found=f"{protocol}://",
            expected=", ".join(f"{name}://" for name in PROTOCOLS if name != "memory"),
        )
    bucket, _, below = match["rest"].strip("/").partition("/")
    if not bucket:
        raise ConfigError("an address needs a bucket", found=text, expected=f"{protocol}://BUCKET/PATH")
    extra = PROTOCOLS[protocol]
    if "@" in bucket:
        what = "an account does" if extra == "azure" else "credentials do"
        raise ConfigError(  # and what it was is not said
            f"{what} not belong into an address",
            cure="Set them in the environment or in a profile, as for any other tool.",
        )
    protocol = _ONE_NAME.get(protocol, protocol)
    clean = f"{protocol}://{bucket}/{below}".rstrip("/")
    try:
        from upath import UPath

        path: UPath = UPath(clean, **_OPTIONS[extra])
        path.fs  # noqa: B018 - imports the library
    except ImportError as error:
        raise ConfigError(
            f"{protocol}:// needs a library that is not installed",
            found=str(error),
            cure=f"Install it with: pip install 'hexdata[{extra}]'.",
        ) from error
    return path


def _local_path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(
            "file:// with two slashes names another machine",
            found=url,
            expected="file:///PATH",
            cure="A path of this machine needs no file:// at all.",
        )
    return Path(url2pathname(parts.path))


def prefix_of(folder: AnyPath) -> str:
    """Return what stands before the names of what lies in a folder: its path, and one slash.

    The path of a whole bucket ends with a slash, as that of a whole disk does; others do not.
    """
    return str(folder).rstrip("/") + "/"
