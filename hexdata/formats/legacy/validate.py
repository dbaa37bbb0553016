"""Validation of groups of examples and their conversion to one raw record batch.

Checks are vectorised, and each has a stable code. A record is rejected with the code of the first check that
it fails. Does not read the pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import Reason
from hexdata.formats.legacy.allowlist import EnumValue, PickledScalar, kind_of, shortened
from hexdata.formats.legacy.dialect import WINNER_SPELLINGS, MetadataSizeError, metadata_text
from hexdata.formats.legacy.examples import CodedColumn, Column, ExampleGroup, NumberColumn
from hexdata.formats.legacy.limits import LegacyLimits
from hexdata.formats.source import Rejection
from hexdata.policy import SparsePolicies
from hexdata.schema import MAX_TIER, POLICY_TYPE, board_bytes, raw_schema
from hexdata.text import encodable

__all__ = ["BlockValidator"]

Bools = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_NUMBERS: Final = {
    "player_to_move": np.uint8,
    "file_idx": np.int32,
    "line_idx": np.int32,
    "position_in_game": np.uint16,
    "total_positions": np.uint16,
    "value_sample_tier": np.uint8,
    "winner": np.uint8,
    "move": np.uint16,
}
"""Nullable columns of integers from 0 up, with their final types. Until ``finish``, -1 represents null."""

_RANGES: Final = {
    "position_in_game": (Reason.POSITION_TYPE, Reason.POSITION_RANGE, 65535),
    "total_positions": (Reason.POSITION_TYPE, Reason.POSITION_RANGE, 65535),
    "value_sample_tier": (Reason.TIER_TYPE, Reason.TIER_RANGE, MAX_TIER + 1),
}
"""For a metadata key: the codes for a value of another type and for a number out of range, and the first
number that is too large."""

_KNOWN: Final = frozenset(["game_id", "winner", *_RANGES])
_ORIGINS: Final = ("source_file", "original_source")
"""Metadata keys that name the raw file. The last one present is used. They are kept in ``metadata`` too."""

_TEXT_WINNERS: Final = {
    spelling: winner
    for pair in WINNER_SPELLINGS.values()
    for winner, spelling in enumerate(pair)
    if isinstance(spelling, str)
}


_POLICY_ROWS: Final = 1024
"""Number of dense policies that are converted to sparse ones at a time, which limits the memory."""


class _InvalidValue(NamedTuple):
    """Reason code and details of an invalid value."""

    code: Reason
    detail: str


class BlockValidator:
    """The columns of one block of records, filled group by group, and the rejections.

    Args:
        first: Number in the file of the first record of the block.
        count: Number of records in the block.
        board_size: Cells along an edge in this file; None if no usable board has been read yet.
        limits: Limits of the column ``metadata``.

    Attributes:
        board_size: As the argument; set from the first usable board if it was None.
    """

    def __init__(self, first: int, count: int, board_size: int | None, limits: LegacyLimits) -> None:
        self.board_size = board_size
        self._first = first
        self._count = count
        self._limits = limits
        self._reasons: dict[int, tuple[Reason, str]] = {}
        self._rejected = np.zeros(count, dtype=bool)
        self._numbers = {name: np.full(count, -1, np.int32) for name in _NUMBERS}
        self._value = np.zeros(count)
        self._boards: list[tuple[Int64Array, int, UInt8Array]] = []
        self._policies: list[tuple[Int64Array, int, pa.Array]] = []
        self._texts = {name: _Texts(count) for name in ("origin", "metadata")}
        budget = limits.metadata_bytes + limits.metadata_mean * count
        self._distinct_budget = budget
        """Remaining characters of metadata, each distinct text counted once."""
        self._total_budget = budget
        """Remaining characters of metadata, each text counted for every record that has it."""

    def reject(self, index: int, code: Reason, detail: str) -> None:
        """Reject a record. If it is rejected already, its first reason is kept.

        Args:
            index: Index of the record in the block.
            code: Reason code.
            detail: Details for the report.
        """
        self._reasons.setdefault(index, (code, detail))
        self._rejected[index] = True

    def fill(self, groups: Iterable[ExampleGroup]) -> None:
        """Check all examples of the block, and copy their values to the columns."""
        with_boards = [group for group in groups if self._add_boards(group)]
        self._set_board_size()
        for group in with_boards:
            self._add_policies(group)
            self._add_values(group)
            self._add_players(group)
            self._add_metadata(group)

    @property
    def accepted(self) -> Bools:
        """True for each record of the block that is not rejected, (count,)."""
        return ~self._rejected

    def finish(self) -> tuple[pa.RecordBatch, list[Rejection]]:
        """Return the accepted records as ``raw_schema``, and the rejections, both in order.

        If the file has had no usable board yet, the batch has no rows, and its boards are 0 bytes wide.
        """
        keep = np.flatnonzero(~self._rejected) if self._reasons else np.arange(self._count)
        size = self.board_size or 0
        packed = np.zeros((self._count, board_bytes(size)), np.uint8)
        for indices, board_size, boards in self._boards:
            if board_size == size:
                packed[indices] = boards
        schema = raw_schema(size)
        columns = {
            "record": pa.array(keep + self._first),
            "board": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(board_bytes(size)), len(keep), [None, pa.py_buffer(self._kept(packed, keep))]
            ),
            "policy": self._policy_lists(keep),
            "value": pa.array(self._kept(self._value, keep)),
            "origin": self._texts["origin"].dictionary(keep),
            "metadata": self._texts["metadata"].dictionary(keep).cast(pa.string()),
            **{name: pa.nulls(len(keep), schema.field(name).type) for name in ("end_reason", "swap")},
        }
        for name, numbers in self._numbers.items():
            kept = self._kept(numbers, keep)
            columns[name] = pa.array(kept.astype(_NUMBERS[name]), mask=kept < 0)
        batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
        rejected = [Rejection(self._first + index, *self._reasons[index]) for index in sorted(self._reasons)]
        return batch, rejected

    def _kept(self, column: npt.NDArray[Any], keep: Int64Array) -> npt.NDArray[Any]:
        """Return the rows ``keep`` of a column of the block, without a copy if these are all."""
        return column if len(keep) == self._count else column[keep]

    def _reject(self, group: ExampleGroup, bad: Bools, code: Reason, detail: Callable[[int], str]) -> None:
        """Reject the examples of a group for which ``bad`` (n,) is True. ``detail`` is called per row."""
        self._reject_at(group.indices, bad, code, detail)

    def _reject_at(self, indices: Int64Array, bad: Bools, code: Reason, detail: Callable[[int], str]) -> None:
        """Reject the records ``indices`` (n,) for which ``bad`` (n,) is True."""
        for row in np.flatnonzero(bad).tolist():
            self.reject(int(indices[row]), code, detail(row))

    def _reject_all(self, group: ExampleGroup, code: Reason, detail: str) -> None:
        self._reject(group, np.ones(len(group.indices), dtype=bool), code, lambda _: detail)

    # Boards and policies

    def _add_boards(self, group: ExampleGroup) -> bool:
        """Check and store the boards. Return False if the group has none, so all records are rejected."""
        kind, boards = group.layout.board, group.board
        if isinstance(kind, str):
            self._reject_all(group, Reason.BOARD_TYPE, f"found {kind}; expected an array (2, n, n)")
            return False
        if boards is None:
            expected = f"(2, n, n), n from {MIN_SIZE} to {MAX_SIZE}"
            self._reject_all(group, Reason.BOARD_SHAPE, f"found {kind.shape}; expected {expected}")
            return False
        self._reject(
            group,
            boards.invalid > 0,
            Reason.BOARD_CELLS,
            lambda row: f"{boards.invalid[row]} cells are neither 0 nor 1",
        )
        self._reject(
            group,
            boards.overlapping > 0,
            Reason.BOARD_OVERLAP,
            lambda row: f"{boards.overlapping[row]} cells are both blue and red",
        )
        self._boards.append((group.indices, kind.shape[1], boards.packed))
        return True

    def _set_board_size(self) -> None:
        """Set the board size from the first usable board, and reject boards of another size."""
        if self.board_size is None:
            usable = [(indices[~self._rejected[indices]], size) for indices, size, _ in self._boards]
            firsts = [(int(indices[0]), size) for indices, size in usable if len(indices)]
            self.board_size = min(firsts)[1] if firsts else None
        for indices, size, _ in self._boards:
            if size != self.board_size:
                for index in indices.tolist():
                    self.reject(
                        index, Reason.BOARD_SIZE, f"found {size}; expected {self.board_size}, as before"
                    )

    def _add_policies(self, group: ExampleGroup) -> None:
        kind, board = group.layout.policy, group.layout.board
        if kind == "None" or isinstance(board, str):
            return
        if isinstance(kind, str):
            self._reject_all(group, Reason.POLICY_TYPE, f"found {kind}; expected an array (n·n,) or None")
            return
        if group.policy is None:
            expected = board.shape[-1] ** 2
            self._reject_all(group, Reason.POLICY_SHAPE, f"found {kind.shape}; expected ({expected},)")
            return
        moves, one_hot = group.policy.moves, group.policy.one_hot
        self._numbers["move"][group.indices[one_hot]] = moves[one_hot]
        if not one_hot.all():
            is_bool = np.dtype(kind.dtype).kind == "b"
            dense = group.policy.dense if is_bool else group.policy.dense.view(kind.dtype)
            indices = group.indices[~one_hot]
            if is_bool:
                invalid: Bools = np.any(dense > 1, axis=1)
                detail = "bools that are neither 0 nor 1"
                self._reject_at(indices, invalid, Reason.POLICY_VALUES, lambda _: detail)
            self._add_dense(indices, dense)

    def _add_dense(self, indices: Int64Array, policy: npt.NDArray[Any]) -> None:
        """Check and store policies (k, cells) that are not one-hot, of the records ``indices`` (k,)."""
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = policy.astype(np.float32)
            valid = np.isfinite(policy).all(axis=1) & (policy >= 0).all(axis=1)
            exact = (narrow.astype(policy.dtype) == policy).all(axis=1) & np.isfinite(narrow).all(axis=1)
        detail = "NaN, infinite or negative probabilities"
        self._reject_at(indices, ~valid, Reason.POLICY_VALUES, lambda _: detail)
        inexact = f"{policy.dtype} probabilities that float32 cannot hold"
        self._reject_at(indices, valid & ~exact, Reason.POLICY_DTYPE, lambda _: inexact)
        for start in range(0, len(narrow), _POLICY_ROWS):
            rows = slice(start, start + _POLICY_ROWS)
            policies = SparsePolicies.from_dense(narrow[rows]).to_arrow()
            self._policies.append((indices[rows], policy.shape[1], policies))

    def _policy_lists(self, keep: Int64Array) -> pa.Array:
        """Return ``schema.POLICY_TYPE`` of the records ``keep``; null if a record has no dense policy."""
        cells = (self.board_size or 0) ** 2
        usable = [(indices, policies) for indices, count, policies in self._policies if count == cells]
        if not usable:
            return pa.nulls(len(keep), POLICY_TYPE)
        policies = pa.concat_arrays([policies for _, policies in usable])
        rows = np.full(self._count, -1)
        rows[np.concatenate([indices for indices, _ in usable])] = np.arange(len(policies))
        rows = rows[keep]
        return policies.take(pa.array(rows, mask=rows < 0))

    # Values and metadata

    def _add_values(self, group: ExampleGroup) -> None:
        self._value[group.indices] = self._read(group, group.value, _read_value, 0.0, _are_values)

    def _add_players(self, group: ExampleGroup) -> None:
        if group.player_to_move is not None:
            self._numbers["player_to_move"][group.indices] = self._read(
                group, group.player_to_move, _read_player, -1, partial(_are_below, 2)
            )

    def _add_metadata(self, group: ExampleGroup) -> None:
        metadata = group.metadata
        for name, limits in _RANGES.items():
            if name in metadata:
                read, are_valid = partial(_read_number, name, *limits), partial(_are_below, limits[-1])
                self._numbers[name][group.indices] = self._read(group, metadata[name], read, -1, are_valid)
        if "winner" in metadata:
            self._numbers["winner"][group.indices] = self._read(group, metadata["winner"], _read_winner, -1)
        if "game_id" in metadata:
            ids = self._read(group, metadata["game_id"], _read_game_id, (-1, -1), _are_game_ids)
            self._numbers["file_idx"][group.indices] = ids[:, 0]
            self._numbers["line_idx"][group.indices] = ids[:, 1]
        names = [name for name in sorted(metadata) if name not in _KNOWN]
        if names or group.numbers:
            self._add_texts(group, names)

    def _add_texts(self, group: ExampleGroup, names: list[str]) -> None:
        numbers = sorted(group.numbers)
        columns = [group.metadata[name] for name in names] + [group.numbers[name] for name in numbers]
        others = CodedColumn.zipped(columns)
        objects = [dict(zip(names, values, strict=False)) for values in others.values]
        of_example = [dict(zip(numbers, values[len(names) :], strict=True)) for values in others.values]
        texts = [self._metadata_text(*parts) for parts in zip(objects, of_example, strict=True)]
        self._reject_large(group, others, texts)
        texts = [text or None for text in texts]
        lossy = np.array([text is None for text in texts])[others.codes]
        self._reject(
            group,
            lossy,
            Reason.METADATA_VALUE,
            lambda row: (
                "not of JSON: "
                + ", ".join(
                    f"{shortened(name)} ({kind_of(value)})"
                    for name, value in [*objects[others.codes[row]].items()][:8]
                )
            ),
        )
        origins = [text and _origin(values) for text, values in zip(texts, objects, strict=True)]
        self._texts["metadata"].put(group.indices, others.codes, texts)
        self._texts["origin"].put(group.indices, others.codes, origins)

    def _metadata_text(self, values: dict[str, Any], numbers: dict[str, Any]) -> str | None:
        """Return metadata as JSON text; None if JSON cannot represent it, "" if it exceeds a limit."""
        if self._distinct_budget < 0:
            return ""  # the block has reached its limit already
        try:
            text = metadata_text(values, numbers, self._limits)
        except MetadataSizeError:
            return ""
        self._distinct_budget -= len(text or "")
        return text

    def _reject_large(self, group: ExampleGroup, others: CodedColumn, texts: list[str | None]) -> None:
        """Reject records whose metadata exceeds a limit, alone or together with the block.

        A text that several records share counts for each of them, as the store writes it each time.
        """
        sizes = np.array([len(text or "") for text in texts])[others.codes]
        large = np.array([text == "" for text in texts])[others.codes]
        large |= np.cumsum(sizes) > self._total_budget
        self._total_budget -= int(sizes[~large].sum())
        mean = self._limits.metadata_mean
        self._reject(
            group,
            large,
            Reason.METADATA_SIZE,
            lambda _: f"{self._limits.metadata_expected}, and {mean:,} a record over {self._count:,} records",
        )

    def _read(
        self,
        group: ExampleGroup,
        column: Column,
        read: Callable[[Any], Any],
        null: object,
        are_valid: Callable[[npt.NDArray[Any]], bool] | None = None,
    ) -> npt.NDArray[Any]:
        """Convert each distinct value of a column, and reject the rows with an invalid value.

        Args:
            group: Group of the column.
            column: The column.
            read: Converts a value: returns the new value, None for null, or a :class:`_InvalidValue`.
            null: Value that represents null in the result.
            are_valid: Returns whether ``read`` would return all numbers of a :class:`NumberColumn` unchanged.

        Returns:
            The converted values, (n,); ``null`` for rejected rows.
        """
        if isinstance(column, NumberColumn) and are_valid is not None and are_valid(column.numbers):
            return column.numbers
        results = [read(value) for value in column.values]
        invalid = np.array([isinstance(result, _InvalidValue) for result in results])
        if invalid.any():
            for row in np.flatnonzero(invalid[column.codes]).tolist():
                self.reject(int(group.indices[row]), *results[column.codes[row]])
        values = [
            null if result is None or isinstance(result, _InvalidValue) else result for result in results
        ]
        return np.array(values)[column.codes]


class _Texts:
    """A dictionary-encoded column of texts, initially null."""

    def __init__(self, count: int) -> None:
        self._codes = np.full(count, -1, np.int32)
        self._known: dict[str, int] = {}

    def put(self, indices: Int64Array, codes: npt.NDArray[np.intp], texts: list[str | None]) -> None:
        """Set the rows at ``indices`` to ``texts[codes]``."""
        table = [-1 if text is None else self._known.setdefault(text, len(self._known)) for text in texts]
        self._codes[indices] = np.array(table, np.int32)[codes]

    def dictionary(self, keep: Int64Array) -> pa.DictionaryArray:
        """Return the rows ``keep``. The dictionary has only their texts, in the order of first use."""
        texts = [*self._known]
        kept = self._codes[keep]
        first = np.full(len(texts) + 1, len(kept))
        first[kept[::-1]] = np.arange(len(kept))[::-1]  # of equal codes, the one assigned last is the first
        order = np.argsort(first[:-1])[: np.count_nonzero(first[:-1] < len(kept))]
        table = np.full(len(texts) + 1, -1, np.int32)
        table[order] = np.arange(len(order))
        codes = table[kept]
        used_texts = pa.array([texts[index] for index in order.tolist()], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), used_texts)


# Checks of all numbers of a NumberColumn at once: whether the converter of single values, below, returns each
# of them unchanged.
def _are_values(numbers: npt.NDArray[Any]) -> bool:
    return numbers.ndim == 1 and bool(((numbers >= 0) & (numbers <= 1)).all())


def _are_below(stop: int, numbers: npt.NDArray[Any]) -> bool:
    is_integer = numbers.ndim == 1 and numbers.dtype.kind in "iu"
    return is_integer and bool(numbers.min() >= 0 and numbers.max() < stop)


def _are_game_ids(numbers: npt.NDArray[Any]) -> bool:
    return numbers.ndim == 2 and bool(numbers.min() >= 0 and numbers.max() < 1 << 31)


# Converters of single values: each returns the value for the column, None for null, or an _InvalidValue.


def _read_value(value: object) -> float | _InvalidValue:
    number = value.value if isinstance(value, PickledScalar) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return _InvalidValue(Reason.VALUE_TYPE, f"found {kind_of(value)}; expected a number from 0 to 1")
    if not 0 <= number <= 1:
        return _InvalidValue(Reason.VALUE_RANGE, f"found {_short(number)}; expected 0 to 1")
    return float(number)


def _read_number(
    name: str, wrong_type: Reason, out_of_range: Reason, stop: int, value: object
) -> int | _InvalidValue | None:
    number = value.value if isinstance(value, PickledScalar) else value
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int):
        return _InvalidValue(wrong_type, f"{name}: found {kind_of(value)}; expected an integer")
    if not 0 <= number < stop:
        return _InvalidValue(out_of_range, f"{name}: found {_short(number)}; expected 0 to {stop - 1}")
    return number


def _read_player(value: object) -> int | _InvalidValue | None:
    return _read_number(
        "player_to_move",
        Reason.PLAYER_TYPE,
        Reason.PLAYER_RANGE,
        2,
        value.value if isinstance(value, EnumValue) else value,
    )


def _read_winner(value: object) -> int | _InvalidValue | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _TEXT_WINNERS:
        return _TEXT_WINNERS[value]
    if isinstance(value, int) and not isinstance(value, bool) and value in (1, 2):
        return value - 1
    if isinstance(value, EnumValue) and value.value in (0, 1):
        return int(value.value)
    if isinstance(value, EnumValue):
        value = f"{value.kind} of {value.value if isinstance(value.value, int) else value.value[:40]!r}"
    found = repr(value[:40]) if isinstance(value, str) else kind_of(value)
    return _InvalidValue(
        Reason.WINNER_VALUE, f"found {found}; expected BLUE, RED, an enum member of 0 or 1, or None"
    )


def _read_game_id(value: object) -> tuple[int, int] | _InvalidValue | None:
    if value is None:
        return None
    if isinstance(value, tuple) and len(value) == 2:
        file_idx, line_idx = (
            _read_number("game_id", Reason.GAME_ID, Reason.GAME_ID, 1 << 31, part) for part in value
        )
        if isinstance(file_idx, int) and isinstance(line_idx, int):
            return file_idx, line_idx
    return _InvalidValue(
        Reason.GAME_ID, f"found {kind_of(value)}; expected two integers from 0 to 2^31 - 1, or None"
    )


def _origin(metadata: dict[str, Any]) -> str | None:
    named = [metadata[key] for key in _ORIGINS if isinstance(metadata.get(key), str)]
    return encodable(named[-1]) if named else None


def _short(number: int | float) -> str:
    return repr(number) if isinstance(number, float) or abs(number) < 1 << 64 else "an enormous number"
