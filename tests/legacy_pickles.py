"""Legacy pickles for tests: examples, enums, files, and small files that expand to gigabytes."""

from __future__ import annotations

import enum
import gzip
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

__all__ = [
    "ENUM_MODULES",
    "EXPANDING",
    "Player",
    "Winner",
    "assert_same",
    "example",
    "install_enums",
    "legacy_enum",
    "load_pickle",
    "one_hot",
    "save_pickle",
    "top_level",
    "write_expanding",
]

# Enums

ENUM_MODULES: Final = ("hex_ai.enums", "hex_ai.value_utils")
_ENUMS: Final = {
    (module, name): enum.Enum(name, {"BLUE": 0, "RED": 1}, module=module)  # type: ignore[misc]
    for module in ENUM_MODULES
    for name in ("Player", "Winner")
}


def legacy_enum(name: str, module: str = "hex_ai.enums") -> Any:
    """Return the enum "Player" or "Winner" of a module of the legacy tool."""
    return _ENUMS[module, name]


Player = legacy_enum("Player")
Winner = legacy_enum("Winner")


def install_enums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package ``hex_ai`` importable, with its enums, so that pickle can write and read these."""
    monkeypatch.setitem(sys.modules, "hex_ai", types.ModuleType("hex_ai"))
    for module in ENUM_MODULES:
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    for (module, name), kind in _ENUMS.items():
        setattr(sys.modules[module], name, kind)


# Examples


def one_hot(move: int, n: int, dtype: str = "f4") -> np.ndarray:
    """Return a policy (n·n,) with all probability on one move."""
    cells = np.zeros(n * n, dtype)
    cells[move] = 1
    return cells


def example(game: int, ply: int, total: int = 4, *, n: int = 5, **changes: Any) -> dict[str, Any]:
    """Return an example as the legacy tool of September 2025 wrote it.

    Blue plays down column a and red down column b, so blue wins.

    Args:
        game: Line of the game in its file.
        ply: Number of moves made.
        total: Number of positions of the game.
        n: Board size.
        changes: Values of fields and metadata to set instead; ``...`` leaves one out.
    """
    board = np.zeros((2, n, n), "f4")
    for move in range(ply):
        board[move % 2, move // 2, move % 2] = 1
    metadata = {
        "game_id": (0, game),
        "position_in_game": ply,
        "total_positions": total,
        "value_sample_tier": ply % 4,
        "winner": "BLUE",
    }
    fields = {
        "board": board,
        "policy": one_hot(ply // 2 * n + ply % 2, n) if ply < total - 1 else None,
        "value": 0.0,
        "player_to_move": ply % 2,
        "metadata": metadata,
    }
    for name, change in changes.items():
        (fields if name in fields else metadata)[name] = change
    fields["metadata"] = changes.get("metadata", {k: v for k, v in metadata.items() if v is not ...})
    return {key: item for key, item in fields.items() if item is not ...}


def top_level(examples: list[Any], **header: Any) -> dict[str, Any]:
    """Return the content of a legacy file."""
    return {"examples": examples, "source_file": "data/a.trmph", **header}


# Files


def save_pickle(path: Path, content: object, protocol: int = 4) -> Path:
    """Write an object, or the bytes of a pickle, as a gzipped file; return its path."""
    raw = content if isinstance(content, bytes) else pickle.dumps(content, protocol)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw, 1, mtime=0))
    return path


def load_pickle(path: Path) -> Any:
    """Return the object in a gzipped pickle that hexdata or a test wrote."""
    with gzip.open(path) as file:
        return pickle.load(file)


def assert_same(one: Any, other: Any, where: str = "top") -> None:
    """Compare two objects: types, dtypes, shapes, bytes, memory order, keys and their order, enum classes."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_same(first, second, f"{where}[{index}]")
    elif isinstance(one, np.ndarray):
        found = (one.dtype.str, one.shape, one.flags.f_contiguous, one.tobytes())
        assert found == (other.dtype.str, other.shape, other.flags.f_contiguous, other.tobytes()), where
    elif isinstance(one, np.generic):
        assert (one.dtype.str, one.tobytes()) == (other.dtype.str, other.tobytes()), where
    else:
        assert repr(one) == repr(other), where  # -0.0 is not 0.0, and a NaN equals itself


# Small files that a careless reader expands to gigabytes

_MEGABYTE: Final = "x" * (1 << 20)


def _with_metadata(metadata: dict[Any, Any]) -> dict[str, Any]:
    return example(0, 0, n=13, policy=None, player_to_move=..., metadata=metadata)


def _examples(metadata: Callable[[int], dict[Any, Any]], count: int = 5000) -> object:
    return {"examples": [_with_metadata(metadata(number)) for number in range(count)]}


def _distinct_notes() -> Iterator[bytes]:
    """Yield the pickle of 1,000 examples, each with a different text of one megabyte."""
    yield b"\x80\x03}X\x08\x00\x00\x00examples]("
    for number in range(1000):
        file = io.BytesIO()
        pickler = pickle.Pickler(file, 3)
        pickler.fast = True  # without memo numbers, which would be those of one example
        pickler.dump(_with_metadata({"note": f"{number:06d}" + _MEGABYTE[:-6]}))
        yield file.getvalue()[2:-1]
    yield b"es."


def _nones() -> Iterator[bytes]:
    """Yield the pickle of ten million examples that are None."""
    yield b"\x80\x03}\x8c\x08examples]"
    yield from [b"(" + b"N" * 1000 + b"e"] * 10_000
    yield b"s."


EXPANDING: Final[dict[str, Callable[[], object]]] = {
    "a shared list": lambda: _examples(lambda _: {"note": [_MEGABYTE] * 4000}, 1),
    "a shared header": lambda: {"examples": [_with_metadata({})], "more": [_MEGABYTE] * 60_000},
    "unknown keys": lambda: {"examples": [{_MEGABYTE: None} for _ in range(5000)]},
    "a long key": lambda: _examples(lambda _: {_MEGABYTE: float("nan")}),
    "a shared note": lambda: _examples(lambda _: {"note": _MEGABYTE}),
    "distinct notes": _distinct_notes,
    "nones": _nones,
    "distinct keys": lambda: _examples(lambda number: {f"key{number}": number}),
    "many keys": lambda: _examples(lambda _: {f"key{number}": number for number in range(5000)}, 1),
    "a shared payload": lambda: (
        {"array": (array := np.zeros(1 << 17)), "examples": [[array] * 3 for _ in range(5000)]}
    ),
    "header keys": lambda: {"examples": []} | {f"key{number}": None for number in range(1_000_000)},
    "lists": lambda: {"examples": [[[] for _ in range(100)] for _ in range(20_000)]},
}
"""Functions that return each content: an object to pickle, or an iterator over the bytes of a pickle."""


def write_expanding(name: str, path: Path) -> None:
    """Write one of ``EXPANDING`` as a gzipped file."""
    content = EXPANDING[name]()
    with gzip.open(path, "wb", compresslevel=6) as file:
        for piece in content if isinstance(content, Iterator) else [pickle.dumps(content, 4)]:
            file.write(piece)
