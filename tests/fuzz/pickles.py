"""Fuzz targets for legacy pickles, compared with Python's own unpickler.

The property: if hexdata accepts a pickle, Python reads the same arrays, values, metadata and types from it.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import math
import pickle
import random
import re
import struct
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hexdata.board import pack_boards
from hexdata.errors import FormatError
from hexdata.formats.legacy import LegacyReader, write_legacy
from hexdata.formats.legacy.allowlist import (
    AllowedGlobal,
    ByteArray,
    EnumValue,
    PickledArray,
    PickledDtype,
    PickledScalar,
)
from hexdata.formats.legacy.dialect import (
    DIALECT_KEY,
    EXAMPLE_KEY,
    EXAMPLE_TYPES_KEY,
    TYPES_KEY,
    unescaped_key,
)
from hexdata.formats.legacy.stream import PickleStream
from hexdata.formats.legacy.unpickler import Unpickler
from tests.fuzz.random_pickles import damaged, opcodes_of, written
from tests.fuzz.target import DifferentError, Target, read_all

__all__ = ["PickleRowsTarget", "PickleTarget", "check_file", "compare", "load", "ours", "theirs"]

MOST_NODES = 20_000
"""Maximum number of values compared per pickle, since nested shared lists grow exponentially."""


class TooLargeError(Exception):
    """The content has more values than are compared."""


# Reading with Python


class Member:
    """A member of an enum whose package is not installed."""

    def __init__(self, kind: str, value: object) -> None:
        self.kind, self.value = kind, value


class _Restricted:
    """A mixin for Python's unpicklers: allows only NumPy's functions and placeholders for enums."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("hex_ai.enums", "hex_ai.value_utils") and name in ("Player", "Winner"):
            return functools.partial(Member, f"{module}.{name}")
        core = module.replace("numpy.core", "numpy._core")
        functions = ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
        allowed = {"_codecs.encode", "numpy.ndarray", "numpy.dtype", *(f"numpy._core.{f}" for f in functions)}
        if f"{core}.{name}" not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(core, name)  # type: ignore[misc]


class SafeUnpickler(_Restricted, pickle.Unpickler):
    """Python's unpickler in C."""


class SlowUnpickler(_Restricted, pickle._Unpickler):  # type: ignore[misc]
    """Python's unpickler in Python. Unlike that in C, it needs no memory for numbers that are not used."""


_LARGE_MEMO_NUMBER = re.compile(rb"r...[\x01-\xff]|p[\s+_0-9]{7}", re.DOTALL)


def load(raw: bytes, slow: bool = False) -> Any:
    """Read with Python; a pickle with frames of wrong lengths, on which its unpicklers disagree, without."""
    kind = SlowUnpickler if slow or _LARGE_MEMO_NUMBER.search(raw) else SafeUnpickler
    try:
        return kind(io.BytesIO(raw)).load()
    except Exception:
        if b"\x95" not in raw:
            raise
        return kind(io.BytesIO(b"".join(opcodes_of(raw)))).load()


# Canonical form of both results


def canonical(value: Any, nodes: list[int], depth: int = 0) -> object:
    """Return a value of either reading as tuples that are equal if type and content are."""
    nodes[0] += 1
    if nodes[0] > MOST_NODES or depth > 60:
        raise TooLargeError
    kind = type(value)
    if kind in (list, tuple):
        return (kind.__name__, *(canonical(item, nodes, depth + 1) for item in value))
    if kind is dict:
        return ("dict", *(canonical(part, nodes, depth + 1) for item in value.items() for part in item))
    if kind is float:
        return ("float", struct.pack("<d", value))
    if isinstance(value, PickledArray):  # without a dtype until it is filled in
        cells = np.frombuffer(value.payload, value.dtype or "|i1")
        value = cells.reshape(value.shape if value.dtype else 0, order="F" if value.fortran else "C")
    if isinstance(value, np.ndarray):
        # In native byte order, to which NumPy converts when it unpickles.
        native = value.astype(value.dtype.newbyteorder("="))
        return ("array", native.dtype.str, native.shape, native.tobytes())
    if isinstance(value, (np.generic, PickledScalar)):
        number = value.item() if isinstance(value, np.generic) else value.value
        return ("scalar", np.dtype(value.dtype).newbyteorder("=").str, repr(number))
    if isinstance(value, (Member, EnumValue)):
        return ("enum", value.kind, canonical(value.value, nodes, depth + 1))
    if isinstance(value, (PickledDtype, np.dtype)):
        return ("dtype", np.dtype(value.name if isinstance(value, PickledDtype) else value).str)
    if kind in (bytearray, ByteArray):
        return ("bytearray", bytes(value))
    return ("name",) if isinstance(value, AllowedGlobal) or callable(value) else (kind.__name__, value)


