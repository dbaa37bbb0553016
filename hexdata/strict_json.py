"""Strict reading of JSON: limited in size, without duplicate keys or NaN, and checked against a schema.

A schema is a dataclass, or a type composed of dataclasses, lists, dicts and plain types. The keys of a JSON
object must be fields of the dataclass, and fields without a default are required. A key that is not a valid
Python name is declared with ``field(metadata={"key": …})``. ``Within``, ``Matching`` and ``AtMost`` restrict
numbers, texts and lists. The checks are plain Python, since importing a validation library takes longer than
reading a manifest.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from hexdata.errors import HexdataError, StoreError
from hexdata.text import encodable, printable

__all__ = [
    "MAX_JSON_BYTES",
    "MAX_JSON_VALUES",
    "PLAIN_NAME",
    "AtMost",
    "Count",
    "FileName",
    "HexDigest",
    "Matching",
    "Within",
    "check_value",
    "load_json",
    "parse_json",
    "parse_metadata",
    "shortened",
]

MAX_JSON_BYTES: Final = 64 << 20
"""Maximum size of a JSON file in bytes, enough for a manifest of 400,000 files."""
MAX_JSON_VALUES: Final = 4_000_000
"""Maximum number of values in one text: each takes about 100 bytes of memory."""
_MAX_DEPTH: Final = 64
_MAX_METADATA_DEPTH: Final = 400
"""Maximum nesting of metadata of source files; the readers of sources have stricter limits."""
_VERIFY: Final = "Run `hexdata verify` to list the damage."
_SHOWN: Final = 80
"""Maximum number of characters of a value or a key in a message."""
_TOKENS: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""Matches a string, or a bracket outside of strings."""

Schema = TypeVar("Schema")


@dataclass(frozen=True)
class Within:
    """Restricts an integer or a float in a schema to ``least`` <= number <= ``most``."""

    least: float
    most: float

    def check(self, value: Any) -> Any:
        """Return the number, or raise ``_WrongValue``."""
        if not self.least <= value <= self.most:
            raise _WrongValue(value, f"{self.least} to {self.most}")
        return value


@dataclass(frozen=True)
class Matching:
    """Restricts a text in a schema to those that match a pattern.

    Attributes:
        pattern: Regular expression that the whole text must match.
        meaning: The expected text in words, for messages.
        max_length: Maximum length in characters.
    """

    pattern: str
    meaning: str
    max_length: int = 4096

    def check(self, value: Any) -> Any:
        """Return the text, or raise ``_WrongValue``."""
        if len(value) > self.max_length or not re.fullmatch(self.pattern, value):
            raise _WrongValue(value, self.meaning)
        return value


@dataclass(frozen=True)
class AtMost:
    """Restricts a list or a text in a schema to at most ``items`` items or characters."""

    items: int

    def check(self, value: Any) -> Any:
        """Return the list or the text, or raise ``_WrongValue``."""
        if len(value) > self.items:
            raise _WrongValue(value, f"at most {self.items:,} items")
        return value


Count = Annotated[int, Within(0, 1 << 62)]
"""A number of rows, files or bytes."""
HexDigest = Annotated[str, Matching("^[0-9a-f]{64}$", "64 hexadecimal digits")]
"""A SHA-256."""

PLAIN_NAME: Final = r"(?:[^./\\\x00][^/\\\x00]*|\.[^./\\\x00][^/\\\x00]*|\.\.[^/\\\x00]+)"
"""Pattern of one part of a path: any name except ``.`` and ``..``, without slash, backslash and NUL."""
FileName = Annotated[str, Matching(f"^{PLAIN_NAME}$", "the plain name of a file", max_length=255)]
"""Name of a file in the same directory as the JSON file."""


def parse_json(
    data: bytes | str,
    path: object,
    *,
    what: str = "the file",
    hint: str | None = None,
    error: type[HexdataError] = StoreError,
    max_bytes: int = MAX_JSON_BYTES,
    metadata: bool = False,
) -> Any:
    """Return the value of a JSON text.

    Args:
        data: The text. Bytes must be UTF-8.
        path: Path of the file, for errors.
        what: Name of the text in errors, such as ``"the manifest"``.
        hint: Advice in errors.
        error: Class of the errors.
        max_bytes: Maximum length of ``data``.
        metadata: Whether the text contains metadata of source files. If True, NaN and infinite numbers are
            accepted, and up to 400 levels of nesting. Default False.

    Raises:
        HexdataError: Of the class ``error``: the text is too long, nested more than 64 levels deep, has too
            many values, is not JSON, or contains duplicate keys, a NaN or an infinite number.
    """
    problem = functools.partial(error, path=path, hint=hint)
    if len(data) > max_bytes:
        raise problem(f"{what} is too large", found=f"more than {max_bytes:,} bytes")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        levels = _MAX_METADATA_DEPTH if metadata else _MAX_DEPTH
        if _depth_exceeds(text, levels):
            raise problem(f"{what} is nested too deeply", expected=f"at most {levels} levels")
        if sum(map(text.count, ",[{")) > MAX_JSON_VALUES:
            raise problem(f"{what} has too many values", expected=f"at most {MAX_JSON_VALUES:,}")
        return json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=None if metadata else _refuse_constant,
            parse_float=None if metadata else _finite_float,
        )
    except (ValueError, RecursionError) as wrong:
        raise problem(f"{what} is not valid JSON", found=shortened(str(wrong))) from wrong


