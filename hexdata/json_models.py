"""JSON that hexdata reads back: bounded, without duplicate keys and NaN, and of a declared type.

A type is a ``Model`` (a msgspec struct whose keys are its fields, and no others), or is composed of models,
lists, dicts and plain types. ``msgspec.Meta`` restricts numbers, texts and lists. msgspec decodes JSON faster
than Python does, but accepts duplicate keys; so Python reads the text, and msgspec converts the values.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from hexdata.errors import StoreError
from hexdata.text import shortened

MAX_JSON_BYTES: Final = 64 << 20
"""Maximum size of a JSON file in bytes, enough for a manifest of 400,000 files."""
MAX_JSON_VALUES: Final = 4_000_000
"""Maximum number of values in one text: each takes about 100 bytes of memory."""
_MAX_DEPTH: Final = 64
_MAX_METADATA_DEPTH: Final = 400
"""Maximum nesting of metadata of source files; the readers of sources have stricter limits."""

Kind = TypeVar("Kind")
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
"""A number of rows, files or bytes."""
HexDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""A SHA-256."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object with fixed keys. Fields without a default are required."""


def read_json(
    data: bytes, path: object, *, what: str = "the file", hint: str | None = None, metadata: bool = False
) -> Any:
    """Return the value of a JSON text.

    Args:
        data: The text in UTF-8.
        path: Path of the file, for errors.
        what: Name of the text in errors, such as ``"the manifest"``.
        hint: Advice in errors.
        metadata: Whether the text contains metadata of source files. If True, NaN, infinite numbers and lone
            surrogates are accepted, and up to 400 levels of nesting. Default False.

    Raises:
        StoreError: The text is too long, nested more than 64 levels deep, has too many values, is not JSON,
            or contains duplicate keys, a NaN, an infinite number or text that UTF-8 cannot encode.
    """
    # Metadata was accepted from a source, within stricter limits, and must be readable again.
    levels = _MAX_METADATA_DEPTH if metadata else _MAX_DEPTH
    try:
        if len(data) > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES:,} bytes")
        # Before parsing, which takes the memory. Each value follows one of these bytes; texts may add some.
        if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
            raise ValueError(f"more than {MAX_JSON_VALUES:,} values")
        value = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
        if not metadata:  # this refuses NaN, infinite numbers and lone surrogates
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        layer, depth = [value], 0
        while layer and depth <= levels:  # most texts are a few levels deep
            depth += 1
            nodes = [node for node in layer if isinstance(node, (dict, list))]
            layer = [item for node in nodes for item in (node.values() if isinstance(node, dict) else node)]
        if layer:
            raise ValueError(f"nested more than {levels} levels deep")
    except (ValueError, RecursionError) as wrong:
        found = shortened(str(wrong))
        raise StoreError(f"{what} is not valid JSON", path=path, found=found, hint=hint) from wrong
    return value


def as_model(
    kind: type[Kind], value: Any, path: object = None, *, what: str, hint: str | None = None
) -> Kind:
    """Return a JSON value as an instance of a type.

    Args:
        kind: The type: a ``Model``, or a type composed of models.
        value: A result of :func:`read_json`.
        path: Path of the file, for errors; None if the value is not from a file.
        what: Name of the value in errors.
        hint: Advice in errors.

    Raises:
        StoreError: The value is not of the type, or a model raises ValueError. The message has the path of
            the value, in which ``[...]`` is any key of a dict.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as wrong:  # the latter for a key with a surrogate
        # Such as "Expected `int`, got `str` - at `$.files[...].rows`".
        reason, _, place = str(wrong).replace("`", "").partition(" - at ")
        keys = shortened(place.removeprefix("$").removeprefix("."))
        where = f" at {keys}" if keys else ""
        raise StoreError(f"{what} is not valid{where}: {shortened(reason)}", path=path, hint=hint) from None


def read_metadata(text: str | None, path: object, what: str) -> dict[str, Any]:
    """Return a JSON object from a column of a store, such as ``sources.header``.

    Args:
        text: Value of the column; null gives ``{}``.
        path: Path of the file, for errors.
        what: Name of the column and its row in errors.

    Raises:
        StoreError: The text is not JSON, or not an object.
    """
    hint = "Run `hexdata verify` to list the damage."
    # Names of files may contain lone surrogates, which stand for bytes that are not UTF-8.
    data = (text or "{}").encode("utf-8", "surrogatepass")
    content = read_json(data, path, what=what, hint=hint, metadata=True)
    return as_model(dict[str, Any], content, path, what=what, hint=hint)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {shortened(key)!r} in an object")
        found[key] = value
    return found
