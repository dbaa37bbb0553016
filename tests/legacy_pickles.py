"""Pickles of some kilobytes that a careless reader turns into gigabytes or hours."""

from __future__ import annotations

import gzip
import pickle
import pickletools
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

__all__ = ["EXPANDING", "write_expanding"]

N: Final = 13
_MEGABYTE: Final = "x" * (1 << 20)
_BATCH: Final = 1000


def _example(metadata: dict[object, object]) -> dict[str, object]:
    board = np.zeros((2, N, N), "f4")
    return {"board": board, "policy": None, "value": 0.0, "metadata": metadata}


def _shared_list() -> object:
    return {"examples": [_example({"note": [_MEGABYTE] * 4000})]}


def _shared_header() -> object:
    return {"examples": [_example({})], "more": [_MEGABYTE] * 60_000}


def _unknown_keys() -> object:
    return {"examples": [{_MEGABYTE: None} for _ in range(5000)]}


def _long_key() -> object:
    return {"examples": [_example({_MEGABYTE: float("nan")}) for _ in range(5000)]}


def _shared_note() -> object:
    return {"examples": [_example({"note": _MEGABYTE}) for _ in range(5000)]}


def _distinct_keys() -> object:
    return {"examples": [_example({f"key{number}": number}) for number in range(5000)]}


def _many_keys() -> object:
    return {"examples": [_example({f"key{number}": number for number in range(5000)})]}


def _shared_payload() -> object:
    array = np.zeros(1 << 17)
    return {"array": array, "examples": [[array, array, array] for _ in range(5000)]}


def _header_keys() -> object:
    return {"examples": []} | {f"key{number}": None for number in range(1_000_000)}


def _lists() -> object:
    return {"examples": [[[] for _ in range(100)] for _ in range(20_000)]}


def _distinct_notes() -> Iterator[bytes]:
    """A thousand notes of a megabyte, pickled one at a time."""
    yield b"\x80\x03}X\x08\x00\x00\x00examples]("
    for number in range(1000):
        raw = pickle.dumps(_example({"note": f"{number:06d}" + _MEGABYTE[:-6]}), 3)[2:-1]
        yield _without_memo(raw)
    yield b"es."


def _without_memo(raw: bytes) -> bytes:
    """Leave out the memo numbers of an example by writing what it refers to again in full."""
    pieces = []
    stored: dict[int, bytes] = {}
    ops = [*pickletools.genops(raw + b".")]
    for (opcode, argument, start), (_, _, stop) in pairwise(ops):
        piece = raw[start:stop]
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            stored[argument] = pieces[-1]
            continue
        pieces.append(stored[argument] if opcode.name in ("BINGET", "LONG_BINGET") else piece)
    return b"".join(pieces)


def _nones() -> Iterator[bytes]:
    """Ten million examples that are None."""
    yield b"\x80\x04}\x8c\x08examples]"
    for _ in range(10_000):
        yield b"(" + b"N" * _BATCH + b"e"
    yield b"s."


EXPANDING: Final[dict[str, Callable[[], object]]] = {
    "a shared list": _shared_list,
    "a shared header": _shared_header,
    "unknown keys": _unknown_keys,
    "a long key": _long_key,
    "a shared note": _shared_note,
    "distinct notes": _distinct_notes,
    "nones": _nones,
    "distinct keys": _distinct_keys,
    "many keys": _many_keys,
    "a shared payload": _shared_payload,
    "header keys": _header_keys,
    "lists": _lists,
}
"""What makes each content: an object to pickle, or the pickle piece by piece."""


def write_expanding(name: str, path: Path) -> None:
    """Write one of `EXPANDING`, gzipped."""
    content = EXPANDING[name]()
    with gzip.open(path, "wb", compresslevel=6) as file:
        if isinstance(content, Iterator):
            for piece in content:
                file.write(piece)
        else:
            pickle.dump(content, file, 4)