def load_json(
    kind: type[Schema],
    data: bytes | str,
    path: object,
    *,
    what: str = "the file",
    hint: str | None = None,
    error: type[HexdataError] = StoreError,
    max_bytes: int = MAX_JSON_BYTES,
    metadata: bool = False,
) -> Schema:
    """Return the value of a JSON text as an instance of a schema.

    Args:
        kind: The schema: a dataclass, or a type composed of dataclasses.
        data: The text. Bytes must be UTF-8.
        path: Path of the file, for errors.
        what: Name of the text in errors, such as ``"the manifest"``.
        hint: Advice in errors.
        error: Class of the errors.
        max_bytes: Maximum length of ``data``.
        metadata: Whether the text contains metadata of source files. If True, NaN and infinite numbers are
            accepted, and up to 400 levels of nesting. Default False.

    Raises:
        HexdataError: Of the class ``error``: as for :func:`parse_json`, or a key is missing or unknown, or a
            value does not match the schema. The message names the first such key.
    """
    content = parse_json(
        data, path, what=what, hint=hint, error=error, max_bytes=max_bytes, metadata=metadata
    )
    return check_value(kind, content, path, what=what, hint=hint, error=error)


def check_value(
    kind: type[Schema],
    value: Any,
    path: object = None,
    *,
    what: str,
    hint: str | None = None,
    error: type[HexdataError] = StoreError,
) -> Schema:
    """Return a value of plain dicts, lists, texts and numbers as an instance of a schema.

    Args:
        kind: The schema: a dataclass, or a type composed of dataclasses.
        value: A result of :func:`parse_json`, or the saved state of an object.
        path: Path of the file, for errors; None if the value is not from a file.
        what: Name of the value in errors.
        hint: Advice in errors.
        error: Class of the errors.

    Raises:
        HexdataError: Of the class ``error``: the value does not match the schema. The message names the first
            key that is missing, unknown or wrong. Errors raised by the dataclass itself keep their class.
    """
    try:
        checked: Schema = _check_of(cast("Any", kind))(value)
        return checked
    except _WrongValue as wrong:
        raise wrong.explained(path, what, hint, error) from None
    except HexdataError as wrong:  # raised by a dataclass whose values contradict each other
        raise wrong if path is None else wrong.at(path) from None


def parse_metadata(text: str | None, path: object, what: str) -> dict[str, Any]:
    """Return a JSON object from a column of a store, such as ``sources.header``.

    Args:
        text: Value of the column; null gives ``{}``.
        path: Path of the file, for errors.
        what: Name of the column and its row in errors.

    Raises:
        StoreError: The text is not JSON, or not an object.
    """
    content = parse_json(text or "{}", path, what=what, hint=_VERIFY, metadata=True)
    if not isinstance(content, dict):
        raise StoreError(f"{what} is not an object", path=path, found=shortened(repr(content)), hint=_VERIFY)
    return content


def shortened(text: str) -> str:
    """Return a text from a file for a message: printable, and shortened to 80 characters."""
    shown = printable(text[: _SHOWN + 1])
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


# --- schemas ------------------------------------------------------------------------------------------


class _WrongValue(Exception):  # noqa: N818 - never leaves this module
    """A value that does not match its schema. ``keys`` is the path to it."""

    def __init__(self, found: object = None, expected: str | None = None, problem: str = "value") -> None:
        super().__init__()
        self.keys: list[str] = []
        self.found = found
        self.expected = expected
        self.problem = problem

    def below(self, key: object) -> _WrongValue:
        """Prepend ``key``, under which the parent object or list holds the value, and return the error."""
        self.keys.insert(0, shortened(str(key)))
        return self

    def explained(self, path: object, what: str, hint: str | None, error: type[HexdataError]) -> HexdataError:
        """Return the error as an instance of ``error``, with a message."""
        where = ".".join(self.keys)
        if self.problem == "missing":
            return error(f"{what} lacks the key {where}", path=path, hint=hint)
        found = shortened(repr(self.found))
        if self.problem == "unknown":
            within, found = f" in {where}" if where else "", shortened(str(self.found))
            message = f"{what} has an unknown key{within}"
        else:
            message = f"{what} has a wrong value of {where}" if where else f"{what} has a wrong value"
        return error(message, path=path, found=found, expected=self.expected, hint=hint)


_Check = Callable[[Any], Any]
"""Takes a JSON value; returns it as an instance of the schema, or raises ``_WrongValue``."""


