"""Spellings of the fields of legacy pickles, kept so that a file can be written back unchanged.

A spelling is the type or notation of a field, such as "b/r" for the winner. This module also converts values
of a pickle to JSON. It does not reject records.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import FormatError, InputError, Reason
from hexdata.formats.legacy import limits
from hexdata.formats.legacy.allowlist import EnumValue, PickledScalar, kind_of
from hexdata.text import shortened

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

_TRAINABLE: Final = "policy_target_trainable"
_CODES: Final = ("policy_move_code", "policy_target_source_code")
"""Keys of metadata with a letter for the origin of the policy. The policy of a ``C`` is not to be trained."""

_RESERVED: Final = "hexdata:"
ESCAPE: Final = "hexdata:key:"
"""Prefix of a key of the file that collides with a key reserved by hexdata."""

_FIELDS: Final = (
    *("layout", "keys", "metadata_keys", "board", "policy", "policy_search_target", "value"),
    *("player_to_move", "winner", "game_id", "position_in_game", "total_positions", "value_sample_tier"),
)
"""The fields with spellings, in the order in which an example lists those that differ."""

Int64Array = npt.NDArray[np.int64]
Spellings = dict[str, object]
"""Spelling by name of the field."""


class Dialect:
    """Counts the spellings of each field over the accepted examples. Nulls are not counted."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[Any]] = defaultdict(Counter)  # the first spelling comes first

    def add(
        self, spelled: Sequence[tuple[str, object, Int64Array]], accepted: npt.NDArray[np.bool_]
    ) -> dict[int, Spellings]:
        """Count the spellings of the examples of a block.

        Args:
            spelled: A field, a spelling, and the indices in the block of examples that have it, ascending.
                The spelling of a null is None.
            accepted: Whether the example at each index of the block is accepted, (count,).

        Returns:
            For each example whose spellings differ from the first ones in the file, by its index in the
            block: the spellings that differ.
        """
        filtered = ((field, spelling, indices[accepted[indices]]) for field, spelling, indices in spelled)
        found = [each for each in filtered if each[1] is not None and len(each[2])]
        # In the order of the examples, so that the first key of a counter is the first spelling.
        for field, spelling, indices in sorted(found, key=lambda each: int(each[2][0])):
            self._counts[field][spelling] += len(indices)
        # Only now is the first spelling of every field known.
        different: dict[int, Spellings] = {}
        for field, spelling, indices in sorted(found, key=lambda each: _FIELDS.index(each[0])):
            if spelling != next(iter(self._counts[field])):
                for index in indices.tolist():
                    different.setdefault(index, {})[field] = spelling
        return different

    def as_json(self) -> dict[str, object]:
        """Return the spelling of each field as JSON values.

        A field with several spellings has the value ``{"mixed": [[spelling, count], …]}``. Its first spelling
        in the file is under ``first``; it applies to all examples that have none under ``DIALECT_KEY``.
        """
        result: dict[str, object] = {}
        first: dict[str, object] = {}
        for name, counts in sorted(self._counts.items()):
            # JSON has no tuples.
            listed = [[list(key) if isinstance(key, tuple) else key, count] for key, count in counts.items()]
            result[name] = listed[0][0]
            if len(listed) > 1:
                first[name], result[name] = listed[0][0], {"mixed": sorted(listed, key=str)}
        return result | ({"first": first} if first else {})


def spelling(field: str, value: object) -> str:
    """Return the spelling of a value of a field that is no array, such as "int" or "numpy <f4"."""
    if type(value) is int and field != "winner":  # nearly all
        return "int"
    if isinstance(value, EnumValue):
        return value.kind
    if isinstance(value, PickledScalar):
        return f"numpy {value.dtype}"
    if field == "winner":
        found = [name for name, pair in WINNER_SPELLINGS.items() if value in pair]
        return found[0] if found else kind_of(value)
    if field == "game_id" and isinstance(value, tuple) and len(value) == 2:
        one, other = spelling("", value[0]), spelling("", value[1])
        return one if one == other else f"{one}, {other}"
    return kind_of(value)


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


