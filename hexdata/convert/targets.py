"""The optional columns of positions: the numbers in the metadata of legacy examples, and columns of readers.

A legacy example states results of its search as numbers beside the board, or in its metadata. They stay in
the column ``metadata``, so that the example can be restored. This module decides which of them become columns
too, and computes these columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from hexdata.convert.spool import Source
from hexdata.errors import InputError
from hexdata.formats.legacy.dialect import (
    EXAMPLE_KEY,
    EXAMPLE_TYPES_KEY,
    TYPES_KEY,
    policy_weight,
    unescaped_key,
)
from hexdata.games.convention import Convention, convert_values
from hexdata.schema import EXTRA_PREFIX, FULL_WEIGHT, MAX_EXTRAS, TARGETS, is_target, target_type
from hexdata.text import encodable, shortened

_MAX_NAMES: Final = 1024
"""Maximum number of keys of a source that are examined."""
_MAX_NAME: Final = 63
"""Longer names are shortened in notes; they cannot be columns."""
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)

_NOT_OF_POSITIONS: Final = frozenset(["policy_target_trainable", "policy_target_version"])
"""Keys of metadata with numbers that become no column: the mask is ``policy_weight``, and a version of the
writer says nothing about a position."""

_RANGES: Final = {
    "policy_weight": (0.0, _MAX_FLOAT32, "a finite number from 0"),
    "root_value": (0.0, 1.0, "a number from 0 to 1"),
    "visits": (0.0, float((1 << 31) - 1), "an integer from 0 to 2^31 - 1"),
    "weight": (0.0, _MAX_FLOAT32, "a finite number from 0"),
}
"""The smallest and the largest value of each column of ``schema.TARGETS``, and their description."""
_ANY_NUMBER: Final = (-math.inf, math.inf, "a number")


def _numbers(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and the values of an example in a text of ``metadata``.

    NaN is None. A value that is no number is a text, a bool, a list or a dict.
    """
    content = json.loads(text)
    types = content.pop(TYPES_KEY, {})
    of_example = content.pop(EXAMPLE_KEY, {})
    types_of_example = content.pop(EXAMPLE_TYPES_KEY, {})
    weight = policy_weight(content)
    if weight is not None:
        yield "policy_weight", weight
    values = [(unescaped_key(key), value, types) for key, value in content.items()]
    values = [each for each in values if each[0] not in _NOT_OF_POSITIONS]
    values += [(name, value, types_of_example) for name, value in of_example.items()]
    for name, value, typed in values:
        if name in typed and isinstance(value, str):  # an infinite number or NaN
            value = float(value)
        yield name, None if isinstance(value, float) and math.isnan(value) else value


