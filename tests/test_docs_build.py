"""Checks links between the documents, and that the reference covers every command, option, key and name.

``.ci/run`` builds the documents with Sphinx; these tests only read the files. The library reference is
generated from docstrings, so a module that ``library.md`` lists is documented.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import pytest
import typer

import hexdata
from hexdata.cli import app
from hexdata.pipeline import Config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([ROOT / "CHANGELOG.md", ROOT / "README.md", *DOCS.rglob("*.md")])

INTERNAL = {
    *("browse", "cards", "checks", "config", "extras", "games", "pool"),
    *("retry", "schema", "store", "strict_json", "system", "temporary", "text"),
}
"""Packages and modules that are not for users."""

LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"^#{1,3} +(?P<text>.+?)\s*$", re.MULTILINE)
"""A heading that can be linked to: ``myst_heading_anchors`` of ``docs/conf.py`` is 3."""
FENCED = re.compile(r"^ *```.*?^ *```\s*$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(?P<option>--[\w-]+)[^`]*` \|(?P<default>[^|]*)\|", re.MULTILINE)


def prose(document: Path) -> str:
    """Return a document without its code blocks."""
    return FENCED.sub("", document.read_text(encoding="utf-8"))


def anchors_of(text: str) -> set[str]:
    """Return the anchors that code hosts and MyST give to the headings of a Markdown text."""
    slugs = [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in (match["text"].replace("`", "") for match in HEADING.finditer(text))
    ]
    return {
        slug if not slugs[:i].count(slug) else f"{slug}-{slugs[:i].count(slug)}"
        for i, slug in enumerate(slugs)
    }


def dead_links(document: Path) -> list[str]:
    """Return the links of a document to missing files and headings."""
    dead = []
    for match in LINK.finditer(prose(document)):
        path, _, anchor = match["target"].partition("#")
        if "://" in path:
            continue
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors_of(prose(target))):
            dead.append(match["target"])
    return dead


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(document):
    assert dead_links(document) == []


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"^```\{toctree\}(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            names = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {path for name in names for path in page.parent.glob(f"{name}.md")}
    assert listed | {DOCS / "index.md"} == set(DOCS.rglob("*.md"))


def test_every_decision_is_in_the_list_of_decisions():
    listed = {match["target"] for match in LINK.finditer(prose(DOCS / "adr" / "README.md"))}
    assert listed == {path.name for path in DOCS.glob("adr/0*.md")}


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


def mistakes_in(sections: dict[str, str], commands: dict) -> list[str]:
    """Return the differences between the page of the command line and the existing commands."""
    mistakes = []
    for name, command in commands.items():
        section = sections.get(f"hexdata {name}")
        if section is None:
            mistakes.append(f"no section on hexdata {name}")
            continue
        told = {match["option"]: match["default"].strip() for match in ROW.finditer(section)}
        real = options_of(command)
        mistakes += [f"hexdata {name} {option} is not there" for option in real if option not in told]
        mistakes += [f"hexdata {name} has no {option}" for option in told if option not in real]
        mistakes += [
            f"hexdata {name} {option} is {default} by default, not {told[option]}"
            for option, default in real.items()
            if default is not None and told.get(option, default) != default
        ]
    described = [title for title in sections if title.startswith("hexdata ")]
    return mistakes + [
        f"no such command: {t}" for t in described if t.removeprefix("hexdata ") not in commands
    ]


def test_the_command_line_is_told_as_it_is():
    group = typer.main.get_command(app)
    sections = sections_of((DOCS / "cli.md").read_text(encoding="utf-8"))
    assert mistakes_in(sections, group.commands) == []


def test_a_wrong_page_of_the_command_line_is_found():
    sample = typer.Typer()

    @sample.command("shuffle")
    def shuffle(seed: int = 0, where: str = "", dry_run: bool = False) -> None: ...

    @sample.command("show")
    def show(former: Annotated[str, typer.Option("--former", hidden=True)] = "") -> None: ...

    rows = "| `--seed N` | 1 | x |\n| `--dry-run` | | x |\n| `--old` | | x |\n"
    page = f"## hexdata shuffle\n{rows}## hexdata sql\n"
    assert mistakes_in(sections_of(page), typer.main.get_command(sample).commands) == [
        "hexdata shuffle --where is not there",
        "hexdata shuffle --no-dry-run is not there",
        "hexdata shuffle has no --old",
        "hexdata shuffle --seed is 0 by default, not 1",
        "no section on hexdata show",
        "no such command: hexdata sql",
    ]


def test_every_key_of_a_config_is_told():
    section = sections_of((DOCS / "cli.md").read_text(encoding="utf-8"))["Configs"]
    rows = dict(re.findall(r"^\| `\[(\w+)\]` \| (.+) \|$", section, re.MULTILINE))
    told = {stage: set(re.findall(r"`(\w+)`", keys)) for stage, keys in rows.items()}
    real = {}
    for stage, field in Config.model_fields.items():
        if stage != "store":
            (kind,) = [part for part in field.annotation.__args__ if part is not type(None)]
            real[stage] = {key.name for key in fields(kind)}
    assert told == real


# The library.


def names_of(source: str) -> list[str]:
    """Return the ``__all__`` of a module's source text, without importing it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return ast.literal_eval(node.value)
    return []


def public_names() -> dict[str, list[str]]:
    """Return the public names of every package and module of ``hexdata`` for users."""
    found = {}
    for path in sorted((ROOT / "hexdata").iterdir()):
        source = path / "__init__.py" if path.is_dir() else path
        unit = path.stem
        if (
            source.suffix == ".py"
            and source.exists()
            and unit not in INTERNAL | {"__init__", "__main__", "cli"}
        ):
            names = names_of(source.read_text(encoding="utf-8"))
            if names:
                found[f"hexdata.{unit}"] = names
    return found


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "library.md").read_text(encoding="utf-8")
    whole = set(re.findall(r"^\.\. automodule:: ([\w.]+)\n   :members:", page, re.MULTILINE))
    units = public_names()
    assert len(units) > 10
    assert sorted(units.keys() - whole) == []
    top = dict(re.findall(r"^\| `hexdata\.(\w+)` \| \[`hexdata\.(\w+)`\]", page, re.MULTILINE))
    assert set(top) == set(hexdata.__all__)
    assert [name for name, unit in top.items() if name not in units[f"hexdata.{unit}"]] == []


def test_every_mention_of_the_supported_pythons_agrees():
    """``.ci/run`` reads the versions from ``pyproject.toml``; ruff and mypy check for the oldest."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(content["project"]["classifiers"]))
    assert len(named) > 1
    assert content["project"]["requires-python"] == f">={named[0]}"
    assert content["tool"]["mypy"]["python_version"] == named[0]
    assert content["tool"]["ruff"]["target-version"] == f"py{named[0].replace('.', '')}"
    sentence = f"hexdata supports Python {', '.join(named[:-1])} and {named[-1]}"
    for name in ("README.md", "docs/guide.md"):
        assert sentence in " ".join((ROOT / name).read_text(encoding="utf-8").split()), name
