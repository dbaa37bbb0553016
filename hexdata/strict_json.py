"""Strict reading of JSON: bounded, without duplicate keys or NaN, and checked against a schema.

A schema is a dataclass with ``__pydantic_config__ = FORBID_EXTRA``, beside the thing it describes; ``Within``
and ``Matching`` narrow its numbers and texts. pydantic is loaded when the first schema is used.
"""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar, cast

from hexdata.errors import HexdataError, StoreError
from hexdata.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import TypeAdapter, ValidationError

__all__ = [
    "FORBID_EXTRA",
    "MAX_JSON_BYTES",
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
    "shortened",
]

MAX_JSON_BYTES: Final = 64 << 20
"""Maximum size of a JSON file: a manifest of 400,000 files."""
_MAX_VALUES: Final = 4_000_000
"""Maximum number of values in one text: each takes about 100 bytes of memory."""
_MAX_DEPTH: Final = 64
_MAX_ERRORS: Final = 1_000
"""If a text has more wrong values than this, none of them is named."""
_SHOWN: Final = 80
"""Characters of a value, or of a key, in a message."""
_TOKENS: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A string, or a bracket outside of strings."""

_MISSING: Final = ("missing", "missing_argument", "missing_keyword_only_argument")
_UNKNOWN: Final = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a key that is absent, and one that is unknown."""

FORBID_EXTRA: Final = {"extra": "forbid"}
"""Pydantic's configuration of every schema: unknown keys are refused."""

Schema = TypeVar("Schema")


@dataclass(frozen=True)
class Within:
    """Narrows an integer or a float in a schema to ``least`` <= number <= ``most``."""

    least: float
    most: float

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return the schema of the number with its bounds."""
        return {**handler(source), "ge": self.least, "le": self.most}


@dataclass(frozen=True)
class Matching:
    """Narrows a text in a schema to those that match a pattern; ``meaning`` says what that is in messages."""

    pattern: str
    meaning: str
    max_length: int = 4096

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return the schema of the text with its pattern."""
        _MEANINGS[self.pattern] = self.meaning
        return {**handler(source), "pattern": self.pattern, "max_length": self.max_length}


