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

__all__ = [
    "CLIENT_MEMORY",
    "PROTOCOLS",
    "AnyPath",
    "RemotePath",
    "as_path",
    "client_memory",
    "local_path",
    "prefix_of",
    "without_secrets",
]

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
_SECRET: Final = re.compile(
    r"(?<=://)(?:[^/?\s]+|(?<!http://)(?<!https://)[^/?@:\s]+:[^?@\s]+)@"
    r"|(?<=[^\s?])\?[^\s\"'?]+=[^\s\"']*"
)
"""What may hold a secret: a URL's user and query. A secret key of S3 may hold a slash; of HTTP, what stands
before one is a port."""
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
    match = _url(text)
    if match is None:
        return Path(text)
    protocol = match["protocol"].lower()
    if protocol == "file":
        return _path_of_url(text)
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
    if "@" in bucket or (":" in bucket and "@" in below and not bucket.startswith("arn:")):
        what = "an account does" if extra == "azure" else "credentials do"
        raise ConfigError(  # and what it was is not said
            f"{what} not belong into an address",
            hint="Set them in the environment or in a profile, as for any other tool.",
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
            hint=f"Install it with: pip install 'hexdata[{extra}]'.",
        ) from error
    return path


def local_path(text: str | AnyPath, what: str, hint: str = "Give a path of this machine.") -> Path:
    """Return the path that a text means, where none but one of this machine will do.

    Args:
        text: what a person wrote, or a path; ``file://`` is a path of this machine.
        what: it is for, as the error names it.
        hint: what else a person can do.

    Raises:
        ConfigError: it is an address.
    """
    if isinstance(text, Path):
        return text
    text = str(text)
    match = _url(text)
    if match is None:
        return Path(text)
    if match["protocol"].lower() == "file":
        return _path_of_url(text)
    raise ConfigError(
        f"{what} can only be on this machine", found=without_secrets(text), expected="a path", hint=hint
    )


def _url(text: str) -> re.Match[str] | None:
    """Return the parts of an address; None of a path, even one that begins with a drive."""
    match = _URL.fullmatch(text)
    is_drive = match is not None and len(match["protocol"]) == 1 and not text.startswith("//", 2)
    return None if is_drive else match


def without_secrets(text: str) -> str:
    """Return a text of one line, without what may be secret in the addresses that it names."""
    return _SECRET.sub("", " ".join(text.split()))


def _path_of_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(
            "file:// with two slashes names another machine",
            found=without_secrets(url),
            expected="file:///PATH",
            hint="A path of this machine needs no file:// at all.",
        )
    return Path(url2pathname(parts.path))


def client_memory(*places: AnyPath) -> int:
    """Return the bytes that a process holds besides, if any of the places that it works on is an address."""
    return 0 if all(isinstance(place, Path) for place in places) else CLIENT_MEMORY


def prefix_of(folder: AnyPath) -> str:
    """Return what stands before the names of what lies in a folder: its path, and one slash.

    The path of a whole bucket ends with a slash, as that of a whole disk does; others do not.
    """
    return str(folder).rstrip("/") + "/"
