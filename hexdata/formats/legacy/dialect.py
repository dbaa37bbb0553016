"""Spellings of the fields of legacy pickles, kept so that a file can be written back unchanged.

A spelling is the type or notation of a field, such as "b/r" for the winner. This module also converts values
of a pickle to JSON. It does not reject records.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import FormatError, Reason
from hexdata.formats.legacy.allowlist import EnumValue, PickledScalar, kind_of
from hexdata.formats.legacy.examples import CodedColumn, ExampleGroup, NumberColumn
from hexdata.formats.legacy.limits import LegacyLimits
from hexdata.formats.legacy.payloads import ArrayKind
from hexdata.formats.legacy.unpickler import ExamplesPlaceholder, irregular_error

__all__ = [
    "DIALECT_KEY",
    "EXAMPLE_KEY",
    "EXAMPLE_TYPES_KEY",
    "TYPES_KEY",
    "WINNER_SPELLINGS",
    "Dialect",
    "MetadataSizeError",
    "escaped_key",
    "header_json",
    "metadata_text",
]
__all__ += ["unescaped_key", "with_spellings"]

WINNER_SPELLINGS: Final = {
    "BLUE/RED": ("BLUE", "RED"),
    "b/r": ("b", "r"),
    "1/2": ("1", "2"),
    "int 1/2": (1, 2),
}
"""Values of blue and red for each spelling of a winner. The spelling of an enum is the name of its class."""

DIALECT_KEY: Final = "hexdata:dialect"
"""Key in ``metadata`` for the spellings of an example that differ from those of the first example."""

EXAMPLE_KEY: Final = "hexdata:example"
"""Key in ``metadata`` for the numbers that an example has beside the keys that the legacy tool writes."""
TYPES_KEY: Final = "hexdata:types"
"""Key in ``metadata`` for the spellings of numbers that JSON does not show: "numpy <f4", or "float" for a
number that is infinite or NaN, which is a text in JSON. An object with the keys of these numbers."""
EXAMPLE_TYPES_KEY: Final = "hexdata:example_types"
"""The same for the numbers under ``EXAMPLE_KEY``."""

_RESERVED: Final = "hexdata:"
_ESCAPE: Final = "hexdata:key:"
"""Prefix of a key of the file that collides with a key reserved by hexdata."""

_PLAIN: Final = frozenset([bool, int, float, str])
_FIELDS: Final = ("winner", "game_id", "position_in_game", "total_positions", "value_sample_tier")

Spellings = dict[str, object]
"""Spelling by name of the field."""


class Dialect:
    """Counts the spellings of each field over the accepted examples. Nulls are not counted.

    Args:
        limits: Limits of the file.
    """

    def __init__(self, limits: LegacyLimits) -> None:
        self._limits = limits
        self._counts: dict[str, Counter[Any]] = {}
        self._first: Spellings = {}

    def add(self, groups: Sequence[ExampleGroup], accepted: npt.NDArray[np.bool_]) -> dict[int, Spellings]:
        """Count the spellings of the examples of a block.

        Args:
            groups: Groups of examples of the block.
            accepted: Whether the example at each index of the block is accepted, (count,).

        Returns:
            For each example whose spellings differ from the first ones in the file, by its index in the
            block: the spellings that differ.

        Raises:
            FormatError: "limit-layouts".
        """
        columns = [
            (field, group.indices, column, accepted[group.indices])
            for group in groups
            for field, column in _spelled(group)
        ]
        for field, _, column, is_accepted in columns:
            sizes = np.bincount(column.codes[is_accepted], minlength=len(column.values))
            for spelling, size in zip(column.values, sizes.tolist(), strict=True):
                if spelling is not None and size:
                    self._counts.setdefault(field, Counter())[spelling] += size
        if any(len(counts) > self._limits.layouts for counts in self._counts.values()):
            raise FormatError(
                "more layouts of examples than the limit",
                code=Reason.LIMIT_LAYOUTS,
                expected=f"at most {self._limits.layouts:,}",
            )
        self._set_first(columns)
        found: dict[int, Spellings] = {}
        for field, indices, column, is_accepted in columns:
            different = np.array([value not in (None, self._first.get(field)) for value in column.values])
            if different.any():
                for row in np.flatnonzero(different[column.codes] & is_accepted).tolist():
                    spelling = column.values[column.codes[row]]
                    found.setdefault(int(indices[row]), {})[field] = spelling
        return found

    def _set_first(self, columns: Sequence[tuple[str, Any, CodedColumn, npt.NDArray[np.bool_]]]) -> None:
        """Set the first spelling of each field: that of the example with the lowest index in the block."""
        firsts: dict[str, tuple[int, object]] = {}
        for field, indices, column, is_accepted in columns:
            if field in self._first:
                continue
            has_value = np.array([value is not None for value in column.values])[column.codes] & is_accepted
            if has_value.any():
                row = int(has_value.argmax())
                candidate = (int(indices[row]), column.values[column.codes[row]])
                firsts[field] = min(firsts.get(field, candidate), candidate, key=lambda first: first[0])
        self._first |= {field: spelling for field, (_, spelling) in firsts.items()}

    def as_json(self) -> dict[str, object]:
        """Return the spelling of each field as JSON values.

        A field with several spellings has the value ``{"mixed": [[spelling, count], …]}``. Its first spelling
        in the file is under ``first``; it applies to all examples that have none under ``DIALECT_KEY``.
        """
        result: dict[str, object] = {
            name: _jsonable(next(iter(counts)))
            if len(counts) == 1
            else {"mixed": sorted(([_jsonable(key), count] for key, count in counts.items()), key=str)}
            for name, counts in sorted(self._counts.items())
        }
        firsts = sorted(self._first.items())
        mixed = {name: _jsonable(first) for name, first in firsts if len(self._counts[name]) > 1}
        return result | ({"first": mixed} if mixed else {})


def _spelled(group: ExampleGroup) -> Iterator[tuple[str, CodedColumn]]:
    """Yield each field of a group with the column of its spellings, None for a null."""
    layout = group.layout
    constants = {
        "layout": "tuple" if layout.keys is None else "dict",
        "keys": layout.keys,
        "metadata_keys": layout.metadata_keys,
        "board": _array_spelling(layout.board),
        "policy": _array_spelling(layout.policy),
    }
    same = np.zeros(len(group.indices), np.intp)
    for field, spelling in constants.items():
        if spelling is not None:
            yield field, CodedColumn(same, [spelling])
    columns = {"value": group.value, "player_to_move": group.player_to_move}
    columns |= {field: group.metadata[field] for field in _FIELDS if field in group.metadata}
    for field, column in columns.items():
        # The spelling of a number depends on its type only, except that of a winner.
        if isinstance(column, NumberColumn) and field != "winner":
            yield field, CodedColumn(same, [_SPELLERS.get(field, _spelling)(column.first)])
        elif column is not None:
            spell = _SPELLERS.get(field, _spelling)
            spellings = [None if value is None else spell(value) for value in column.values]
            yield field, CodedColumn(column.codes, spellings)


def _jsonable(spelling: object) -> object:
    return list(spelling) if isinstance(spelling, tuple) else spelling


def _array_spelling(kind: ArrayKind | str) -> str | None:
    return None if isinstance(kind, str) else kind.dtype + (" fortran" if kind.fortran else "")


def _spelling(value: object) -> str:
    if type(value) in _PLAIN:
        return type(value).__name__
    if isinstance(value, EnumValue):
        return value.kind if isinstance(value.value, int) else f"{value.kind} by text"
    if isinstance(value, PickledScalar):
        return f"numpy {value.dtype}"
    return next((kind.__name__ for kind in _PLAIN if isinstance(value, kind)), kind_of(value))


def _winner_spelling(value: object) -> str:
    if isinstance(value, (EnumValue, PickledScalar)):
        return _spelling(value)
    return next((name for name, pair in WINNER_SPELLINGS.items() if value in pair), _spelling(value))


def _game_id_spelling(value: object) -> str:
    """Return the spelling of both numbers of a game id, or the two spellings if they differ."""
    if not isinstance(value, tuple) or len(value) != 2:
        return _spelling(value)
    spellings = [_spelling(part) for part in value]
    return spellings[0] if spellings[0] == spellings[-1] else ", ".join(spellings)


_SPELLERS: Final = {"winner": _winner_spelling, "game_id": _game_id_spelling}


def with_spellings(batch: pa.RecordBatch, spellings_by_row: Mapping[int, Spellings]) -> pa.RecordBatch:
    """Return a raw batch with additional spellings in ``metadata``.

    Args:
        batch: The raw batch.
        spellings_by_row: Spellings by index of the row.
    """
    texts = batch.column("metadata").to_pylist()
    for row, spellings in spellings_by_row.items():
        metadata = json.loads(texts[row] or "{}") | {DIALECT_KEY: spellings}
        texts[row] = json.dumps(dict(sorted(metadata.items())), separators=(",", ":"))
    index = batch.schema.get_field_index("metadata")
    return batch.set_column(index, batch.schema.field(index), pa.array(texts, pa.string()))


_TAGS: Final = ("__dict__", "__tuple__", "__float__", "__numpy__", "__object__")


class _NotJsonError(ValueError):
    """A value that JSON cannot represent without loss."""


def escaped_key(key: str) -> str:
    """Return the key under which a key of a file is stored, so that it cannot collide with reserved keys."""
    return _ESCAPE + key if key.startswith(_RESERVED) or key == "dialect" else key


def unescaped_key(key: str) -> str:
    """Return the key of the file for a stored key: the inverse of :func:`escaped_key`."""
    return key.removeprefix(_ESCAPE)


class MetadataSizeError(Exception):
    """Metadata with more values, bytes or levels than the limits allow."""


def metadata_text(metadata: dict[str, Any], numbers: dict[str, Any], limits: LegacyLimits) -> str | None:
    """Return metadata as JSON text with sorted keys; None if JSON cannot represent it without loss.

    Args:
        metadata: The metadata.
        numbers: Numbers or None that the example has beside its metadata, stored under ``EXAMPLE_KEY``.
        limits: Limits of the file.

    Raises:
        MetadataSizeError: The metadata exceeds a limit.
    """
    budget = _Budget(limits.metadata_values, limits.metadata_bytes)
    try:
        values, types = _plain_numbers(metadata, limits, budget)
        values = {escaped_key(key): value for key, value in values.items()}
        if types:
            values[TYPES_KEY] = types
        if numbers:
            values[EXAMPLE_KEY], types = _plain_numbers(numbers, limits, budget)
            if types:
                values[EXAMPLE_TYPES_KEY] = types
    except _NotJsonError:
        return None
    except FormatError as error:
        raise MetadataSizeError from error
    text = json.dumps(dict(sorted(values.items())), separators=(",", ":"))
    if len(text) > limits.metadata_bytes:
        raise MetadataSizeError
    return text


def _plain_numbers(
    values: dict[str, Any], limits: LegacyLimits, budget: _Budget
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values of a pickle as JSON values, and the spellings of numbers that these do not show."""
    plain: dict[str, Any] = {}
    types: dict[str, str] = {}
    for key in sorted(values):
        budget.spend(len(key))
        value = values[key]
        if isinstance(value, PickledScalar):
            budget.spend(len(key) + len(value.dtype))
            types[key], value = _spelling(value), value.value
        if isinstance(value, float) and not math.isfinite(value):
            types.setdefault(key, "float")
            value = str(value)
        plain[key] = _to_json(value, limits.nesting, budget, strict=True)
    return plain, types