def ours(raw: bytes) -> tuple[list[object], object]:
    """Return each example as it was when it was handed out, and the outermost dict, both canonical.

    Raises:
        FormatError: hexdata refuses the pickle.
    """
    unpickler = Unpickler(PickleStream(io.BytesIO(raw)))
    nodes = [0]
    examples = [canonical(item, nodes) for items in unpickler.run() for item in items]
    top = unpickler.result
    if not isinstance(top, dict) or type(top.get("examples")).__name__ != "ExamplesPlaceholder":
        raise FormatError("no legacy file")
    return examples, canonical({key: value for key, value in top.items() if key != "examples"}, nodes)


def theirs(raw: bytes, slow: bool = False) -> tuple[list[object], object]:
    """Return the same by Python."""
    nodes, top = [0], load(raw, slow)
    examples = [canonical(item, nodes) for item in top.pop("examples")]
    return examples, canonical(top, nodes)


def compare(raw: bytes) -> bool:
    """Compare the interpreter with both unpicklers of Python; return whether it accepts a pickle."""
    try:
        found = ours(raw)
        for slow in (False, True):
            if found != theirs(raw, slow):
                raise DifferentError("Python reads other values")
    except (FormatError, TooLargeError):
        return False
    except Exception as error:
        raise DifferentError(f"Python does not read what hexdata does: {error!r}") from error
    return True


# The rows of the reader


def number(value: Any) -> Any:
    """Return the plain number of an enum member or a NumPy scalar."""
    value = value.value if isinstance(value, Member) else value
    return value.item() if isinstance(value, np.generic) else value


WINNERS = {"BLUE": 0, "RED": 1, "b": 0, "r": 1, "1": 0, "2": 1, 1: 0, 2: 1, None: None}
KNOWN = ("game_id", "winner", "position_in_game", "total_positions", "value_sample_tier")
FIELDS = ("board", "policy", "value", "player_to_move", "metadata", "policy_search_target")


def expected(example: Any) -> dict[str, Any]:
    """Return what an accepted row must hold, from Python's reading of its example."""
    if isinstance(example, tuple):
        example = dict(zip(("board", "policy", "value"), example, strict=True))
    metadata = example.get("metadata", {})
    file_idx, line_idx = metadata.get("game_id") or (None, None)
    winner = metadata.get("winner")
    move, policy = None, example["policy"]
    if policy is not None and np.count_nonzero(policy) == 1 == policy.max() and not np.signbit(policy).any():
        move, policy = int(policy.argmax()), None
    policy = example.get("policy_search_target", policy)
    if policy is not None:
        narrow = policy.astype(np.float32)
        cells = np.flatnonzero(narrow.view(np.uint32)).tolist()
        policy = [{"cell": cell, "probability": float(narrow[cell])} for cell in cells]
    numbers = {key: typed(value) for key, value in example.items() if key not in FIELDS}
    extra = {key: typed(value) for key, value in metadata.items() if key not in KNOWN}
    return {
        "board": bytes(pack_boards((example["board"] == 1).astype(np.uint8)[np.newaxis])[0]),
        "move": move,
        "policy": policy,
        "value": float(number(example["value"])),
        "player_to_move": number(example.get("player_to_move")),
        "file_idx": number(file_idx),
        "line_idx": number(line_idx),
        **{key: number(metadata.get(key)) for key in KNOWN[2:]},
        "winner": int(winner.value) if isinstance(winner, Member) else WINNERS[winner],
        "metadata": json.dumps([extra, numbers], sort_keys=True),
    }


