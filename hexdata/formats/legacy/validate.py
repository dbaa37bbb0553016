"""Validation of groups of examples and their conversion to one raw record batch.

Checks are vectorised, and each has a stable code. A record is rejected with the code of the first check that
it fails. Does not read the pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import FormatError, Reason
from hexdata.formats.legacy import dialect, limits
from hexdata.formats.legacy.allowlist import EnumValue, is_number, kind_of, plain
from hexdata.formats.legacy.examples import ARRAYS, SEARCH_KEY, ArrayKind, Column, ExampleGroup
from hexdata.formats.source import Rejection, raw_batch
from hexdata.policy import SparsePolicies
from hexdata.schema import MAX_TIER, POLICY_TYPE, board_bytes, raw_schema
from hexdata.text import encodable, shortened

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_NUMBERS: Final = {
    "player_to_move": (Reason.PLAYER_TYPE, Reason.PLAYER_RANGE, 1),
    "position_in_game": (Reason.POSITION_TYPE, Reason.POSITION_RANGE, 65534),
    "total_positions": (Reason.POSITION_TYPE, Reason.POSITION_RANGE, 65534),
    "value_sample_tier": (Reason.TIER_TYPE, Reason.TIER_RANGE, MAX_TIER),
}
"""For integers from 0: the codes for a value of another type and for a number out of range, and the largest
number."""
_MAX_ID: Final = (1 << 31) - 1
_NULLABLE: Final = (*_NUMBERS, "winner", "move")
"""Nullable columns of integers from 0 up. Until ``finish``, -1 represents null."""

_OF_EXAMPLE: Final[tuple[str, ...]] = ("value", "player_to_move")
_OF_METADATA: Final[tuple[str, ...]] = (
    "position_in_game",
    "total_positions",
    "value_sample_tier",
    "winner",
    "game_id",
)
"""Keys with columns of their own, in the order in which they are checked."""
_ORIGINS: Final = ("source_file", "original_source")
"""Metadata keys that name the raw file. The last one present is used. They are kept in ``metadata`` too."""

_WINNERS: Final = {
    spelling: winner for pair in dialect.WINNER_SPELLINGS.values() for winner, spelling in enumerate(pair)
}
_POLICY_ROWS: Final = 1024
"""Number of dense policies that are converted to sparse ones at a time, which limits the memory."""


class BlockValidator:
    """The columns of one block of records, filled group by group, and the rejections.

    Args:
        first: Number in the file of the first record of the block.
        count: Number of records in the block.
        board_size: Cells along an edge in this file; None if no usable board has been read yet.

    Attributes:
        board_size: As the argument; set from the first usable board if it was None.
        accepted: True for each record of the block that is not rejected, (count,).
        spelled: The spellings of the fields, for ``Dialect``: field, spelling, and indices of the records.
    """

    def __init__(self, first: int, count: int, board_size: int | None) -> None:
        self.board_size = board_size
        self.accepted = np.ones(count, dtype=bool)
        self.spelled: list[tuple[str, object, Int64Array]] = []
        self._first = first
        self._count = count
        self._rejected: dict[int, Rejection] = {}
        """The rejection of each rejected record, by its index in the block."""
        self._numbers: dict[str, Array] = {name: np.full(count, -1, np.int32) for name in _NULLABLE}
        self._numbers |= {"value": np.zeros(count), "game_id": np.full((count, 2), -1, np.int32)}
        self._boards: list[tuple[Int64Array, int, UInt8Array]] = []
        self._parts: dict[str, list[pa.Array]] = {"policy": [], "origin": [], "metadata": []}
        """The values of nullable columns."""
        self._codes = {name: np.full(count, -1) for name in self._parts}
        """The index of the value of each record, -1 for null."""
        self._empty = np.zeros(count, dtype=bool)
        """The policy of the search has no probability on any cell."""
        self._masked = np.zeros(count, dtype=bool)
        """The policy is not to be trained."""
        self._budget = limits.METADATA_BYTES + limits.METADATA_MEAN * count
        """Remaining characters of metadata. A text that several records share counts for each of them, as the
        store writes it each time."""

    def reject(self, index: int, code: Reason, detail: str, other_size: int | None = None) -> None:
        """Reject a record. If it is rejected already, its first reason is kept.

        Args:
            index: Index of the record in the block.
            code: Reason code.
            detail: Details for the report.
            other_size: Its board size, if it is rejected for it.
        """
        self._rejected.setdefault(index, Rejection(self._first + index, code, detail, other_size))
        self.accepted[index] = False

    def fill(self, groups: Iterable[ExampleGroup]) -> None:
        """Check all examples of the block, and copy their values to the columns."""
        with_boards = [group for group in groups if self._add_boards(group)]
        # The size of the file must be known before policies are compared with it.
        self._set_board_size()
        for group in with_boards:
            self._add_policies(group)
            self._add_fields(group)
            self._add_texts(group)
            self._add_spellings(group)
        # Last, as the mask is in the metadata.
        detail = f"{SEARCH_KEY} is zero, but the policy is to be trained"
        self._reject(np.arange(self._count), self._empty & ~self._masked, Reason.POLICY_VALUES, detail)

    def finish(self) -> tuple[pa.RecordBatch, list[Rejection]]:
        """Return the accepted records as ``raw_schema``, and the rejections, both in order.

        If the file has had no usable board yet, the batch has no rows, and its boards are 0 bytes wide.
        """
        keep = slice(None) if not self._rejected else np.flatnonzero(self.accepted)  # a slice does not copy
        size = self.board_size or 0
        schema = raw_schema(size)
        packed = np.zeros((self._count, board_bytes(size)), np.uint8)
        for indices, board_size, boards in self._boards:
            if board_size == size:
                packed[indices] = boards
        records = np.arange(self._first, self._first + self._count)
        columns: dict[str, Any] = {"record": records[keep], "value": self._numbers.pop("value")[keep]}
        self._numbers["file_idx"], self._numbers["line_idx"] = self._numbers.pop("game_id").T
        for name, numbers in self._numbers.items():
            kept = numbers[keep]
            columns[name] = pa.array(np.maximum(kept, 0), schema.field(name).type, mask=kept < 0)
        for name, parts in self._parts.items():
            kind = POLICY_TYPE if name == "policy" else pa.string()
            codes = self._codes[name][keep]
            values = pa.concat_arrays([pa.nulls(0, kind), *parts])
            columns[name] = values.take(pa.array(codes, mask=codes < 0))
        rejected = sorted(self._rejected.values(), key=lambda each: each.record)
        return raw_batch(size, (), packed[keep], columns), rejected

    def _reject(
        self, indices: Int64Array, bad: Bools | bool, code: Reason, detail: str, other_size: int | None = None
    ) -> None:
        """Reject the records ``indices`` (n,) for which ``bad``, (n,) or for all, is True."""
        for index in indices[np.broadcast_to(bad, len(indices))].tolist():
            self.reject(index, code, detail, other_size)

    def _put(self, name: str, indices: Int64Array, values: pa.Array, codes: Int64Array) -> None:
        """Set a nullable column of the records ``indices``, (n,), to ``values[codes]``."""
        self._codes[name][indices] = codes + sum(map(len, self._parts[name]))
        self._parts[name].append(values)

    # Boards and policies

    def _add_boards(self, group: ExampleGroup) -> bool:
        """Check and store the boards. Return False if the group has none, so all records are rejected."""
        kind, arrays, indices = group.layout.kinds[0], group.arrays, group.indices
        if "boards" not in arrays:
            code = Reason.BOARD_SHAPE if isinstance(kind, ArrayKind) else Reason.BOARD_TYPE
            expected = f"an array (2, n, n), n from {MIN_SIZE} to {MAX_SIZE}"
            self._reject(indices, True, code, f"found {kind}; expected {expected}")
            return False
        self._reject(indices, arrays["invalid"], Reason.BOARD_CELLS, "cells that are neither 0 nor 1")
        self._reject(indices, arrays["overlapping"], Reason.BOARD_OVERLAP, "cells that are blue and red")
        self._boards.append((indices, group.layout.packed["board"].shape[1], arrays["boards"]))
        return True

    def _set_board_size(self) -> None:
        """Set the board size from the first usable board, and reject boards of another size."""
        if self.board_size is None:
            usable = [(indices[self.accepted[indices]], size) for indices, size, _ in self._boards]
            # Groups are in no order, so the lowest index decides which board is the first.
            firsts = [(int(indices[0]), size) for indices, size in usable if len(indices)]
            self.board_size = min(firsts)[1] if firsts else None
        for indices, size, _ in self._boards:
            if size != self.board_size:
                detail = f"found {size}; expected {self.board_size}"
                self._reject(indices, True, Reason.BOARD_SIZE, detail, size)

    def _has_array(self, group: ExampleGroup, key: str) -> bool:
        """Return whether a group has policies under a key; reject its records if these are not valid."""
        kind, packed = group.layout.kinds[ARRAYS.index(key)], group.layout.packed
        if key not in packed and kind not in (None, "None"):
            code = Reason.POLICY_SHAPE if isinstance(kind, ArrayKind) else Reason.POLICY_TYPE
            self._reject(group.indices, True, code, f"{key}: found {kind}; expected an array (n·n,) or None")
        return key in packed

    def _add_policies(self, group: ExampleGroup) -> None:
        """Check and store the moves, and the policies of a search or those that are not one-hot."""
        arrays, indices, kinds = group.arrays, group.indices, group.layout.packed
        if self._has_array(group, "policy"):
            one_hot = arrays["one_hot"]
            self._numbers["move"][indices[one_hot]] = arrays["moves"][one_hot]
            # The table has one policy for each position: that of the search, even if it is None.
            if SEARCH_KEY in (group.layout.keys or ()):
                detail = f"the policy beside {SEARCH_KEY} is not one move"
                self._reject(indices, ~one_hot, Reason.POLICY_VALUES, detail)
            elif not one_hot.all():
                self._add_dense(indices[~one_hot], arrays["dense"], kinds["policy"].dtype)
        if self._has_array(group, SEARCH_KEY):
            self._empty[indices] = ~arrays["search"].any(axis=1)
            self._add_dense(indices, arrays["search"], kinds[SEARCH_KEY].dtype)

    def _add_dense(self, indices: Int64Array, payload: UInt8Array, dtype: str) -> None:
        """Check and store policies that are stored as probabilities.

        Args:
            indices: Indices of the records in the block, (k,).
            payload: Bytes of the policies, (k, bytes).
            dtype: NumPy type string.
        """
        is_bool = np.dtype(dtype).kind == "b"
        # Bools stay bytes here: NumPy takes every byte other than 0 as True.
        policy: npt.NDArray[Any] = payload if is_bool else payload.view(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = policy.astype(np.float32)
            valid = np.isfinite(policy).all(axis=1) & (policy >= 0).all(axis=1)
            # The store holds float32, and an export must restore every bit.
            exact = (narrow.astype(policy.dtype) == policy).all(axis=1) & np.isfinite(narrow).all(axis=1)
        if is_bool:
            valid &= (policy <= 1).all(axis=1)
        detail = "NaN, infinite or negative probabilities, or bools that are neither 0 nor 1"
        self._reject(indices, ~valid, Reason.POLICY_VALUES, detail)
        inexact = f"{policy.dtype} probabilities that float32 cannot hold"
        self._reject(indices, valid & ~exact, Reason.POLICY_DTYPE, inexact)
        if policy.shape[1] == (self.board_size or 0) ** 2:
            for start in range(0, len(narrow), _POLICY_ROWS):
                rows = slice(start, start + _POLICY_ROWS)
                policies = SparsePolicies.from_dense(narrow[rows]).to_arrow()
                self._put("policy", indices[rows], policies, np.arange(len(policies)))

    # Values and metadata

    def _add_fields(self, group: ExampleGroup) -> None:
        """Check and store the fields that have a column of their own."""
        fields = {name: group.fields[name] for name in _OF_EXAMPLE if name in group.fields}
        fields |= {name: group.metadata[name] for name in _OF_METADATA if name in group.metadata}
        for name, column in fields.items():
            values = self._read(group, column, _READERS.get(name, partial(_number, name)))
            null = (-1, -1) if name == "game_id" else -1
            numbers = np.array([null if value is None else value for value in values])
            self._numbers[name][group.indices] = numbers[column.codes]
            # Several values may have the same spelling.
            spellings = [None if value is None else dialect.spelling(name, value) for value in column.values]
            codes: dict[object, int] = {}
            numbered = np.array([codes.setdefault(each, len(codes)) for each in spellings])[column.codes]
            for spelling, code in codes.items():
                self.spelled.append((name, spelling, group.indices[numbered == code]))

    def _read(self, group: ExampleGroup, column: Column, read: Callable[[Any], Any]) -> list[Any]:
        """Return what ``read`` returns for each distinct value of a column; None for a null, and if it raises
        a FormatError, by which the rows with this value are rejected.
        """
        values = []
        for code, value in enumerate(column.values):
            result = None
            try:
                if value is not None or read is _value:  # the only field that is not nullable
                    result = read(value)
            except FormatError as error:
                self._reject(group.indices, column.codes == code, error.code, str(error))
            values.append(result)
        return values

    def _add_texts(self, group: ExampleGroup) -> None:
        """Check and store the metadata that has no column of its own."""
        names = [name for name in sorted(group.metadata) if name not in _OF_METADATA]
        numbers = sorted(group.fields.keys() - set(_OF_EXAMPLE))
        columns = [group.metadata[name] for name in names] + [group.fields[name] for name in numbers]
        if not columns:
            return
        # Examples often share their metadata, which is then converted once.
        zipped = Column.zipped(columns)
        counts = iter(np.bincount(zipped.codes).tolist())

        def read(values: Sequence[Any]) -> tuple[str, str | None, bool]:
            """Return the text of values that some examples share, its origin, and whether it is masked."""
            count, metadata = next(counts), dict(zip(names, values, strict=False))
            weight = dialect.policy_weight({key: plain(value) for key, value in metadata.items()})
            of_example = dict(zip(numbers, values[len(names) :], strict=True))
            text = dialect.metadata_text(metadata, of_example) if self._budget >= 0 else ""
            self._budget -= len(text) * count
            if self._budget < 0:
                raise FormatError("the examples have too much metadata together", Reason.METADATA_SIZE)
            return text, _origin(metadata), weight == 0

        rows = [row or (None, None, False) for row in self._read(group, zipped, read)]
        texts, origins, masked = zip(*rows, strict=True)
        self._put("metadata", group.indices, pa.array(texts, pa.string()), zipped.codes)
        self._put("origin", group.indices, pa.array(origins, pa.string()), zipped.codes)
        self._masked[group.indices] = np.array(masked)[zipped.codes]

    def _add_spellings(self, group: ExampleGroup) -> None:
        """Add the spellings that all examples of a group share."""
        layout = group.layout
        shared: dict[str, object] = {"layout": "tuple" if layout.keys is None else "dict"}
        shared |= {"keys": layout.keys, "metadata_keys": layout.metadata_keys}
        for name, kind in zip(ARRAYS, layout.kinds, strict=True):
            if isinstance(kind, ArrayKind):
                shared[name] = kind.dtype + (" fortran" if kind.fortran else "")
        if SEARCH_KEY in layout.packed and "policy" not in layout.packed:
            shared["policy"] = "none"  # else the move that was played, which the store has, would be written
        self.spelled += [(name, spelling, group.indices) for name, spelling in shared.items()]


# Converters of single values: each returns the value for the column or None for null, or raises.


def _value(value: object) -> float:
    number = plain(value)
    if not is_number(value):
        raise FormatError("value", Reason.VALUE_TYPE, kind_of(value), "a number from 0 to 1")
    if not 0 <= number <= 1:
        raise FormatError("value", Reason.VALUE_RANGE, number, "0 to 1")
    return float(number)


def _number(name: str, value: object) -> int:
    wrong_type, out_of_range, most = _NUMBERS[name]
    number = plain(value)
    if name == "player_to_move" and isinstance(value, EnumValue):
        number = value.value
    if type(number) is not int:
        raise FormatError(name, wrong_type, kind_of(value), "an integer")
    if not 0 <= number <= most:
        raise FormatError(name, out_of_range, number, f"0 to {most}")
    return int(number)


def read_winner(value: object) -> int:
    """Return the winner for a value of a pickle.

    Raises:
        FormatError: "winner-value".
    """
    if type(value) in (str, int) and value in _WINNERS:
        return _WINNERS[value]
    if isinstance(value, EnumValue) and value.value in (0, 1):
        return int(value.value)
    found = shortened(str(value)) if isinstance(value, str | EnumValue) else kind_of(value)
    expected = "BLUE, RED, an enum member of 0 or 1, or None"
    raise FormatError("winner", Reason.WINNER_VALUE, found, expected)


def _game_id(value: object) -> tuple[int, int]:
    if isinstance(value, tuple) and len(value) == 2:
        first, second = plain(value[0]), plain(value[1])
        if type(first) is type(second) is int and min(first, second) >= 0 and max(first, second) <= _MAX_ID:
            return first, second
    raise FormatError("game_id", Reason.GAME_ID, kind_of(value), "two integers from 0 to 2^31 - 1, or None")


def _origin(metadata: dict[str, Any]) -> str | None:
    named = [metadata[key] for key in _ORIGINS if isinstance(metadata.get(key), str)]
    return encodable(named[-1]) if named else None


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "value": _value,
    "winner": read_winner,
    "game_id": _game_id,
}
"""Converters of the fields of other values than ``_NUMBERS``."""