# Policies that are not to be trained


def policy_weight(metadata: Mapping[str, Any]) -> float | None:
    """Return the weight of the policy that the metadata of an example states; None if it states none.

    The weight is 0 if the policy is not to be trained, else 1.

    Raises:
        FormatError: "policy-mask": The mask is not a bool, or contradicts the letter of the move.
    """
    stated = {code != "C" for key in _CODES if (code := metadata.get(key)) in ("V", "G", "C", "T")}
    trainable = metadata.get(_TRAINABLE)
    if trainable is not None:
        if not isinstance(trainable, bool) and trainable not in (0, 1):
            found = shortened(repr(trainable))
            raise FormatError(f"{_TRAINABLE} is no bool", Reason.POLICY_MASK, found, "True or False")
        stated.add(bool(trainable))
    if len(stated) > 1:
        found = shortened(str({key: metadata.get(key) for key in (_TRAINABLE, *_CODES)}))
        raise FormatError("the mask contradicts the letter of the move", Reason.POLICY_MASK, found)
    return float(stated.pop()) if stated else None


def with_policy_weights(raw: pa.RecordBatch) -> pa.RecordBatch:
    """Return a raw batch of legacy examples with the column ``policy_weight``, null where none is stated."""
    texts = raw.column("metadata").dictionary_encode()
    weights = [policy_weight(json.loads(text)) for text in texts.dictionary.to_pylist()]
    return raw.append_column("policy_weight", pa.array(weights, pa.float32()).take(texts.indices))


# Values of a pickle as JSON


def escaped_key(key: str) -> str:
    """Return the key under which a key of a file is stored, so that it cannot collide with reserved keys."""
    return ESCAPE + key if key.startswith(_RESERVED) or key == "dialect" else key


def unescaped_key(key: str) -> str:
    """Return the key of the file for a stored key: the inverse of :func:`escaped_key`."""
    return key.removeprefix(ESCAPE)


def metadata_text(metadata: dict[str, Any], numbers: dict[str, Any]) -> str:
    """Return metadata as JSON text with sorted keys.

    Args:
        metadata: The metadata.
        numbers: Numbers or None that the example has beside its metadata, stored under ``EXAMPLE_KEY``.

    Raises:
        FormatError: "metadata-size"; "metadata-value", if JSON cannot represent a value without loss.
    """
    converter = _JsonConverter(strict=True)
    plain, types = converter.numbers(metadata)
    values = {escaped_key(key): value for key, value in plain.items()}
    of_example, example_types = converter.numbers(numbers)
    # After escaping: a key of the file can no longer be equal to one of these.
    own = {TYPES_KEY: types, EXAMPLE_KEY: of_example, EXAMPLE_TYPES_KEY: example_types}
    values |= {key: value for key, value in own.items() if value}
    text = json.dumps(dict(sorted(values.items())), separators=(",", ":"))
    if len(text) > limits.METADATA_BYTES:
        raise FormatError(f"metadata of {len(text):,} bytes", Reason.METADATA_SIZE)
    return text


def header_json(top: Mapping[Any, Any]) -> dict[str, object]:
    """Return the top-level items except the examples as JSON values, with escaped keys.

    A value without a JSON equivalent becomes a dict with a single key such as ``__tuple__``.

    Args:
        top: The outermost dict of the pickle.

    Raises:
        FormatError: "limit-nesting" or "limit-header"; "unknown-layout", if a key is not text.
    """
    converter = _JsonConverter(strict=False)
    header = {}
    for key, value in top.items():
        if not isinstance(key, str):
            raise FormatError("a top-level key that is not text", found=kind_of(key), expected="text")
        converter.spend(len(key))
        if key != "examples":
            header[escaped_key(key)] = converter.value(value)
    return header


_TAGS: Final = ("__dict__", "__tuple__", "__float__", "__numpy__", "__object__")


