"""Writer of legacy pickles: the inverse of the reader, given the dialect that the reader found.

The opcodes are written without the module ``pickle``. Enums of packages that are not installed can therefore
be named, the same input always results in the same bytes, and memory does not grow with the file. The value
convention is not converted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, BinaryIO, Final, cast

import numpy as np
import pyarrow as pa
from zlib_ng import gzip_ng

from hexdata.board import unpack_boards
from hexdata.errors import InputError
from hexdata.formats.legacy import dialect as spellings
from hexdata.formats.legacy.allowlist import DTYPE_CODES, ENUMS, EnumValue, PickledArray, PickledScalar
from hexdata.formats.legacy.dialect import escaped_key, unescaped_key
from hexdata.formats.legacy.examples import ARRAYS, REQUIRED, SEARCH_KEY
from hexdata.json_models import read_metadata
from hexdata.policy import SparsePolicies
from hexdata.schema import binary_matrix
from hexdata.text import shortened

_GAME_KEYS: Final = ["game_id", "position_in_game", "total_positions", "value_sample_tier", "winner"]
_TUPLES: Final = {"layout": "tuple", "board": "<f4", "policy": "<f4", "value": "float"}
_DICTS: Final = {
    **_TUPLES,
    "layout": "dict",
    "winner": "BLUE/RED",
    "keys": ["board", "policy", "value", "player_to_move", "metadata"],
    "metadata_keys": _GAME_KEYS,
    "player_to_move": "int",
}
_ENUMS: Final = {"player_to_move": "hex_ai.enums.Player", "winner": "hex_ai.enums.Winner"}

DIALECTS: Final[Mapping[str, Mapping[str, object]]] = {
    "tuples": _TUPLES,
    "dicts": _DICTS,
    "enums": {**_DICTS, **_ENUMS, "metadata_keys": [*_GAME_KEYS, "source_file"]},
}
"""Dialects of the legacy tool: until 18 July 2025 (where a value of 1.0 means that blue won), from 25 July,
and in September. ``header["dialect"]`` of a reader has the same form."""

_SCALARS: Final = ("value", "player_to_move", "file_idx", "line_idx", *_GAME_KEYS[1:])
"""Columns of a raw batch that are converted to Python values."""

_TUPLES_OF: Final = {2: b"\x86", 3: b"\x87"}
"""Opcodes of tuples by their length."""
_BATCH: Final = 1000
"""Number of examples appended at a time, as in the pickler of Python."""
_MEMO: Final = 1 << 16
"""Maximum number of memo entries. Values beyond it are written in full each time."""


def write_legacy(
    target: BinaryIO,
    batches: Iterable[pa.RecordBatch],
    *,
    board_size: int,
    dialect: Mapping[str, object],
    header: Mapping[str, object],
    level: int = 6,
    all_metadata: bool = False,
) -> int:
    """Write a gzipped pickle of protocol 4, without a time stamp.

    Args:
        target: Open binary file.
        batches: Batches of ``schema.raw_schema(board_size)``, in order. Values are written unchanged. An
            example whose ``metadata`` contains spellings is written with these.
        board_size: Cells along an edge.
        dialect: One of :data:`DIALECTS`, or ``header["dialect"]`` of a reader.
        header: The other top-level keys, as in the header of a reader; ``dialect`` is ignored. Keys that
            follow the examples are read after the last batch, so they may be added until then.
        level: Level of gzip compression, 1 to 9. Default 6.
        all_metadata: Whether to write all keys of the column ``metadata``, after those of the dialect and in
            sorted order. Default False: only the keys of the dialect.

    Returns:
        The number of examples written.

    Raises:
        InputError: A spelling is unknown, or a value of the metadata or the header cannot be written.
    """
    examples = _Examples(board_size, dialect, all_metadata=all_metadata)
    write = _Opcodes()
    count = 0
    with _gzip(target, level) as out:
        # Keys that preceded the examples in the source precede them again, in the same order.
        before = _items(header)[: cast("int", dialect.get("examples", 0))]
        out.write(b"\x80\x04}(" + write.items(before) + write.value("examples") + b"]")
        for batch in batches:
            for start in range(0, len(batch), _BATCH):
                part = batch.slice(start, _BATCH)
                out.write(b"(" + b"".join(map(write.value, examples.of(part))) + b"e")
                count += len(part)
        out.write(write.items(_items(header)[len(before) :]) + b"u.")
    return count


def _items(header: Mapping[str, object]) -> list[tuple[Any, Any]]:
    items = ((unescaped_key(key), value) for key, value in header.items() if key != "dialect")
    return [(key, spellings.from_tagged(value)) for key, value in items]


def _gzip(raw: BinaryIO, level: int) -> BinaryIO:
    """Return a gzip stream into ``raw`` without a file name and a time stamp."""
    stream: Any = gzip_ng.GzipNGFile.__new__(gzip_ng.GzipNGFile)
    try:
        stream.__init__("", "wb", level, raw, mtime=0)
    except BaseException:
        stream.fileobj = None  # else its finalizer writes to ``raw`` again, after it is closed
        raise
    return cast("BinaryIO", stream)


class _Opcodes:
    """Encodes values as opcodes that push them. Texts, names and enum members are memoized on first use.

    Arrays, NumPy scalars and enum members are the placeholders that the reader makes of them.
    """

    def __init__(self) -> None:
        self._memo: dict[object, bytes] = {}  # the opcodes that refer to an object
        self._heads: dict[object, bytes] = {}  # else they take a fifth of the time of an example

    def value(self, value: Any) -> bytes:
        """Return the opcodes of a value, with those of the values in it."""
        # By the exact type: for ``isinstance``, a bool is an int.
        kind = type(value)
        if kind is str:
            return self._memo.get(value) or self._once(value, lambda: _text(value))
        if kind is int:
            return _integer(value)
        if kind is float:
            return b"G" + struct.pack(">d", value)
        if kind is dict:
            return b"}(" + self.items(value.items()) + b"u"
        if kind is PickledArray:
            length = struct.pack("<I", len(value.payload))
            return b"".join((self._array_head(value), b"B", length, value.payload, b"tb"))
        if kind is EnumValue:
            module, _, name = value.kind.rpartition(".")
            return self._once(value, lambda: self._name(module, name) + self.value(value.value) + b"\x85R")
        if kind is PickledScalar:
            made = self._name("numpy._core.multiarray", "scalar") + self._dtype(value.dtype)
            payload = np.array(value.value, value.dtype).tobytes()
            return made + b"C%c" % len(payload) + payload + b"\x86R"
        if value is None or kind is bool:
            return b"N" if value is None else b"\x88" if value else b"\x89"
        parts = b"".join([self.value(part) for part in value])
        if kind is list:
            return b"](" + parts + b"e"
        return parts + _TUPLES_OF[len(value)] if len(value) in _TUPLES_OF else b"(" + parts + b"t"

    def items(self, items: Iterable[tuple[Any, Any]]) -> bytes:
        """Return the opcodes of each key, followed by those of its value."""
        return b"".join([self.value(part) for item in items for part in item])

    def _once(self, key: object, opcodes: Callable[[], bytes]) -> bytes:
        """Return a reference to the object of ``key``; on first use, ``opcodes()`` and a MEMOIZE."""
        if key in self._memo:
            return self._memo[key]
        body, index = opcodes(), len(self._memo)
        if index >= _MEMO:
            return body
        self._memo[key] = b"h%c" % index if index < 256 else b"j" + struct.pack("<I", index)
        return body + b"\x94"

    def _name(self, module: str, name: str) -> bytes:
        return self._once((module, name), lambda: self.value(module) + self.value(name) + b"\x93")

    def _dtype(self, dtype: str) -> bytes:
        """Return the opcodes of a dtype, given as a NumPy type string such as "<f4"."""
        _check_dtype(dtype)

        def opcodes() -> bytes:
            made = self._name("numpy", "dtype") + self.value(dtype[1:]) + b"\x89\x88\x87R"
            return made + b"(K\x03" + self.value(dtype[0]) + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"

        return self._once(("dtype", dtype), opcodes)

    def _array_head(self, array: PickledArray) -> bytes:
        """Return the opcodes of an array before its payload."""
        key, known = (array.shape, array.dtype, array.fortran), len(self._memo)
        if key in self._heads:
            return self._heads[key]
        head = self._name("numpy._core.multiarray", "_reconstruct") + self._name("numpy", "ndarray")
        head += b"K\x00\x85" + self._once(b"b", lambda: b"C\x01b") + b"\x87R"
        head += b"(K\x01(" + b"".join(map(_integer, array.shape)) + b"t" + self._dtype(array.dtype)
        head += self.value(array.fortran)
        if len(self._memo) == known:
            self._heads[key] = head  # contains references only, no MEMOIZE
        return head


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


class _Examples:
    """Makes examples of rows of raw batches, in the dialect of the file, or of the row if it has one.

    Args:
        board_size: Cells along an edge.
        dialect: Spelling of each field, as ``Dialect.as_json`` returns it.
        all_metadata: Whether examples have all keys of the column ``metadata``.
    """

    def __init__(self, board_size: int, dialect: Mapping[str, Any], *, all_metadata: bool) -> None:
        self._size = board_size
        self._all_metadata = all_metadata
        self._dialect = {**dialect, **dialect.get("first", {})}
        read = partial(read_metadata, path=None, what="metadata of a position")
        # Positions of a game often share their metadata, which is then parsed once.
        self._parsed = lru_cache(maxsize=1024)(read)

    def of(self, batch: pa.RecordBatch) -> Iterator[Any]:
        """Return the example of each row of a batch, in order."""
        stored = [self._parsed(text) for text in batch["metadata"].to_pylist()]
        own = [json.dumps(each.get(spellings.DIALECT_KEY, {})) for each in stored]
        examples: dict[int, Any] = {}
        # Rows of the same dialect are converted together: in a shuffled file, neighbours may differ.
        for text in dict.fromkeys(own):
            rows = [row for row, other in enumerate(own) if other == text]
            dialect = {**self._dialect, **json.loads(text)}
            found = self._of_dialect(batch.take(rows), dialect, [stored[row] for row in rows])
            examples |= zip(rows, found, strict=True)
        return map(examples.__getitem__, range(len(own)))

    def _of_dialect(
        self, batch: pa.RecordBatch, dialect: dict[str, Any], stored: list[dict[str, Any]]
    ) -> Iterator[Any]:
        is_tuple = dialect["layout"] == "tuple"
        keys = REQUIRED if is_tuple else dialect["keys"]
        arrays = {(key, row): array for key, row, array in self._arrays(batch, dialect, keys)}
        columns = [batch.column(name).to_pylist() for name in _SCALARS]
        for row, values in enumerate(zip(*columns, strict=True)):
            fields, kept = dict(zip(_SCALARS, values, strict=True)), stored[row]
            made: dict[str, Any] = {}
            for key in keys:
                if key in ARRAYS:
                    made[key] = arrays.get((key, row))
                elif key == "metadata":
                    made[key] = self._metadata(dialect, fields, kept)
                elif key in ("value", "player_to_move"):
                    made[key] = _spelled(fields[key], dialect.get(key, "float" if key == "value" else "int"))
                else:
                    numbers = kept.get(spellings.EXAMPLE_KEY, {})
                    made[key] = _stored(numbers, key, kept.get(spellings.EXAMPLE_TYPES_KEY, {}), key)
            yield tuple(made.values()) if is_tuple else made

    def _metadata(
        self, dialect: dict[str, Any], values: dict[str, Any], stored: dict[str, Any]
    ) -> dict[str, Any]:
        made: dict[str, Any] = {}
        others = sorted(map(unescaped_key, stored)) if self._all_metadata else []
        others = [key for key in others if escaped_key(key) in stored and key not in dialect["metadata_keys"]]
        for key in [*dialect["metadata_keys"], *others]:
            if key == "game_id":
                ids = values["file_idx"], values["line_idx"]
                first, _, second = dialect.get(key, "int").partition(", ")
                made[key] = (
                    None if None in ids else (_spelled(ids[0], first), _spelled(ids[1], second or first))
                )
            elif key == "winner":
                spelling, winner = dialect.get(key, "BLUE/RED"), values[key]
                texts = spellings.WINNER_SPELLINGS.get(spelling)
                made[key] = _spelled(winner, spelling) if winner is None or texts is None else texts[winner]
            elif key in _GAME_KEYS:
                made[key] = _spelled(values[key], dialect.get(key, "int"))
            else:
                made[key] = _stored(stored, escaped_key(key), stored.get(spellings.TYPES_KEY, {}), key)
        return made

    def _arrays(
        self, batch: pa.RecordBatch, dialect: Mapping[str, Any], keys: Collection[str]
    ) -> Iterator[tuple[str, int, PickledArray]]:
        """Yield the arrays of a batch, each with its key and row, as a dialect spells them.

        Args:
            batch: The rows.
            dialect: The dialect.
            keys: Keys of the examples.
        """
        n, packed, moves = self._size, binary_matrix(batch.column("board")), batch.column("move")
        one_hot = np.flatnonzero(moves.is_valid().to_numpy(zero_copy_only=False))
        # A move becomes a one-hot policy again, as the source had it.
        played = np.eye(n * n, dtype=np.uint8)[moves.drop_null().to_numpy()]
        given, sparse = SparsePolicies.from_arrow(batch.column("policy"), n * n)
        key_of_dense = SEARCH_KEY if SEARCH_KEY in keys else "policy"
        for key, rows, arrays in (
            ("board", np.arange(len(batch)), unpack_boards(packed, n, np.uint8)),
            ("policy", one_hot, played),
            (key_of_dense, given, sparse.to_dense(n * n)),
        ):
            dtype, _, order = dialect.get(key, "<f4").partition(" ")
            if dtype == "none":
                continue
            _check_dtype(dtype)
            for row, array in zip(rows.tolist(), arrays.astype(dtype), strict=True):
                payload = array.tobytes("F" if order else "C")
                yield key, row, PickledArray(dtype, array.shape, payload, bool(order))


def _check_dtype(dtype: str) -> None:
    """Check that a dtype is one that the reader makes, as objects would be pickles within a pickle.

    Raises:
        InputError: It is another one.
    """
    if dtype[:1] not in ("<", ">", "|") or dtype[1:] not in DTYPE_CODES:
        raise InputError("the dialect contains an unknown dtype", found=shortened(dtype))


def _spelled(value: Any, spelling: str) -> object:
    """Return a number or None as its spelling says."""
    if value is None:
        return None
    if spelling in ("int", "float"):
        return int(value) if spelling == "int" else float(value)
    if spelling.startswith("numpy "):
        return PickledScalar(spelling.removeprefix("numpy "), value)
    # A store may be of a stranger, and a name that is written here is called by ``pickle.load``.
    if spelling not in ENUMS:
        raise InputError("the dialect contains an unknown spelling", found=shortened(spelling))
    return EnumValue(spelling, int(value))


def _stored(stored: dict[str, Any], kept: str, types: dict[str, Any], key: str) -> object:
    """Return a value from the column ``metadata``.

    Args:
        stored: The object in the column that contains the value.
        kept: Key of the value in this object.
        types: Spellings of numbers by key in the source, as under ``TYPES_KEY``.
        key: Key of the value in the source.
    """
    if kept not in stored:
        raise InputError(f"the key {shortened(str(key))} of an example has no value in the column `metadata`")
    value = stored[kept]
    if key in types:
        return _spelled(float(value) if isinstance(value, str) else value, types[key])
    return value
