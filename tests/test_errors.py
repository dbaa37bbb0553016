"""Error classes: messages and pickling."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from hexdata import errors
from hexdata.errors import FormatError, HexdataError, InputError, StoreError, UnsafePickleError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HexdataError)]
ALL_PARTS = {
    "path": Path("games/a.pkl.gz"),
    "record": 12,
    "found": "3 planes",
    "expected": "2 planes",
    "hint": "Convert it again with --board-size 13.",
}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "board has another shape"),
        ({"path": Path("a.pkl.gz")}, "a.pkl.gz: board has another shape"),
        ({"record": 0}, "record 0: board has another shape"),
        ({"path": "a.trmph", "record": "line 12"}, "a.trmph: line 12: board has another shape"),
        ({"found": 0}, "board has another shape; found 0"),
        ({"expected": "2 planes"}, "board has another shape; expected 2 planes"),
        ({"hint": "Convert it again."}, "board has another shape. Convert it again."),
        (
            ALL_PARTS,
            "games/a.pkl.gz: record 12: board has another shape; found 3 planes; expected 2 planes. "
            "Convert it again with --board-size 13.",
        ),
    ],
)
def test_messages_contain_all_parts(keywords, message):
    assert str(HexdataError("board has another shape", **keywords)) == message


def test_detail_omits_path_and_hint():
    """The table ``rejected`` stores the detail; the path is in the table of sources."""
    detail = HexdataError("board has another shape", **ALL_PARTS).detail()
    assert detail == "record 12: board has another shape; found 3 planes; expected 2 planes"


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_public_and_formats_alike(kind):
    assert kind.__name__ in errors.__all__
    assert str(kind("wrong", **ALL_PARTS)) == str(HexdataError("wrong", **ALL_PARTS))


def test_the_public_list_is_complete():
    assert {kind.__name__ for kind in KINDS} | {"Reason"} == set(errors.__all__)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling(kind, protocol):
    error = kind("wrong", **ALL_PARTS)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


def test_an_error_crosses_a_process_boundary():
    raising = (
        "import pickle, sys; from hexdata.errors import FormatError; "
        "error = FormatError('cut short', code='truncated', record=7, hint='Copy it again.').at('a.pkl.gz'); "
        "sys.stdout.buffer.write(pickle.dumps(error))"
    )
    root = Path(errors.__file__).parents[1]
    child = subprocess.run([sys.executable, "-c", raising], capture_output=True, check=True, cwd=root)
    error = pickle.loads(child.stdout)
    assert type(error) is FormatError
    assert error.code == "truncated"
    assert str(error) == "a.pkl.gz: record 7: cut short. Copy it again."


def test_at_keeps_the_first_path():
    error = StoreError("no manifest")
    assert error.at(Path("first")) is error
    assert error.at("second").path == "first"
    assert str(error) == "first: no manifest"


def test_codes_are_stable():
    assert InputError("wrong").code == "input-error"
    assert FormatError("wrong").code == "unknown-layout"
    assert UnsafePickleError("wrong", code="unsafe-global").code == "unsafe-global"
    assert FormatError.code == "input-error"  # the code of an instance does not change the class


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not HexdataError])
def test_hexdataerror_catches_all_errors(kind):
    with pytest.raises(HexdataError, match="wrong"):
        raise kind("wrong")