def typed(value: Any) -> Any:
    """Return a number of NumPy, or one that is not finite, with its type; any other value unchanged."""
    if isinstance(value, np.generic):
        return ["numpy", value.dtype.str, repr(value.item())]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def untyped(values: dict[str, Any], types: dict[str, str]) -> dict[str, Any]:
    """Return values of the column ``metadata`` in the form of :func:`typed`."""
    result = dict(values)
    for key, spelling in types.items():
        if spelling.startswith("numpy "):
            value = float(values[key]) if isinstance(values[key], str) else values[key]
            result[key] = ["numpy", spelling.removeprefix("numpy "), repr(value)]
    return result


def check_file(path: Path) -> tuple[str, int]:
    """Compare the rows of a file with the examples that Python reads from it.

    Returns:
        The reason code of its error, "" for none, and the number of rejected examples.
    """
    rows, rejected, code = read_all(lambda: LegacyReader(path))
    if code:
        return code, len(rejected)
    examples = load(path.read_bytes())["examples"]
    if len(rows) + len(rejected) != len(examples):
        raise DifferentError(f"{len(rows)} rows and {len(rejected)} rejected of {len(examples)} examples")
    for row in rows:
        extra = json.loads(row["metadata"] or "{}")
        extra.pop(DIALECT_KEY, None)
        numbers = untyped(extra.pop(EXAMPLE_KEY, {}), extra.pop(EXAMPLE_TYPES_KEY, {}))
        types = extra.pop(TYPES_KEY, {})
        extra = untyped({unescaped_key(key): value for key, value in extra.items()}, types)
        found = row | {"metadata": json.dumps([extra, numbers], sort_keys=True)}
        for name, value in expected(examples[row["record"]]).items():
            if repr(found[name]) != repr(value):
                raise DifferentError(f"record {row['record']}: {name} is {found[name]!r}, not {value!r}")
    return "", len(rejected)


def check_written_back(path: Path) -> None:
    """Compare the accepted examples of a file with those that are written back from its rows."""
    with LegacyReader(path) as reader:
        batches = [batch.positions for batch in reader.batches()]
    header: Any = json.loads(json.dumps({"dialect": reader.header["dialect"]}, allow_nan=False))
    written = io.BytesIO()
    write_legacy(written, batches, board_size=reader.board_size or 0, dialect=header["dialect"], header={})
    examples, found = (
        load(path.read_bytes())["examples"],
        load(gzip.decompress(written.getvalue()))["examples"],
    )
    accepted = [examples[record] for batch in batches for record in batch["record"].to_pylist()]
    if [canonical(one, [0]) for one in accepted] != [canonical(other, [0]) for other in found]:
        raise DifferentError("an example is written back in another way")


# Targets


class PickleTarget(Target):
    """The interpreter: each accepted pickle has the values and types that both unpicklers of Python read."""

    examples: ClassVar[int] = 1
    words = (
        *(
            b"cos\nsystem\n",
            b"\x8c\x08builtins\x8c\x04eval\x93",
            b"X\x08\x00\x00\x00examples",
            b"]",
            b"\x87R",
        ),
        *(b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"u."),
        *(b"chex_ai.enums\nWinner\nK\x01\x85R", b"c_codecs\nencode\n", b"\x8e" + b"\xff" * 8, b"(" * 20),
        *(b"\x95\x04\x00\x00\x00\x00\x00\x00\x00", b"J\xff\xff\xff\xff", b"\x94h\x00", b"h\x01", b"\x80\x04"),
    )

    def seeds(self) -> list[bytes]:
        return [written(random.Random(number), self.examples) for number in range(24)]

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Return a new pickle, or change opcodes; bytes, if the input does not consist of opcodes."""
        kind = rng.random()
        if kind < 0.4:
            return written(rng, rng.choice((1, 2, 3)) * self.examples)
        try:
            return damaged(opcodes_of(raw), rng) if kind < 0.85 else super().mutate(raw, rng)
        except Exception:  # noqa: BLE001 - of pickletools
            return super().mutate(raw, rng)

    def check(self, raw: bytes) -> bool:
        return compare(raw)


class PickleRowsTarget(PickleTarget):
    """The reader: rows have Python's values, also those of runs, and become the same examples again."""

    max_len = 4096
    examples = 3
    """The fewest for which runs are found."""

    def check(self, raw: bytes) -> bool:
        self.path.write_bytes(raw)
        is_read = not check_file(self.path)[0]
        if is_read:
            check_written_back(self.path)
        return is_read
