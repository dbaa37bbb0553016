"""Reason codes: each is documented in docs/format.md and used in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hexdata.errors import FormatError, Reason

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hexdata"
PER_RECORD = ("board.py", "formats", "convert")
"""The modules that write the table ``rejected``, and those whose errors are written there."""


def documented(heading: str) -> list[str]:
    """Return the codes of the table of docs/format.md whose first row begins with ``heading``."""
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    table = text.partition(heading)[2].partition("\n\n")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


REJECTED = documented("| reason | rejects | meaning |")
OTHERS = documented("| code | meaning |")


def used_in(*paths: str) -> set[str]:
    """Return the names of the members of ``Reason`` in these modules and packages."""
    files = [file for path in paths for file in [PACKAGE / path, *(PACKAGE / path).rglob("*.py")]]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return set(re.findall(r"\bReason\.([A-Z0-9_]+)", text))


def test_every_reason_is_documented_once():
    assert sorted(REJECTED + OTHERS) == sorted(Reason)


@pytest.mark.parametrize("table", [REJECTED, OTHERS])
def test_the_tables_are_sorted(table):
    assert table == sorted(table)
    assert table


def test_every_reason_for_a_rejection_is_used_by_a_reader_or_by_convert():
    assert used_in(*PER_RECORD) == {Reason(code).name for code in REJECTED}


def test_every_other_reason_is_used_elsewhere():
    elsewhere = [path.name for path in PACKAGE.iterdir() if path.name not in PER_RECORD]
    assert {Reason(code).name for code in OTHERS} <= used_in(*elsewhere)


def test_a_reason_is_its_code_as_text():
    error = FormatError("damaged", code=Reason.CORRUPT_GZIP)
    assert f"{error.code}" == str(error.code) == error.code == "corrupt-gzip"
