"""Errors: messages, pickling, and the codes that docs/format.md lists."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from hexdata import errors
from hexdata.errors import FormatError, HexdataError, InputError, Reason, UnsafePickleError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HexdataError)]
PARTS: dict[str, Any] = {
    "path": Path("games/a.pkl.gz"),
    "record": 12,
    "found": "3 planes",
    "expected": "2 planes",
    "hint": "Convert it again with --board-size 13.",
}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "board has another shape"),
        ("path", "games/a.pkl.gz: board has another shape"),
        ("record", "record 12: board has another shape"),
        ("found", "board has another shape; found 3 planes"),
        ("expected", "board has another shape; expected 2 planes"),
        ("hint", "board has another shape. Convert it again with --board-size 13."),
        ("path record found expected hint",
         "games/a.pkl.gz: record 12: board has another shape; found 3 planes; expected 2 planes. "
         "Convert it again with --board-size 13."),
    ],
)  # fmt: skip
def test_messages_contain_all_parts(names: str, message: str) -> None:
    assert (
        str(HexdataError("board has another shape", **{name: PARTS[name] for name in names.split()}))
        == message
    )


def test_parts_may_be_zero_or_texts() -> None:
    assert str(HexdataError("wrong", record=0, found=0)) == "record 0: wrong; found 0"
    assert str(HexdataError("wrong", path="a.trmph", record="line 12")) == "a.trmph: line 12: wrong"
    # The table ``rejected`` stores the detail; the path is in the table of sources.
    assert HexdataError("wrong", **PARTS).detail() == "record 12: wrong; found 3 planes; expected 2 planes"


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_public_and_survives_pickling(kind: Any) -> None:
    error = kind("wrong", **PARTS)
    assert kind.__name__ in errors.__all__
    assert str(error) == str(HexdataError("wrong", **PARTS))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert (type(again), str(again), again.args) == (kind, str(error), error.args)
        assert vars(again) == vars(error)


def test_codes_are_stable() -> None:
    assert InputError("wrong").code == "input-error"
    assert FormatError("wrong").code == "unknown-layout"
    assert UnsafePickleError("wrong", code="unsafe-global").code == "unsafe-global"
    assert FormatError.code == "input-error"  # the code of an instance does not change the class
    error = FormatError("damaged", code=Reason.CORRUPT_GZIP)
    assert f"{error.code}" == str(error.code) == error.code == "corrupt-gzip"


# --- reasons --------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
PER_RECORD = ("board.py", "formats", "convert")
"""The modules that write the table ``rejected``, and those whose errors are written there."""


def documented(heading: str) -> list[str]:
    """Return the codes of the table of docs/format.md whose first row begins with ``heading``."""
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    table = text.partition(heading)[2].partition("\n\n")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def used_in(paths: list[Path]) -> set[str]:
    """Return the names of the members of ``Reason`` in these modules and packages."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return set(re.findall(r"\bReason\.([A-Z0-9_]+)", text))


def test_every_reason_is_documented_once_and_used() -> None:
    rejected, others = documented("| reason | meaning |"), documented("| code | meaning |")
    assert rejected == sorted(rejected)
    assert others == sorted(others)
    assert sorted(rejected + others) == sorted(Reason)
    package = [path for path in (ROOT / "hexdata").iterdir() if path.is_dir() or path.suffix == ".py"]
    readers = [path for path in package if path.name in PER_RECORD]
    assert used_in(readers) == {Reason(code).name for code in rejected}
    assert {Reason(code).name for code in others} <= used_in([p for p in package if p not in readers])
