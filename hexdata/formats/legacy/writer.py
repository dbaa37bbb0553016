"""Writer of legacy pickles: the inverse of the reader, given the dialect that the reader found.

The opcodes are written without the module ``pickle``. Enums of packages that are not installed can therefore
be named, the same input always results in the same bytes, and memory does not grow with the file. The value
convention is not converted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from zlib_ng import gzip_ng

from hexdata.board import unpack_boards
from hexdata.errors import InputError
from hexdata.formats.legacy.dialect import (
    DIALECT_KEY,
    EXAMPLE_KEY,
    EXAMPLE_TYPES_KEY,
    TYPES_KEY,
    WINNER_SPELLINGS,
    escaped_key,
    unescaped_key,
)
from hexdata.policy import SparsePolicies
from hexdata.strict_json import parse_metadata, shortened

__all__ = ["DIALECTS", "write_legacy"]

_GAME_KEYS: Final = ["game_id", "position_in_game", "total_positions", "value_sample_tier", "winner"]
_TUPLES: Final = {"layout": "tuple", "board": "<f4", "policy": "<f4", "value": "float"}
_DICTS: Final = {
    "layout": "dict",
    "board": "<f4",
    "policy": "<f4",
    "value": "float",
    "winner": "BLUE/RED",
    "keys": ["board", "policy", "value", "metadata"],
    "metadata_keys": _GAME_KEYS,
}
_WITH_PLAYER: Final = {
    "keys": ["board", "policy", "value", "player_to_move", "metadata"],
    "player_to_move": "int",
}

DIALECTS: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "tuples": _TUPLES,
        "dicts": _DICTS,
        "dicts-player": _DICTS | _WITH_PLAYER,
        "dicts-enums": _DICTS
        | _WITH_PLAYER
        | {
            "player_to_move": "hex_ai.enums.Player",
            "winner": "hex_ai.enums.Winner",
            "metadata_keys": [*_GAME_KEYS, "source_file"],
        },
    }
)
"""Dialects of the legacy tool: until 18 July 2025 (where a value of 1.0 means that blue won), from 23 July,
from 25 July, and in September. ``header["dialect"]`` of a reader has the same form."""

_SCALARS: Final = (
    "value",
    "player_to_move",
    "file_idx",
    "line_idx",
    "position_in_game",
    "total_positions",
    "value_sample_tier",
    "winner",
    "metadata",
)
"""Columns of a raw batch that are converted to Python values."""

_PARTS: Final = ("board", "policy", "value")
"""Fields of a tuple, in order."""

_BATCH: Final = 1000
"""Number of examples appended at a time, as in the pickler of Python."""
_MEMO: Final = 1 << 16
"""Maximum number of memo entries. Values beyond it are written in full each time."""


def write_legacy(
    target: str | Path | BinaryIO,
    batches: Iterable[pa.RecordBatch],
    *,
    board_size: int,
    dialect: str | Mapping[str, object],
    header: Mapping[str, object],
    level: int = 6,
    all_metadata: bool = False,
) -> int:
    """Write a gzipped pickle of protocol 4, without a time stamp.

    Args:
        target: Open binary file, or path. A path is written in place, so pass a temporary one.
        batches: Batches of ``schema.raw_schema(board_size)``, in order. Values are written unchanged. An
            example whose ``metadata`` contains spellings is written with these.
        board_size: Cells along an edge.
        dialect: Name in :data:`DIALECTS`, or ``header["dialect"]`` of a reader.
        header: The other top-level keys, as in the header of a reader; ``dialect`` is ignored. Keys that
            follow the examples are read after the last batch, so they may be added until then.
        level: Level of gzip compression, 1 to 9. Default 6.
        all_metadata: Whether to write all keys of the column ``metadata``, after those of the dialect and in
            sorted order. Default False: only the keys of the dialect.

    Returns:
        The number of examples written.

    Raises:
        InputError: A field has several spellings in the dialect without a first one, a spelling is unknown,
            or a value of the metadata or the header cannot be written.
    """
    if isinstance(target, (str, Path)):
        with Path(target).open("wb") as file:
            return write_legacy(
                file,
                batches,
                board_size=board_size,
                dialect=dialect,
                header=header,
                level=level,
                all_metadata=all_metadata,
            )
    spelling = DIALECTS[dialect] if isinstance(dialect, str) else dialect
    examples = _ExampleEncoder(board_size, spelling, all_metadata=all_metadata)
    count = 0
    with _gzip(target, level) as out:
        write = examples.write
        before = _items(header)[: cast(int, spelling.get("examples", 0))]
        out.write(b"\x80\x04}(" + _pairs(write, before) + write.text("examples") + b"]")
        for batch in batches:
            for start in range(0, len(batch), _BATCH):
                part = batch.slice(start, _BATCH)
                out.write(b"(" + b"".join(examples.encode(part)) + b"e")
                count += len(part)
        out.write(_pairs(write, _items(header)[len(before) :]) + b"u.")
    return count


def _items(header: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(unescaped_key(key), value) for key, value in header.items() if key != "dialect"]


def _pairs(write: _Opcodes, items: Iterable[tuple[str, object]]) -> bytes:
    return b"".join(write.text(key) + write.value(value, tagged=True) for key, value in items)


def _gzip(raw: BinaryIO, level: int) -> BinaryIO:
    """Return a gzip stream into ``raw`` without a file name and a time stamp."""
    stream: Any = gzip_ng.GzipNGFile.__new__(gzip_ng.GzipNGFile)
    try:
        stream.__init__("", "wb", level, raw, mtime=0)
    except BaseException:
        stream.fileobj = None  # else its finalizer writes to ``raw`` again, after it is closed
        raise
    return cast(BinaryIO, stream)


class _Opcodes:
    """Encodes values as opcodes that push them. Texts, names and enum members are memoized on first use."""

    def __init__(self) -> None:
        self._memo: dict[object, int] = {}
        self._heads: dict[object, bytes] = {}

    def once(self, key: object, opcodes: Callable[[], bytes]) -> bytes:
        """Return a reference to the object of ``key``; on first use, ``opcodes()`` and a MEMOIZE."""
        index = self._memo.get(key)
        if index is not None:
            return b"h%c" % index if index < 256 else b"j" + struct.pack("<I", index)
        body = opcodes()
        if len(self._memo) >= _MEMO:
            return body
        self._memo[key] = len(self._memo)
        return body + b"\x94"

    def text(self, text: str) -> bytes:
        return self.once(text, lambda: _text(text))

    def name(self, module: str, name: str) -> bytes:
        return self.once((module, name), lambda: self.text(module) + self.text(name) + b"\x93")

    def member(self, kind: str, value: int) -> bytes:
        """Return the opcodes of an enum member; ``kind`` is "module.Class"."""
        module, _, name = kind.rpartition(".")
        if not module:
            raise InputError("the dialect contains an unknown spelling", found=shortened(str(kind)))
        return self.once((kind, value), lambda: self.name(module, name) + _integer(value) + b"\x85R")

    def dtype(self, dtype: str) -> bytes:
        """Return the opcodes of a dtype, given as a NumPy type string such as "<f4"."""

        def opcodes() -> bytes:
            made = self.name("numpy", "dtype") + self.text(dtype[1:]) + b"\x89\x88\x87R"
            state = b"(K\x03" + self.text(dtype[0]) + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
            return made + state + b"b"

        return self.once(("dtype", dtype), opcodes)

    def array_head(self, shape: tuple[int, ...], dtype: str, fortran: bool) -> bytes:
        """Return the opcodes of an array before its payload.

        The payload must follow as a BINBYTES, and then ``tb``.

        Args:
            shape: Shape of the array.
            dtype: NumPy type string.
            fortran: Whether the payload is in Fortran order.
        """
        key, known = (shape, dtype, fortran), len(self._memo)
        if key in self._heads:
            return self._heads[key]
        made = self.name("numpy._core.multiarray", "_reconstruct") + self.name("numpy", "ndarray")
        made += b"K\x00\x85" + self.once(b"b", lambda: b"C\x01b") + b"\x87R"
        lengths = b"(" + b"".join(map(_integer, shape)) + b"t"
        head = made + b"(K\x01" + lengths + self.dtype(dtype) + (b"\x88" if fortran else b"\x89")
        if len(self._memo) == known:
            self._heads[key] = head  # contains references only, no MEMOIZE
        return head

    def scalar(self, dtype: str, value: Any) -> bytes:
        payload = np.array(value, dtype).tobytes()
        made = self.name("numpy._core.multiarray", "scalar") + self.dtype(dtype)
        return made + b"C%c" % len(payload) + payload + b"\x86R"

    def number(self, value: Any, spelling: object) -> bytes:
        """Return the opcodes of a number or None in the given spelling."""
        if value is None:
            return b"N"
        if spelling == "int":
            return _integer(int(value))
        if spelling == "float":
            return b"G" + struct.pack(">d", value)
        if isinstance(spelling, str) and spelling.startswith("numpy "):
            return self.scalar(spelling.removeprefix("numpy "), value)
        return self.member(str(spelling), int(value))

    def value(self, value: Any, *, tagged: bool) -> bytes:
        """Return the opcodes of a JSON value.

        Args:
            value: The value.
            tagged: Whether it is from ``dialect.header_json``: tags such as ``__tuple__`` are then decoded.

        Raises:
            InputError: A tagged value cannot be written back.
        """
        if value is None or isinstance(value, bool):
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        if isinstance(value, int):
            return _integer(value)
        if isinstance(value, float):
            return self.number(value, "float")
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return b"](" + b"".join(self.value(item, tagged=tagged) for item in value) + b"e"
        items = value.items()
        if tagged and len(value) == 1:
            ((tag, content),) = items
            if tag == "__tuple__":
                return b"(" + b"".join(self.value(item, tagged=True) for item in content) + b"t"
            if tag == "__float__":
                return self.number(float(content), "float")
            if tag == "__numpy__":
                dtype, number = content
                return self.scalar(dtype, number["__float__"] if isinstance(number, dict) else number)
            if tag == "__object__":
                raise InputError(
                    "the header contains a value that cannot be written back", found=shortened(str(content))
                )
            items = content if tag == "__dict__" else items
        pairs = (self.value(part, tagged=tagged) for item in items for part in item)
        return b"}(" + b"".join(pairs) + b"u"


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"\x8c%c" % len(raw) + raw if len(raw) < 256 else b"X" + struct.pack("<I", len(raw)) + raw


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 16:
        return b"K%c" % value if value < 256 else b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(raw) + raw


def _metadata(text: str) -> dict[str, Any]:
    return parse_metadata(text, None, "metadata of a position")


class _ExampleEncoder:
    """Encodes rows of raw batches as opcodes, in the dialect of the file, or of the row if it has one.

    Args:
        board_size: Cells along an edge.
        dialect: Spelling of each field, as ``Dialect.as_json`` returns it.

    Raises:
        InputError: A field has several spellings and no first one.
    """

    def __init__(self, board_size: int, dialect: Mapping[str, Any], *, all_metadata: bool = False) -> None:
        self._all_metadata = all_metadata
        first = dialect.get("first", {})
        for field, spelling in dialect.items():
            if isinstance(spelling, Mapping) and field != "first" and field not in first:
                raise InputError(
                    f"the examples have several spellings of {field}, so they cannot be written back",
                    found=shortened(str(dict(spelling))),
                    hint=f"Choose one of the dialects {', '.join(DIALECTS)}.",
                )
        self.write = _Opcodes()
        self._size = board_size
        self._dialect = {**dialect, **first}
        self._parsed = lru_cache(maxsize=1024)(_metadata)

    def encode(self, batch: pa.RecordBatch) -> Iterator[bytes]:
        """Yield the opcodes of each example of a batch, in order."""
        columns = [batch.column(name).to_pylist() for name in _SCALARS]
        codes, dialects = self._dialects(batch.column("metadata"))
        arrays = []
        for code, dialect in enumerate(dialects):
            part = batch if len(dialects) == 1 else batch.take(np.flatnonzero(codes == code))
            arrays.append(zip(self._boards(part, dialect), self._policies(part, dialect), strict=True))
        for code, values in zip(codes.tolist(), zip(*columns, strict=True), strict=True):
            board, policy = next(arrays[code])
            example = self._example(dialects[code], board, policy, dict(zip(_SCALARS, values, strict=True)))
            yield b"".join(example)

    def _dialects(self, metadata: pa.StringArray) -> tuple[npt.NDArray[np.int64], list[dict[str, Any]]]:
        """Return for each row the index of its dialect, (n,), and the list of dialects."""
        codes = np.zeros(len(metadata), np.int64)
        named = pc.match_substring(metadata, f'"{DIALECT_KEY}":').fill_null(False)
        numbers = {"{}": 0}
        for row in np.flatnonzero(named.to_numpy(zero_copy_only=False)).tolist():
            own = json.dumps(self._parsed(metadata[row].as_py()).get(DIALECT_KEY, {}))
            codes[row] = numbers.setdefault(own, len(numbers))
        return codes, [{**self._dialect, **json.loads(own)} for own in numbers]

    def _example(
        self, dialect: dict[str, Any], board: bytes, policy: bytes | None, values: dict[str, Any]
    ) -> Iterator[bytes]:
        # The order of calls is that of the file: the first use of an object is memoized.
        write = self.write
        stored = self._parsed(values["metadata"]) if values["metadata"] is not None else {}
        is_tuple = dialect["layout"] == "tuple"
        yield b"" if is_tuple else b"}("
        for key in _PARTS if is_tuple else dialect["keys"]:
            yield b"" if is_tuple else write.text(key)
            if key == "board":
                yield self._array(board, (2, self._size, self._size), dialect["board"])
            elif key == "policy":
                yield self._array(policy, (self._size**2,), dialect.get("policy", "<f4"))
            elif key == "metadata":
                yield self._metadata(dialect, values, stored)
            elif key in ("value", "player_to_move"):
                yield write.number(values[key], dialect.get(key, "float" if key == "value" else "int"))
            else:
                yield self._stored(stored.get(EXAMPLE_KEY, {}), key, key, stored.get(EXAMPLE_TYPES_KEY, {}))
        yield b"\x87" if is_tuple else b"u"

    def _array(self, payload: bytes | None, shape: tuple[int, ...], spelling: str) -> bytes:
        if payload is None:
            return b"N"
        dtype, _, order = spelling.partition(" ")
        head = self.write.array_head(shape, dtype, bool(order))
        return head + b"B" + struct.pack("<I", len(payload)) + payload + b"tb"

    def _metadata(self, dialect: dict[str, Any], values: dict[str, Any], stored: dict[str, Any]) -> bytes:
        write, types = self.write, stored.get(TYPES_KEY, {})
        parts = []
        others = sorted(map(unescaped_key, stored)) if self._all_metadata else []
        others = [key for key in others if escaped_key(key) in stored and key not in dialect["metadata_keys"]]
        for key in [*dialect["metadata_keys"], *others]:
            parts.append(write.text(key))
            if key == "game_id":
                ids = values["file_idx"], values["line_idx"]
                parts.append(self._game_id(ids, dialect.get("game_id", "int")))
            elif key == "winner":
                parts.append(self._winner(values["winner"], dialect.get("winner", "BLUE/RED")))
            elif key in values:
                parts.append(write.number(values[key], dialect.get(key, "int")))
            else:  # older stores did not escape keys
                kept = escaped_key(key)
                parts.append(self._stored(stored, kept if kept in stored else key, key, types))
        return b"}(" + b"".join(parts) + b"u"

    def _stored(self, stored: dict[str, Any], kept: str, key: str, types: dict[str, Any]) -> bytes:
        """Return the opcodes of a value from the column ``metadata``.

        Args:
            stored: The object in the column that contains the value.
            kept: Key of the value in this object.
            key: Key of the value in the source.
            types: Spellings of numbers by key in the source, as under ``TYPES_KEY``.
        """
        if kept not in stored:
            raise InputError(
                "a key of an example has no value",
                found=shortened(str(key)),
                expected="a value in the column `metadata`",
            )
        value, spelling = stored[kept], types.get(key)
        if spelling is None:
            return self.write.value(value, tagged=False)
        return self.write.number(float(value) if isinstance(value, str) else value, spelling)

    def _game_id(self, ids: tuple[int | None, int | None], spelling: str) -> bytes:
        if None in ids:
            return b"N"
        first, _, second = spelling.partition(", ")
        return self.write.number(ids[0], first) + self.write.number(ids[1], second or first) + b"\x86"

    def _winner(self, winner: int | None, spelling: str) -> bytes:
        if winner is None:
            return b"N"
        if spelling in WINNER_SPELLINGS:
            return self.write.value(WINNER_SPELLINGS[spelling][winner], tagged=False)
        return self.write.member(spelling, winner)

    def _boards(self, batch: pa.RecordBatch, dialect: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the payload of each board."""
        dtype, _, order = dialect["board"].partition(" ")
        planes = unpack_boards(_packed(batch.column("board")), self._size, np.uint8).astype(dtype)
        for board in planes.transpose(0, 3, 2, 1) if order else planes:
            yield board.tobytes()

    def _policies(self, batch: pa.RecordBatch, dialect: Mapping[str, Any]) -> Iterator[bytes | None]:
        """Yield the payload of each policy; None for a row without one."""
        moves, cells = batch.column("move"), self._size**2
        policies = np.zeros((len(batch), cells), dialect.get("policy", "<f4").partition(" ")[0])
        one_hot = np.flatnonzero(moves.is_valid().to_numpy(zero_copy_only=False))
        policies[one_hot, moves.drop_null().to_numpy()] = 1
        given, sparse = SparsePolicies.from_arrow(batch.column("policy"), cells)
        policies[given] = sparse.to_dense(cells)
        has_policy = {*one_hot.tolist(), *given.tolist()}
        for row, policy in enumerate(policies):
            yield policy.tobytes() if row in has_policy else None


def _packed(boards: pa.FixedSizeBinaryArray) -> npt.NDArray[np.uint8]:
    """Return packed boards as a view, uint8 (n, width)."""
    width = boards.type.byte_width
    data = np.frombuffer(boards.buffers()[1], np.uint8)
    return data[boards.offset * width : (boards.offset + len(boards)) * width].reshape(-1, width)
