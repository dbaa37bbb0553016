"""Conditional requests: writing an object only if its stored version is the expected one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from hexdata.storage.base import Changed
from hexdata.storage.reading import object_info, speaks_s3
from hexdata.storage.retry import code_of, with_retries
from hexdata.storage.sending import send_body

__all__ = ["CONFLICT", "current_tag", "guards_writes", "tag_of", "write_if_unchanged"]

CONFLICT: Final = "ConditionalRequestConflict"
"""Error code of S3 while another conditional request for the same object is running."""
_NOT_MET: Final = ("PreconditionFailed", "412", "409", "NoSuchKey", "404")
"""Error codes for a condition that is not met."""
_UNSUPPORTED: Final = ("NotImplemented", "501")
"""Error codes of stores without conditional requests."""

_without_conditions: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Buckets without conditional requests, by file system. Their tags are compared here."""
_NO_TAG: Final = f'"{"0" * 32}"'
"""A tag that no object has."""

T = TypeVar("T")


def write_if_unchanged(system: Any, path: str, tag: str | None, request: Callable[[dict[str, str]], T]) -> T:
    """Send a request that writes an object, if the stored version has the expected tag.

    A store with the S3 protocol compares the tags itself. In other stores, and in those without conditional
    requests, the tags are compared here, so another process can still write between the comparison and the
    request.

    Args:
        system: File system of fsspec.
        path: Path of the object in this file system.
        tag: Expected tag; None if no object may exist.
        request: Sends the request with additional arguments: the condition, or none. It may be called twice.

    Returns:
        The result of the request.

    Raises:
        Changed: The object has another tag.
        OSError: The request failed.
    """
    bucket = path.partition("/")[0]
    if speaks_s3(system) and bucket not in _without_conditions.get(system, ()):
        try:
            return request({"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag})
        except OSError as error:
            code = code_of(error)
            if isinstance(error, FileExistsError) or code in _NOT_MET:
                raise Changed(path) from error
            if code not in _UNSUPPORTED:
                raise
        _without_conditions.setdefault(system, set()).add(bucket)
    if current_tag(system, path) != tag:
        raise Changed(path)
    return request({})


def guards_writes(system: Any, path: str, data: bytes) -> bool:
    """Return whether a store rejects requests whose condition is not met.

    Some servers ignore conditions. This is tried with both kinds, on an object that already has the content
    of the requests. From then on, this process compares the tags in such a bucket itself.

    Args:
        system: File system of fsspec. Without the S3 protocol, the result is True.
        path: Path of an object in this file system, which only this process writes.
        data: Its content.

    Raises:
        OSError: A request failed.
    """
    if not speaks_s3(system):
        return True
    bucket, key, _ = system.split_path(path)
    if bucket in _without_conditions.get(system, ()):
        return False
    for condition in ({"IfNoneMatch": "*"}, {"IfMatch": _NO_TAG}):
        try:
            with_retries(send_body, system, "put_object", data, Bucket=bucket, Key=key, **condition)
        except OSError as error:
            if isinstance(error, FileExistsError) or code_of(error) in _NOT_MET:
                continue
            if code_of(error) not in _UNSUPPORTED:
                raise
        _without_conditions.setdefault(system, set()).add(bucket)
        return False
    return True


def current_tag(system: Any, path: str) -> str | None:
    """Return the tag of the stored version of an object, or None if it does not exist."""
    try:
        return tag_of(object_info(system, path, folders=False))
    except FileNotFoundError:
        return None


def tag_of(info: dict[str, Any]) -> str | None:
    """Return the tag in the properties of an object, or None if the store has no tags."""
    tag = info.get("ETag") or info.get("etag") or info.get("generation")
    return None if tag is None else str(tag)
