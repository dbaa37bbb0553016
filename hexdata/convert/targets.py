"""The optional columns of positions: the numbers in the metadata of legacy examples, and columns of readers.

A legacy example states results of its search as numbers beside the board, or in its metadata. They stay in
the column ``metadata``, so that the example can be restored. This module decides which of them become columns
too, and computes these columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import Reason
from hexdata.formats import RawBatch, Rejection
from hexdata.formats.legacy.dialect import EXAMPLE_KEY, EXAMPLE_TYPES_KEY, TYPES_KEY, unescaped_key
from hexdata.games.convention import Convention
from hexdata.schema import EXTRA_PREFIX, MAX_EXTRAS, TARGETS, is_target, target_type
from hexdata.store.originals import convert_values
from hexdata.strict_json import shortened
from hexdata.text import encodable

__all__ = ["NumberCounter", "check_declared", "choose_targets", "reject_invalid", "target_columns"]

_MAX_NAMES: Final = 1024
"""Maximum number of keys of a source that are examined."""
_MAX_NAME: Final = 63
"""Longer names are shortened in notes; they cannot be columns."""
_MAX_INT32: Final = (1 << 31) - 1
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)

_RANGES: Final = {"root_value": (0.0, 1.0), "visits": (0.0, float(_MAX_INT32)), "weight": (0.0, _MAX_FLOAT32)}
"""The smallest and the largest value of each column of ``schema.TARGETS``."""
_EXPECTED: Final = {
    "root_value": "a number from 0 to 1",
    "visits": "an integer from 0 to 2^31 - 1",
    "weight": "a finite number from 0",
}


# Numbers in metadata


def _numbers(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and the values of an example in a text of ``metadata``.

    NaN is None. A value that is no number is a text, a bool, a list or a dict.
    """
    content = json.loads(text)
    types = content.pop(TYPES_KEY, {})
    of_example = content.pop(EXAMPLE_KEY, {})
    types_of_example = content.pop(EXAMPLE_TYPES_KEY, {})
    for key, value in content.items():
        name = unescaped_key(key)
        yield name, _plain(value, name in types)
    for name, value in of_example.items():
        yield name, _plain(value, name in types_of_example)


def _plain(value: Any, typed: bool) -> Any:
    if typed and isinstance(value, str):  # an infinite number or NaN
        value = float(value)
    return None if isinstance(value, float) and math.isnan(value) else value


