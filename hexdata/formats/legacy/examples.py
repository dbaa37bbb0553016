"""Groups of examples with the same layout, as columns. Values are not checked.

Examples that were read one by one are sorted into groups here. The fast path returns the examples of a run as
a group directly. Both kinds of groups are validated by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError, Reason
from hexdata.formats.legacy.allowlist import PickledArray, is_number, kind_of, shortened
from hexdata.formats.legacy.limits import LegacyLimits
from hexdata.formats.legacy.payloads import (
    PORTION,
    ArrayKind,
    PackedBoards,
    PackedPolicies,
    PayloadPacker,
)

__all__ = [
    "CodedColumn",
    "ExampleGroup",
    "ExampleLayout",
    "NumberColumn",
    "Reject",
    "group_examples",
    "layout_of",
]

Int64Array = npt.NDArray[np.int64]
Reject = Callable[[int, Reason, str], None]
"""Rejects a record, given its index in the block, a reason code and the details."""

_REQUIRED: Final = ("board", "policy", "value")
_OPTIONAL: Final = ("player_to_move", "metadata")


@dataclass(frozen=True, slots=True)
class ExampleLayout:
    """The keys and array kinds shared by the examples of a group."""

    keys: tuple[str, ...] | None
    """Keys of the dict, in order; None for a tuple (board, policy, value). Keys that the legacy tool does not
    write have numbers as values."""
    metadata_keys: tuple[str, ...] | None
    """Keys of the metadata, in order; None if there is no metadata."""
    board: ArrayKind | str
    """Kind of the array; if the value is not an array, a description of it."""
    policy: ArrayKind | str

    @property
    def number_keys(self) -> list[str]:
        """The keys beside those that the legacy tool writes, in order."""
        return [key for key in self.keys or () if key not in _REQUIRED and key not in _OPTIONAL]


@dataclass(frozen=True, slots=True)
class CodedColumn:
    """A dictionary-encoded column of arbitrary objects: row i is values[codes[i]]."""

    codes: npt.NDArray[np.intp]
    values: list[Any]

    @classmethod
    def of_numbers(cls, numbers: npt.NDArray[Any]) -> CodedColumn:
        """Return an array (n,) of integers or floats as a column. Values are equal if their bits are."""
        bits = numbers.view(f"u{numbers.itemsize}")
        if len(bits) and (bits == bits[0]).all():  # most columns are constant: skip the sort
            return cls(np.zeros(len(bits), np.intp), numbers[:1].tolist())
        distinct, codes = np.unique(bits, return_inverse=True)
        return cls(codes, distinct.view(numbers.dtype).tolist())

    @classmethod
    def zipped(cls, columns: Sequence[Column]) -> CodedColumn:
        """Return a column of tuples that combine the rows of several columns. Needs at least one column."""
        if len(columns[0].codes) == 1:
            return cls(np.zeros(1, np.intp), [tuple(column.values[column.codes[0]] for column in columns)])
        varying = [column for column in columns if len(column.values) > 1]
        if not varying:
            codes = np.zeros(len(columns[0].codes), np.intp)
            return cls(codes, [tuple(column.values[0] for column in columns)])
        mixed = varying[0].codes
        for column in varying[1:]:
            mixed = np.unique(mixed, return_inverse=True)[1] * len(column.values) + column.codes
        _, rows, codes = np.unique(mixed, return_index=True, return_inverse=True)
        parts = [[column.values[code] for code in column.codes[rows].tolist()] for column in columns]
        return cls(codes, list(zip(*parts, strict=True)))


class NumberColumn:
    """A column of plain Python numbers, or of pairs of integers, that are checked as one array.

    It has the attributes of a :class:`CodedColumn`, which are computed when they are used.

    Args:
        numbers: Integers or floats (n,), or pairs of integers (n, 2).
    """

    def __init__(self, numbers: npt.NDArray[Any]) -> None:
        self.numbers = numbers

    @property
    def first(self) -> Any:
        """The value of the first row."""
        value = self.numbers[0].tolist()
        return value if self.numbers.ndim == 1 else tuple(value)

    @cached_property
    def _coded(self) -> CodedColumn:
        if self.numbers.ndim == 1:
            return CodedColumn.of_numbers(self.numbers)
        return CodedColumn.zipped([CodedColumn.of_numbers(part) for part in self.numbers.T.copy()])

    @property
    def codes(self) -> npt.NDArray[np.intp]:
        """As in :class:`CodedColumn`."""
        return self._coded.codes

    @property
    def values(self) -> list[Any]:
        """As in :class:`CodedColumn`."""
        return self._coded.values


Column = CodedColumn | NumberColumn


@dataclass(slots=True)
class ExampleGroup:
    """n examples of one layout."""

    layout: ExampleLayout
    indices: Int64Array
    """Index of each example in its block, (n,), ascending."""
    board: PackedBoards | None
    """None if the boards are not arrays of a valid shape."""
    policy: PackedPolicies | None
    """None if the boards or the policies are not arrays of a valid shape."""
    value: Column
    player_to_move: Column | None
    metadata: dict[str, Column] = field(default_factory=dict)
    numbers: dict[str, Column] = field(default_factory=dict)
    """Columns of the keys ``layout.number_keys``: numbers or None."""


def layout_of(example: object, limits: LegacyLimits) -> ExampleLayout | tuple[Reason, str]:
    """Return the layout of an example; or a reason code and the details if the layout is invalid."""
    if isinstance(example, tuple) and len(example) == 3:
        return ExampleLayout(None, None, _array_kind(example[0]), _array_kind(example[1]))
    if not isinstance(example, dict):
        found = f"a tuple of {len(example)}" if isinstance(example, tuple) else kind_of(example)
        return Reason.EXAMPLE_LAYOUT, f"found {found}; expected a dict, or a tuple (board, policy, value)"
    missing = [key for key in _REQUIRED if key not in example]
    others = [key for key in example if key not in _REQUIRED and key not in _OPTIONAL]
    unknown = [key for key in others if not isinstance(key, str) or not _is_number_or_none(example[key])]
    if missing or unknown:
        parts = [f"missing keys {missing}"] if missing else []
        if unknown:
            names = ", ".join(f"{shortened(str(key))!r} ({kind_of(example[key])})" for key in unknown[:8])
            parts.append(f"unknown keys {names}; expected a number or None in other keys")
        return Reason.EXAMPLE_LAYOUT, ", ".join(parts)
    metadata = example.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(key, str) for key in metadata):
        return Reason.METADATA_TYPE, f"found {kind_of(metadata)}; expected a dict with texts as keys"
    count, size = len(metadata) + len(others), sum(map(len, metadata)) + sum(map(len, others))
    if count > limits.metadata_keys or size > limits.metadata_bytes:
        return Reason.METADATA_SIZE, f"{count:,} keys of {size:,} characters; {limits.metadata_expected}"
    return ExampleLayout(
        tuple(example),
        tuple(metadata) if "metadata" in example else None,
        _array_kind(example["board"]),
        _array_kind(example["policy"]),
    )


def group_examples(
    items: Iterable[tuple[int, Any]], reject: Reject, limits: LegacyLimits, seen: set[int]
) -> Iterable[ExampleGroup]:
    """Sort examples into groups of one layout, and reject objects that are not examples.

    Args:
        items: Index in the block and content of each example.
        reject: Called with the index, a reason code and the details of a rejected example.
        limits: Limits of the file.
        seen: Hashes of the layouts of the file so far. Those of this block are added.

    Yields:
        The groups.

    Raises:
        FormatError: "limit-layouts". The limit exists as each layout takes milliseconds, even if rejected.
    """
    members: dict[ExampleLayout, list[tuple[int, Any]]] = {}
    for index, example in items:
        layout = layout_of(example, limits)
        if isinstance(layout, ExampleLayout):
            members.setdefault(layout, []).append((index, example))
        else:
            reject(index, *layout)
    seen.update(map(hash, members))
    if len(seen) > limits.layouts:
        raise FormatError(
            "more layouts of examples than the limit",
            code=Reason.LIMIT_LAYOUTS,
            expected=f"at most {limits.layouts:,}",
        )
    for layout, indexed in members.items():
        yield _group(layout, np.array([index for index, _ in indexed]), [example for _, example in indexed])


def _group(layout: ExampleLayout, indices: Int64Array, examples: list[Any]) -> ExampleGroup:
    board, policy, value = (0, 1, 2) if layout.keys is None else _REQUIRED
    has_player = layout.keys is not None and "player_to_move" in layout.keys
    packer = PayloadPacker(layout.board, layout.policy)
    if packer.board is not None:
        portion = max(1, PORTION // len(examples[0][board].payload))
        for start in range(0, len(examples), portion):
            part = examples[start : start + portion]
            packer.add(
                _payloads([example[board] for example in part]),
                _payloads([example[policy] for example in part]) if packer.policy else None,
            )
    return ExampleGroup(
        layout,
        indices,
        *packer.finish(),
        _objects([example[value] for example in examples]),
        _objects([example["player_to_move"] for example in examples]) if has_player else None,
        {
            key: _objects([example["metadata"][key] for example in examples])
            for key in layout.metadata_keys or ()
        },
        {key: _objects([example[key] for example in examples]) for key in layout.number_keys},
    )


def _is_number_or_none(value: object) -> bool:
    return value is None or is_number(value)


def _array_kind(value: object) -> ArrayKind | str:
    if isinstance(value, PickledArray) and value.dtype:
        return ArrayKind(value.dtype, value.shape, value.fortran)
    return kind_of(value)


def _payloads(arrays: list[PickledArray]) -> npt.NDArray[np.uint8]:
    """Return the payloads of arrays of one kind, (n, bytes)."""
    joined = b"".join([array.payload for array in arrays])
    return np.frombuffer(joined, np.uint8).reshape(len(arrays), len(arrays[0].payload))


def _objects(values: list[Any]) -> CodedColumn:
    return CodedColumn(np.arange(len(values)), values)