@functools.cache
def _check_of(kind: Any) -> _Check:
    """Return the function that checks a value against a schema."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _narrowed(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        return _check_union(arguments)
    if origin is Literal:
        return _check_literal(arguments)
    if dataclasses.is_dataclass(kind):
        return _check_dataclass(cast("type", kind))
    if origin in (dict, Mapping):
        return _check_dict(*map(_check_of, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _check_tuple(arguments)
    if origin in (list, tuple, Sequence):
        return _check_list(arguments[0], tuple if origin is tuple else list)
    return _PLAIN[kind]


def _check_union(kinds: tuple[Any, ...]) -> _Check:
    checks = [_check_of(kind) for kind in kinds if kind is not NoneType]
    optional = len(checks) < len(kinds)

    def check(value: Any) -> Any:
        if value is None and optional:
            return None
        expected = []
        for each in checks:
            try:
                return each(value)
            except _WrongValue as wrong:
                if len(checks) == 1:
                    raise
                expected.append(wrong.expected or "")
        raise _WrongValue(value, " or ".join(sorted(expected)))

    return check


def _check_literal(known: tuple[Any, ...]) -> _Check:
    *others, last = map(repr, known)
    expected = f"{', '.join(others)} or {last}" if others else last

    def check(value: Any) -> Any:
        if not (isinstance(value, str) and value in known):
            raise _WrongValue(value, expected)
        return value

    return check


def _check_dataclass(kind: type) -> _Check:
    hints = get_type_hints(kind, include_extras=True)
    fields = [each for each in dataclasses.fields(kind) if each.init]
    checks = {
        each.metadata.get("key", each.name): (each.name, _check_of(hints[each.name])) for each in fields
    }
    missing = dataclasses.MISSING
    required = [
        each.metadata.get("key", each.name)
        for each in fields
        if each.default is missing and each.default_factory is missing
    ]

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _WrongValue(value, "an object")
        found = {}
        for key, (name, of_field) in checks.items():
            if key in value:
                try:
                    found[name] = of_field(value[key])
                except _WrongValue as wrong:
                    raise wrong.below(key) from None
            elif key in required:
                raise _WrongValue(problem="missing").below(key)
        if len(found) < len(value):
            raise _WrongValue(next(key for key in value if key not in checks), problem="unknown")
        return kind(**found)

    return check


def _check_dict(of_key: _Check, of_value: _Check) -> _Check:
    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _WrongValue(value, "an object")
        for key in value:
            try:
                of_key(key)
            except _WrongValue as wrong:
                raise _WrongValue(key, wrong.expected, "unknown") from None
        found = {}
        for key, item in value.items():
            try:
                found[key] = of_value(item)
            except _WrongValue as wrong:
                raise wrong.below(key) from None
        return found

    return check


def _check_list(kind: Any, made: type[list[Any]] | type[tuple[Any, ...]]) -> _Check:
    of_item = _check_of(kind)
    # Long lists of integers, such as offsets, are checked at once, which is faster.
    bounds = _bounds(kind) if get_args(kind)[:1] == (int,) else None

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _WrongValue(value, "a list")
        integers = bounds is not None and set(map(type, value)) == {int}
        if bounds and integers and bounds.least <= min(value) and max(value) <= bounds.most:
            return made(value)
        found = []
        for number, item in enumerate(value):
            try:
                found.append(of_item(item))
            except _WrongValue as wrong:
                raise wrong.below(number) from None
        return made(found)

    return check


def _bounds(kind: Any) -> Within | None:
    return next((each for each in get_args(kind)[1:] if isinstance(each, Within)), None)


def _check_tuple(kinds: tuple[Any, ...]) -> _Check:
    checks = [_check_of(kind) for kind in kinds]

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(checks):
            raise _WrongValue(value, f"a list of {len(checks)} items")
        found = []
        for number, (each, item) in enumerate(zip(checks, value, strict=True)):
            try:
                found.append(each(item))
            except _WrongValue as wrong:
                raise wrong.below(number) from None
        return tuple(found)

    return check


def _narrowed(kind: Any, limits: tuple[Any, ...]) -> _Check:
    checks = [_check_of(kind), *(limit.check for limit in limits)]

    def check(value: Any) -> Any:
        for each in checks:
            value = each(value)
        return value

    return check


def _check_int(value: Any) -> int:
    if type(value) is not int:
        raise _WrongValue(value, "an integer")
    return value


def _check_float(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise _WrongValue(value, "a finite number")
    return float(value)


def _check_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _WrongValue(value, "true or false")
    return value


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongValue(value, "text")
    if not value.isascii() and encodable(value) != value:
        raise _WrongValue(value, "text that UTF-8 can encode")
    return value


_PLAIN: Final[dict[Any, _Check]] = {
    int: _check_int,
    float: _check_float,
    bool: _check_bool,
    str: _check_text,
    Any: lambda value: value,
}


# --- texts -------------------------------------------------------------------------------------------


def _depth_exceeds(text: str, limit: int) -> bool:
    if text.count("[") + text.count("{") <= limit:
        return False
    depth = 0
    for token in _TOKENS.finditer(text):
        found = token.group()
        if found in ("[", "{"):
            depth += 1
            if depth > limit:
                return True
        elif found in ("]", "}"):
            depth -= 1
    return False


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice!r} in an object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:_SHOWN]} is too large")
    return number