class _JsonConverter:
    """Converts values of a pickle to JSON values, within limits on their number and characters.

    The limits hold for all values together: nested lists that contain the same list several times grow
    exponentially when written.

    Args:
        strict: If True, the values are metadata, and one without a JSON equivalent raises. If False, they are
            a header, and such a value becomes a dict with a tag.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._values = limits.METADATA_VALUES if strict else limits.HEADER_VALUES
        self._size = limits.METADATA_BYTES if strict else limits.HEADER_BYTES

    def spend(self, characters: int) -> None:
        """Count a value with its number of characters, 0 if it is no text.

        Raises:
            FormatError: "metadata-size" or "limit-header".
        """
        self._values -= 1
        self._size -= characters
        if min(self._values, self._size) < 0:
            code = Reason.METADATA_SIZE if self._strict else Reason.LIMIT_HEADER
            raise FormatError("more data beside the boards than the limit", code)

    def numbers(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return values as JSON values, and the spellings of numbers that these do not show."""
        plain: dict[str, Any] = {}
        types: dict[str, str] = {}
        for key in sorted(values):
            self.spend(len(key))
            value = values[key]
            if isinstance(value, PickledScalar):
                self.spend(len(key) + len(value.dtype))
                types[key], value = spelling(key, value), value.value
            # JSON has no such numbers.
            if isinstance(value, float) and not math.isfinite(value):
                types.setdefault(key, "float")
                value = str(value)
            try:
                plain[key] = self.value(value)
            except FormatError as error:
                error.record = f"key {shortened(key)}"
                raise
        return plain, types

    def value(self, value: Any, depth: int = limits.MOST_NESTED) -> object:
        """Return a value as a JSON value of at most ``depth`` levels.

        Raises:
            FormatError: "metadata-value" or "metadata-size"; "limit-nesting" or "limit-header".
        """
        self.spend(len(value) if isinstance(value, str) else 0)
        if value is None or isinstance(value, (bool, str, int)):
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        if depth == 0:
            code = Reason.METADATA_SIZE if self._strict else Reason.LIMIT_NESTING
            raise FormatError("nested more deeply than the limit", code)
        if isinstance(value, list):
            return [self.value(item, depth - 1) for item in value]
        is_json = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        if is_json and (self._strict or not _is_tag(value)):
            self.spend(sum(map(len, value)))
            return {key: self.value(item, depth - 1) for key, item in value.items()}
        if self._strict:
            raise FormatError("a value that is not of JSON", Reason.METADATA_VALUE, kind_of(value))
        if isinstance(value, dict):
            return {"__dict__": self.value([[key, item] for key, item in value.items()], depth)}
        if isinstance(value, tuple):
            return {"__tuple__": self.value(list(value), depth)}
        if isinstance(value, float):
            return {"__float__": str(value)}
        if isinstance(value, PickledScalar):
            return {"__numpy__": [value.dtype, self.value(value.value, depth - 1)]}
        return {"__object__": kind_of(value)}


def _is_tag(value: dict[Any, Any]) -> bool:
    """Return whether a dict has the form of a tagged value, such as ``{"__tuple__": […]}``."""
    return len(value) == 1 and next(iter(value)) in _TAGS


def from_tagged(value: Any) -> Any:
    """Return the value of a header for a JSON value that :func:`header_json` returned.

    Raises:
        InputError: The value of the header had no JSON equivalent.
    """
    if isinstance(value, list):
        return [from_tagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not _is_tag(value):
        return {key: from_tagged(item) for key, item in value.items()}
    ((tag, content),) = value.items()
    if tag == "__dict__":
        return {from_tagged(key): from_tagged(item) for key, item in content}
    if tag == "__tuple__":
        return tuple(from_tagged(content))
    if tag == "__float__":
        return float(content)
    if tag == "__numpy__":
        return PickledScalar(content[0], from_tagged(content[1]))
    raise InputError("the header contains a value that cannot be written back", found=shortened(str(content)))