def header_json(top: Mapping[Any, Any], limits: LegacyLimits) -> dict[str, object]:
    """Return the top-level items except the examples as JSON values, with escaped keys.

    A value without a JSON equivalent becomes a dict with a single key such as ``__tuple__``.

    Args:
        top: The outermost dict of the pickle.
        limits: Limits of the file.

    Raises:
        FormatError: "limit-nesting" or "limit-header"; "unknown-layout", if a key is not text.
    """
    budget = _Budget(limits.header_values, limits.header_bytes)
    header = {}
    for key, value in top.items():
        if not isinstance(key, str):
            raise FormatError("a top-level key that is not text", found=kind_of(key), expected="text")
        budget.spend(len(key))
        if key != "examples":
            header[escaped_key(key)] = _to_json(value, limits.nesting, budget, strict=False)
    return header


class _Budget:
    """Remaining number of values and characters that may be written.

    Nested lists that contain the same list several times grow exponentially when written.

    Args:
        values: Maximum number of values.
        size: Maximum number of characters of all texts.
    """

    def __init__(self, values: int, size: int) -> None:
        self._values = values
        self._size = size

    def spend(self, size: int) -> None:
        """Subtract one value.

        Args:
            size: Number of characters if the value is a text, else 0.

        Raises:
            FormatError: "limit-header".
        """
        self._values -= 1
        self._size -= size
        if self._values < 0 or self._size < 0:
            raise FormatError("more data beside the examples than the limit", code=Reason.LIMIT_HEADER)


