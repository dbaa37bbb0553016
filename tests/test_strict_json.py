"""Strict JSON: invalid text, excessive text and schema violations raise one error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from hexdata.errors import ConfigError, StoreError
from hexdata.strict_json import (
    Count,
    HexDigest,
    Matching,
    Within,
    check_value,
    load_json,
    parse_json,
)

PATH = "/store/made.json"


@dataclass(frozen=True)
class Part:
    rows: Count
    sha256: HexDigest = "0" * 64
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Made:
    parts: dict[Annotated[str, Matching("^[a-z]{1,8}$", "a small letter or more")], Part]
    layout: Literal["blocks", "samples"] = "blocks"
    share: Annotated[float, Within(0, 1)] = 0.5
    note: str | None = field(default=None, metadata={"key": "note"})
    pair: tuple[int, int | str] = (0, 0)
    of_: bool = field(default=False, metadata={"key": "is-of"})


def refused(text: str | bytes) -> str:
    with pytest.raises(StoreError) as caught:
        load_json(Made, text, PATH, what="the made file", hint="Make it again.")
    assert caught.value.path == PATH
    assert caught.value.hint == "Make it again."
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    return caught.value.detail()


def test_valid_json_is_loaded() -> None:
    text = b'{"parts": {"a": {"rows": 3, "shape": [1, 2]}}, "share": 1, "pair": [1, "x"], "is-of": true}'
    made = Made({"a": Part(3, shape=(1, 2))}, share=1.0, pair=(1, "x"), of_=True)
    assert load_json(Made, text, PATH) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("{} x", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        ("\ufeff{}", "is not valid JSON"),
        ('{"parts": {}}'.encode("utf-16"), "is not valid JSON"),
        ('{"parts": {}, "share": NaN}', "NaN is not a number"),
        ('{"parts": {}, "share": -Infinity}', "-Infinity is not a number"),
        ('{"parts": {}, "share": 1e999}', "1e999 is too large"),
        ('{"parts": {}, "parts": {}}', "duplicate key 'parts'"),
        ('{"parts": {"a": {"rows": ' + "1" * 5000 + "}}}", "is not valid JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ('["' + '\\"' * 100_000 + "[" * 100, "is not valid JSON"),
        ("[" * 65 + "]" * 65, "nested too deeply"),
        ("[0" + ",0" * 4_000_000 + "]", "too many values"),
    ],
)
def test_invalid_or_excessive_json_is_refused(text: str | bytes, message: str) -> None:
    assert message in refused(text)


def test_brackets_in_strings_do_not_count_as_nesting() -> None:
    value = {"a": '"[' * 1000, "b": "\\" * 99 + "{"}
    assert parse_json(json.dumps(value), PATH) == value
    assert parse_json("[" * 64 + "]" * 64, PATH) is not None


def test_a_text_that_is_too_long_is_not_read() -> None:
    with pytest.raises(StoreError, match="the file is too large"):
        parse_json("[" + " " * 100 + "]", PATH, max_bytes=100)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "has a wrong value; found []"),
        (None, "has a wrong value; found None"),
        ({}, "lacks the key parts"),
        ({"parts": {"a": {}}}, "lacks the key parts.a.rows"),
        ({"parts": {"a": {"rows": True}}}, "wrong value of parts.a.rows; found True"),
        ({"parts": {"a": {"rows": 1.0}}}, "wrong value of parts.a.rows; found 1.0; expected an integer"),
        ({"parts": {"a": {"rows": "1"}}}, "wrong value of parts.a.rows; found '1'"),
        ({"parts": {"a": {"rows": -1}}}, "expected 0 to 4611686018427387904"),
        ({"parts": {"a": {"rows": 10**30}}}, "expected 0 to"),
        ({"parts": {"a": {"rows": 1, "sha256": "F" * 64}}}, "expected 64 hexadecimal digits"),
        ({"parts": {"a": {"rows": 1, "sha256": "0" * 64 + "\n"}}}, "expected 64 hexadecimal digits"),
        ({"parts": {"a": {"rows": 1, "shape": [1, "\x1b" * 999]}}}, "of parts.a.shape.1"),
        ({"parts": {"../a": {"rows": 1}}}, "unknown key in parts; found ../a; expected a small letter"),
        ({"parts": {}, "\x1b[31m": 1}, r"unknown key; found \x1b[31m"),
        ({"parts": {"a": {"rows": 1, "row": 1}}}, "unknown key in parts.a; found row"),
        (
            {"parts": {}, "layout": "tar"},
            "of layout; found 'tar'; expected 'blocks' or 'samples'",
        ),
        ({"parts": {}, "share": 1.5}, "wrong value of share; found 1.5; expected 0 to 1"),
        ({"parts": dict.fromkeys(map(chr, range(10_000, 12_000)), 1)}, "unknown key in parts"),
        ({"parts": {}, "layout": "\ud800"}, r"wrong value of layout; found '\ud800'"),
        (
            {"parts": {}, "note": "\ud800"},
            r"wrong value of note; found '\ud800'; expected text that UTF-8 can",
        ),
        ({"parts": {}, "pair": [1]}, "wrong value of pair; found [1]; expected a list of 2"),
        ({"parts": {}, "pair": [1, None]}, "wrong value of pair.1; found None; expected an integer or text"),
        ({"parts": {}, "share": 10**400}, "wrong value of share"),
        ({"parts": {}, "of": 1}, "unknown key; found of"),
    ],
)
def test_schema_violations_are_named(value: Any, message: str) -> None:
    assert message in refused(json.dumps(value))


def test_plain_values_are_checked_like_texts() -> None:
    made = {"parts": {"a": {"rows": 3, "shape": (1, 2)}}}
    assert check_value(Made, made, what="the state") == Made({"a": Part(3, shape=(1, 2))})
    circle: list[Any] = []
    circle.append(circle)
    for wrong in (circle, {1: object()}, {"parts": {}, "share": float("nan")}):
        with pytest.raises(ConfigError, match="the state"):
            check_value(Made, wrong, what="the state", error=ConfigError)
