"""Conversion of the state of a live pipeline to plain values for checkpoints, and back.

It does not depend on what stages store, and never runs code from a state.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import numpy as np

from hexdata.errors import ConfigError, StoreError
from hexdata.live.chunk import Chunk, ChunkSource, FoundFile, ReadProgress

__all__ = ["decode_state", "encode_state"]

_NO_BYTES: Final = ("bytes",)
"""Replacement for ``b""``, the only bytes that ``torch.load`` with ``weights_only=True`` refuses."""

_STORED_TYPES: Final = {
    "Chunk": Chunk,
    "ChunkSource": ChunkSource,
    "FoundFile": FoundFile,
    "Reading": ReadProgress,
}
"""Pipeline items by their type names in states."""

_TYPE_NAMES: Final = {kind: name for name, kind in _STORED_TYPES.items()}

_STORED_FIELDS: Final = {"index": "place", "previous": "after", "progress": "reading"}
"""Fields of pipeline items whose names in states differ from those in Python."""

_FIELDS: Final = {stored: name for name, stored in _STORED_FIELDS.items()}


def encode_state(value: Any) -> Any:
    """Return a value as text, numbers, bytes, lists, dicts and tuples, which pickle and ``torch.save``
    preserve.

    An array, a path, a tuple or a pipeline item becomes a tuple of its type name and its parts.

    Raises:
        ConfigError: A stage or a queue contains a value that cannot be encoded.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return _NO_BYTES if value == b"" else value
    if isinstance(value, list):
        return [encode_state(item) for item in value]
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {key: encode_state(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return ("array", value.dtype.str, list(value.shape), encode_state(value.tobytes()))
    if isinstance(value, np.generic):
        return encode_state(value.item())
    if isinstance(value, tuple):
        return ("tuple", [encode_state(item) for item in value])
    if isinstance(value, Path):
        return ("path", str(value))
    if type(value) in _TYPE_NAMES:
        names = [each.name for each in dataclasses.fields(value)]
        parts = {_STORED_FIELDS.get(name, name): encode_state(getattr(value, name)) for name in names}
        return (_TYPE_NAMES[type(value)], parts)
    raise ConfigError(
        "a live pipeline contains a value that a state cannot store",
        found=repr(value)[:80],
        expected="text, numbers, bytes, arrays, paths, lists, tuples, dicts, or items of hexdata.live.chunk",
    )


def decode_state(value: Any) -> Any:
    """Return the value that :func:`encode_state` encoded; arrays are writable copies.

    Raises:
        StoreError: ``encode_state`` does not produce such a value.
    """
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if isinstance(value, dict):
        return {key: decode_state(item) for key, item in value.items()}
    if not isinstance(value, tuple):
        return value
    try:
        match value:
            case ("bytes",):
                return b""
            case ("array", dtype, shape, data):
                return np.frombuffer(decode_state(data), np.dtype(dtype)).reshape(shape).copy()
            case ("tuple", items):
                return tuple(decode_state(items))
            case ("path", path):
                return Path(path)
            case (name, parts):
                fields = {_FIELDS.get(part, part): decode_state(stored) for part, stored in parts.items()}
                return _STORED_TYPES[name](**fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(value) from error
    raise _damaged(value)


def _damaged(value: object) -> StoreError:
    return StoreError("the state of a live pipeline is damaged", found=repr(value)[:80])
