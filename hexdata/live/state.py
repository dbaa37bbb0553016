"""The state of a live pipeline as plain values, for checkpoints: text, numbers, bytes, lists and the like.

Knows nothing of what stages keep, and never runs code out of a state.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import numpy as np

from hexdata.errors import ConfigError, StoreError
from hexdata.live.chunk import Chunk, ChunkSource, FoundFile, Reading

__all__ = ["decode_state", "encode_state"]

_NO_BYTES: Final = ("bytes",)
"""For ``b""``, which ``torch.load`` with ``weights_only=True`` refuses, as it does no other bytes."""

_RECORDS: Final = {kind.__name__: kind for kind in (Chunk, ChunkSource, FoundFile, Reading)}


def encode_state(value: Any) -> Any:
    """Return a value in plain ones, which pickle, ``torch.save`` and the like keep and give back alike.

    What is not plain is a tuple of what it is and its parts: arrays, paths, what flows through a pipeline,
    and tuples themselves.

    Raises:
        ConfigError: a stage keeps, or a queue holds, what cannot be written like that.
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
    if type(value) in _RECORDS.values():
        parts = {each.name: encode_state(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return (type(value).__name__, parts)
    raise ConfigError(
        "a live pipeline holds what a state cannot keep",
        found=repr(value)[:80],
        expected="text, numbers, bytes, arrays, lists, tuples, dicts, and what hexdata.live.chunk has",
    )


def decode_state(value: Any) -> Any:
    """Undo :func:`encode_state`; arrays are new and can be written to.

    Raises:
        StoreError: it gave no such value.
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
                return _RECORDS[name](**decode_state(parts))
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(value) from error
    raise _broken(value)


def _broken(value: object) -> StoreError:
    return StoreError("the state of a live pipeline is broken", found=repr(value)[:80])
