"""How a file spells what it says: what its header needs so that the file can be written back as it was.

Turns Python values of a pickle into JSON values too. Never decides whether a record is kept.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError
from hexdata.formats.legacy.examples import ArrayKind, Coded, Group
from hexdata.formats.legacy.limits import Limits
from hexdata.formats.legacy.standins import EnumValue, Scalar, kind_of

__all__ = ["WINNER_SPELLINGS", "Dialect", "extra_text", "header_value"]

WINNER_SPELLINGS: Final = {
    "BLUE/RED": ("BLUE", "RED"),
    "b/r": ("b", "r"),
    "1/2": ("1", "2"),
    "int 1/2": (1, 2),
}
"""Blue and red as a winner is written, but for enums, which are spelled by the name of their class."""

_FIELDS: Final = ("winner", "position_in_game", "total_positions", "value_sample_tier")


class Dialect:
    """Counts, over the accepted examples, how each field is spelled. Nulls are data and not counted."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[Any]] = {}

    def add(self, group: Group, accepted: npt.NDArray[np.bool_]) -> None:
        """Count a group's examples; ``accepted`` (n,) says which."""
        layout, size = group.layout, int(np.count_nonzero(accepted))
        self._count("layout", "tuple" if layout.keys is None else "dict", size)
        for name, keys in (("keys", layout.keys), ("metadata_keys", layout.metadata_keys)):
            if keys is not None:
                self._count(name, keys, size)
        for name, kind in (("board", layout.board), ("policy", layout.policy)):
            if isinstance(kind, ArrayKind):
                self._count(name, kind.dtype + (" fortran" if kind.fortran else ""), size)
        self._count_column("value", group.value, accepted)
        if group.player_to_move is not None:
            self._count_column("player_to_move", group.player_to_move, accepted)
        for name in _FIELDS:
            if name in group.metadata:
                self._count_column(name, group.metadata[name], accepted)

    def as_json(self) -> dict[str, object]:
        """Return the spelling of each field; where it has several, ``{"mixed": [[spelling, count], …]}``."""
        return {
            name: next(iter(counts))
            if len(counts) == 1
            else {"mixed": sorted(([key, count] for key, count in counts.items()), key=str)}
            for name, counts in sorted(self._counts.items())
        }

    def _count_column(self, name: str, column: Coded, accepted: npt.NDArray[np.bool_]) -> None:
        sizes = np.bincount(column.codes[accepted], minlength=len(column.values))
        for value, size in zip(column.values, sizes.tolist(), strict=True):
            if value is not None and size:
                self._count(name, _winner_spelling(value) if name == "winner" else _spelling(value), size)

    def _count(self, name: str, spelling: object, size: int) -> None:
        if size:
            self._counts.setdefault(name, Counter())[spelling] += size


def _spelling(value: object) -> str:
    if isinstance(value, EnumValue):
        return value.kind if isinstance(value.value, int) else f"{value.kind} by text"
    if isinstance(value, Scalar):
        return f"numpy {value.dtype}"
    return next(
        (kind.__name__ for kind in (bool, int, float, str) if isinstance(value, kind)), kind_of(value)
    )


def _winner_spelling(value: object) -> str:
    if isinstance(value, EnumValue):
        return _spelling(value)
    return next(name for name, pair in WINNER_SPELLINGS.items() if value in pair)


class _NotJsonError(ValueError):
    """A value that JSON would not give back as it was."""


def extra_text(extra: dict[str, Any], limits: Limits) -> str | None:
    """Return JSON text of metadata, keys sorted; None if JSON would not give back the same values."""
    budget = _Budget(limits)
    try:
        values = {key: _to_json(extra[key], limits.nesting, budget, strict=True) for key in sorted(extra)}
    except (_NotJsonError, FormatError):
        return None
    return json.dumps(values, separators=(",", ":"))


def header_value(value: object, limits: Limits) -> object:
    """Return a header's value for JSON; what JSON does not know becomes a dict with one ``__key__``.

    Raises:
        FormatError: "limit-nesting" or "limit-header".
    """
    return _to_json(value, limits.nesting, _Budget(limits), strict=False)


class _Budget:
    """So many values may still be written out: a list that holds one list twice, and so on, explodes."""

    def __init__(self, limits: Limits) -> None:
        self._left = limits.header_values

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise FormatError("more values in the header than the limit", code="limit-header")


def _to_json(value: Any, depth: int, budget: _Budget, *, strict: bool) -> object:
    """Recurses, but no deeper than ``depth``."""
    budget.spend()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if depth == 0:
        raise FormatError("nested more deeply than the limit", code="limit-nesting")
    if isinstance(value, list):
        return [_to_json(item, depth - 1, budget, strict=strict) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _to_json(item, depth - 1, budget, strict=strict) for key, item in value.items()}
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
    if isinstance(value, Scalar):
        return {"__numpy__": [value.dtype, _to_json(value.value, depth - 1, budget, strict=False)]}
    return {"__object__": kind_of(value)}
