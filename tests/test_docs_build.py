"""Checks links between the documents, and that the reference covers every command, option, key and name.

``.ci/run`` builds the documents with Sphinx; these tests only read the files. The library reference is
generated from docstrings, so a module that ``library.md`` lists is documented.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from pydoc import locate

import pytest
import typer

import hexdata
from hexdata import ConvertOptions, ExportOptions, HexdataError, ShuffleOptions
from hexdata.cli import app
from hexdata.export import PicklesOptions
from hexdata.pipeline import _SECTIONS
from hexdata.sql import SqlLimits
from hexdata.verify import VerifyOptions

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([ROOT / "CHANGELOG.md", ROOT / "README.md", *DOCS.rglob("*.md")])

INTERNAL = {
    *("arrays", "browse", "cards", "checks", "config", "extras", "games", "json_models", "pool"),
    *("retry", "schema", "store", "system", "temporary", "text"),
}
"""Packages and modules that are not for users."""

LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,3} +(.+?)\s*$", re.MULTILINE)
"""A heading that can be linked to: ``myst_heading_anchors`` of ``docs/conf.py`` is 3."""
FENCED = re.compile(r"^ *```.*?^ *```\s*$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(?P<option>--[\w-]+)[^`]*` \|(?P<default>[^|]*)\|", re.MULTILINE)


def prose(document: Path) -> str:
    """Return a document without its code blocks."""
    return FENCED.sub("", document.read_text(encoding="utf-8"))


def anchors_of(text: str) -> set[str]:
    """Return the anchors that code hosts and MyST give to the headings of a Markdown text."""
    slugs: list[str] = []
    for heading in HEADING.findall(text):
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        repeated = len([each for each in slugs if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", each)])
        slugs.append(f"{slug}-{repeated}" if repeated else slug)
    return set(slugs)


def test_every_link_leads_somewhere():
    dead = []
    for document in DOCUMENTS:
        for link in LINK.findall(prose(document)):
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            is_dead = not target.exists() or (anchor and anchor not in anchors_of(prose(target)))
            if "://" not in path and is_dead:
                dead.append((document.name, link))
    assert dead == []


# The command line.


def sections_of(text: str) -> dict[str, str]:
    """Return the text below each heading of the second level."""
    parts = re.split(r"^## +(.+?)\s*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def options_of(command) -> dict[str, str | None]:
    """Return the long spellings of a command's visible options, each with its default as in a table."""
    return {
        flag: None if option.default is None else "" if option.default is False else str(option.default)
        for option in command.params
        if option.param_type_name == "option" and not option.hidden
        for flag in (*option.opts, *option.secondary_opts)
        if flag.startswith("--")
    }


def test_the_command_line_is_told_as_it_is():
    commands = typer.main.get_command(app).commands
    sections = sections_of((DOCS / "cli.md").read_text(encoding="utf-8"))
    assert {t.removeprefix("hexdata ") for t in sections if t.startswith("hexdata ")} == set(commands)
    for name, command in commands.items():
        if f"<!-- options of {name} -->" in sections[f"hexdata {name}"]:
            continue  # the table is made from the command
        rows = ROW.finditer(sections[f"hexdata {name}"])
        told = {match["option"]: match["default"].strip() for match in rows}
        real = options_of(command)
        assert set(told) == set(real), name
        known = {option: default for option, default in real.items() if default is not None}
        assert {option: told[option] for option in known} == known, name


def test_every_key_of_a_config_is_told():
    """A row names its keys, or all options of a command except those it lists."""
    commands = typer.main.get_command(app).commands
    section = sections_of((DOCS / "cli.md").read_text(encoding="utf-8"))["Configs"]
    rows = dict(re.findall(r"^\| `\[(\w+)\]` \| (.+) \|$", section, re.MULTILINE))
    told = {stage: set(re.findall(r"`(\w+)`", keys)) for stage, keys in rows.items()}
    for stage, keys in rows.items():
        if command := re.search(r"all options of \[`hexdata (\w+)`\]", keys):
            options = set(options_of(commands[command[1]])) - set(re.findall("`(--[a-z-]+)`", keys))
            told[stage] |= {option.removeprefix("--").replace("-", "_") for option in options}
    real = {stage: {key.name for key in fields(kind)} for stage, kind in _SECTIONS.items()}
    assert told == real


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("convert`", ConvertOptions),
        ("shuffle`", ShuffleOptions),
        ("export`", ExportOptions),
        ("export --format pickle`", PicklesOptions),
        ("verify`", VerifyOptions),
        ("sql`, `hexdata report`", SqlLimits),
    ],
)
def test_the_smallest_budgets_are_told_as_they_are(command, options):
    page = (DOCS / "howto" / "memory.md").read_text(encoding="utf-8")
    (megabytes,) = map(int, re.findall(rf"^\| `hexdata {re.escape(command)} \| (\d+) MB", page, re.MULTILINE))
    options(memory=megabytes * 1_000_000)
    with pytest.raises(HexdataError, match=f"expected at least {megabytes} MB"):
        options(memory=(megabytes - 1) * 1_000_000)


def test_every_name_in_the_library_exists():
    pages = [ROOT / "CONTRIBUTING.md", *DOCUMENTS]
    texts = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"`(hexdata(?:\.\w+)+)[`(]", texts)) - {"hexdata.duckdb"}  # a file
    needs_torch = ("hexdata.torch", "hexdata.webdataset")
    assert [n for n in named if not n.startswith(needs_torch) and locate(n) is None] == []


# The library.


def test_every_public_name_is_in_the_reference():
    """The modules for users are those with ``__all__``; the reference is generated from their docstrings."""
    page = (DOCS / "library.md").read_text(encoding="utf-8")
    whole = set(re.findall(r"^\.\. automodule:: ([\w.]+)\n   :members:", page, re.MULTILINE))
    paths = [*(ROOT / "hexdata").glob("*.py"), *(ROOT / "hexdata").glob("*/__init__.py")]
    units = {
        path.parent.name if path.stem == "__init__" else path.stem
        for path in paths
        if "__all__ =" in path.read_text()
    }
    units -= INTERNAL | {"hexdata", "cli"}
    assert len(units) > 10
    assert {f"hexdata.{unit}" for unit in units} <= whole
    top = dict(re.findall(r"^\| `hexdata\.(\w+)` \| \[`hexdata\.(\w+)`\]", page, re.MULTILINE))
    assert set(top) == set(hexdata.__all__)
    assert [name for name, unit in top.items() if name not in import_module(f"hexdata.{unit}").__all__] == []


def test_every_mention_of_the_supported_pythons_agrees():
    """``.ci/run`` reads the versions from ``pyproject.toml``; ruff and mypy check for the oldest."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(content["project"]["classifiers"]))
    oldest = content["tool"]["mypy"]["python_version"], content["tool"]["ruff"]["target-version"]
    assert oldest == (named[0], f"py{named[0].replace('.', '')}")
    sentence = f"hexdata supports Python {', '.join(named[:-1])} and {named[-1]}"
    for name in ("README.md", "docs/guide.md"):
        assert sentence in " ".join((ROOT / name).read_text(encoding="utf-8").split()), name
