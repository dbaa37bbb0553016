"""The table of reasons in docs/format.md names every reason code that the code can make, and no other.

The codes are read out of the source: a code that is made in a way this file does not know fails the test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hexdata.convert.spool import AFTER_REPEAT, UNREADABLE
from hexdata.errors import FormatError
from hexdata.formats.legacy import validate

ROOT = Path(__file__).parents[1]
READERS = [
    ROOT / "hexdata" / "board.py",
    *sorted((ROOT / "hexdata" / "convert").rglob("*.py")),
    *sorted((ROOT / "hexdata" / "formats").rglob("*.py")),
]
"""Where reasons are made."""

CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
ERRORS = {"FormatError", "UnsafePickleError"}
"""Take the code as a keyword."""
MAKERS = {
    "Rejection": 1,
    "_Problem": 0,
    "_reject": 2,
    "_reject_all": 1,
    "_unsafe": 2,
    "failed": 0,
    "past": 0,
    "reject": 1,
}
"""Take the code as the argument of this number; what they do with it within is passing it on."""
STEMS = {"_size": 1, "_read_number": 1}
"""Take a part of a code as the argument of this number, and make the code of it."""
RETURNS = {"layout_of"}
"""Return a code and the details."""
CONSTANTS = {"AFTER_REPEAT": AFTER_REPEAT, "UNREADABLE": UNREADABLE}
PASSED_ON = {"code", "reason"}
"""Names and attributes of a code that was made elsewhere."""


@dataclass
class Found:
    """Codes, templates of codes, what fills these by the function it is given to, and what is not clear."""

    codes: set[str] = field(default_factory=set)
    templates: set[tuple[str, str]] = field(default_factory=set)
    stems: dict[str, set[str]] = field(default_factory=dict)
    unclear: list[str] = field(default_factory=list)

    def take(self, value: ast.expr, function: str) -> None:
        """Take in the expression of a code that stands in a function."""
        if isinstance(value, ast.IfExp):
            self.take(value.body, function)
            self.take(value.orelse, function)
        elif isinstance(value, ast.Constant) and CODE.fullmatch(str(value.value)):
            self.codes.add(str(value.value))
        elif isinstance(value, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in value.values]
            self.templates.add((function, "".join(map(str, parts))))
        elif isinstance(value, ast.Name) and value.id in CONSTANTS:
            self.codes.add(CONSTANTS[value.id])
        elif getattr(value, "id", getattr(value, "attr", None)) not in PASSED_ON:
            self.unclear.append(f"{function}: {ast.unparse(value)}")

    def filled(self) -> set[str]:
        """Return the codes that the templates make, each of the stems of its function."""
        return {
            template.format(stem)
            for function, template in self.templates
            for stem in self.stems.get(function, set())
        }


def nodes_of(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every node below ``tree`` with the name of the innermost function around it."""
    for node in ast.iter_child_nodes(tree):
        yield function, node
        yield from nodes_of(node, node.name if isinstance(node, ast.FunctionDef) else function)


def look(text: str, found: Found) -> None:
    """Add what one source file makes."""
    for function, node in nodes_of(ast.parse(text)):
        if isinstance(node, ast.Call):
            _look_at_call(node, function, found)
        elif isinstance(node, ast.Return) and function in RETURNS and isinstance(node.value, ast.Tuple):
            found.take(node.value.elts[0], function)


def _look_at_call(call: ast.Call, function: str, found: Found) -> None:
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if name in ERRORS:
        given = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
        found.take(given[0] if given else ast.Constant(FormatError("").code), function)
    place = MAKERS.get(name, STEMS.get(name))
    if place is None or len(call.args) <= place or any(isinstance(arg, ast.Starred) for arg in call.args):
        return  # a namesake, or a code and its details from elsewhere, unpacked
    value = call.args[place]
    if name in MAKERS:
        found.take(value, function)
    elif isinstance(value, ast.Constant):
        found.stems.setdefault(name, set()).add(str(value.value))


@pytest.fixture(scope="module")
def found() -> Found:
    result = Found()
    for path in READERS:
        look(path.read_text(encoding="utf-8"), result)
    result.stems["_read_number"] |= {stem for stem, _ in validate._RANGES.values()}
    result.stems["_read_number"] -= {"game-id"}  # whatever is wrong with an id has one code
    return result


def documented() -> list[str]:
    """Return the codes of the table, in its order."""
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    table = text.partition("| reason |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def test_the_table_names_every_reason_and_no_other(found):
    assert found.unclear == []
    codes = found.codes | found.filled()
    listed = documented()
    assert len(codes) > 40
    assert sorted(listed) == listed
    assert set(listed) == codes


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("raise FormatError('x', code='bad-thing')", {"bad-thing"}),
        ("raise FormatError('x')", {"unknown-layout"}),
        ("raise FormatError('x', code='one' if y else 'two')", {"one", "two"}),
        ("Rejection(1, 'odd-record', '')", {"odd-record"}),
        ("self.past('limit-x', '', 1)", {"limit-x"}),
        ("def _size():\n    self.past(f'limit-{x}', '', 1)\nself._size(4, 'y', 9)", {"limit-y"}),
        ("def layout_of():\n    return 'no-layout', 'why'", {"no-layout"}),
        ("line.reject(error)", set()),
    ],
)
def test_a_code_is_found_wherever_it_is_made(text, codes):
    found = Found()
    look(text, found)
    assert found.codes | found.filled() == codes
    assert found.unclear == []


@pytest.mark.parametrize("text", ["FormatError('x', code=pick())", "Rejection(1, 'Not a code', '')"])
def test_a_code_that_is_made_otherwise_is_told(text):
    found = Found()
    look(text, found)
    assert len(found.unclear) == 1