@dataclass
class _Summary:
    """The values of one name in a source."""

    low: float = math.inf
    high: float = -math.inf
    is_number: bool = False
    """Some values are numbers."""
    whole: bool = True
    """All numbers are integers."""
    problem: str | None = None
    """The reason why the values cannot be a column."""

    def add(self, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.problem = "not all values are numbers"
            return
        try:
            self.is_number = True
            number = float(value)
        except OverflowError:
            number = math.nan
        if number != value:
            self.problem = "numbers that float64 cannot hold"
            return
        self.low, self.high = min(self.low, number), max(self.high, number)
        self.whole = self.whole and number.is_integer()

    def fits(self, target: str) -> bool:
        """Return whether all numbers are in the range of a column of ``TARGETS``."""
        low, high = _RANGES[target]
        return low <= self.low and self.high <= high and (target != "visits" or self.whole)


class NumberCounter:
    """Finds the numbers in the metadata of a source, batch by batch."""

    def __init__(self) -> None:
        self._found: dict[str, _Summary] = {}
        self._ignored = False

    def add(self, texts: pa.Array) -> None:
        """Add the column ``metadata`` of a raw batch."""
        if texts.null_count == len(texts):
            return
        for text in texts.dictionary_encode().dictionary.to_pylist():
            seen = set()
            for name, value in _numbers(text):
                if value is None:
                    continue
                name = encodable(name if len(name) <= _MAX_NAME else shortened(name))
                summary = self._found.get(name)
                if summary is None:
                    if len(self._found) >= _MAX_NAMES:
                        self._ignored = True
                        continue
                    summary = self._found[name] = _Summary()
                if name in seen:
                    summary.problem = "stated twice in an example"
                seen.add(name)
                summary.add(value)

    def columns(self) -> tuple[list[str], dict[str, str], list[str]]:
        """Return the columns that the source can have, the numbers that cannot be columns, and notes.

        Returns:
            The names of the columns, sorted; the reason for each name whose numbers stay in the metadata;
            and notes on the source.
        """
        columns: dict[str, str] = {}
        left_out: dict[str, str] = {}
        notes = []
        for name, summary in sorted(self._found.items()):
            if not summary.is_number:
                continue
            column = EXTRA_PREFIX + name
            if name in TARGETS and summary.problem is None:
                if summary.fits(name):
                    column = name
                else:
                    notes.append(
                        f"{name} is the column {column}: its values, from {summary.low:g} to "
                        f"{summary.high:g}, are not always {_EXPECTED[name]}"
                    )
            problem = summary.problem
            if problem is None and not is_target(column):
                problem = "the name is not one of a column"
            if problem is None and column.lower() in columns:
                problem = f"the name differs from {columns[column.lower()]} only in case"
            if problem is None and len(columns) >= MAX_EXTRAS + len(TARGETS):
                problem = f"more than {MAX_EXTRAS} columns"
            if problem is None:
                columns[column.lower()] = column
            else:
                left_out[name] = problem
        if self._ignored:
            notes.append(f"only the first {_MAX_NAMES:,} keys of its metadata were examined for numbers")
        return sorted(columns.values()), left_out, notes


def target_columns(
    raw: pa.RecordBatch, columns: Sequence[str], convention: Convention
) -> dict[str, pa.Array]:
    """Return optional columns of positions.

    Args:
        raw: The positions. A column that they do not have is in their column ``metadata``.
        columns: Names of the columns.
        convention: Value convention of the source, from which ``root_value`` is converted.
    """
    missing = [name for name in columns if name not in raw.schema.names]
    numbers = _parsed(raw.column("metadata"), missing) if missing else {}
    result = {}
    for name in columns:
        if name in raw.schema.names:
            values = raw.column(name)
        else:
            values = pa.array(numbers[name], mask=np.isnan(numbers[name]))
        if name == "root_value":
            given = values.to_numpy(zero_copy_only=False)
            values = pa.array(convert_values(given, convention), mask=np.isnan(given))
        result[name] = values.cast(target_type(name))
    return result


def _parsed(texts: pa.Array, columns: Sequence[str]) -> dict[str, npt.NDArray[np.float64]]:
    """Return the numbers of these columns in texts of ``metadata``, (N,); NaN where there is none."""
    encoded = texts.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    index = {name.removeprefix(EXTRA_PREFIX): number for number, name in enumerate(columns)}
    table = np.full((len(columns), len(distinct) + 1), np.nan)  # the last column is for null
    for row, text in enumerate(distinct):
        for name, value in _numbers(text):
            if name in index and value is not None:
                table[index[name], row] = value
    codes = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return {name: table[number][codes] for number, name in enumerate(columns)}


# Columns of readers


def check_declared(targets: Sequence[str]) -> None:
    """Check the optional columns that a reader declares.

    Raises:
        ValueError: A name is not one of an optional column, two names are equal ignoring case, or there are
            too many columns.
    """
    if not all(map(is_target, targets)) or len({name.lower() for name in targets}) < len(targets):
        raise ValueError(f"the reader declares invalid targets: {list(targets)}")
    if sum(name not in TARGETS for name in targets) > MAX_EXTRAS:
        raise ValueError(f"the reader declares more than {MAX_EXTRAS} targets with {EXTRA_PREFIX}")


def reject_invalid(batch: RawBatch, targets: Iterable[str]) -> RawBatch:
    """Return a raw batch without the positions that have an invalid value in an optional column.

    Args:
        batch: The batch.
        targets: Its optional columns.
    """
    positions = batch.positions
    rejected: dict[int, Rejection] = {}
    for name in targets:
        column = positions.column(name)
        values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        low, high = _RANGES.get(name, (-math.inf, math.inf))
        with np.errstate(invalid="ignore"):
            valid = (values >= low) & (values <= high)
        valid |= column.is_null().to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(~valid).tolist():
            record = positions.column("record")[row].as_py()
            detail = f"{name}: found {values[row]:g}; expected {_EXPECTED.get(name, 'a number')}"
            rejected.setdefault(row, Rejection(record, Reason.TARGET_RANGE, detail))
    if not rejected:
        return batch
    kept = np.ones(len(positions), bool)
    kept[list(rejected)] = False
    merged = sorted([*batch.rejected, *rejected.values()], key=lambda rejection: rejection.record)
    return RawBatch(positions.filter(pa.array(kept)), merged)


# Columns of a store


def choose_targets(
    known: Sequence[str], sources: Iterable[Sequence[str]]
) -> tuple[list[list[str]], list[dict[str, str]], list[str]]:
    """Choose the optional columns of sources so that a store has distinct names, and not too many.

    Args:
        known: Columns that the store has.
        sources: The columns that each source can have, in the order of their ids.

    Returns:
        For each source, the chosen columns and the reason for each name that is left out; and the columns of
        the store, sorted.
    """
    names = {name.lower(): name for name in known}
    extras = sum(name not in TARGETS for name in known)
    chosen: list[list[str]] = []
    left_out: list[dict[str, str]] = []
    for columns in sources:
        own: list[str] = []
        others: dict[str, str] = {}
        for name in columns:
            taken, given = names.get(name.lower()), name.removeprefix(EXTRA_PREFIX)
            if taken is None and name not in TARGETS and extras >= MAX_EXTRAS:
                others[given] = f"the store has {MAX_EXTRAS} columns with {EXTRA_PREFIX} already"
            elif taken not in (None, name):
                others[given] = f"the name differs from {taken} of the store only in case"
            else:
                extras += taken is None and name not in TARGETS
                names[name.lower()] = name
                own.append(name)
        chosen.append(own)
        left_out.append(others)
    return chosen, left_out, sorted(names.values())