@dataclass(frozen=True)
class AtMost:
    """Narrows a list in a schema to ``items`` or fewer."""

    items: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return the schema of the list with its bound."""
        return {**handler(source), "max_length": self.items}


_MEANINGS: dict[str, str] = {}
"""What each pattern of a schema means, for messages."""

Count = Annotated[int, Within(0, 1 << 62)]
"""A number of rows, files or bytes."""
HexDigest = Annotated[str, Matching("^[0-9a-f]{64}$", "64 hexadecimal digits")]
"""A SHA-256."""

PLAIN_NAME: Final = r"(?:[^./\\\x00][^/\\\x00]*|\.[^./\\\x00][^/\\\x00]*|\.\.[^/\\\x00]+)"
"""Pattern of one part of a path: any name except ``.`` and ``..``, without slashes, backslashes and NUL."""
FileName = Annotated[str, Matching(f"^{PLAIN_NAME}$", "the plain name of a file", max_length=255)]
"""A file in the folder of the text that names it."""


def parse_json(
    data: bytes | str,
    path: object,
    *,
    what: str = "the file",
    hint: str | None = None,
    error: type[HexdataError] = StoreError,
    max_bytes: int = MAX_JSON_BYTES,
) -> Any:
    """Return the value of a JSON text.

    Args:
        data: the text. Bytes are UTF-8.
        path: the file that it is of, which errors name.
        what: what the text is, as errors name it, such as ``"the manifest"``.
        hint: what errors advise.
        error: class of the errors.
        max_bytes: maximum length of ``data``.

    Raises:
        HexdataError: of the class ``error``: the text is too long, nested more than 64 levels deep, not
            JSON, or has an object with duplicate keys, a NaN or an infinite number.
    """
    problem = functools.partial(error, path=path, hint=hint)
    if len(data) > max_bytes:
        raise problem(f"{what} is too large", found=f"more than {max_bytes:,} bytes")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        if _depth_exceeds(text, _MAX_DEPTH):
            raise problem(f"{what} is nested too deeply", expected=f"at most {_MAX_DEPTH} levels")
        if sum(map(text.count, ",[{")) > _MAX_VALUES:
            raise problem(f"{what} has too many values", expected=f"at most {_MAX_VALUES:,}")
        return json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
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
) -> Schema:
    """Return the value of a JSON text as an instance of a schema.

    Args:
        kind: the schema: a dataclass, or a type built of such.
        data: the text. Bytes are UTF-8.
        path: the file that it is of, which errors name.
        what: what the text is, as errors name it.
        hint: what errors advise.
        error: class of the errors.
        max_bytes: maximum length of ``data``.

    Raises:
        HexdataError: of the class ``error``: as :func:`parse_json`, or a key is missing or unknown,
            or a value is not what the schema has there. The message names the first such key.
    """
    content = parse_json(data, path, what=what, hint=hint, error=error, max_bytes=max_bytes)
    return check_value(kind, content, path, what=what, hint=hint, error=error, text=data)


def check_value(
    kind: type[Schema],
    value: Any,
    path: object = None,
    *,
    what: str,
    hint: str | None = None,
    error: type[HexdataError] = StoreError,
    text: bytes | str | None = None,
) -> Schema:
    """Return a value of plain dicts, lists, texts and numbers as an instance of a schema.

    Args:
        kind: the schema.
        value: what :func:`parse_json` returned, or the saved state of an object.
        path: the file that it is of, which errors name; None for none.
        what: what the value is, as errors name it.
        hint: what errors advise.
        error: class of the errors.
        text: the JSON text of ``value``, if it is at hand.

    Raises:
        HexdataError: of the class ``error``: the value is not what the schema describes.
    """
    from pydantic import ValidationError

    try:
        if text is None:
            text = json.dumps(value, allow_nan=False)
        checked: Schema = _adapter(cast("Any", kind)).validate_json(text, strict=True)
        return checked
    except ValidationError as wrong:
        raise _explain(wrong, path, what, hint, error) from wrong
    except (TypeError, ValueError, RecursionError) as wrong:
        found = shortened(str(wrong))
        raise error(f"{what} holds what JSON does not", path=path, found=found, hint=hint) from wrong


def shortened(text: str) -> str:
    """Return a text of a file for a message: printable, and cut to 80 characters."""
    shown = printable(text[: _SHOWN + 1])
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _explain(
    wrong: ValidationError, path: object, what: str, hint: str | None, error: type[HexdataError]
) -> HexdataError:
    """Turn pydantic's findings into one error, on the first of them."""
    count = wrong.error_count()
    if count > _MAX_ERRORS:
        return error(f"{what} has {count:,} wrong values", path=path, hint=hint)
    first = wrong.errors(include_url=False)[0]
    names = [shortened(str(part)) for part in first["loc"]]
    expected = _MEANINGS.get(first.get("ctx", {}).get("pattern", ""))
    if first["type"] == "json_invalid":  # such as half a surrogate pair
        return error(f"{what} is not valid JSON", path=path, found=first["ctx"]["error"], hint=hint)
    if first["type"] in _MISSING:
        return error(f"{what} lacks the key {'.'.join(names)}", path=path, hint=hint)
    if first["type"] in _UNKNOWN or names[-1:] == ["[key]"]:
        names = names[:-1] if names[-1] == "[key]" else names
        within = f" in {'.'.join(names[:-1])}" if names[:-1] else ""
        if expected is None:
            expected = first.get("ctx", {}).get("expected")
        return error(
            f"{what} has an unknown key{within}", path=path, found=names[-1], expected=expected, hint=hint
        )
    where = f"{what} has a wrong value of {'.'.join(names)}" if names else f"{what} has a wrong value"
    expected = expected or first["msg"].removeprefix("Input should be ")
    return error(where, path=path, found=shortened(repr(first["input"])), expected=expected, hint=hint)


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
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_SHOWN]} is too large a number")
    return number