def _to_json(value: Any, depth: int, budget: _Budget, *, strict: bool) -> object:
    """Return a value of a pickle as a JSON value.

    Args:
        value: The value.
        depth: Maximum nesting depth.
        budget: Charged for each value.
        strict: If True, a value without a JSON equivalent raises; else it becomes a dict with a tag.

    Raises:
        FormatError: "limit-nesting", "limit-header" or "irregular-examples".
        _NotJsonError: ``strict`` is set and JSON cannot represent the value.
    """
    budget.spend(len(value) if isinstance(value, str) else 0)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if depth == 0:
        raise FormatError("nested more deeply than the limit", code=Reason.LIMIT_NESTING)
    if isinstance(value, list):
        return [_to_json(item, depth - 1, budget, strict=strict) for item in value]
    if isinstance(value, dict) and (strict or not _is_tag(value)) and all(isinstance(k, str) for k in value):
        written = {}
        for key, item in value.items():
            budget.spend(len(key))
            written[key] = _to_json(item, depth - 1, budget, strict=strict)
        return written
    if strict:
        raise _NotJsonError
    if isinstance(value, dict):
        return {
            "__dict__": _to_json([[key, item] for key, item in value.items()], depth, budget, strict=False)
        }
    if isinstance(value, tuple):
        return {"__tuple__": _to_json(list(value), depth, budget, strict=False)}
    if isinstance(value, float):
        return {"__float__": str(value)}
    if isinstance(value, ExamplesPlaceholder):
        raise irregular_error()
    if isinstance(value, PickledScalar):
        return {"__numpy__": [value.dtype, _to_json(value.value, depth - 1, budget, strict=False)]}
    return {"__object__": kind_of(value)}


def _is_tag(value: dict[Any, Any]) -> bool:
    """Return whether a dict has the form of a tagged value, such as ``{"__tuple__": […]}``."""
    return len(value) == 1 and next(iter(value)) in _TAGS
