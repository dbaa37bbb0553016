"""The public names, with their parameters and fields, are those that ``public_api.txt`` lists.

If a test here fails because you added a name or parameter, run ``python tests/test_public_api.py``, which
writes the file again. If you changed or removed one, follow "Stable names" of ``docs/library.md`` first.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LISTED = ROOT / "tests" / "public_api.txt"
ENTRY = re.compile(r"^\.\. auto(?P<kind>\w+):: (?P<name>[\w.]+)\n(?P<options>(?:   :.*\n)*)", re.MULTILINE)
MEMBERS = re.compile(r"^   :members: (?P<names>.+)$", re.MULTILINE)
OPTIONS = re.compile(r"^hexdata\.[\w.]+(?:Options|Section|Config)(?=[( ])", re.MULTILINE)


def documented_names() -> list[str]:
    """Return the public names: those that the library reference is generated from."""
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    found = {f"hexdata.{name}" for name in import_module("hexdata").__all__}
    for entry in ENTRY.finditer(page):
        if entry["kind"] == "module":
            chosen = MEMBERS.search(entry["options"])
            names = chosen["names"].split(", ") if chosen else import_module(entry["name"]).__all__
            found |= {f"{entry['name']}.{name}" for name in names}
        else:
            found.add(entry["name"])
    return sorted(found)


def parameters_of(function: Any, *, skip: int = 0) -> str:
    """Return the names of parameters; "=" follows one that has a default, and "*" precedes keywords."""
    texts: list[str] = []
    for each in list(inspect.signature(function).parameters.values())[skip:]:
        if each.kind is each.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        texts.append(f"{stars}{each.name}{'' if each.default is each.empty else '='}")
    return f"({', '.join(texts)})"


def lines_of(name: str) -> Iterator[str]:
    """Yield a public name, then the methods and attributes that its class defines."""
    module, _, last = name.rpartition(".")
    value = getattr(import_module(module), last)
    if inspect.isclass(value) and value.__module__.startswith("hexdata"):
        own_init = "__init__" in {key for each in value.__mro__[:-1] if _is_own(each) for key in vars(each)}
        yield f"{name}{parameters_of(value.__init__, skip=1) if own_init else ''}"
        defined = {key for each in value.__mro__ if _is_own(each) for key in _defined(each)}
        for key in sorted(key for key in defined if not key.startswith("_")):
            method = inspect.getattr_static(value, key, None)
            if isinstance(method, classmethod | staticmethod):
                yield f"{name}.{key}{parameters_of(getattr(value, key))}"
            else:
                yield f"{name}.{key}{parameters_of(method, skip=1) if inspect.isfunction(method) else ''}"
    else:
        yield f"{name}{parameters_of(value) if inspect.isfunction(value) else ''}"


def _is_own(cls: type) -> bool:
    return cls.__module__.startswith("hexdata")


def _defined(cls: type) -> set[str]:
    return {*vars(cls), *vars(cls).get("__annotations__", ())}


def list_names() -> list[str]:
    """Return the lines of all public names. A name in several modules is described once."""
    lines: list[str] = []
    described: dict[int, str] = {}
    for name in sorted(documented_names(), key=lambda name: (name.count("."), name)):
        module, _, last = name.rpartition(".")
        value = getattr(import_module(module), last)
        known = described.setdefault(id(value), name)
        is_same = known != name and known.rpartition(".")[2] == last
        lines.extend([f"{name} is {known}"] if is_same else lines_of(name))
    return lines


def test_the_public_names_are_those_listed() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed, and hexdata.torch has public names")
    listed, found = LISTED.read_text(encoding="utf-8").splitlines(), list_names()
    assert sorted(set(listed) - set(found)) == [], (
        "public names are gone or have other parameters: read Stable names in docs/library.md. "
        "If you only added a parameter, run python tests/test_public_api.py"
    )
    assert sorted(set(found) - set(listed)) == [], "public names are new: run python tests/test_public_api.py"


@pytest.mark.parametrize("name", OPTIONS.findall(LISTED.read_text(encoding="utf-8")))
def test_help_describes_every_option(name: str) -> None:
    module, _, last = name.rpartition(".")
    kind = getattr(import_module(module), last)
    doc = f"{inspect.getdoc(kind)}\n"
    section = re.search(r"^Attributes:\n((?: {4}.*\n|\n(?= ))*)", doc, re.MULTILINE)
    described = re.findall(r"^    (\w+): ", section[1] if section else "", re.MULTILINE)
    assert [field.name for field in fields(kind)] == described, "each once, in the order of the signature"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    LISTED.write_text("".join(f"{line}\n" for line in list_names()), encoding="utf-8")