@dataclass
class _Numbers:
    """The findings on the values of one name in the metadata of a source."""

    name: str
    fits: bool = True
    """All numbers are in the range of the column of this name, if there is one."""
    has_number: bool = False
    problem: str = ""
    """The reason why they cannot be a column."""

    def add(self, value: Any) -> None:
        """Add a value of the metadata."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.problem = "not all values are numbers"
            return
        self.has_number = True
        low, high, _ = _RANGES.get(self.name, _ANY_NUMBER)
        self.fits &= low <= value <= high and (self.name != "visits" or value == int(value))
        # An integer above 2^53 may have no float64; NaN stands for one that is too large for any.
        try:
            exact = float(value)
        except OverflowError:
            exact = math.nan
        if exact != value:
            self.problem = "numbers that float64 cannot hold"


class NumberCounter:
    """Finds the numbers in the metadata of a source, batch by batch."""

    def __init__(self) -> None:
        self._found: dict[str, _Numbers] = {}
        self._ignored = False

    def add(self, texts: pa.Array) -> None:
        """Add the column ``metadata`` of a raw batch."""
        if texts.null_count == len(texts):
            return
        # Positions often share a text, which is parsed once.
        for text in texts.dictionary_encode().dictionary.to_pylist():
            here = set()
            for name, value in _numbers(text):
                if value is None:
                    continue
                name = encodable(name if len(name) <= _MAX_NAME else shortened(name))
                if name not in self._found and len(self._found) >= _MAX_NAMES:
                    self._ignored = True
                    continue
                own = self._found.setdefault(name, _Numbers(name))
                # The example and its metadata have this key, and there is one column.
                if name in here:
                    own.problem = "stated twice in an example"
                here.add(name)
                own.add(value)

    def columns(self) -> tuple[list[str], dict[str, str], list[str]]:
        """Return the columns that the source can have, the numbers that cannot be columns, and notes.

        Returns:
            The names of the columns; the reason for each name whose numbers stay in the metadata; and notes
            on the source.
        """
        columns, left_out, notes = [], {}, []
        for name, own in sorted(self._found.items()):
            column, problem = EXTRA_PREFIX + name, own.problem
            if name in TARGETS and not problem:
                if own.fits:
                    column = name
                else:
                    expected = _RANGES[name][2]
                    notes.append(f"{name} is the column {column}: its values are not always {expected}")
            if own.has_number and (problem or not is_target(column)):
                left_out[name] = problem or "the name is not one of a column"
            elif own.has_number:
                columns.append(column)
        if self._ignored:
            notes.append(f"only the first {_MAX_NAMES:,} keys of its metadata were examined for numbers")
        return columns, left_out, notes


def target_columns(
    raw: pa.RecordBatch, columns: Sequence[str], convention: Convention
) -> dict[str, pa.Array]:
    """Return optional columns of positions.

    Args:
        raw: The positions. A column that they do not have is in their column ``metadata``.
        columns: Names of the columns.
        convention: Value convention of the source, from which ``root_value`` is converted.
    """
    # If the reader gives all columns, metadata need not be parsed.
    is_complete = set(columns) <= set(raw.schema.names)
    texts = pa.nulls(raw.num_rows, pa.string()) if is_complete else raw.column("metadata")
    encoded = texts.dictionary_encode()
    distinct, codes = encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy()
    index = {name.removeprefix(EXTRA_PREFIX): number for number, name in enumerate(columns)}
    table = np.full((len(columns), len(distinct) + 1), np.nan)  # the last column is for null
    for row, text in enumerate(distinct):
        for name, value in _numbers(text):
            if name in index and value is not None:
                table[index[name], row] = value
    result = {}
    for name, numbers in zip(columns, table, strict=True):
        is_given = name in raw.schema.names
        values = raw.column(name) if is_given else pa.array(numbers[codes], from_pandas=True)
        if name == "root_value":
            given = values.to_numpy(zero_copy_only=False)
            values = pa.array(convert_values(given, convention), from_pandas=True)
        values = values.cast(target_type(name))
        result[name] = values.fill_null(FULL_WEIGHT) if name == "policy_weight" else values
    return result


def choose_columns(sources: Sequence[Source], known: Sequence[str]) -> tuple[str, ...]:
    """Choose the optional columns of each source; return those of the store.

    Columns that readers give have precedence, since they exist nowhere else, while numbers of metadata stay
    in it. The others that a source cannot have are added to ``not_targets`` of its facts.

    Args:
        sources: The sources.
        known: The columns that the store has.

    Raises:
        InputError: The store cannot have a column that a reader gives.
    """
    stored = {name.lower(): name for name in known}
    for source in sources:
        for name in source.facts.declared:
            if problem := _add_column(stored, name):
                reason = f"the store cannot have the column {name} of this file: {problem}"
                raise InputError(reason, path=source.name, hint="Convert it into a new store.")
    for source in sources:
        problems = {name: _add_column(stored, name) for name in source.facts.targets}
        source.targets = tuple(name for name, problem in problems.items() if not problem)
        left_out = {name.removeprefix(EXTRA_PREFIX): each for name, each in problems.items() if each}
        source.facts.not_targets = source.facts.not_targets | left_out
    return tuple(sorted(stored.values()))


def _add_column(stored: dict[str, str], name: str) -> str:
    """Add an optional column to those of a store, by lower-case name; return why it cannot have it, or ""."""
    same = stored.setdefault(name.lower(), name)
    if same != name:
        return f"the name differs from {same} of the store only in case"
    if sum(each not in TARGETS for each in stored.values()) > MAX_EXTRAS:
        del stored[name.lower()]
        return f"the store has {MAX_EXTRAS} columns with {EXTRA_PREFIX} already"
    return ""
